//! The life of a TCP connection, on the holder.

use super::{forwarded, remote, request, response, syn_ack, third, translated};
use crate::case::{Case, Place, ingress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, Lab, REMOTE, SERVED, SERVED_SAME_PORT, TCP_80, TCP_443, now, syn};
use lb_common::flow::State;
use lb_common::reason::Reason;

pub(crate) fn handshake() -> Case {
    let (first, second, last) = (syn(), syn_ack(REMOTE), third());
    Case::new(remote)
        .send(
            ingress(Device::Uplink, &first)
                .redirected(Reason::ForwardRedirect, forwarded(&first, REMOTE))
                .counts(TCP_80, |stats| (stats.packets_in, stats.bytes_in) = (1, 44)),
        )
        .flow(&first, REMOTE, Place::Handshakes(State::Opening))
        .send(
            ingress(Device::Overlay, &second)
                .redirected(Reason::ReplyRedirect, translated(&second))
                .counts(TCP_80, |stats| (stats.packets_out, stats.bytes_out) = (1, 40)),
        )
        .flow(&first, REMOTE, Place::Handshakes(State::Answered))
        .send(
            ingress(Device::Uplink, &last)
                .redirected(Reason::ForwardRedirect, forwarded(&last, REMOTE))
                .counts(TCP_80, |stats| {
                    (stats.packets_in, stats.bytes_in, stats.connections) = (1, 40, 1);
                }),
        )
        .flow(&first, REMOTE, Place::Flows(State::Established))
        .goes_to(&request(), REMOTE)
        .comes_back(&response(REMOTE))
        .flow(&first, REMOTE, Place::Flows(State::Established))
}

/// Somebody who has not seen the SYN-ACK cannot fill the flow table.
pub(crate) fn wrong_acknowledgement_does_not_establish() -> Case {
    let blind = third().ack(5000);
    let beyond = third().ack(5001 + (1 << 20));
    Case::new(remote)
        .goes_to(&syn(), REMOTE)
        .comes_back(&syn_ack(REMOTE))
        .goes_to(&blind, REMOTE)
        .flow(&syn(), REMOTE, Place::Handshakes(State::Answered))
        .goes_to(&beyond, REMOTE)
        .flow(&syn(), REMOTE, Place::Handshakes(State::Answered))
        .goes_to(&third(), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
}

/// Sequence numbers wrap.
pub(crate) fn acknowledgement_wraps() -> Case {
    let second = syn_ack(REMOTE).seq(u32::MAX);
    Case::new(remote).goes_to(&syn(), REMOTE).comes_back(&second).goes_to(&third().ack(0), REMOTE).flow(
        &syn(),
        REMOTE,
        Place::Flows(State::Established),
    )
}

/// The third packet was lost, the request comes first.
pub(crate) fn data_completes_the_handshake() -> Case {
    Case::new(remote).goes_to(&syn(), REMOTE).comes_back(&syn_ack(REMOTE)).goes_to(&request(), REMOTE).flow(
        &syn(),
        REMOTE,
        Place::Flows(State::Established),
    )
}

pub(crate) fn both_sides_close() -> Case {
    let from_client = request().fin();
    let from_backend = response(REMOTE).fin();
    Case::new(remote)
        .established(REMOTE)
        .goes_to(&from_client, REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::ClientClosed))
        .comes_back(&from_backend)
        .flow(&syn(), REMOTE, Place::Flows(State::Closed))
        .goes_to(&third(), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Closed))
}

pub(crate) fn backend_closes_first() -> Case {
    Case::new(remote)
        .established(REMOTE)
        .comes_back(&response(REMOTE).fin())
        .flow(&syn(), REMOTE, Place::Flows(State::BackendClosed))
        .goes_to(&request().fin(), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Closed))
}

pub(crate) fn client_resets() -> Case {
    Case::new(remote).established(REMOTE).goes_to(&third().rst(), REMOTE).flow(
        &syn(),
        REMOTE,
        Place::Flows(State::Reset),
    )
}

pub(crate) fn backend_resets() -> Case {
    Case::new(remote).established(REMOTE).comes_back(&response(REMOTE).rst()).flow(
        &syn(),
        REMOTE,
        Place::Flows(State::Reset),
    )
}

/// A reset that was forged, or that the receiver has no use for: the connection goes on, and is soon what it was, whoever speaks
/// next. Connection tracking of the kernel knows the window; here it is not followed.
pub(crate) fn more_after_a_reset() -> Case {
    let idle = |lab: &mut Lab| {
        for (key, mut reply) in lab.maps.replies.list().unwrap() {
            reply.last_seen -= 1;
            lab.maps.replies.insert(&key, &reply).unwrap();
        }
    };
    Case::new(remote)
        .established(REMOTE)
        .goes_to(&third().rst(), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Reset))
        .goes_to(&request(), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
        .comes_back(&response(REMOTE).rst())
        .then(idle)
        .comes_back(&response(REMOTE))
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
        .goes_to(&third().rst(), REMOTE)
        .goes_to(&request().fin(), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::ClientClosed))
}

