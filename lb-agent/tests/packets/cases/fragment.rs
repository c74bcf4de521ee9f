//! I5: fragments. They arrive whole at the right pod, or not at all.

use super::inside::{self, POD_TO_REMOTE};
use super::route::local;
use super::{forwarded, remote, translated};
use crate::case::{Case, FORWARDED, Place, egress, ingress};
use crate::frame::{End, Frame};
use crate::lab::{
    CLIENT, Device, HOLDER, HOLDER_2, LOCAL, Lab, REMOTE, REMOTE_2, SERVED, SERVED_SAME_PORT, Slot, TCP_80,
    UDP_80, now, sh,
};
use lb_common::addr::{Ipv4, Protocol};
use lb_common::backend::BackendState;
use lb_common::flow::{Reply, State};
use lb_common::fragment::{FragmentKey, Hook};
use lb_common::reason::Reason;

const UDP: u8 = 17;
const TCP: u8 = 6;

/// The first fragment of a datagram, which has more than eight times `UNITS` bytes.
fn first(from: End, to: End) -> Frame {
    Frame::udp(from, to).payload(&[0x5a; 64]).fragment(0, true)
}

/// In units of eight bytes, with the header.
const UNITS: u16 = 9;

/// The next one, which has no ports. It is not the last.
fn later(from: End, to: End) -> Frame {
    Frame::protocol(UDP, from.0, to.0).payload(&[0xa5; 40]).fragment(UNITS, true)
}

fn question() -> [Frame; 3] {
    [first(CLIENT, SERVED), later(CLIENT, SERVED), later(CLIENT, SERVED).fragment(14, false)]
}

fn answer(backend: End) -> [Frame; 3] {
    [first(backend, CLIENT), later(backend, CLIENT), later(backend, CLIENT).fragment(14, false)]
}

/// Both ways by redirect. Later fragments count, but begin no connection.
pub(crate) fn by_redirect() -> Case {
    let [q1, q2, q3] = question();
    let [a1, a2, a3] = answer(REMOTE);
    Case::new(remote)
        .goes_to(&q1, REMOTE)
        .flow(&q1, REMOTE, Place::Handshakes(State::Opening))
        .send(
            ingress(Device::Uplink, &q2)
                .redirected(Reason::ForwardRedirect, forwarded(&q2, REMOTE))
                .counts(UDP_80, |stats| (stats.packets_in, stats.bytes_in) = (1, 60)),
        )
        .goes_to(&q3, REMOTE)
        .flow(&q1, REMOTE, Place::Handshakes(State::Opening))
        .comes_back(&a1)
        .flow(&q1, REMOTE, Place::Flows(State::Established))
        .send(
            ingress(Device::Overlay, &a2)
                .redirected(Reason::ReplyRedirect, translated(&a2))
                .counts(UDP_80, |stats| (stats.packets_out, stats.bytes_out) = (1, 60)),
        )
        .comes_back(&a3)
        // In an established connection likewise, and any of them twice.
        .goes_to(&q1.clone().id(2), REMOTE)
        .goes_to(&q3.clone().id(2), REMOTE)
        .goes_to(&q3.id(2), REMOTE)
}

/// A segment that a router has cut. Only the first part has the flags.
pub(crate) fn segments() -> Case {
    let segment = super::request().payload(&[1; 60]).fragment(0, true);
    let rest = Frame::protocol(TCP, CLIENT.0, SERVED.0).payload(&[0xff; 40]).fragment(10, false);
    let answer = super::response(REMOTE).payload(&[1; 60]).fragment(0, true);
    let rest_of_answer = Frame::protocol(TCP, REMOTE.0, CLIENT.0).payload(&[0xff; 40]).fragment(10, false);
    Case::new(remote)
        .established(REMOTE)
        .goes_to(&segment, REMOTE)
        .goes_to(&rest, REMOTE)
        .comes_back(&answer)
        .comes_back(&rest_of_answer)
        .flow(&segment, REMOTE, Place::Flows(State::Established))
}

/// Through the stack both ways; the stack has put an answer together and cut it again when it leaves.
pub(crate) fn local_backend() -> Case {
    let mut case = Case::new(local);
    for packet in question() {
        case = case.send(ingress(Device::Uplink, &packet).marked(0x0012_0000).stack(
            Reason::ForwardStack,
            packet.clone().to(LOCAL),
            FORWARDED | 0x0012_0000,
        ));
    }
    let [first, later, _] = answer(LOCAL);
    case = case
        .send(ingress(Device::Pods, &first).passes(Reason::PassReplyToStack))
        .send(ingress(Device::Pods, &later).passes(Reason::PassFragment));
    for packet in answer(LOCAL) {
        let translated = packet.clone().from(SERVED);
        case = case.send(egress(Device::Uplink, &packet).stack(Reason::ReplyTranslated, translated, 0));
    }
    case
}

