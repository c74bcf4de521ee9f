//! Clients inside the cluster, whose connections this node has given sources.

use crate::clients::{Downloads, Idle};
use crate::world::{PATIENCE, World};
use anyhow::ensure;
use lb_common::addr::Ipv4;
use lb_common::masquerade::{Network, Own};
use std::collections::BTreeSet;
use testbed::{Host, wait};

/// From each of three clients.
const IDLE: usize = 100;

/// Nothing of a port is known to the agent alone: what packets have noted is what the next agent finds.
#[test]
fn connections_from_inside_outlive_a_kill() {
    let mut world = World::serving(&["--period=1"]);
    let pods = [1, 2].map(|node| world.testbed.add_pod(node, &format!("client-{node}")).unwrap());
    let clients = [Host::clone(&pods[0]), Host::clone(&pods[1]), world.node(1).clone()];
    let mut idle: Vec<_> = clients.iter().map(|client| Idle::open(client, IDLE)).collect();
    let downloads: Vec<_> = clients.iter().map(|client| Downloads::start(client, 1)).collect();
    let go_on = |idle: &mut Vec<Idle>, when: &str| {
        for (idle, downloads) in idle.iter_mut().zip(&downloads) {
            idle.check().unwrap_or_else(|error| panic!("{when}: {error:#}"));
            downloads.await_progress();
        }
    };
    let ports = |world: &World| -> BTreeSet<_> {
        world.maps(1).masquerades.list().unwrap().into_iter().map(|(key, given)| (key, given.port)).collect()
    };
    go_on(&mut idle, "before");
    let given = ports(&world);
    assert!(given.len() >= 3 * (IDLE + 1), "{} ports", given.len());
    for node in 1..=3 {
        world.kill(node);
    }
    go_on(&mut idle, "while no agent runs");
    world.start_all(&["--period=1"]);
    world.await_ready();
    world.await_nodes("tcx");
    go_on(&mut idle, "afterwards");
    // Some sweeps later, too.
    for _ in 0..3 {
        downloads[0].await_progress();
    }
    go_on(&mut idle, "after sweeps");
    assert!(given.is_subset(&ports(&world)), "ports have changed");
    drop(idle);
    downloads.into_iter().for_each(Downloads::finish);
    wait::until("the ports come back", PATIENCE, || {
        ensure!(ports(&world).is_empty(), "{} are not back", ports(&world).len());
        Ok(())
    })
    .unwrap();
}

/// The kernel tells nobody of these: the periodic pass finds them.
#[test]
fn what_others_write_about_the_inside_is_put_right_after_a_period() {
    let world = World::serving(&["--period=1"]);
    let mut maps = world.maps(1);
    let (networks, own) = (maps.inside.networks().unwrap(), maps.inside.own().unwrap());
    let nodes = [11, 12, 13].map(|last| Network { prefix: 32, address: Ipv4::new([192, 0, 2, last]) });
    assert!(nodes.iter().all(|node| networks.contains(node)), "{networks:?}");
    assert_eq!(own.overlay.octets(), world.testbed.node(1).overlay().octets());

    maps.inside.remove(nodes[1]).unwrap();
    maps.inside.insert(Network { prefix: 24, address: Ipv4::new([198, 51, 100, 0]) }).unwrap();
    maps.inside.set_own(Own::default()).unwrap();
    wait::until("both are as before", PATIENCE, || {
        let found = (maps.inside.networks()?, maps.inside.own()?);
        ensure!(found == (networks.clone(), own), "{found:?}");
        Ok(())
    })
    .unwrap();

    let lo = world.node(1).clone();
    lo.sysctls(&[("ipv4/conf/lo/accept_local", "0")]).unwrap();
    wait::until("the loopback is open", PATIENCE, || {
        let value = lo.run(&["cat", "/proc/sys/net/ipv4/conf/lo/accept_local"])?;
        ensure!(value.trim() == "1", "{value}");
        Ok(())
    })
    .unwrap();
}
