//! Packets to a served port that nobody serves: answered, and never passed to the node's own sockets.

use super::remote;
use crate::case::{Case, Place, ingress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, LOCAL, Lab, SERVED, TCP_80, UDP_80, syn};
use lb_common::addr::Protocol;
use lb_common::reason::Reason;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};

fn nobody(lab: &mut Lab) {
    lab.serve(SERVED, Protocol::TCP, TCP_80, &[]);
    lab.serve(SERVED, Protocol::UDP, UDP_80, &[]);
}

fn reset_to(packet: Frame) -> Case {
    let answer = packet.reset();
    Case::new(nobody)
        .send(
            ingress(Device::Uplink, &packet)
                .marked(0x0000_4abc)
                .redirected(Reason::RejectNoEndpoint, answer)
                .counts(TCP_80, |stats| stats.refused = 1),
        )
        .flow(&packet, LOCAL, Place::Nowhere)
}

pub(crate) fn syn_is_reset() -> Case {
    reset_to(syn())
}

/// Data in a SYN counts in what the reset acknowledges.
pub(crate) fn syn_with_data_is_reset() -> Case {
    reset_to(syn().seq(u32::MAX).payload(b"fast open"))
}

pub(crate) fn ack_is_reset() -> Case {
    reset_to(Frame::tcp(CLIENT, SERVED).ack(77))
}

pub(crate) fn data_is_reset() -> Case {
    reset_to(Frame::tcp(CLIENT, SERVED).ack(77).payload(&[0x55; 1001]))
}

pub(crate) fn fin_is_reset() -> Case {
    reset_to(Frame::tcp(CLIENT, SERVED).fin().ack(77))
}

pub(crate) fn fin_without_ack_is_reset() -> Case {
    reset_to(Frame::tcp(CLIENT, SERVED).fin().payload(b"odd"))
}

/// RFC 9293, section 3.5.2: a reset is not answered.
pub(crate) fn reset_is_not_answered() -> Case {
    Case::new(nobody).send(
        ingress(Device::Uplink, Frame::tcp(CLIENT, SERVED).rst())
            .dropped(Reason::RejectNoEndpoint)
            .counts(TCP_80, |stats| stats.refused = 1),
    )
}

fn unreachable_to(packet: Frame) -> Case {
    let answer = packet.port_unreachable();
    Case::new(nobody).send(
        ingress(Device::Uplink, &packet)
            .redirected(Reason::RejectNoEndpoint, answer)
            .counts(UDP_80, |stats| stats.refused = 1),
    )
}

pub(crate) fn datagram_is_unreachable() -> Case {
    unreachable_to(Frame::udp(CLIENT, SERVED).payload(b"a query of more than eight bytes"))
}

pub(crate) fn empty_datagram_is_unreachable() -> Case {
    unreachable_to(Frame::udp(CLIENT, SERVED))
}

pub(crate) fn datagram_without_checksum_is_unreachable() -> Case {
    unreachable_to(Frame::udp(CLIENT, SERVED).without_checksum().payload(b"odd"))
}

/// What we do not know how to answer is dropped, still not passed on.
pub(crate) fn ip_options_are_not_answered() -> Case {
    Case::new(nobody)
        .send(ingress(Device::Uplink, syn().ip_options(&[1, 1, 1, 1])).dropped(Reason::DropRejectFailed))
        .send(
            ingress(Device::Uplink, Frame::udp(CLIENT, SERVED).ip_options(&[1, 1, 1, 1]))
                .dropped(Reason::DropRejectFailed),
        )
}

/// Invariant 2: the node's own servers on a served port get nothing, served or not.
pub(crate) fn listening_sockets_get_nothing() -> Case {
    let keep = std::cell::RefCell::new(None);
    let data = Frame::tcp(CLIENT, SERVED).ack(77).payload(b"x");
    let (reset, answer) = (data.reset(), data.clone());
    Case::new(nobody)
        .then(move |_| {
            let tcp = TcpListener::bind((Ipv4Addr::from(SERVED.0), SERVED.1)).unwrap();
            let udp = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, SERVED.1)).unwrap();
            keep.replace(Some((tcp, udp)));
        })
        .send(ingress(Device::Uplink, syn()).redirected(Reason::RejectNoEndpoint, syn().reset()))
        .send(ingress(Device::Uplink, data).redirected(Reason::RejectNoEndpoint, reset))
        .send(
            ingress(Device::Uplink, Frame::udp(CLIENT, SERVED))
                .redirected(Reason::RejectNoEndpoint, Frame::udp(CLIENT, SERVED).port_unreachable()),
        )
        .then(remote)
        .goes_to(&answer, crate::lab::REMOTE)
}

/// The agent has announced the served port but not yet written its table.
pub(crate) fn no_ring() -> Case {
    Case::new(|lab| {
        lab.announce(SERVED, Protocol::TCP, TCP_80);
        lab.announce(SERVED, Protocol::UDP, UDP_80);
    })
    .send(
        ingress(Device::Uplink, syn()).dropped(Reason::DropNoRing).counts(TCP_80, |stats| stats.refused = 1),
    )
    .send(ingress(Device::Uplink, Frame::udp(CLIENT, SERVED)).dropped(Reason::DropNoRing))
}