/// The first one is too big for the overlay, so the stack cuts it; the others fit, but belong to it.
pub(crate) fn same_exit_as_the_first() -> Case {
    let big = Frame::udp(CLIENT, SERVED).payload(&[0x5a; 1472]).fragment(0, true);
    let small = later(CLIENT, SERVED).fragment(185, false);
    Case::new(|lab| {
        remote(lab);
        sh("ip link set weave mtu 1376");
    })
    .send(ingress(Device::Uplink, &big).stack(Reason::ForwardStack, big.clone().to(REMOTE), FORWARDED))
    .send(ingress(Device::Uplink, &small).stack(
        Reason::ForwardStack,
        small.clone().to(REMOTE),
        FORWARDED,
    ))
}

/// Nobody can tell whose it is; the stack drops it in time. What is not the same datagram does not follow.
pub(crate) fn before_the_first() -> Case {
    let stranger: End = ([198, 51, 100, 8], CLIENT.1);
    let segment = Frame::protocol(TCP, CLIENT.0, SERVED.0).payload(&[0; 40]).fragment(UNITS, false);
    let passes = |device, packet: Frame| ingress(device, packet).passes(Reason::PassFragment);
    Case::new(remote)
        .send(passes(Device::Uplink, later(CLIENT, SERVED)))
        .flow(&first(CLIENT, SERVED), REMOTE, Place::Nowhere)
        .goes_to(&first(CLIENT, SERVED), REMOTE)
        .send(passes(Device::Uplink, later(CLIENT, SERVED).id(2)))
        .send(passes(Device::Uplink, later(stranger, SERVED)))
        .send(passes(Device::Uplink, later(CLIENT, ([192, 0, 2, 11], 80))))
        .send(passes(Device::Uplink, segment))
        // Nobody outside may send for a pod, nor is a packet on the overlay what came by the uplink.
        .send(passes(Device::Overlay, later(CLIENT, SERVED)))
        .send(egress(Device::Uplink, later(CLIENT, SERVED)).passes(Reason::PassFragment))
        .goes_to(&later(CLIENT, SERVED), REMOTE)
        .send(passes(Device::Overlay, later(REMOTE, CLIENT)))
}

fn aged(case: Case, seconds: u32) -> Case {
    case.then(move |lab| {
        for (key, mut known) in lab.maps.fragments.list().unwrap() {
            known.second = now() - seconds;
            lab.maps.fragments.insert(&key, &known).unwrap();
        }
    })
}

/// Datagrams' numbers come again.
pub(crate) fn expired() -> Case {
    let case = aged(Case::new(remote).goes_to(&first(CLIENT, SERVED), REMOTE), 1);
    let case = aged(case.goes_to(&later(CLIENT, SERVED), REMOTE), 3);
    case.send(ingress(Device::Uplink, later(CLIENT, SERVED)).passes(Reason::PassFragment))
}

/// I5: a datagram that is complete is over, in whatever order it came: what has its number next is another one's, and goes
/// nowhere before its own first one.
pub(crate) fn complete() -> Case {
    let [q1, q2, q3] = question();
    let [a1, a2, a3] = answer(REMOTE);
    let stray = |packet: &Frame| ingress(Device::Uplink, packet).passes(Reason::PassFragment);
    Case::new(remote)
        .goes_to(&q1, REMOTE)
        .goes_to(&q2, REMOTE)
        .goes_to(&q3, REMOTE)
        .send(stray(&q2))
        .goes_to(&q1, REMOTE)
        .goes_to(&q3, REMOTE)
        .goes_to(&q2, REMOTE)
        .send(stray(&q3))
        .comes_back(&a1)
        .comes_back(&a3)
        .comes_back(&a2)
        .send(ingress(Device::Overlay, &a2).passes(Reason::PassFragment))
        .then(|lab| assert!(lab.maps.fragments.list().unwrap().is_empty()))
}

/// The client's end is replaced in all of them.
pub(crate) fn of_a_client_inside() -> Case {
    let source = POD_TO_REMOTE.source(Protocol::UDP);
    let (question, answer) = (later(inside::POD, SERVED), later(REMOTE, source));
    let forwarded = question.clone().from(source).to(REMOTE).ttl(63);
    let returned = answer.clone().from(SERVED).to(inside::POD).ttl(63);
    Case::new(inside::node)
        .walks(POD_TO_REMOTE, &first(inside::POD, SERVED))
        .send(ingress(Device::Pods, &question).redirected(Reason::ForwardRedirect, forwarded))
        .walks_back(POD_TO_REMOTE, &first(REMOTE, source))
        .send(ingress(Device::Overlay, &answer).redirected(Reason::ReplyRedirect, returned))
}

