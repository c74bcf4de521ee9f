//! Agents that are killed, come back and are cleaned up, on networks where the overlay is routed to.

use crate::cleanup::same;
use crate::node;
use crate::world::{PATIENCE, World};
use anyhow::ensure;
use testbed::{Options, Topology, wait};

fn an_agent_comes_back_and_goes(topology: Topology, kind: &str) {
    let mut world = World::with(Options { topology, rp_filter: 1, forward_drop: true, ..Options::default() });
    let before: Vec<String> = (1..=3).map(|node| world.snapshot(node)).collect();
    let attach = format!("--attach={kind}");
    world.start_all(&[&attach]);
    world.await_ready();
    world.await_served();

    let n2 = world.node(2).clone();
    let overlay = world.testbed.node(2).overlay_device();
    let loose = n2.run(&["cat", &format!("/proc/sys/net/ipv4/conf/{overlay}/rp_filter")]).unwrap();
    assert_eq!(loose.trim(), "2", "strict would drop forwards: their source is behind another device");
    let pods = world.testbed.node(2).pods_bridge().unwrap_or(world.pods[1].port()).to_owned();
    let wanted = |hook: &str| ["egress", "ingress"].map(|way| format!("{hook} {kind}/{way} reweave_{way}"));
    let hooks = node::hooks(&n2).unwrap();
    for device in [overlay, &pods, "eth0"] {
        assert!(wanted(device).iter().all(|hook| hooks.contains(hook)), "{device}: {hooks:?}");
    }
    // A guard, its end, and one for the holder.
    let rules = node::rules(&n2).unwrap();
    assert_eq!(rules.len(), 3, "{rules:?}");

    // What only the running agent could mend is broken meanwhile.
    world.kill(2);
    n2.ip("rule del priority 100\nrule del priority 101").unwrap();
    world.start(2, &[&attach]);
    wait::until("the rules are back", PATIENCE, || {
        let found = node::rules(&n2)?;
        ensure!(found == rules, "{found:?}");
        Ok(())
    })
    .unwrap();
    world.await_served();

    for node in 1..=3 {
        world.terminate(node);
        world.clean_up(node).unwrap();
        same(&before[usize::from(node) - 1], &world.snapshot(node), node);
    }
}

#[test]
fn an_agent_comes_back_and_goes_on_flannel() {
    an_agent_comes_back_and_goes(Topology::Flannel, "tcx");
}

#[test]
fn an_agent_comes_back_and_goes_on_host_gw() {
    an_agent_comes_back_and_goes(Topology::HostGw, "clsact");
}

#[test]
fn an_agent_comes_back_and_goes_on_calico_with_vxlan() {
    an_agent_comes_back_and_goes(Topology::CalicoVxlan, "clsact");
}

#[test]
fn an_agent_comes_back_and_goes_on_calico_without_a_tunnel() {
    an_agent_comes_back_and_goes(Topology::Calico, "tcx");
}
