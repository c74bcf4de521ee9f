//! What becomes of a Service: made early, changed, deleted; also while no agent looks.

use crate::client::{Talk, kind};
use crate::shared;
use crate::world::{PATIENCE, TALK, check, service};
use anyhow::ensure;
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::net::SocketAddrV4;
use testbed::wait;

#[test]
fn a_service_that_comes_before_its_endpoints_refuses_and_then_serves() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.apply(&service("early", address, "late"));
    world.await_shown("early", Some(address));
    let to = SocketAddrV4::new(address, TALK);
    assert_eq!(kind(Talk::open(world.testbed.client(), to)), ErrorKind::ConnectionRefused);
    let pod = world.add_pod(2, "late", "late");
    world.await_served(address);
    assert_eq!(Talk::open(world.testbed.client(), to).unwrap().pod, pod.name());
    world.plane.remove_pod(&pod).unwrap();
}

#[test]
fn a_service_that_comes_before_its_holder_waits_for_it() {
    let Some(mut world) = shared::world() else { return };
    let address = world.address();
    world.apply(&service("early", address, "web"));
    world.await_event("early", "LoadBalancerProblem", &format!("no node holds {address}"));
    assert_eq!(world.shown("early").unwrap(), Value::Null);
    world.hold(3, address);
    world.await_served(address);
    world.await_shown("early", Some(address));
}

#[test]
fn a_service_that_is_deleted_is_served_no_more_and_comes_back() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(2);
    world.serve("web", address);
    world.kubectl(&["delete", "service", "web"]);
    world.await_served_by(address, &[]);
    world.request(address).unwrap_err();
    world.serve("web", address);
}

/// Somebody else's finalizer holds it up.
#[test]
fn a_service_that_is_being_deleted_keeps_its_connections_and_gets_no_others() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.serve("ending", address);
    let mut talks = world.talks(address);
    world.patch("ending", &json!({ "metadata": { "finalizers": ["example.com/slow"] } }));
    world.kubectl(&["delete", "service", "ending", "--wait=false"]);
    world.await_shown("ending", None);
    let to = SocketAddrV4::new(address, TALK);
    assert_eq!(kind(Talk::open(world.testbed.client(), to)), ErrorKind::ConnectionRefused);
    check(&mut talks, "while it ends");
    world.patch("ending", &json!({ "metadata": { "finalizers": null } }));
    world.await_served_by(address, &[]);
    assert_eq!(world.get("service/ending").unwrap(), Value::Null);
}

#[test]
fn a_service_that_asks_for_another_address_gets_it_and_leaves_the_first() {
    let Some(mut world) = shared::world() else { return };
    let (first, second) = (world.held_by(1), world.held_by(2));
    world.serve("moving", first);
    world.patch("moving", &json!({ "spec": { "loadBalancerIP": second } }));
    world.await_served_by(second, &[2]);
    world.await_served_by(first, &[]);
    world.await_served(second);
    world.await_shown("moving", Some(second));
    world.request(first).unwrap_err();
}

/// Nobody of ours sees the changes happen.
#[test]
fn what_changes_while_all_agents_are_down_is_right_when_they_are_back() {
    let Some(mut world) = shared::world() else { return };
    let names = ["flipped", "handed-over", "readdressed", "deleted"];
    let addresses = names.map(|name| {
        let address = world.held_by(1);
        world.serve(name, address);
        address
    });
    let [flipped, handed_over, readdressed, deleted] = addresses;
    let other = world.held_by(2);
    for node in 1..=3 {
        world.stop_agent(node);
    }
    // The datapath goes on.
    for address in addresses {
        world.request(address).unwrap();
    }
    let to_cluster_ip = json!({ "spec": { "type": "ClusterIP", "loadBalancerClass": null } });
    world.patch("flipped", &to_cluster_ip);
    // A class is for life, so the type changes twice.
    world.patch("handed-over", &to_cluster_ip);
    let to_other = json!({ "spec": { "type": "LoadBalancer", "loadBalancerClass": "example.com/other" } });
    world.patch("handed-over", &to_other);
    let theirs = json!([{ "hostname": "lb.example.com" }]);
    world.write_status("handed-over", &theirs);
    world.patch("readdressed", &json!({ "spec": { "loadBalancerIP": other } }));
    world.kubectl(&["delete", "service", "deleted"]);
    for node in 1..=3 {
        world.start_agent(node);
    }
    world.await_ready();
    world.await_served(other);
    world.await_shown("readdressed", Some(other));
    world.await_shown("flipped", None);
    for address in [flipped, handed_over, readdressed, deleted] {
        world.await_served_by(address, &[]);
        world.request(address).unwrap_err();
    }
    // Another controller's is not ours to clear.
    assert_eq!(world.shown("handed-over").unwrap(), theirs);
    wait::until("the Service is ours again", PATIENCE, || {
        world.patch("handed-over", &to_cluster_ip);
        ensure!(world.shown("handed-over")? == Value::Null, "the server keeps the status");
        world.patch(
            "handed-over",
            &json!({ "spec": { "type": "LoadBalancer", "loadBalancerClass": "reweave.levk.dev/node-address" } }),
        );
        Ok(())
    })
    .unwrap();
    world.await_served(handed_over);
    world.await_shown("handed-over", Some(handed_over));
}
