//! The sweep of source ports, and the networks inside the cluster.

use lb_agent::datapath::load::{self, Limits};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::sweep::{Swept, sweep};
use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::config::{Config, Timeouts};
use lb_common::flow::{Flow, FlowKey, Path, State};
use lb_common::masquerade::{Client, Masquerade, MasqueradedKey, Network, Own};
use std::collections::BTreeSet;

const OVERLAY: Ipv4 = Ipv4::new([10, 32, 0, 1]);
const ADDRESS: Ipv4 = Ipv4::new([192, 0, 2, 101]);
const CLIENT: Ipv4 = Ipv4::new([10, 32, 0, 5]);
/// Seconds since boot, as the sweeps have it.
const NOW: u32 = 100_000;

fn maps() -> Maps {
    assert!(nix::unistd::geteuid().is_root(), "this test loads BPF programs: run it as root");
    let limits = Limits { flows: 100, handshakes: 100, services: 4, backends: 4, endpoints: 4 };
    let mut maps = Maps::take(&mut load::load_unpinned(&limits, &Config::DEFAULT).unwrap()).unwrap();
    maps.inside.set_own(Own { overlay: OVERLAY, ..Own::default() }).unwrap();
    maps
}

fn tuple(source: Ipv4, port: u16, protocol: Protocol) -> FlowKey {
    FlowKey::new(source, Port::new(port), ADDRESS, Port::new(80), protocol)
}

fn owned(port: u16, protocol: Protocol) -> MasqueradedKey {
    MasqueradedKey::new(ADDRESS, Port::new(80), Port::new(port), protocol)
}

/// A client's port `client` was given `port`; both know of each other.
fn give(maps: &mut Maps, client: u16, port: u16, protocol: Protocol) {
    maps.masquerades.insert(&tuple(CLIENT, client, protocol), &Masquerade::new(Port::new(port))).unwrap();
    maps.masqueraded.insert(&owned(port, protocol), &Client::new(CLIENT, Port::new(client))).unwrap();
}

fn flow(state: State, idle: u32) -> Flow {
    Flow::new(0, 0, 0, Path::Redirect, state, NOW - idle)
}

/// Client ports that have one, and source ports that have an owner.
fn left(maps: &Maps) -> (BTreeSet<u16>, BTreeSet<u16>) {
    let clients = maps.masquerades.list().unwrap().into_iter().map(|(key, _)| key.source_port.number());
    let ports = maps.masqueraded.list().unwrap().into_iter().map(|(key, _)| key.port.number());
    (clients.collect(), ports.collect())
}

fn swept(maps: &mut Maps) -> Swept {
    sweep(maps, &Timeouts::DEFAULT, NOW).unwrap()
}

#[test]
fn a_source_port_goes_with_its_connection() {
    let mut maps = maps();
    let tcp = Protocol::TCP;
    for (client, port) in [(1, 20_001), (2, 20_002), (3, 20_003), (4, 20_004), (5, 20_005)] {
        give(&mut maps, client, port, tcp);
    }
    let mut known = |port, flow: Flow, is_established| {
        let table = if is_established { &mut maps.flows } else { &mut maps.handshakes };
        table.insert(&tuple(OVERLAY, port, tcp), &flow).unwrap();
    };
    // One in a handshake stays, one in a handshake that is given up goes, and so for those that are established. Their backend
    // is gone, but not for long.
    known(20_001, flow(State::Opening, 5), false);
    known(20_002, flow(State::Opening, 61), false);
    known(20_003, flow(State::Established, 5), true);
    known(20_004, flow(State::Closed, 11), true);
    // The fifth has none. And what the client's own tuple is known by is another matter.
    maps.flows.insert(&tuple(CLIENT, 5, tcp), &flow(State::Established, 0)).unwrap();
    assert_eq!(swept(&mut maps).removed_masquerades, 3);
    assert_eq!(left(&maps), ([1, 3].into(), [20_001, 20_003].into()));
    assert_eq!(swept(&mut maps).removed_masquerades, 0, "the second time");
}

/// TCP and UDP have ports of their own, with the timeouts of each.
#[test]
fn protocols_are_apart() {
    let mut maps = maps();
    for protocol in [Protocol::TCP, Protocol::UDP] {
        give(&mut maps, 1, 20_001, protocol);
        // Too long for a datagram without an answer, not for a handshake.
        maps.handshakes.insert(&tuple(OVERLAY, 20_001, protocol), &flow(State::Opening, 40)).unwrap();
    }
    assert_eq!(swept(&mut maps).removed_masquerades, 1);
    let keys: Vec<_> = maps.masqueraded.list().unwrap().into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, [owned(20_001, Protocol::TCP)]);
}

/// A client that has lost its port to another: its entry goes, the other's port stays.
#[test]
fn who_is_not_the_owner_goes() {
    let mut maps = maps();
    give(&mut maps, 1, 20_001, Protocol::TCP);
    give(&mut maps, 2, 20_001, Protocol::TCP);
    maps.flows.insert(&tuple(OVERLAY, 20_001, Protocol::TCP), &flow(State::Established, 0)).unwrap();
    assert_eq!(swept(&mut maps).removed_masquerades, 1);
    assert_eq!(left(&maps), ([2].into(), [20_001].into()));
    let entries = swept(&mut maps).entries["masquerades"];
    assert_eq!(entries, 1);
}

/// A port whose client knows nothing of it: the connection that it was given out for never began.
#[test]
fn an_owner_without_a_connection_goes() {
    let mut maps = maps();
    give(&mut maps, 1, 20_001, Protocol::TCP);
    maps.masquerades.remove(&tuple(CLIENT, 1, Protocol::TCP)).unwrap();
    swept(&mut maps);
    assert_eq!(left(&maps), (BTreeSet::new(), BTreeSet::new()));
}

#[test]
fn networks_are_read_back_as_they_were_written() {
    let mut maps = maps();
    let network = |prefix, address| Network { prefix, address: Ipv4::new(address) };
    let networks = [network(12, [10, 32, 0, 0]), network(24, [10, 32, 7, 0]), network(32, [192, 0, 2, 7])];
    for network in networks {
        maps.inside.insert(network).unwrap();
        maps.inside.insert(network).unwrap();
    }
    assert_eq!(maps.inside.networks().unwrap(), networks.into());
    maps.inside.remove(networks[1]).unwrap();
    assert_eq!(maps.inside.networks().unwrap(), [networks[0], networks[2]].into());
}
