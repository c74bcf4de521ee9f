//! Who holds an address: another node, two, nobody, a node whose object is gone.

use crate::recorder::{Recorder, proxied};
use crate::shared;
use crate::world::{check, service};

#[test]
fn connections_and_status_stay_when_an_address_moves() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.serve("moving", address);
    // Another Service with the same address goes with it.
    world.apply(
        &service("beside", address, "web").replace("port: 8", "port: 18").replace("port: 53", "port: 54"),
    );
    world.await_shown("beside", Some(address));
    let record = Recorder::start(&world, "moving");
    let mut talks = world.talks(address);
    check(&mut talks, "before");
    world.testbed.move_address(address, 1, 2).unwrap();
    world.await_served_by(address, &[2]);
    world.await_recognised(address, &world.pods);
    check(&mut talks, "after");
    check(&mut world.talks(address), "new");
    world.await_shown("beside", Some(address));
    record.await_last(&proxied(address));
    // For a moment nobody held it, or two did.
    let (shown, seen) = (proxied(address), record.seen());
    assert!(seen == [shown.clone()] || seen == [shown.clone(), String::new(), shown], "{seen:?}");
}

#[test]
fn an_address_of_two_nodes_is_served_by_none_until_one_gives_it_up() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.serve("disputed", address);
    world.hold(2, address);
    world.await_served_by(address, &[]);
    world.await_shown("disputed", None);
    let problem = format!("{address} is held by several nodes (n1, n2); serving it from none");
    world.await_event("disputed", "LoadBalancerProblem", &problem);
    world.request(address).unwrap_err();
    // An agent that starts again repeats its Event, and writes no other.
    world.stop_agent(1);
    world.start_agent(1);
    world.await_event_said("disputed", "LoadBalancerProblem", &problem, 2);

    world.give_up(1, address);
    world.await_served_by(address, &[2]);
    world.testbed.router().ip(&format!("neigh flush to {address}")).unwrap();
    world.await_served(address);
    world.await_shown("disputed", Some(address));
    world.await_event("disputed", "LoadBalancerProblemOver", &problem);
}

#[test]
fn an_address_of_no_node_is_shown_by_nobody_until_one_takes_it() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.serve("homeless", address);
    world.give_up(1, address);
    world.await_served_by(address, &[]);
    world.await_shown("homeless", None);
    let problem = format!("no node holds {address}");
    world.await_event("homeless", "LoadBalancerProblem", &problem);
    world.hold(3, address);
    world.await_served_by(address, &[3]);
    world.await_served(address);
    world.await_shown("homeless", Some(address));
    world.await_event("homeless", "LoadBalancerProblemOver", &problem);
}

/// A node that is taken out of the cluster and joins again: connections through it go on all the while.
#[test]
fn a_node_whose_object_is_deleted_and_made_again_serves_as_before() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.serve("rejoining", address);
    let mut talks = world.talks(address);
    world.kubectl(&["delete", "node", "n1"]);
    world.await_said(1, "the API has no Node of this name");
    world.readyz(1).unwrap_err();
    // Its address is nobody's now, and it makes no Node of itself.
    world.await_shown("rejoining", None);
    check(&mut talks, "without a Node");
    assert!(world.get("node/n1").unwrap().is_null());

    world.plane.add_nodes(&world.testbed).unwrap();
    world.await_node_ready(1);
    world.await_shown("rejoining", Some(address));
    // The controller has taken the pods of a node that is not there out of the slices, and with them their connections.
    talks.retain(|talk| talk.pod != "web-1");
    check(&mut talks, "with a new Node");
    world.await_backends(1, address, 3);
    check(&mut world.talks(address), "new");
}
