//! Who may forward: the one node that holds the address (invariant 1).

use crate::client::{Talk, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, World, at, world};
use std::io::ErrorKind;
use testbed::cluster::Service;
use testbed::wait;

fn await_status(world: &World, text: &str) {
    wait::until(&format!("the status says {text}"), SOON, || {
        let status = world.testbed.cluster().status("web")?;
        anyhow::ensure!(status.contains(text), "{status}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_address_without_exactly_one_holder_is_not_forwarded() {
    let world = world();
    let pod = world.pod(3, "pod");
    let _echo = Echo::tcp(&pod, 8080);
    world.serve("web", Service::new("web", V).tcp(80, 8080), &[pod.endpoint()]);
    let (client, service) = (world.testbed.client(), at(V, 80));
    assert_eq!(Talk::open(client, service).unwrap().pod, "pod");
    await_status(&world, "192.0.2.101");

    // A second holder appears: whichever of them the client reaches, it says no.
    world.testbed.node(2).ip(&format!("addr add {V}/32 dev eth0")).unwrap();
    await_status(&world, "ingress: []");
    world.settle();
    for node in [HOLDER, 2] {
        assert!(world.maps(node).unwrap().services.all().unwrap().is_empty());
    }
    assert_eq!(kind(Talk::open(client, service)), ErrorKind::ConnectionRefused);

    // One again, the other one.
    world.testbed.node(HOLDER).ip(&format!("addr del {V}/32 dev eth0")).unwrap();
    world.testbed.router().ip(&format!("neigh flush to {V}")).unwrap();
    await_status(&world, "192.0.2.101");
    world.settle();
    assert_eq!(Talk::open(client, service).unwrap().pod, "pod");

    // None: the router finds nobody, and no status promises anything.
    world.testbed.node(2).ip(&format!("addr del {V}/32 dev eth0")).unwrap();
    await_status(&world, "ingress: []");
    world.testbed.router().ip(&format!("neigh flush to {V}")).unwrap();
    assert_eq!(kind(Talk::open(client, service)), ErrorKind::HostUnreachable);

    world.testbed.node(HOLDER).ip(&format!("addr add {V}/32 dev eth0")).unwrap();
    world.testbed.router().ip(&format!("neigh flush to {V}")).unwrap();
    await_status(&world, "192.0.2.101");
    world.settle();
    assert_eq!(Talk::open(client, service).unwrap().pod, "pod");
}