/// A bridge's netfilter hooks have put it together: larger than the way takes, it goes by `lo`, and the stack cuts it again.
pub(crate) fn put_together() -> Case {
    let source = POD_TO_REMOTE.source(Protocol::UDP);
    let big = |from, to| Frame::udp(from, to).payload(&[0x5a; 1_400]);
    let (question, answer) = (big(inside::POD, SERVED), big(REMOTE, source));
    let forwarded = question.clone().from(source).to(REMOTE).destination_mac([0; 6]);
    let returned = answer.clone().from(SERVED).to(inside::POD).destination_mac([0; 6]);
    Case::new(|lab| {
        inside::node(lab);
        sh("ip link set weave mtu 1376");
    })
    .send(ingress(Device::Pods, &question).comes_again(Reason::ForwardRedirect, forwarded))
    .send(ingress(Device::Overlay, &answer).comes_again(Reason::ReplyRedirect, returned))
}

/// A first fragment stands for the number from then on, whosever it is.
pub(crate) fn number_used_again() -> Case {
    let same_port = first(CLIENT, SERVED_SAME_PORT);
    Case::new(remote)
        .goes_to(&first(CLIENT, SERVED), REMOTE)
        .send(ingress(Device::Uplink, first(CLIENT, (SERVED.0, 53))).passes(Reason::PassForeign))
        .send(ingress(Device::Uplink, later(CLIENT, SERVED)).passes(Reason::PassFragment))
        .goes_to(&same_port, super::REMOTE_SAME_PORT)
        .goes_to(&later(CLIENT, SERVED_SAME_PORT), REMOTE)
        .then(|lab| {
            let known = lab.maps.fragments.list().unwrap();
            assert_eq!(known.len(), 1);
            assert_eq!(known[0].1.destination_port.number(), SERVED_SAME_PORT.1);
        })
}

/// The first one is answered, the others are dropped with it.
pub(crate) fn refused() -> Case {
    let [q1, q2, q3] = question();
    Case::new(|lab| lab.serve(SERVED, Protocol::UDP, UDP_80, &[]))
        .send(ingress(Device::Uplink, &q1).redirected(Reason::RejectNoEndpoint, q1.port_unreachable()))
        .send(ingress(Device::Uplink, &q2).dropped(Reason::DropFragment))
        .send(ingress(Device::Uplink, &q3).dropped(Reason::DropFragment))
}

/// Another pod may have the address by now.
pub(crate) fn backend_gone() -> Case {
    let moved = Slot::remote(2, REMOTE_2).generation(2);
    Case::new(remote)
        .goes_to(&first(CLIENT, SERVED), REMOTE)
        .then(move |lab| lab.set_backend(UDP_80, &moved))
        .send(ingress(Device::Uplink, later(CLIENT, SERVED)).dropped(Reason::DropFragment))
        .goes_to(&first(CLIENT, SERVED).id(2), REMOTE_2)
        .goes_to(&later(CLIENT, SERVED).id(2), REMOTE_2)
        .then(move |lab| lab.set_backend(UDP_80, &moved.state(BackendState::Absent)))
        .send(ingress(Device::Uplink, later(CLIENT, SERVED).id(2)).dropped(Reason::DropFragment))
}

/// An answer whose connection is gone is not sent with the pod's address.
pub(crate) fn connection_gone() -> Case {
    let [first, later, _] = answer(REMOTE);
    let key = first.key();
    Case::new(remote)
        .goes_to(&Frame::udp(CLIENT, SERVED), REMOTE)
        .comes_back(&first)
        .comes_back(&later)
        .then(move |lab| lab.maps.replies.remove(&key).unwrap())
        .send(ingress(Device::Overlay, &later).dropped(Reason::DropFragment))
}

/// The address is where it always is; the ports are behind the options.
pub(crate) fn ip_options() -> Case {
    let options = [7, 7, 4, 0, 0, 0, 0, 0];
    Case::new(remote)
        .goes_to(&first(CLIENT, SERVED).ip_options(&options), REMOTE)
        .goes_to(&later(CLIENT, SERVED).ip_options(&options), REMOTE)
        .goes_to(&later(CLIENT, SERVED), REMOTE)
        .comes_back(&first(REMOTE, CLIENT).ip_options(&[1; 40]))
        .comes_back(&later(REMOTE, CLIENT).ip_options(&[1; 40]))
}

