//! The programs on the hooks: by clsact, from one hook to the other, and beside somebody else's.

use crate::clients::Idle;
use crate::foreign::{self, Foreign};
use crate::node;
use crate::world::{End, PATIENCE, SOON, WEB, World};
use anyhow::ensure;
use aya::programs::links::LinkOrder;
use std::net::UdpSocket;
use std::time::Duration;
use testbed::load::Load;
use testbed::wait;

const CLSACT: &[&str] = &["--attach=clsact"];

/// Cases K9, K12; the way of kernels before 6.6.
#[test]
fn clsact_serves_is_adopted_and_gives_way_to_tcx_and_back() {
    let mut world = World::serving(CLSACT);
    let mut idle = Idle::open(world.testbed.client(), 200);
    let load = Load::start(world.testbed.client(), WEB, 2);
    let steps: [(End, &[&str], &str); 5] = [
        (World::terminate, CLSACT, "clsact"),
        (World::kill, CLSACT, "clsact"),
        (World::kill, &[], "tcx"),
        (World::kill, CLSACT, "clsact"),
        (World::terminate, &["--attach=tcx"], "tcx"),
    ];
    for (stop, args, kind) in steps {
        for node in 1..=3 {
            stop(&mut world, node);
            world.start(node, args);
        }
        world.await_ready();
        world.await_nodes(kind);
        load.await_answers(50, PATIENCE).unwrap();
        idle.check().unwrap_or_else(|error| panic!("to {kind}: {error:#}"));
    }
    let counts = load.finish().unwrap();
    assert!(counts.failures.is_empty(), "of {}: {:?}", counts.answered, counts.failures);
}

/// Case K9: a foreign packet meets the programs behind ours too, whoever came first.
#[test]
fn programs_of_others_still_run() {
    let mut world = World::new();
    let n1 = world.node(1).clone();
    let send = |world: &World| {
        world
            .testbed
            .client()
            .enter(|| {
                let socket = UdpSocket::bind("0.0.0.0:0")?;
                for _ in 0..3 {
                    socket.send_to(b"foreign", "192.0.2.11:9")?;
                }
                Ok(())
            })
            .unwrap();
    };
    let foreign = Foreign::load(world.testbed.pins(1).parent().unwrap());
    let is_run = |world: &World, order: &str| {
        let before = foreign.seen();
        send(world);
        wait::until(&format!("it sees packets, {order}"), SOON, || {
            let seen = foreign.seen() - before;
            ensure!(seen >= 3, "{seen} of 3");
            Ok(())
        })
        .unwrap();
    };
    // There before us, so behind us.
    let link = foreign.attach(&n1, "eth0", LinkOrder::last());
    is_run(&world, "alone");
    world.start_all(&[]);
    world.await_nodes("tcx");
    world.await_ready();
    world.await_served();
    let on_eth0 = || {
        node::hooks(&n1)
            .unwrap()
            .into_iter()
            .filter(|h| h.starts_with("eth0 tcx/ingress"))
            .collect::<Vec<_>>()
    };
    assert_eq!(on_eth0(), ["eth0 tcx/ingress reweave_ingress", "eth0 tcx/ingress foreign"]);
    is_run(&world, "behind ours");
    foreign::detach(&n1, &link);
    let link = foreign.attach(&n1, "eth0", LinkOrder::first());
    assert_eq!(on_eth0(), ["eth0 tcx/ingress foreign", "eth0 tcx/ingress reweave_ingress"]);
    is_run(&world, "before ours");
    world.await_served();
    world.agent(1).await_said("another program runs before ours");
    // Neither a restart nor its end touches it.
    world.kill(1);
    world.start(1, &[]);
    world.await_ready();
    is_run(&world, "after our restart");
    world.agent(1).await_said("another program runs before ours");
    world.terminate(1);
    world.clean_up(1).unwrap();
    is_run(&world, "after our cleanup");
    foreign::detach(&n1, &link);

    // As a clsact filter beside ours.
    n1.run(&["tc", "qdisc", "add", "dev", "eth0", "clsact"]).unwrap();
    foreign.filter(&n1, "eth0", "9000");
    world.start(1, CLSACT);
    world.await_served();
    wait::until("ours is in front", Duration::from_secs(5), || node::check_hooks(&n1, "clsact")).unwrap();
    is_run(&world, "a filter behind ours");
}
