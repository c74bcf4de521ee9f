//! The packet program, judged packet by packet (`BPF_PROG_TEST_RUN`). Needs root and `ip`.
//!
//! Each case runs on a fresh node: a network namespace of its own, so that the kernel's routing answers, and fresh maps.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking, like the tests themselves"
)]

mod case;
mod cases;
mod explain;
mod frame;
mod fuzz;
mod lab;
mod verifier;

use case::{Case, Step};
use lb_common::reason::Reason;
use std::collections::BTreeSet;

/// One test for each case, and all of them as one list.
macro_rules! cases {
    ($($module:ident: $($name:ident),+;)+) => {
        $(mod $module {
            $(#[test]
            fn $name() {
                crate::case::run(stringify!($name), &crate::cases::$module::$name());
            })+
        })+

        fn all() -> Vec<Case> {
            vec![$($(cases::$module::$name(),)+)+]
        }

        fn names() -> Vec<&'static str> {
            vec![$($(concat!(stringify!($module), "::", stringify!($name)),)+)+]
        }
    };
}

cases! {
    backends: gone_is_reset, slot_given_to_another_is_reset, syn_after_gone_chooses_again, draining, draining_in_a_handshake, draining_udp, ring_names_a_missing_backend, ring_names_a_slot_of_another_service, from_none_to_some_and_back, affinity;
    collision: second_goes_to_another_backend, handshakes_collide_too, single_backend_refuses_the_second, closed_flow_gives_way, expired_flow_gives_way, tuple_of_another_holder_is_taken, tuple_that_a_holder_let_go_is_free;
    egress: finished, marks_end_at_overlay_and_pods, foreign_on_the_uplink, past_the_holder, icmp_redirects;
    foreign: ipv6, arp, vlan, version_6_in_ipv4, header_length_below_20, short, header_in_the_padding, truncated, other_protocols, other_ports, pods_own_traffic, unknown_interface, own_connection, syn_ack_without_flow;
    fragment: by_redirect, segments, local_backend, same_exit_as_the_first, before_the_first, expired, number_used_again, refused, backend_gone, connection_gone, ip_options, cannot_follow, complete, of_a_client_inside, put_together, on_the_other_node, tuple_of_another_holder, more_than_fit, syn_in_fragments;
    full: new_tcp_is_reset_and_old_goes_on, no_half_of_a_connection_is_left, answer_in_udp_is_dropped, handshakes_do_not_evict_flows, evicted_handshake_is_picked_up;
    holder: handshake, other_mark_bits_stay, mark_shift, closes, pod_refuses, udp, not_a_forward, live_tuple_is_not_taken_over, closed_tuple_is_taken_over, expired_tuple_is_taken_over, moved_holder_goes_on, own_connection_keeps_its_tuple, moved_connection_leaves_its_tuple, stray_reset, table_full, answer_on_the_overlay_is_foreign;
    icmp: path_takes_less, every_error, quote_of_a_datagram, local_backend, from_the_backend, from_a_hop, through_the_stack, on_the_other_node, not_about_a_connection_of_ours, not_an_error, cut_short, unusual_headers, time_to_live, no_route;
    inside: pod_to_remote, pod_to_local, forwarding_stack, process_to_remote, process_to_local, process_on_overlay, own_port_is_not_given, other_node, network_behind_the_uplink, backend_aside, stray_to_backend_aside, udp, ip_options, unknown_neighbours, loopback_is_left_alone, one_port_two_services, port_of_another, no_port, port_of_what_is_over, unknown_source, own_socket, syn_ack, affinity, owner_has_changed, no_overlay_address, refused, too_big, backend_gone;
    inside_icmp: pod, pod_to_local, process, other_node, backend_aside, owner_has_changed, not_of_ours;
    mss: clamped, small_enough, among_other_options, behind_ip_options, through_the_stack;
    refuse: syn_is_reset, syn_with_data_is_reset, ack_is_reset, data_is_reset, fin_is_reset, fin_without_ack_is_reset, reset_is_not_answered, datagram_is_unreachable, empty_datagram_is_unreachable, datagram_without_checksum_is_unreachable, ip_options_are_not_answered, listening_sockets_get_nothing, no_ring;
    route: local_backend, local_backend_udp, forwarding_stack, mark_shift, time_to_live, every_time_to_live, too_big_to_forward, segmented_later, answer_too_big, no_route, endpoint_is_the_node_itself, answer_without_flow, answer_without_owner;
    shared_uplink: connection, forward_of_a_holder, other_traffic_of_a_holder, errors_of_both_sides, marks_end;
    tcp: handshake, wrong_acknowledgement_does_not_establish, acknowledgement_wraps, data_completes_the_handshake, both_sides_close, backend_closes_first, client_resets, backend_resets, more_after_a_reset, backend_refuses, repeated_syn, syn_after_close_begins_anew, syn_on_a_live_flow_changes_nothing, expired_flow_is_picked_up, idle_flow_is_kept, stray_reset_is_not_remembered, same_port, ip_options, other_mark_bits_stay, padding;
    udp: answered, no_checksum_stays_none, checksum_of_zero_becomes_ones, same_port, ip_options, backend_gone_is_reselected, endpoints_from_none_to_one, scaled_to_zero_is_refused, expired;
}

/// What no packet of a test-run can end with, and why.
const UNREACHED: [(Reason, &str); 1] =
    [(Reason::DropRewrite, "the kernel has no reason to refuse what was checked before; out of memory only")];

#[test]
fn every_reason_is_the_end_of_some_case() {
    let mut reached: BTreeSet<Reason> = UNREACHED.into_iter().map(|(reason, _)| reason).collect();
    for step in all().iter().flat_map(|case| &case.steps) {
        if let Step::Send(send) = step {
            assert!(
                UNREACHED.iter().all(|(reason, _)| *reason != send.reason()),
                "{:?} is reached",
                send.reason()
            );
            reached.insert(send.reason());
        }
    }
    let missing: Vec<_> = Reason::ALL.iter().filter(|reason| !reached.contains(reason)).collect();
    assert!(missing.is_empty(), "no case ends with {missing:?}");
}
