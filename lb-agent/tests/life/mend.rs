//! What others take away comes back.

use crate::node;
use crate::world::{PATIENCE, SOON, World};
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::net::Ipv4Addr;
use testbed::{Host, wait};

const HELD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 101);

fn soon(what: &str, look: impl FnMut() -> Result<()>) {
    wait::until(what, SOON, look).unwrap();
}

fn rp_filter(host: &Host) -> Result<String> {
    Ok(host.run(&["cat", "/proc/sys/net/ipv4/conf/weave/rp_filter"])?.trim().to_owned())
}

/// With the default period of ten seconds, so that only an event can be the reason.
#[test]
fn what_others_delete_is_back_within_a_second() {
    let mut world = World::serving(&[]);
    let n2 = world.node(2).clone();
    let one_of_each = |world: &World| world.check_nodes("tcx");

    n2.ip("rule del priority 100").unwrap();
    assert_eq!(node::rules(&n2).unwrap(), [""; 0]);
    soon("the rule", || one_of_each(&world));

    let route = node::routes(&n2).unwrap().remove(0);
    n2.run(&[&["ip", "route", "del"], route.split(' ').collect::<Vec<_>>().as_slice()].concat()).unwrap();
    assert_eq!(node::routes(&n2).unwrap(), [""; 0]);
    soon("the route", || one_of_each(&world));

    let table = node::nft_tables(&n2).unwrap().into_iter().find(|table| table.contains("reweave")).unwrap();
    n2.feed(&["nft", "-f", "-"], &format!("delete {table}")).unwrap();
    soon("the table", || one_of_each(&world));

    n2.sysctls(&[("ipv4/conf/weave/rp_filter", "1")]).unwrap();
    soon("the reverse-path filter", || {
        ensure!(rp_filter(&n2)? == "2", "{}", rp_filter(&n2)?);
        Ok(())
    });
    world.await_served();

    // Made anew under the same name, as a restart of weave does.
    n2.ip("link del vxlan-6784").unwrap();
    n2.ip("link add vxlan-6784 mtu 1450 type vxlan id 6784 dstport 6784 local 192.0.2.12
           link set vxlan-6784 master weave up")
        .unwrap();
    n2.bridge(
        "fdb append 00:00:00:00:00:00 dev vxlan-6784 dst 192.0.2.11
         fdb append 00:00:00:00:00:00 dev vxlan-6784 dst 192.0.2.13",
    )
    .unwrap();
    soon("programs on the new device", || one_of_each(&world));
    world.await_served();
    assert!(world.process(2).is_running().unwrap());

    // Out of the bridge and back in.
    n2.ip("link set vxlan-6784 nomaster").unwrap();
    n2.ip("link set vxlan-6784 master weave").unwrap();
    soon("programs on the device that was moved", || one_of_each(&world));
    world.await_served();
}

#[test]
fn an_address_that_goes_and_comes_is_followed_within_a_second() {
    let world = World::serving(&[]);
    let shown = || world.cluster().published_node("n1");
    assert!(shown().unwrap().contains("192.0.2.101"));
    for _ in 0..2 {
        world.node(1).ip(&format!("addr del {HELD}/32 dev eth0")).unwrap();
        soon("the annotation without the address, and nothing served", || {
            ensure!(!shown()?.contains("192.0.2.101"), "{}", shown()?);
            ensure!(world.maps(1).services.all()?.is_empty(), "still served");
            ensure!(!world.cluster().status("web")?.contains("192.0.2.101"), "still in the status");
            Ok(())
        });
        world.get().unwrap_err();
        world.node(1).ip(&format!("addr add {HELD}/32 dev eth0")).unwrap();
        soon("the address served again", || {
            ensure!(shown()?.contains("192.0.2.101"), "{}", shown()?);
            ensure!(world.cluster().status("web")?.contains("192.0.2.101"), "not in the status");
            world.check_nodes("tcx")
        });
        world.await_served();
    }
}

/// The kernel tells nobody of these: the periodic pass finds them.
#[test]
fn programs_that_others_detach_are_back_after_a_period() {
    let mut world = World::serving(&["--period=1"]);
    let n1 = world.node(1).clone();
    let links = world.testbed.pins(1).join("links");
    for entry in fs::read_dir(&links).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    soon("links whose pins were removed", || node::check_hooks(&n1, "tcx"));
    // A link that is detached though its pin stays.
    let shown =
        n1.run(&["bpftool", "-j", "link", "show", "pinned", first(&links).unwrap().as_str()]).unwrap();
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    n1.run(&["bpftool", "link", "detach", "id", &shown["id"].to_string()]).unwrap();
    assert!(node::check_hooks(&n1, "tcx").is_err());
    soon("a detached link", || node::check_hooks(&n1, "tcx"));
    world.await_served();

    world.terminate(1);
    world.start(1, &["--period=1", "--attach=clsact"]);
    wait::until("clsact", PATIENCE, || node::check_hooks(&n1, "clsact")).unwrap();
    n1.run(&["tc", "filter", "del", "dev", "weave", "ingress"]).unwrap();
    soon("the filter", || node::check_hooks(&n1, "clsact"));
    n1.run(&["tc", "qdisc", "del", "dev", "eth0", "clsact"]).unwrap();
    soon("the qdisc", || node::check_hooks(&n1, "clsact"));
    world.await_served();
}

fn first(directory: &std::path::Path) -> Result<String> {
    let entry = fs::read_dir(directory)?.next().context("no link")??;
    Ok(entry.path().to_str().context("not UTF-8")?.to_owned())
}
