//! The API goes away, forgets everything, changes its mind about a token.

use crate::shared::{self, Shared};
use crate::world::{PATIENCE, World, check, service};
use anyhow::ensure;
use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;
use testbed::kubernetes::Component;
use testbed::wait;

/// Clients read a token's file again each minute, and wait up to half a minute after a refusal.
const RENEWED: Duration = Duration::from_secs(120);

/// Connections go on, and new ones come about.
fn check_traffic(world: &World, talks: &mut [crate::client::Talk], address: Ipv4Addr, when: &str) {
    for _ in 0..10 {
        check(talks, when);
        world.request(address).unwrap_or_else(|error| panic!("{when}: {error:#}"));
    }
}

/// The agents hear of what is new, without having been started again.
fn check_news(world: &mut Shared, old: &str) {
    let fresh = world.held_by(2);
    world.serve("news", fresh);
    world.kubectl(&["delete", "service", old]);
}

#[test]
fn a_server_that_is_killed_disturbs_nothing_and_its_news_are_heard_after() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.serve("steady", address);
    let mut talks = world.talks(address);
    world.plane.kill(Component::ApiServer).unwrap();
    for node in 1..=3 {
        world.await_said(node, "last good state stays in force");
        assert_eq!(world.readyz(node).unwrap(), "ok");
    }
    check_traffic(&world, &mut talks, address, "without a server");
    world.plane.start_again(Component::ApiServer).unwrap();
    check_traffic(&world, &mut talks, address, "with a new server");
    check_news(&mut world, "steady");
    world.await_served_by(address, &[]);
}

/// Packets are dropped, nobody refuses or closes anything: to the agent's kernel the watches are alive.
#[test]
fn a_server_that_falls_silent_is_noticed_and_its_news_are_heard_after() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    let other = world.held_by(1);
    world.serve("steady", address);
    world.serve("ending", other);
    let mut talks = world.talks(address);
    world.stop_agent(1);
    world.start_agent_with(1, &["--api-silence=3"]);
    world.await_node_ready(1);
    let drop_all =
        "table ip silence { chain c { type filter hook prerouting priority -300; tcp sport 6443 drop; }; }";
    world.node(1).feed(&["nft", "-f", "-"], drop_all).unwrap();
    world.await_said(1, "last good state stays in force");
    assert_eq!(world.readyz(1).unwrap(), "ok");
    world.kubectl(&["delete", "service", "ending"]);
    check_traffic(&world, &mut talks, address, "in the silence");
    assert_eq!(world.servers_of(other).unwrap(), [1], "it cannot have heard");
    world.node(1).run(&["nft", "delete", "table", "ip", "silence"]).unwrap();
    world.await_served_by(other, &[]);
    let fresh = world.held_by(1);
    world.serve("news", fresh);
    world.stop_agent(1);
}

/// An empty store has no Services, no Nodes and no ServiceAccounts: nobody is to believe it.
#[test]
fn a_store_that_was_wiped_disturbs_nothing_until_it_is_restored() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.serve("steady", address);
    let mut talks = world.talks(address);
    stop_all(&mut world);
    world.plane.back_up_store().unwrap();
    world.plane.wipe_store().unwrap();
    start_all(&mut world);
    assert_eq!(world.kubectl(&["get", "nodes", "--output=name"]).trim(), "");
    for node in 1..=3 {
        world.await_said(node, "does not accept this agent's credentials");
    }
    check_traffic(&world, &mut talks, address, "with an empty store");

    stop_all(&mut world);
    world.plane.restore_store().unwrap();
    start_all(&mut world);
    check_traffic(&world, &mut talks, address, "with the old store");
    check_news(&mut world, "steady");
    world.await_served_by(address, &[]);
}

/// The controllers too: their own accounts are in the store.
fn stop_all(world: &mut World) {
    for component in [Component::ControllerManager, Component::ApiServer, Component::Etcd] {
        world.plane.kill(component).unwrap();
    }
}

fn start_all(world: &mut World) {
    for component in [Component::Etcd, Component::ApiServer, Component::ControllerManager] {
        world.plane.start_again(component).unwrap();
    }
}

/// The old one ends with its Pod, at once; a kubelet's would live on for a while.
#[test]
fn a_token_that_is_rotated_is_read_without_a_restart() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.serve("steady", address);
    let old = copy_of_credentials(&world);
    let may_list = |kubeconfig| world.plane.kubectl_as(kubeconfig, &["get", "services"]);
    may_list(&old).unwrap();
    world.kubectl(&["delete", "pod", "reweave-lb-n1", "-n", "kube-system", "--grace-period=0", "--force"]);
    wait::until("the old token has ended", PATIENCE, || {
        ensure!(may_list(&old).is_err(), "it is accepted");
        Ok(())
    })
    .unwrap();
    world.add_agent_pod(1);
    world.issue_token(1);
    // What n1 alone writes.
    let fresh = world.held_by(1);
    world.apply(&service("fresh", fresh, "web"));
    wait::until("n1 writes with the new token", RENEWED, || {
        let shown = world.shown("fresh")?;
        ensure!(shown[0]["ip"] == fresh.to_string(), "{shown}");
        Ok(())
    })
    .unwrap();
    world.await_served(fresh);
    world.await_node_ready(1);
}

/// A kubeconfig with the token that the agent of n1 has now.
fn copy_of_credentials(world: &World) -> std::path::PathBuf {
    let kubeconfig = world.kubeconfig(1);
    let token = fs::read_to_string(kubeconfig.with_extension("token")).unwrap();
    let text = fs::read_to_string(&kubeconfig).unwrap();
    let path = kubeconfig.with_extension("token").display().to_string();
    let copy = world.testbed.directory().join("old.kubeconfig");
    fs::write(&copy, text.replace(&format!("tokenFile: {path}"), &format!("token: {token}"))).unwrap();
    copy
}
