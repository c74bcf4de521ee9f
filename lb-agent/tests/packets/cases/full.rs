//! C7: full tables refuse the new and keep the old.

use super::{remote, request, response, syn_ack, third};
use crate::case::{Case, Place, ingress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, Lab, REMOTE, SERVED, TCP_80, UDP_80, now, syn};
use lb_common::flow::{Flow, FlowKey, Path, Reply, State};
use lb_common::reason::Reason;

/// Every place but one is taken: the client's own connection gets the last.
const FLOWS: u32 = 4;

fn fill(lab: &mut Lab) {
    remote(lab);
    let mut port = 1;
    loop {
        let frame = Frame::tcp(([203, 0, 113, 1], port), SERVED);
        let flow = Flow::new(TCP_80, 1, 1, Path::Redirect, State::Established, now());
        let place = frame.key();
        if lab.maps.flows.all().unwrap().len() as u32 == FLOWS - 1 {
            break;
        }
        lab.maps.flows.insert(&place, &flow).unwrap();
        let reply: FlowKey = frame.to(REMOTE).key().reversed();
        let address = place.destination;
        let entry = Reply::translate(address, place.destination_port, TCP_80, Path::Redirect, now());
        lab.maps.replies.insert(&reply, &entry).unwrap();
        port += 1;
    }
}

fn case() -> Case {
    Case::new(fill).limits(|limits| limits.flows = FLOWS).established(REMOTE)
}

pub(crate) fn new_tcp_is_reset_and_old_goes_on() -> Case {
    let other = |frame: Frame| frame.from((CLIENT.0, 40_001));
    let last = other(third());
    case()
        .goes_to(&other(syn()), REMOTE)
        .comes_back(&syn_ack(REMOTE).to((CLIENT.0, 40_001)))
        .send(
            ingress(Device::Uplink, &last)
                .redirected(Reason::RejectTableFull, last.reset())
                .counts(TCP_80, |stats| stats.refused = 1),
        )
        .goes_to(&request(), REMOTE)
        .comes_back(&response(REMOTE))
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
        .then(|lab| {
            let tables = (lab.maps.flows.all().unwrap().len(), lab.maps.replies.all().unwrap().len());
            assert_eq!(tables, (4, 4), "a half of a connection was left behind");
        })
}

/// The flow table is full while the reply table is not: nothing is left behind in that.
pub(crate) fn no_half_of_a_connection_is_left() -> Case {
    let other = |frame: Frame| frame.from((CLIENT.0, 40_001));
    let last = other(third());
    case()
        .then(|lab| {
            let key = lab.maps.replies.all().unwrap().into_keys().next().unwrap();
            lab.maps.replies.remove(&key).unwrap();
        })
        .goes_to(&other(syn()), REMOTE)
        .comes_back(&syn_ack(REMOTE).to((CLIENT.0, 40_001)))
        .send(ingress(Device::Uplink, &last).redirected(Reason::RejectTableFull, last.reset()))
        .then(|lab| assert_eq!(lab.maps.replies.all().unwrap().len(), 3))
}

pub(crate) fn answer_in_udp_is_dropped() -> Case {
    case()
        .goes_to(&Frame::udp(CLIENT, SERVED), REMOTE)
        .send(ingress(Device::Overlay, Frame::udp(REMOTE, CLIENT)).dropped(Reason::DropTableFull))
        .then(|lab| assert_eq!(lab.maps.service_stats(UDP_80).unwrap().connections, 0))
}

/// Invariant 7: handshakes evict handshakes only.
pub(crate) fn handshakes_do_not_evict_flows() -> Case {
    Case::new(remote)
        .limits(|limits| limits.handshakes = 64)
        .established(REMOTE)
        .then(|lab| {
            for port in 1..2_000 {
                let first = Frame::tcp(([203, 0, 113, 1], port), SERVED).syn();
                let forward = super::forwarded(&first, REMOTE);
                let sent = ingress(Device::Uplink, &first).redirected(Reason::ForwardRedirect, forward);
                sent.run(lab).unwrap();
            }
            assert!(lab.maps.handshakes.all().unwrap().len() <= 64);
        })
        .goes_to(&request(), REMOTE)
        .comes_back(&response(REMOTE))
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
}

/// C6: a handshake that was evicted finds its backend again by the hash, and can be completed.
pub(crate) fn evicted_handshake_is_picked_up() -> Case {
    Case::new(remote)
        .goes_to(&syn(), REMOTE)
        .comes_back(&syn_ack(REMOTE))
        .then(|lab| {
            let key = syn().key();
            lab.maps.handshakes.remove(&key).unwrap();
            let reply = syn().to(REMOTE).key().reversed();
            lab.maps.handshake_replies.remove(&reply).unwrap();
        })
        .goes_to(&third(), REMOTE)
        .flow(&syn(), REMOTE, Place::Handshakes(State::PickedUp))
        .comes_back(&response(REMOTE))
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
}
