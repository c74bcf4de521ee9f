//! What nobody asked us to serve stays the node's own, on the very same address.

use crate::client::{Asker, Talk, connect_from, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, World, at, world};
use anyhow::{Result, ensure};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use testbed::cluster::Service;
use testbed::{Host, Pod};

/// TCP 80 and UDP 53 are served by a pod on another node.
fn served() -> (World, Pod, [Echo; 2]) {
    let world = world();
    let pod = world.pod(2, "pod");
    let servers = [Echo::tcp(&pod, 8080), Echo::udp(&pod, 5353)];
    world.serve("web", Service::new("web", V).tcp(80, 8080).udp(53, 5353), &[pod.endpoint()]);
    (world, pod, servers)
}

/// One echo request (RFC 792) by a socket that makes checksum and identifier itself.
fn ping(host: &Host, address: Ipv4Addr) -> Result<()> {
    host.sysctls(&[("ipv4/ping_group_range", "0 0")])?;
    host.enter(|| {
        let icmp = SockProtocol::Icmp;
        let socket =
            UdpSocket::from(socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, icmp)?);
        socket.connect((address, 0))?;
        socket.set_read_timeout(Some(SOON))?;
        socket.send(&[8, 0, 0, 0, 0, 0, 0, 1, b'p', b'i', b'n', b'g'])?;
        let mut answer = [0; 12];
        ensure!(
            socket.recv(&mut answer)? == answer.len() && answer[0] == 0 && answer.ends_with(b"ping"),
            "{answer:?}"
        );
        Ok(())
    })
}

#[test]
fn other_ports_of_the_address_are_the_nodes_own() {
    let (world, _pod, _servers) = served();
    let (client, node) = (world.testbed.client(), world.testbed.node(HOLDER));
    let _ssh = Echo::tcp(node, 22);
    let _udp = Echo::udp_at(node, at(V, 5000));
    let mut ssh = Talk::open(client, at(V, 22)).unwrap();
    assert_eq!((ssh.pod.as_str(), ssh.seen_as), ("n1", ssh.local()));
    ssh.check("uptime").unwrap();
    assert_eq!(Asker::new(client, at(V, 5000)).ask("x").unwrap().pod, "n1");
    // The served number in the other protocol is another port.
    let _other = (Echo::tcp(node, 53), Echo::udp_at(node, at(V, 80)));
    assert_eq!(Talk::open(client, at(V, 53)).unwrap().pod, "n1");
    assert_eq!(Asker::new(client, at(V, 80)).ask("x").unwrap().pod, "n1");
    // Served on one address is not served on the node's others.
    assert_eq!(kind(Talk::open(client, at(node.address(), 80))), ErrorKind::ConnectionRefused);
    // Nobody listens, and no Service: the node's own kernel answers.
    let rejected = || -> u64 {
        let outcomes = world.maps(HOLDER).unwrap().outcomes().unwrap();
        outcomes.iter().filter(|(r, _)| r.label().starts_with("reject")).map(|(_, o)| o.packets).sum()
    };
    let before = rejected();
    assert_eq!(kind(Talk::open(client, at(V, 81))), ErrorKind::ConnectionRefused);
    assert_eq!(kind(Asker::new(client, at(V, 81)).ask("x")), ErrorKind::ConnectionRefused);
    assert_eq!(rejected(), before);
    ping(client, V).unwrap();
    // And the port that is served is served.
    assert_eq!(Talk::open(client, at(V, 80)).unwrap().pod, "pod");
    assert_eq!(Asker::new(client, at(V, 53)).ask("x").unwrap().pod, "pod");
}

/// A8: the node connects out from the address, also from a source port that is served.
#[test]
fn the_nodes_own_connections_from_a_served_port_get_their_answers() {
    let (world, _pod, _servers) = served();
    let (client, node) = (world.testbed.client(), world.testbed.node(HOLDER));
    let (_far, _far_udp) = (Echo::tcp(client, 9000), Echo::udp(client, 9000));
    let far = at(world.testbed.client_address(), 9000);
    for port in [80, 40_001] {
        let stream = connect_from(node, (V, port), far, SOON).unwrap();
        let mut talk = Talk::begin(stream).unwrap();
        assert_eq!((talk.pod.as_str(), talk.seen_as), ("client", at(V, port)));
        talk.check("out").unwrap();
        talk.tell("send 1000000").unwrap();
        assert_eq!(talk.take(1_000_000).unwrap(), crate::echo::pattern(1_000_000));
        // Meanwhile the port is served as ever.
        assert_eq!(Talk::open(client, at(V, 80)).unwrap().pod, "pod");
        talk.check("still out").unwrap();
    }
    for port in [53, 40_001] {
        let asker = Asker::bound(node, at(V, port), far);
        let answer = asker.ask("out").unwrap();
        assert_eq!((answer.pod.as_str(), answer.seen_as), ("client", at(V, port)));
        assert_eq!(Asker::new(client, at(V, 53)).ask("x").unwrap().pod, "pod");
        assert_eq!(asker.ask("still out").unwrap().pod, "client");
    }
}
