//! Endpoints that come and go.

use super::{forwarded, remote, request, response, syn_ack, third};
use crate::case::{Case, Place, ingress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, Hook, Lab, REMOTE, REMOTE_2, SERVED, Slot, TCP_80, UDP_80, syn};
use lb_agent::datapath::testrun::Meta;
use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::backend::BackendState;
use lb_common::flow::State;
use lb_common::reason::Reason;
use lb_common::service::{Service, ServiceKey};
use std::collections::BTreeSet;

fn leaves(lab: &mut Lab) {
    lab.set_backend(TCP_80, &Slot::remote(1, REMOTE).state(BackendState::Absent));
}

fn drains(lab: &mut Lab) {
    lab.serve(SERVED, Protocol::TCP, TCP_80, &[Slot::remote(5, REMOTE_2)]);
    lab.set_backend(TCP_80, &Slot::remote(1, REMOTE).state(BackendState::Draining));
    lab.serve(SERVED, Protocol::UDP, UDP_80, &[Slot::remote(6, REMOTE_2)]);
    lab.set_backend(UDP_80, &Slot::remote(2, REMOTE).state(BackendState::Draining));
}

/// B10, invariant 5: the next packet of an established connection is answered with a reset.
pub(crate) fn gone_is_reset() -> Case {
    Case::new(remote)
        .established(REMOTE)
        .then(leaves)
        .send(
            ingress(Device::Uplink, request())
                .redirected(Reason::RejectBackendGone, request().reset())
                .counts(TCP_80, |stats| stats.refused = 1),
        )
        .then(|lab| assert!(lab.maps.flows.all().unwrap().is_empty(), "the flow is still there"))
}

/// The slot has another endpoint now: the generation tells.
pub(crate) fn slot_given_to_another_is_reset() -> Case {
    Case::new(remote)
        .established(REMOTE)
        .then(|lab| {
            let slot = Slot::remote(1, REMOTE_2).generation(2);
            lab.serve(SERVED, Protocol::TCP, TCP_80, &[slot]);
        })
        .send(ingress(Device::Uplink, request()).redirected(Reason::RejectBackendGone, request().reset()))
        .goes_to(&syn(), REMOTE_2)
}

/// A SYN on the tuple of a dead flow begins another, and the former backend has no more say.
pub(crate) fn syn_after_gone_chooses_again() -> Case {
    Case::new(remote)
        .established(REMOTE)
        .then(|lab| {
            lab.serve(SERVED, Protocol::TCP, TCP_80, &[Slot::remote(5, REMOTE_2)]);
            leaves(lab);
        })
        .goes_to(&syn(), REMOTE_2)
        .comes_back(&syn_ack(REMOTE_2))
        .goes_to(&third(), REMOTE_2)
        .send(ingress(Device::Overlay, response(REMOTE).rst()).dropped(Reason::DropReplyUnknown))
        .goes_to(&request(), REMOTE_2)
        .then(|lab| {
            let flow = lab.maps.flows.get(&syn().key()).unwrap().unwrap();
            assert_eq!((flow.backend, flow.state()), (5, State::Established));
        })
}

/// D2: an endpoint that terminates keeps its connections, and gets no new ones.
pub(crate) fn draining() -> Case {
    let other = syn().from((CLIENT.0, 40_001));
    Case::new(remote)
        .established(REMOTE)
        .then(drains)
        .goes_to(&request(), REMOTE)
        .comes_back(&response(REMOTE))
        .goes_to(&other, REMOTE_2)
        .goes_to(&request().fin(), REMOTE)
        .flow(&syn(), REMOTE, Place::Flows(State::ClientClosed))
}

/// A handshake that is under way goes on with a draining endpoint, but a SYN that comes again may choose again.
pub(crate) fn draining_in_a_handshake() -> Case {
    let other = syn().from((CLIENT.0, 40_001));
    let last = third().from((CLIENT.0, 40_001));
    let answer = syn_ack(REMOTE).to((CLIENT.0, 40_001));
    Case::new(remote)
        .goes_to(&syn(), REMOTE)
        .goes_to(&other, REMOTE)
        .comes_back(&answer)
        .then(drains)
        .goes_to(&last, REMOTE)
        .goes_to(&syn(), REMOTE_2)
        // The late answer of the first one would only confuse the client.
        .send(ingress(Device::Overlay, syn_ack(REMOTE)).dropped(Reason::DropReplyUnknown))
        .comes_back(&syn_ack(REMOTE_2))
        .goes_to(&third(), REMOTE_2)
}