/// The pod has nothing on the port: its reset reaches the client.
pub(crate) fn backend_refuses() -> Case {
    let refusal = Frame::tcp(REMOTE, CLIENT).rst().seq(0).ack(1001).window(0);
    Case::new(remote)
        .goes_to(&syn(), REMOTE)
        .comes_back(&refusal)
        .flow(&syn(), REMOTE, Place::Handshakes(State::Reset))
        // The client tries again from the same port.
        .goes_to(&syn().seq(77), REMOTE)
        .comes_back(&syn_ack(REMOTE).ack(78))
        .goes_to(&third().seq(78), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
}

/// A3: a SYN that comes again.
pub(crate) fn repeated_syn() -> Case {
    Case::new(remote)
        .goes_to(&syn(), REMOTE)
        .goes_to(&syn(), REMOTE)
        .flow(&syn(), REMOTE, Place::Handshakes(State::Opening))
        .comes_back(&syn_ack(REMOTE))
        .goes_to(&syn(), REMOTE)
        .comes_back(&syn_ack(REMOTE))
        .goes_to(&third(), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
}

/// A client port is used again after a connection is over. The first answer to the new one must get through at once.
pub(crate) fn syn_after_close_begins_anew() -> Case {
    let (again, answer, last) = (syn().seq(9000), syn_ack(REMOTE).seq(70_000).ack(9001), third().ack(70_001));
    Case::new(remote)
        .established(REMOTE)
        .goes_to(&request().fin(), REMOTE)
        .comes_back(&response(REMOTE).fin())
        .goes_to(&again, REMOTE)
        .flow(&syn(), REMOTE, Place::Handshakes(State::Opening))
        .comes_back(&answer)
        .flow(&syn(), REMOTE, Place::Handshakes(State::Answered))
        .goes_to(&last.seq(9001), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
}

/// A SYN on a live connection is for the backend to judge.
pub(crate) fn syn_on_a_live_flow_changes_nothing() -> Case {
    Case::new(remote).established(REMOTE).goes_to(&syn().seq(9000), REMOTE).flow(
        &syn(),
        REMOTE,
        Place::Flows(State::Established),
    )
}

/// C1: what is idle too long is gone; a packet in the middle of it finds its backend by the hash, and the first answer
/// establishes it again.
pub(crate) fn expired_flow_is_picked_up() -> Case {
    Case::new(remote)
        .config(|config| config.timeouts.established = 20)
        .established(REMOTE)
        .then(|lab| {
            let key = syn().key();
            let mut flow = lab.maps.flows.get(&key).unwrap().unwrap();
            flow.last_seen = now() - 21;
            lab.maps.flows.insert(&key, &flow).unwrap();
        })
        .goes_to(&request(), REMOTE)
        .flow(&syn(), REMOTE, Place::Handshakes(State::PickedUp))
        .comes_back(&response(REMOTE))
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
}

/// Just inside the time, nothing is forgotten.
pub(crate) fn idle_flow_is_kept() -> Case {
    Case::new(remote)
        .config(|config| config.timeouts.established = 20)
        .established(REMOTE)
        .then(|lab| {
            let key = syn().key();
            let mut flow = lab.maps.flows.get(&key).unwrap().unwrap();
            flow.last_seen = now() - 15;
            lab.maps.flows.insert(&key, &flow).unwrap();
        })
        .goes_to(&request(), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
        .then(|lab| {
            let flow = lab.maps.flows.get(&syn().key()).unwrap().unwrap();
            assert!(now() - flow.last_seen <= 2, "the packet did not refresh the flow");
        })
}

/// A stray reset to a served port is forwarded by the hash, but nothing is remembered of it.
pub(crate) fn stray_reset_is_not_remembered() -> Case {
    let stray = Frame::tcp(CLIENT, SERVED).rst();
    Case::new(remote).goes_to(&stray, REMOTE).flow(&stray, REMOTE, Place::Nowhere)
}

/// The backend's port is the served one: no port changes.
pub(crate) fn same_port() -> Case {
    let backend = super::REMOTE_SAME_PORT;
    let first = Frame::tcp(CLIENT, SERVED_SAME_PORT).syn();
    let second = Frame::tcp(backend, CLIENT).syn().seq(5000).ack(1001);
    let back = second.clone().from(SERVED_SAME_PORT).ttl(63);
    Case::new(remote)
        .goes_to(&first, backend)
        .send(
            ingress(Device::Overlay, &second)
                .redirected(Reason::ReplyRedirect, back)
                .counts(TCP_443, |stats| (stats.packets_out, stats.bytes_out) = (1, 40)),
        )
        .goes_to(&Frame::tcp(CLIENT, SERVED_SAME_PORT).seq(1001).ack(5001), backend)
        .flow(&first, backend, Place::Flows(State::Established))
}

/// Options make the IP header longer: everything else moves.
pub(crate) fn ip_options() -> Case {
    let options = [7, 7, 4, 0, 0, 0, 0, 1];
    let with = |frame: Frame| frame.ip_options(&options);
    Case::new(remote)
        .goes_to(&with(syn()), REMOTE)
        .comes_back(&with(syn_ack(REMOTE)))
        .goes_to(&with(third()), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
        .goes_to(&with(request()), REMOTE)
}

/// Other programs' bits of the mark stay.
pub(crate) fn other_mark_bits_stay() -> Case {
    Case::new(remote)
        .send(
            ingress(Device::Uplink, syn())
                .marked(0x0012_4abc)
                .redirected(Reason::ForwardRedirect, forwarded(&syn(), REMOTE)),
        )
        .send(
            ingress(Device::Overlay, syn_ack(REMOTE))
                .marked(0x1112_4abc)
                .redirected(Reason::ReplyRedirect, translated(&syn_ack(REMOTE))),
        )
}

/// A frame padded to the Ethernet minimum keeps its padding; the length that counts is the IP header's.
pub(crate) fn padding() -> Case {
    let padded = |frame: &Frame| {
        let mut bytes = frame.bytes();
        bytes.resize(60, 0xee);
        bytes
    };
    let packet = Frame::tcp(CLIENT, SERVED).syn();
    Case::new(remote).send(
        ingress(Device::Uplink, padded(&packet))
            .redirected(Reason::ForwardRedirect, padded(&forwarded(&packet, REMOTE)))
            .counts(TCP_80, |stats| (stats.packets_in, stats.bytes_in) = (1, 40)),
    )
}
