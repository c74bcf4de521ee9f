//! Which mark names which holder, while holders come and go. Marks live on the node of the pods: n3 here.

use crate::clients::Idle;
use crate::node;
use crate::world::{PATIENCE, World};
use anyhow::{Result, ensure};
use lb_common::mark::{next, preferred};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use testbed::cluster::Service;
use testbed::wait;

/// The overlay address of n1, by which n3 knows it.
const N1: Ipv4Addr = Ipv4Addr::new(10, 32, 0, 1);
/// A node that exists in manifests alone.
const RIVAL: Ipv4Addr = Ipv4Addr::new(10, 32, 0, 77);

fn marks(world: &World) -> Result<BTreeMap<Ipv4Addr, u8>> {
    Ok(world.maps(3).holders.all()?.values().map(|holder| (holder.address.into(), holder.mark)).collect())
}

fn await_marks(world: &World, wanted: &[(Ipv4Addr, u8)]) {
    wait::until("these marks, and a rule and a route for each", PATIENCE, || {
        let found = marks(world)?;
        ensure!(found == BTreeMap::from_iter(wanted.iter().copied()), "{found:?}, not {wanted:?}");
        let (rules, routes) = (node::rules(world.node(3))?, node::routes(world.node(3))?);
        ensure!(rules.len() == wanted.len() && routes.len() == wanted.len(), "{rules:?} {routes:?}");
        Ok(())
    })
    .unwrap();
}

/// A holder that comes before n1 in the order of names and prefers its mark.
fn add_rival(world: &World) {
    let name = (0..).map(|n| format!("a{n}")).find(|name| preferred(name) == preferred("n1")).unwrap();
    let node = format!(
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n  annotations:\n    \
         reweave.levk.dev/addresses: 192.0.2.77\n    reweave.levk.dev/weave: \"{RIVAL},02:00:00:00:00:77\"\n"
    );
    world.cluster().write("node-rival.yaml", &node).unwrap();
    world.cluster().set_service(Service::new("rival", Ipv4Addr::new(192, 0, 2, 77)).tcp(80, 8080)).unwrap();
    world.cluster().set_endpoints("rival", &[world.pods[2].endpoint()]).unwrap();
}

#[test]
fn a_holder_that_stays_keeps_its_mark_through_others_and_restarts() {
    let mut world = World::serving(&["--period=1"]);
    let (ours, other) = (preferred("n1"), next(preferred("n1")));
    await_marks(&world, &[(N1, ours)]);
    add_rival(&world);
    await_marks(&world, &[(N1, ours), (RIVAL, other)]);
    world.kill(3);
    world.start(3, &["--period=1"]);
    world.await_ready();
    await_marks(&world, &[(N1, ours), (RIVAL, other)]);
    world.await_served();
    world.cluster().remove_service("rival").unwrap();
    await_marks(&world, &[(N1, ours)]);
    world.await_served();
}

#[test]
fn a_mark_that_connections_carry_is_not_given_away_and_leads_back_until_they_end() {
    const ON_N3: &[&str] =
        &["--period=1", "--timeout-established=4", "--timeout-closed=1", "--timeout-handshake=1"];
    let mut world = World::new();
    world.start(1, &["--period=1"]);
    world.start(2, &["--period=1"]);
    world.start(3, ON_N3);
    world.await_nodes("tcx");
    world.await_ready();
    world.await_served();
    let (ours, other) = (preferred("n1"), next(preferred("n1")));
    let idle = Idle::open(world.testbed.client(), 30);
    // n1 leaves: its one Service is gone.
    let endpoints: Vec<_> = world.pods.iter().map(testbed::Pod::endpoint).collect();
    world.cluster().remove_service("web").unwrap();
    add_rival(&world);
    await_marks(&world, &[(N1, ours), (RIVAL, other)]);
    // Another agent knows it as well, from the maps.
    world.kill(3);
    world.start(3, ON_N3);
    world.agent(3).await_said("loaded the packet program");
    world.cluster().set_service(Service::new("web", *crate::world::WEB.ip()).tcp(80, 8080)).unwrap();
    world.cluster().set_endpoints("web", &endpoints).unwrap();
    await_marks(&world, &[(N1, ours), (RIVAL, other)]);
    world.await_served();
    drop(idle);
    // It leaves again, and this time nobody is connected for longer than the timeout.
    world.cluster().remove_service("web").unwrap();
    await_marks(&world, &[(RIVAL, other)]);
    // The mark is free now; who has another one keeps that.
    world.cluster().set_service(Service::new("web", *crate::world::WEB.ip()).tcp(80, 8080)).unwrap();
    world.cluster().set_endpoints("web", &endpoints).unwrap();
    await_marks(&world, &[(N1, ours), (RIVAL, other)]);
    world.await_served();
}
