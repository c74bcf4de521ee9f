//! kube-proxy runs on every node, as in most clusters.

use crate::client::Talk;
use crate::shared::{Shared, with_proxies};
use crate::world::{PATIENCE, TALK, WEB, World, check, label, service};
use anyhow::{Result, ensure};
use serde_json::json;
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;
use testbed::kubernetes::Mode;
use testbed::{http, wait};

/// Connections that nobody has said a word on for so long are new to conntrack.
const FORGOTTEN: &str = "3";

#[test]
fn traffic_works_and_kube_proxy_stays_out_of_it_in_nftables_mode() {
    let Some(mut world) = with_proxies(Some(Mode::Nftables)) else { return };
    show_all(&mut world, &["nft", "list", "table", "ip", "kube-proxy"]);
}

#[test]
fn traffic_works_and_kube_proxy_stays_out_of_it_in_iptables_mode() {
    let Some(mut world) = with_proxies(Some(Mode::Iptables)) else { return };
    show_all(&mut world, &["iptables-save"]);
}

fn show_all(world: &mut Shared, rules: &[&str]) {
    let address = world.held_by(1);
    world.serve("beside", address);
    clients_are_seen_by_pods(world, address);
    cluster_ips_work_beside(world);
    mirrored_endpoints_are_served(world);
    kube_proxy_has_nothing_for_the_address(world, address, rules);
    its_rule_for_invalid_packets_kills_nothing(world, address);
}

/// On the holder and on the others.
fn clients_are_seen_by_pods(world: &World, address: Ipv4Addr) {
    let mut answered = BTreeSet::new();
    while answered.len() < 3 {
        answered.insert(world.request(address).unwrap());
    }
    let client = world.testbed.client_address().to_string();
    for pod in &answered {
        // The last request may not be in the log yet; the first is.
        let clients = wait::until("a client in the log", PATIENCE, || {
            let clients = world.clients_of(pod);
            ensure!(!clients.is_empty(), "none");
            Ok(clients)
        });
        let clients = clients.unwrap();
        assert!(clients.iter().all(|seen| *seen == client), "{pod} saw {clients:?}");
    }
}

fn cluster_ip(world: &World, service: &str) -> Result<Ipv4Addr> {
    Ok(world.get(&format!("service/{service}"))?["spec"]["clusterIP"].as_str().unwrap_or_default().parse()?)
}

/// From a node and from pods.
fn cluster_ips_work_beside(world: &World) {
    let address = SocketAddrV4::new(cluster_ip(world, "beside").unwrap(), WEB);
    for host in [world.node(1), world.node(2), &*world.pods[0], &*world.pods[2]] {
        let mut answered = BTreeSet::new();
        wait::until(&format!("all pods answer {} at {address}", host.name()), PATIENCE, || {
            answered.insert(http::get(host, address, "/", Duration::from_secs(1))?);
            ensure!(answered.len() == 3, "{answered:?}");
            Ok(())
        })
        .unwrap();
    }
}

/// A Service without a selector, and Endpoints by hand: the controller makes a slice of them.
fn mirrored_endpoints_are_served(world: &mut World) {
    let address = world.held_by(2);
    let addresses: String =
        world.pods.iter().map(|pod| format!("{{ip: {}, nodeName: n{}}}, ", pod.ip(), pod.node())).collect();
    world.apply(&service("mirrored", address, ""));
    world.apply(&format!(
        "
apiVersion: v1
kind: Endpoints
metadata: {{name: mirrored, namespace: default, labels: {{{}}}}}
subsets:
- addresses: [{addresses}]
  ports: [{{name: web, port: 8080}}, {{name: talk, port: 8081}}, {{name: ask, port: 5353, protocol: UDP}}]
",
        label("mirrored")
    ));
    world.await_served(address);
    check(&mut world.talks(address), "through a mirrored slice");
}

/// What it does have is what a status without `ipMode: Proxy` makes it have, so it has seen ours.
fn kube_proxy_has_nothing_for_the_address(world: &mut World, address: Ipv4Addr, rules: &[&str]) {
    let foreign = world.address();
    world.apply(
        &service("foreign", foreign, "web").replace("reweave.levk.dev/node-address", "example.com/other"),
    );
    world.write_status("foreign", &json!([{ "ip": foreign }]));
    for node in 1..=3 {
        let seen = wait::until("kube-proxy has the other address", PATIENCE, || {
            let seen = world.node(node).run(rules)?;
            ensure!(seen.contains(&foreign.to_string()), "{seen}");
            Ok(seen)
        });
        let seen = seen.unwrap();
        let own = cluster_ip(world, "beside").unwrap();
        assert!(seen.contains(&own.to_string()), "n{node} lacks our Service: {seen}");
        assert!(!seen.contains(&address.to_string()), "n{node} has our address: {seen}");
    }
    // What our hook refuses goes no further, whatever kube-proxy might make of it.
    let unserved = SocketAddrV4::new(address, WEB + 2);
    Talk::open(world.testbed.client(), unserved).unwrap_err();
}

/// Long silences, and words from either side after them, with pods on the holder and on others.
fn its_rule_for_invalid_packets_kills_nothing(world: &World, address: Ipv4Addr) {
    let client = format!("src={} ", world.testbed.client_address());
    for node in 1..=3 {
        world.node(node).sysctls(&[("netfilter/nf_conntrack_tcp_timeout_established", FORGOTTEN)]).unwrap();
    }
    let mut talks = world.talks(address);
    for round in 0..2 {
        check(&mut talks, &format!("round {round}"));
        for talk in &mut talks {
            // Much to the client, much to the pod.
            talk.tell("send 300000").unwrap();
            assert_eq!(talk.take(300_000).unwrap(), crate::echo::pattern(300_000), "from {}", talk.pod);
            talk.tell("take 300000").unwrap();
            talk.give(&crate::echo::pattern(300_000)).unwrap();
            assert_eq!(talk.hear().unwrap(), "same", "to {}", talk.pod);
        }
        wait::until("conntrack has forgotten the connections", PATIENCE, || {
            for node in 1..=3 {
                let entries = world.node(node).run(&["conntrack", "-L", "-p", "tcp"])?;
                let known = entries.lines().find(|line| {
                    line.contains(&client) && line.contains("dport=8081") && line.contains("ESTABLISHED")
                });
                ensure!(known.is_none(), "n{node}: {known:?}");
            }
            Ok(())
        })
        .unwrap();
    }
    check(&mut talks, "after a silence");
    assert!(talks.iter().all(|talk| talk.stream().peer_addr().unwrap().port() == TALK));
}
