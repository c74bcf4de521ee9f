//! UDP, on the holder.

use super::{forwarded, remote, translated};
use crate::case::{Case, Place, ingress};
use crate::frame::{End, Frame};
use crate::lab::{CLIENT, Device, REMOTE, REMOTE_2, SERVED, SERVED_SAME_PORT, Slot, UDP_80, now};
use lb_common::addr::Protocol;
use lb_common::backend::BackendState;
use lb_common::flow::State;
use lb_common::reason::Reason;

fn query() -> Frame {
    Frame::udp(CLIENT, SERVED).payload(b"query")
}

fn answer(backend: End) -> Frame {
    Frame::udp(backend, CLIENT).payload(b"an answer")
}

pub(crate) fn answered() -> Case {
    Case::new(remote)
        .send(
            ingress(Device::Uplink, query())
                .redirected(Reason::ForwardRedirect, forwarded(&query(), REMOTE))
                .counts(UDP_80, |stats| (stats.packets_in, stats.bytes_in) = (1, 33)),
        )
        .flow(&query(), REMOTE, Place::Handshakes(State::Opening))
        .goes_to(&query(), REMOTE)
        .flow(&query(), REMOTE, Place::Handshakes(State::Opening))
        .send(
            ingress(Device::Overlay, answer(REMOTE))
                .redirected(Reason::ReplyRedirect, translated(&answer(REMOTE)))
                .counts(UDP_80, |stats| {
                    (stats.packets_out, stats.bytes_out, stats.connections) = (1, 37, 1);
                }),
        )
        .flow(&query(), REMOTE, Place::Flows(State::Established))
        .goes_to(&query(), REMOTE)
        .comes_back(&answer(REMOTE))
        .flow(&query(), REMOTE, Place::Flows(State::Established))
}

/// RFC 768: zero means that there is no checksum, and stays so.
pub(crate) fn no_checksum_stays_none() -> Case {
    Case::new(remote)
        .goes_to(&query().without_checksum(), REMOTE)
        .comes_back(&answer(REMOTE).without_checksum())
        .goes_to(&Frame::udp(CLIENT, SERVED_SAME_PORT).without_checksum(), super::REMOTE_SAME_PORT)
}

/// RFC 768: a checksum that comes out as zero is sent as 0xffff. Two payload bytes are chosen so that it does, once for
/// the way there and once for the way back.
pub(crate) fn checksum_of_zero_becomes_ones() -> Case {
    let zero = |frame: &dyn Fn(&[u8]) -> Frame, after: &dyn Fn(&Frame) -> Frame| {
        let found = (0..=u16::MAX).map(|n| frame(&n.to_be_bytes())).find(|frame| {
            let bytes = after(frame).bytes();
            bytes[40..42] == [0xff, 0xff]
        });
        found.unwrap()
    };
    let there =
        zero(&|payload| Frame::udp(CLIENT, SERVED).payload(payload), &|frame| forwarded(frame, REMOTE));
    let back = zero(&|payload| Frame::udp(REMOTE, CLIENT).payload(payload), &translated);
    Case::new(remote).goes_to(&there, REMOTE).comes_back(&back)
}

pub(crate) fn same_port() -> Case {
    let packet = Frame::udp(CLIENT, SERVED_SAME_PORT).payload(b"x");
    Case::new(remote).goes_to(&packet, super::REMOTE_SAME_PORT)
}

pub(crate) fn ip_options() -> Case {
    Case::new(remote).goes_to(&query().ip_options(&[7, 3, 4, 0]), REMOTE)
}

/// B3: the backend is replaced; the next datagram goes to one that is there, and so does the flow.
pub(crate) fn backend_gone_is_reselected() -> Case {
    Case::new(remote)
        .goes_to(&query(), REMOTE)
        .comes_back(&answer(REMOTE))
        .then(|lab| {
            lab.serve(SERVED, Protocol::UDP, UDP_80, &[Slot::remote(5, REMOTE_2)]);
            lab.set_backend(UDP_80, &Slot::remote(2, REMOTE).state(BackendState::Absent));
        })
        .goes_to(&query(), REMOTE_2)
        .flow(&query(), REMOTE_2, Place::Handshakes(State::Opening))
        .comes_back(&answer(REMOTE_2))
        .flow(&query(), REMOTE_2, Place::Flows(State::Established))
}

/// B1, B2: with no endpoint there is no flow, and the first datagram after one has come is delivered.
pub(crate) fn endpoints_from_none_to_one() -> Case {
    Case::new(|lab| lab.serve(SERVED, Protocol::UDP, UDP_80, &[]))
        .send(
            ingress(Device::Uplink, query()).redirected(Reason::RejectNoEndpoint, query().port_unreachable()),
        )
        .flow(&query(), REMOTE, Place::Nowhere)
        .then(|lab| lab.serve(SERVED, Protocol::UDP, UDP_80, &[Slot::remote(2, REMOTE)]))
        .goes_to(&query(), REMOTE)
}

/// B2: a one-way sender keeps its flow alive, but not beyond its backend.
pub(crate) fn scaled_to_zero_is_refused() -> Case {
    Case::new(remote)
        .goes_to(&query(), REMOTE)
        .then(|lab| {
            lab.maps.set_ring(UDP_80, &[]).unwrap();
            lab.set_backend(UDP_80, &Slot::remote(2, REMOTE).state(BackendState::Absent));
        })
        .send(
            ingress(Device::Uplink, query())
                .redirected(Reason::RejectNoEndpoint, query().port_unreachable())
                .counts(UDP_80, |stats| stats.refused = 1),
        )
}

/// An established flow that is idle for longer than its time begins again.
pub(crate) fn expired() -> Case {
    Case::new(remote)
        .config(|config| config.timeouts.udp_established = 20)
        .goes_to(&query(), REMOTE)
        .comes_back(&answer(REMOTE))
        .then(|lab| {
            let key = query().key();
            let mut flow = lab.maps.flows.get(&key).unwrap().unwrap();
            flow.last_seen = now() - 21;
            lab.maps.flows.insert(&key, &flow).unwrap();
        })
        .goes_to(&query(), REMOTE)
        .flow(&query(), REMOTE, Place::Handshakes(State::Opening))
}