/// What a packet of its own would be dropped for.
pub(crate) fn cannot_follow() -> Case {
    let big = later(CLIENT, SERVED).payload(&[0; 1400]);
    Case::new(|lab| {
        remote(lab);
        sh("ip link set weave mtu 1376");
    })
    .goes_to(&first(CLIENT, SERVED), REMOTE)
    .send(ingress(Device::Uplink, later(CLIENT, SERVED).ttl(1)).dropped(Reason::DropTtl))
    .send(ingress(Device::Uplink, &big).dropped(Reason::DropTooBig))
}

fn other_node(lab: &mut Lab) {
    lab.holder(HOLDER);
    lab.holder(HOLDER_2);
    lab.endpoint(LOCAL, Protocol::UDP, &[HOLDER.1, HOLDER_2.1]);
}

/// Both ways get the marks that keep them from the CNI's masquerade and lead them back.
pub(crate) fn on_the_other_node() -> Case {
    let forward = |packet: Frame| {
        let sent = packet.source_mac(HOLDER.0).ttl(63);
        ingress(Device::Overlay, sent)
            .marked(0x0042_0001)
            .marks(Reason::HolderForward, FORWARDED | 0x0042_0001)
    };
    let back = |packet: Frame| {
        let mark = u32::from(HOLDER.1) << 24;
        ingress(Device::Pods, packet).marked(0x0042_0001).marks(Reason::HolderReply, mark | 0x0042_0001)
    };
    let entry = first(CLIENT, LOCAL);
    Case::new(other_node)
        .send(forward(first(CLIENT, LOCAL)))
        .send(forward(later(CLIENT, LOCAL)))
        .marked(&entry, Place::Handshakes(State::Opening), HOLDER.1)
        .send(back(first(LOCAL, CLIENT)))
        .send(back(later(LOCAL, CLIENT)))
        .send(back(later(LOCAL, CLIENT)))
        .marked(&entry, Place::Flows(State::Established), HOLDER.1)
        .send(ingress(Device::Pods, later(LOCAL, CLIENT).id(2)).passes(Reason::PassFragment))
}

/// A second holder's datagram of a tuple that the first has: all of it is dropped.
pub(crate) fn tuple_of_another_holder() -> Case {
    let key = first(LOCAL, CLIENT).key();
    let from = |packet: Frame| ingress(Device::Overlay, packet.source_mac(HOLDER_2.0).ttl(63));
    Case::new(move |lab| {
        other_node(lab);
        lab.maps.replies.insert(&key, &Reply::mark(HOLDER.1, State::Established, now())).unwrap();
    })
    .send(from(first(CLIENT, LOCAL)).dropped(Reason::DropHolderConflict))
    .send(from(later(CLIENT, LOCAL)).dropped(Reason::DropFragment))
}

/// More datagrams at once than the map holds: the least recently used is left to the stack, none goes astray.
pub(crate) fn more_than_fit() -> Case {
    let fill = |lab: &mut Lab| {
        let known = lab.maps.fragments.list().unwrap()[0].1;
        let keys: Vec<FragmentKey> = (0..u16::MAX)
            .map(|id| {
                let addresses = (Ipv4::new([203, 0, 113, 1]), Ipv4::new(SERVED.0));
                FragmentKey::new(addresses, Protocol::UDP, id.to_be_bytes(), Hook::EGRESS)
            })
            .collect();
        let values = vec![known; keys.len()];
        lab.maps.fragments.insert_all(&keys, &values).unwrap();
    };
    Case::new(remote)
        .goes_to(&first(CLIENT, SERVED), REMOTE)
        .then(fill)
        .send(ingress(Device::Uplink, later(CLIENT, SERVED)).passes(Reason::PassFragment))
        .goes_to(&first(CLIENT, SERVED).id(2), REMOTE)
        .goes_to(&later(CLIENT, SERVED).id(2), REMOTE)
}

/// A SYN in fragments begins a connection like any other, and no part of it is a packet of its own.
pub(crate) fn syn_in_fragments() -> Case {
    let syn = Frame::tcp(CLIENT, SERVED).syn().payload(&[0; 44]).fragment(0, true);
    let rest = Frame::protocol(TCP, CLIENT.0, SERVED.0).payload(&[0xff; 40]).fragment(8, false);
    Case::new(remote)
        .goes_to(&syn, REMOTE)
        .flow(&syn, REMOTE, Place::Handshakes(State::Opening))
        .send(
            ingress(Device::Uplink, &rest)
                .redirected(Reason::ForwardRedirect, forwarded(&rest, REMOTE))
                .counts(TCP_80, |stats| (stats.packets_in, stats.bytes_in) = (1, 60)),
        )
        .flow(&syn, REMOTE, Place::Handshakes(State::Opening))
}
