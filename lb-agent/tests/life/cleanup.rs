//! `lb-agent cleanup`: the node is as it was before the first agent. Invariant 10; case K14.

use crate::foreign::Foreign;
use crate::node;
use crate::world::{PATIENCE, World};
use anyhow::{Result, ensure};
use aya::programs::links::LinkOrder;
use lb_agent::datapath::maps::NAMES;
use std::fs;
use std::path::Path;
use testbed::{Host, Options, wait};

/// All that an agent could leave behind on a node, as text.
fn snapshot(host: &Host, pins: &Path, state: &Path) -> Result<String> {
    let shell = "ip -details rule; ip -4 route show table all; ip -4 address; tc qdisc show; nft --stateless list ruleset
        for device in $(ls /proc/sys/net/ipv4/conf | grep -v -e all -e default); do
            tc filter show dev $device ingress; tc filter show dev $device egress
        done
        grep --recursive --no-messages . /proc/sys/net/ipv4 /proc/sys/net/bridge | grep -v -e /route/ -e random";
    let shown = host.run(&["sh", "-c", shell])?;
    ensure!(shown.contains("rp_filter:"), "the snapshot has no sysctls: {shown}");
    let there = |path: &Path| format!("{}: {}", path.display(), path.exists());
    let hooks = node::hooks(host)?.join("\n");
    Ok([&shown, &hooks, &there(pins), &there(state)].map(String::as_str).join("\n"))
}

impl World {
    pub(crate) fn snapshot(&self, node: u8) -> String {
        snapshot(self.node(node), &self.testbed.pins(node), &self.state(node)).unwrap()
    }
}

/// Things of others, of every sort that we have too.
fn add_foreign_things(host: &Host, foreign: &Foreign) {
    host.ip("rule add fwmark 0x1 table 77 priority 100
             route add 203.0.113.0/24 via 192.0.2.1 table 77
             route add 203.0.114.0/24 via 192.0.2.1 protocol 99")
        .unwrap();
    host.feed(&["nft", "-f", "-"], "table ip foreign { chain c { type filter hook forward priority 7; }; }")
        .unwrap();
    host.run(&["tc", "qdisc", "add", "dev", "eth0", "clsact"]).unwrap();
    // Our own priority is no sign that a filter is ours.
    foreign.filter(host, "eth0", "9");
    foreign.attach(host, "weave", LinkOrder::last());
}

#[test]
fn a_node_is_as_before_with_tcx() {
    a_node_is_as_before("tcx");
}

#[test]
fn a_node_is_as_before_with_clsact() {
    a_node_is_as_before("clsact");
}

fn a_node_is_as_before(kind: &str) {
    let mut world = World::with(Options { rp_filter: 1, ..Options::default() });
    let foreign = Foreign::load(world.testbed.pins(1).parent().unwrap());
    add_foreign_things(&world.node(2).clone(), &foreign);
    let before: Vec<String> = (1..=3).map(|node| world.snapshot(node)).collect();
    let attach = format!("--attach={kind}");
    world.start_all(&[&attach]);
    world.await_nodes(kind);
    world.await_ready();
    world.await_served();
    let during = world.snapshot(2);
    assert_ne!(during, before[1]);
    for changed in ["conf/weave/rp_filter:2", "conf/lo/rp_filter:2", "conf/lo/accept_local:1"] {
        assert!(during.contains(changed), "{changed}: {during}");
    }

    let refused = format!("{:#}", world.clean_up(1).unwrap_err());
    assert!(refused.contains("another agent runs this datapath (process "), "{refused}");
    world.await_served();

    let ids: Vec<String> = NAMES.iter().map(|name| map_id(&world, name)).collect();
    for node in 1..=3 {
        world.terminate(node);
        let said = world.clean_up(node).unwrap();
        assert!(said.contains("removed pinned maps"), "{said}");
        same(&before[usize::from(node) - 1], &world.snapshot(node), node);
        let again = world.clean_up(node).unwrap();
        assert_eq!(again.trim(), "nothing of lb-agent is on this node");
        same(&before[usize::from(node) - 1], &world.snapshot(node), node);
    }
    wait::until("the kernel frees the maps", PATIENCE, || {
        let left: Vec<_> = ids
            .iter()
            .filter(|id| world.node(1).run(&["bpftool", "map", "show", "id", id]).is_ok())
            .collect();
        ensure!(left.is_empty(), "maps {left:?}");
        Ok(())
    })
    .unwrap();

    world.start_all(&[&attach]);
    world.await_nodes(kind);
    world.await_ready();
    world.await_served();
}

/// Maps of a former layout hold memory for nothing once the programs are exchanged.
#[test]
fn maps_of_another_version_go() {
    let mut world = World::serving(&[]);
    world.terminate(1);
    let former = world.testbed.pins(1).join("maps-v1");
    fs::create_dir(&former).unwrap();
    let pin = former.join("flows");
    let words = ["bpftool", "map", "create", pin.to_str().unwrap(), "type", "hash", "key", "4"];
    let rest = ["value", "4", "entries", "8", "name", "flows"];
    world.node(1).run(&[&words[..], &rest].concat()).unwrap();
    world.start(1, &[]);
    world.await_ready();
    assert!(!former.exists());
    world.await_served();
}

fn map_id(world: &World, name: &str) -> String {
    let pin = world.testbed.pins(1).join("maps-v3").join(name);
    let shown =
        world.node(1).run(&["bpftool", "-j", "map", "show", "pinned", pin.to_str().unwrap()]).unwrap();
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    shown["id"].to_string()
}

#[track_caller]
pub(crate) fn same(before: &str, after: &str, node: u8) {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (before, after) = (lines(before), lines(after));
    let gone: Vec<_> = before.iter().filter(|line| !after.contains(line)).collect();
    let left: Vec<_> = after.iter().filter(|line| !before.contains(line)).collect();
    assert!(before == after, "n{node}: gone {gone:#?}, left {left:#?}");
}

/// A filter that somebody adds to the qdisc that we have made keeps that qdisc.
#[test]
fn a_qdisc_that_others_use_meanwhile_stays() {
    let mut world = World::serving(&["--attach=clsact"]);
    let n1 = world.node(1).clone();
    let foreign = Foreign::load(world.testbed.pins(1).parent().unwrap());
    foreign.filter(&n1, "weave", "9");
    n1.run(&[
        "tc", "filter", "add", "dev", "eth0", "egress", "prio", "9", "u32", "match", "u32", "0", "0",
        "classid", "1:1",
    ])
    .unwrap();
    world.terminate(1);
    world.clean_up(1).unwrap();
    let qdiscs = n1.run(&["tc", "qdisc", "show"]).unwrap();
    let clsact: Vec<_> = qdiscs.lines().filter(|line| line.contains("clsact")).collect();
    assert_eq!(clsact.len(), 2, "{qdiscs}");
    let mut hooks = node::hooks(&n1).unwrap();
    // tc shows the hash tables of u32 as filters too.
    hooks.dedup();
    assert_eq!(hooks, ["eth0 clsact/egress u32", "weave clsact/ingress foreign"]);
}
