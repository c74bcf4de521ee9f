//! Where a packet goes: by redirect, through the stack, or not at all.

use super::{forwarded, remote, request, response, syn_ack, third, translated};
use crate::case::{Case, FORWARDED, Place, egress, ingress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, LOCAL, Lab, REMOTE, SERVED, Slot, TCP_80, UDP_80, sh, syn};
use lb_common::addr::Protocol;
use lb_common::flow::State;
use lb_common::reason::Reason;

pub(crate) fn local(lab: &mut Lab) {
    lab.serve(SERVED, Protocol::TCP, TCP_80, &[Slot::local(1, LOCAL)]);
    lab.serve(SERVED, Protocol::UDP, UDP_80, &[Slot::local(2, LOCAL)]);
}

/// Through the stack: nobody counts the hop but the stack.
fn stacked(packet: &Frame, backend: crate::frame::End) -> Frame {
    packet.clone().to(backend)
}

/// A10: a backend on the holder itself.
fn through_stack(case: Case, backend: crate::frame::End) -> Case {
    let (second, last) = (syn_ack(backend), third());
    let translated = |packet: &Frame| packet.clone().from(SERVED);
    case.send(ingress(Device::Uplink, syn()).marked(0x0012_4abc).stack(
        Reason::ForwardStack,
        stacked(&syn(), backend),
        FORWARDED | 0x0012_4abc,
    ))
    .send(ingress(Device::Pods, &second).passes(Reason::PassReplyToStack))
    .send(
        egress(Device::Uplink, &second)
            .marked(0x0012_4abc)
            .stack(Reason::ReplyTranslated, translated(&second), 0x0012_4abc)
            .counts(TCP_80, |stats| (stats.packets_out, stats.bytes_out) = (1, 40)),
    )
    .send(ingress(Device::Uplink, &last).stack(Reason::ForwardStack, stacked(&last, backend), FORWARDED))
    .flow(&syn(), backend, Place::Flows(State::Established))
    .send(ingress(Device::Pods, response(backend)).passes(Reason::PassReplyToStack))
    .send(egress(Device::Uplink, response(backend)).stack(
        Reason::ReplyTranslated,
        translated(&response(backend)),
        0,
    ))
}

pub(crate) fn local_backend() -> Case {
    through_stack(Case::new(local), LOCAL)
}

pub(crate) fn local_backend_udp() -> Case {
    let (query, answer) = (Frame::udp(CLIENT, SERVED).payload(b"q"), Frame::udp(LOCAL, CLIENT).payload(b"a"));
    let back = answer.clone().from(SERVED);
    Case::new(local)
        .send(ingress(Device::Uplink, &query).stack(Reason::ForwardStack, stacked(&query, LOCAL), FORWARDED))
        .send(ingress(Device::Pods, &answer).passes(Reason::PassReplyToStack))
        .send(egress(Device::Uplink, &answer).stack(Reason::ReplyTranslated, back, 0))
        .flow(&query, LOCAL, Place::Flows(State::Established))
}

/// `--forwarding stack`: remote ones too.
pub(crate) fn forwarding_stack() -> Case {
    let case = Case::new(remote).config(|config| config.through_stack = 1);
    through_stack(case, REMOTE)
}

pub(crate) fn mark_shift() -> Case {
    Case::new(local)
        .config(|config| config.mark_shift = 0)
        .send(ingress(Device::Uplink, syn()).marked(0x1234_5678).stack(
            Reason::ForwardStack,
            stacked(&syn(), LOCAL),
            0x1234_56fb,
        ))
        .send(egress(Device::Pods, syn()).marked(0x1234_56fb).marks(Reason::PassForeign, 0x1234_5600))
        .send(egress(Device::Pods, syn()).marked(0x1234_56fc).marks(Reason::PassFinished, 0x1234_5600))
}

/// The hop is counted where the stack does not; what has none left is not forwarded.
pub(crate) fn time_to_live() -> Case {
    Case::new(remote)
        .send(ingress(Device::Uplink, syn().ttl(1)).dropped(Reason::DropTtl))
        .send(
            ingress(Device::Uplink, syn().ttl(2))
                .redirected(Reason::ForwardRedirect, stacked(&syn(), REMOTE).ttl(1)),
        )
        .send(
            ingress(Device::Uplink, syn().ttl(0))
                .dropped(Reason::DropTtl)
                .counts(TCP_80, |stats| stats.refused = 1),
        )
        .send(ingress(Device::Overlay, syn_ack(REMOTE).ttl(1)).dropped(Reason::DropTtl))
        .send(
            ingress(Device::Overlay, syn_ack(REMOTE).ttl(255))
                .redirected(Reason::ReplyRedirect, translated(&syn_ack(REMOTE)).ttl(254)),
        )
}

/// The checksum of the header when its update carries, at every value of the time to live.
pub(crate) fn every_time_to_live() -> Case {
    let mut case = Case::new(remote);
    for ttl in 2..=255 {
        let packet = syn().ttl(ttl).id(u16::from(ttl).wrapping_mul(0x0101));
        let forward = forwarded(&packet, REMOTE).ttl(ttl - 1);
        case = case.send(ingress(Device::Uplink, packet).redirected(Reason::ForwardRedirect, forward));
    }
    case
}

/// From now on. The announcements in the handshake were others.
fn narrow_overlay(lab: &mut Lab) {
    sh("ip link set weave mtu 1376");
    lab.forget_ways();
}

