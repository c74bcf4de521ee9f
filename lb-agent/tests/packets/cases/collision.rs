//! A1: one client port, connected to two served ports that lead to the same pod, would be one connection there.

use super::{remote, request, response, syn_ack, third};
use crate::case::{Case, Place, ingress};
use crate::frame::{End, Frame};
use crate::lab::{CLIENT, Device, Lab, REMOTE, REMOTE_2, Slot, TCP_443, now, syn};
use lb_common::addr::Protocol;
use lb_common::flow::{Reply, State};
use lb_common::reason::Reason;

/// A second served port of the address with the same pods behind it.
const OTHER: End = ([192, 0, 2, 10], 81);

fn first_to_other() -> Frame {
    Frame::tcp(CLIENT, OTHER).syn()
}

/// One backend for both.
fn one(lab: &mut Lab) {
    remote(lab);
    lab.serve(OTHER, Protocol::TCP, TCP_443, &[Slot::remote(10, REMOTE)]);
}

/// The second service has another one too.
fn two(lab: &mut Lab) {
    remote(lab);
    lab.serve(OTHER, Protocol::TCP, TCP_443, &[Slot::remote(10, REMOTE), Slot::remote(11, REMOTE_2)]);
}

pub(crate) fn second_goes_to_another_backend() -> Case {
    Case::new(two)
        .established(REMOTE)
        .goes_to(&first_to_other(), REMOTE_2)
        .flow(&first_to_other(), REMOTE_2, Place::Handshakes(State::Opening))
        .goes_to(&request(), REMOTE)
        .comes_back(&response(REMOTE))
}

/// The first one is still in its handshake.
pub(crate) fn handshakes_collide_too() -> Case {
    Case::new(two).goes_to(&syn(), REMOTE).goes_to(&first_to_other(), REMOTE_2)
}

pub(crate) fn single_backend_refuses_the_second() -> Case {
    Case::new(one)
        .established(REMOTE)
        .send(
            ingress(Device::Uplink, first_to_other())
                .redirected(Reason::RejectCollision, first_to_other().reset())
                .counts(TCP_443, |stats| stats.refused = 1),
        )
        .goes_to(&request(), REMOTE)
        .comes_back(&response(REMOTE))
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
}

/// What is over takes no place.
pub(crate) fn closed_flow_gives_way() -> Case {
    let answer = syn_ack(REMOTE).seq(9000);
    let back = answer.clone().from(OTHER).ttl(63);
    let last = Frame::tcp(CLIENT, OTHER).seq(1001).ack(9001);
    Case::new(one)
        .established(REMOTE)
        .goes_to(&third().rst(), REMOTE)
        .goes_to(&first_to_other(), REMOTE)
        // Its answer comes from the second served port, although the first one's entry was not swept yet.
        .send(ingress(Device::Overlay, answer).redirected(Reason::ReplyRedirect, back))
        .goes_to(&last, REMOTE)
        .then(|lab| {
            let flow = lab.maps.flows.get(&first_to_other().key()).unwrap().unwrap();
            assert_eq!(flow.state(), State::Established);
        })
}

/// So does what has expired.
pub(crate) fn expired_flow_gives_way() -> Case {
    Case::new(one)
        .config(|config| config.timeouts.established = 20)
        .established(REMOTE)
        .then(|lab| {
            let key = syn().key();
            let mut flow = lab.maps.flows.get(&key).unwrap().unwrap();
            flow.last_seen = now() - 21;
            lab.maps.flows.insert(&key, &flow).unwrap();
        })
        .goes_to(&first_to_other(), REMOTE)
}

/// The tuple belongs to a connection that another holder forwards to a pod here.
pub(crate) fn tuple_of_another_holder_is_taken() -> Case {
    Case::new(|lab| {
        one(lab);
        lab.endpoint(REMOTE, Protocol::TCP, &[17]);
        let key = Frame::tcp(REMOTE, CLIENT).key();
        lab.maps.replies.insert(&key, &Reply::mark(17, State::Established, now())).unwrap();
    })
    .send(
        ingress(Device::Uplink, first_to_other())
            .redirected(Reason::RejectCollision, first_to_other().reset()),
    )
    .then(|lab| {
        let key = Frame::tcp(REMOTE, CLIENT).key();
        lab.maps.replies.insert(&key, &Reply::mark(17, State::Closed, now())).unwrap();
    })
    .goes_to(&first_to_other(), REMOTE)
}

/// A holder that forwards to the endpoint no more has let go of its connections: the address may have moved here.
pub(crate) fn tuple_that_a_holder_let_go_is_free() -> Case {
    Case::new(|lab| {
        one(lab);
        let key = Frame::tcp(REMOTE, CLIENT).key();
        lab.maps.replies.insert(&key, &Reply::mark(17, State::Established, now())).unwrap();
    })
    .goes_to(&first_to_other(), REMOTE)
}