/// C13: UDP in a flow that was never answered is balanced again, an established one stays.
pub(crate) fn draining_udp() -> Case {
    let (query, other) = (Frame::udp(CLIENT, SERVED), Frame::udp((CLIENT.0, 40_001), SERVED));
    Case::new(remote)
        .goes_to(&query, REMOTE)
        .comes_back(&Frame::udp(REMOTE, CLIENT))
        .goes_to(&other, REMOTE)
        .then(drains)
        .goes_to(&query, REMOTE)
        .goes_to(&other, REMOTE_2)
}

/// B9: the table still names an endpoint that is not there: never for a new connection.
pub(crate) fn ring_names_a_missing_backend() -> Case {
    Case::new(|lab| {
        let missing = Slot::remote(1, REMOTE).state(BackendState::Absent);
        lab.serve(SERVED, Protocol::TCP, TCP_80, &[missing, Slot::remote(5, REMOTE_2)]);
    })
    .then(|lab| {
        // Every other entry is the missing one: of 32 clients some certainly begin there.
        for port in 40_000..40_032 {
            let first = syn().from((CLIENT.0, port));
            let sent = ingress(Device::Uplink, &first)
                .redirected(Reason::ForwardRedirect, forwarded(&first, REMOTE_2));
            sent.run(lab).unwrap();
        }
    })
}

/// A slot of another service, named by mistake, is not used either.
pub(crate) fn ring_names_a_slot_of_another_service() -> Case {
    Case::new(|lab| {
        lab.serve(SERVED, Protocol::TCP, TCP_80, &[Slot::remote(1, REMOTE)]);
        lab.set_backend(UDP_80, &Slot::remote(1, REMOTE));
    })
    .send(ingress(Device::Uplink, syn()).redirected(Reason::RejectCollision, syn().reset()))
}

/// From none to some: the next packet works, and back.
pub(crate) fn from_none_to_some_and_back() -> Case {
    Case::new(|lab| lab.serve(SERVED, Protocol::TCP, TCP_80, &[]))
        .send(ingress(Device::Uplink, syn()).redirected(Reason::RejectNoEndpoint, syn().reset()))
        .then(remote)
        .goes_to(&syn(), REMOTE)
        .then(|lab| {
            leaves(lab);
            lab.maps.set_ring(TCP_80, &[]).unwrap();
        })
        .send(ingress(Device::Uplink, syn()).redirected(Reason::RejectNoEndpoint, syn().reset()))
}

/// `sessionAffinity: ClientIP`: the client's port does not count, its address does.
pub(crate) fn affinity() -> Case {
    fn chosen(lab: &mut Lab, clients: impl Iterator<Item = crate::frame::End>) -> BTreeSet<u32> {
        clients
            .map(|client| {
                let syn = Frame::tcp(client, SERVED).syn();
                let meta = Meta { interface: Device::Uplink.index(), ..Meta::default() };
                lab.run(Hook::Ingress, &syn.bytes(), meta);
                lab.maps.handshakes.get(&syn.key()).unwrap().unwrap().backend
            })
            .collect()
    }
    let ports = || (0..32).map(|n| (CLIENT.0, 30_000 + n));
    let addresses = || (0..32).map(|n| ([198, 51, 100, n], 30_000));
    let key = ServiceKey::new(Ipv4::new(SERVED.0), Port::new(SERVED.1), Protocol::TCP);
    let serve = |lab: &mut Lab| {
        lab.serve(SERVED, Protocol::TCP, TCP_80, &[Slot::remote(1, REMOTE), Slot::remote(2, REMOTE_2)]);
    };
    Case::new(serve).then(move |lab| assert_eq!(chosen(lab, ports()).len(), 2, "without affinity")).then(
        move |lab| {
            for client in ports() {
                lab.maps.handshakes.remove(&Frame::tcp(client, SERVED).key()).unwrap();
            }
            lab.maps.services.insert(&key, &Service::new(TCP_80, true)).unwrap();
            assert_eq!(chosen(lab, ports()).len(), 1, "one client");
            assert_eq!(chosen(lab, addresses()).len(), 2, "many clients");
        },
    )
}