/// I4: the overlay's MTU is smaller than the wire's.
pub(crate) fn too_big_to_forward() -> Case {
    let big = request().payload(&[0x2a; 1400]).dont_fragment();
    let fits = request().payload(&[0x2a; 1336]).dont_fragment();
    let datagram = Frame::udp(CLIENT, SERVED).payload(&[0x2a; 1400]).dont_fragment();
    let may_fragment = Frame::udp(CLIENT, SERVED).payload(&[0x2a; 1400]);
    Case::new(remote)
        .established(REMOTE)
        .then(narrow_overlay)
        // The way is known now, and how much passes.
        .goes_to(&request(), REMOTE)
        .send(
            ingress(Device::Uplink, &big)
                .redirected(Reason::RejectTooBig, big.fragmentation_needed(told(1376)))
                .counts(TCP_80, |stats| stats.refused = 1),
        )
        .goes_to(&fits, REMOTE)
        .send(
            ingress(Device::Uplink, &datagram)
                .redirected(Reason::RejectTooBig, datagram.fragmentation_needed(told(1376))),
        )
        .send(ingress(Device::Uplink, &may_fragment).stack(
            Reason::ForwardStack,
            stacked(&may_fragment, REMOTE),
            FORWARDED,
        ))
}

/// The MTU that the program is told by the kernel: none before Linux 5.12.
pub(super) fn told(mtu: u16) -> u16 {
    use aya::util::KernelVersion;
    if KernelVersion::current().unwrap() >= KernelVersion::new(5, 12, 0) { mtu } else { 0 }
}

/// A GSO packet is larger than the MTU, its segments are not.
pub(crate) fn segmented_later() -> Case {
    let big = request().payload(&[0x2a; 2672]).dont_fragment();
    Case::new(remote)
        .established(REMOTE)
        .then(narrow_overlay)
        .send(
            ingress(Device::Uplink, &big)
                .gso_size(1336)
                .redirected(Reason::ForwardRedirect, forwarded(&big, REMOTE)),
        )
        .send(
            ingress(Device::Uplink, &big)
                .gso_size(1337)
                .redirected(Reason::RejectTooBig, big.fragmentation_needed(told(1376))),
        )
}

/// The way to the client is the narrow one. The stack knows how to tell the pod; without permission to fragment only.
pub(crate) fn answer_too_big() -> Case {
    let big = response(REMOTE).payload(&[0x2a; 1400]);
    Case::new(|lab| {
        remote(lab);
        sh("ip link set eth0 mtu 1400");
    })
    .established(REMOTE)
    .send(ingress(Device::Overlay, big.clone().dont_fragment()).passes(Reason::PassReplyToStack))
    .send(ingress(Device::Overlay, big).dropped(Reason::DropTooBig))
}

/// Ways are asked for once a second: as if one had passed.
fn a_second_passes(lab: &mut Lab) {
    lab.forget_ways();
    let key = syn().to(REMOTE).key().reversed();
    let mut reply = lab.maps.replies.get(&key).unwrap().unwrap();
    reply.last_seen -= 1;
    lab.maps.replies.insert(&key, &reply).unwrap();
}

pub(crate) fn no_route() -> Case {
    Case::new(remote)
        .established(REMOTE)
        // Both ways are known now.
        .goes_to(&request(), REMOTE)
        .comes_back(&response(REMOTE))
        .then(|_| sh("ip route add unreachable 10.40.0.0/24; ip route add blackhole 198.51.100.0/24"))
        .then(a_second_passes)
        .send(
            ingress(Device::Uplink, request())
                .dropped(Reason::DropNoRoute)
                .counts(TCP_80, |stats| stats.refused = 1),
        )
        .send(ingress(Device::Overlay, response(REMOTE)).dropped(Reason::DropNoRoute))
}

/// A pod on the host's network of this node: only the stack reaches it.
pub(crate) fn endpoint_is_the_node_itself() -> Case {
    let itself = ([10, 32, 0, 1], 8080);
    Case::new(move |lab| lab.serve(SERVED, Protocol::TCP, TCP_80, &[Slot::remote(1, itself)]))
        .send(ingress(Device::Uplink, syn()).stack(Reason::ForwardStack, stacked(&syn(), itself), FORWARDED))
}

/// A9: routed here by our mark, but nobody knows the flow: never out with the pod's address.
pub(crate) fn answer_without_flow() -> Case {
    Case::new(remote)
        .send(ingress(Device::Overlay, syn_ack(REMOTE)).dropped(Reason::DropReplyUnknown))
        .send(ingress(Device::Overlay, response(REMOTE)).dropped(Reason::DropReplyUnknown))
        .send(ingress(Device::Overlay, Frame::udp(REMOTE, CLIENT)).dropped(Reason::DropReplyUnknown))
        // On the pods' side it is a pod's own connection.
        .send(ingress(Device::Pods, response(REMOTE)).passes(Reason::PassForeign))
}

/// The flow is gone, its reply entry is still there.
pub(crate) fn answer_without_owner() -> Case {
    Case::new(remote)
        .established(REMOTE)
        .then(|lab| {
            lab.maps.flows.remove(&syn().key()).unwrap();
            let key = syn().to(REMOTE).key().reversed();
            let mut reply = lab.maps.replies.get(&key).unwrap().unwrap();
            reply.last_seen -= 5;
            lab.maps.replies.insert(&key, &reply).unwrap();
        })
        .send(ingress(Device::Overlay, response(REMOTE)).dropped(Reason::DropReplyUnknown))
        .flow(&syn(), REMOTE, Place::Nowhere)
}
