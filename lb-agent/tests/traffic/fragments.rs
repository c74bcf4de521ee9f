//! I5: datagrams in fragments, through both paths and both ways, and what becomes of fragments in the wrong order.

use crate::client::Asker;
use crate::echo::Echo;
use crate::raw;
use crate::world::{Builder, HOLDER, SOON, V, World, at, build};
use anyhow::{Result, ensure};
use lb_common::reason::Reason;
use std::net::{SocketAddrV4, UdpSocket};
use testbed::cluster::Service;
use testbed::{Host, Pod, Topology, wait};

/// A pod on a node, alone behind a port of its own.
fn pod(world: &World, node: u8, port: u16) -> (Pod, Echo) {
    let pod = world.pod(node, &format!("pod-{node}"));
    let echo = Echo::udp(&pod, 5353);
    world.serve(pod.name(), Service::new(pod.name(), V).udp(port, 5353), &[pod.endpoint()]);
    (pod, echo)
}

fn count(world: &World, node: u8, reason: Reason) -> u64 {
    let outcomes = world.maps(node).unwrap().outcomes().unwrap();
    outcomes.get(&reason).map_or(0, |outcome| outcome.packets)
}

/// The client's own kernel cuts them, and so does the pod's; the pods' network takes less than the wire.
fn large_datagrams(builder: Builder) {
    let world = builder.start();
    let pods = [(HOLDER, 53), (2, 54)].map(|(node, port)| (port, pod(&world, node, port)));
    for (port, (pod, _echo)) in &pods {
        let asker = Asker::new(world.testbed.client(), at(V, *port));
        // To the byte where one fragment becomes two, then many.
        for length in [1472, 1473, 1474, 1475, 1480, 1481, 4_000, 60_000] {
            let text: String = ('a'..='z').cycle().take(length).collect();
            // What fits the wire is not to be fragmented, so the client first hears what the overlay takes, if it has not yet.
            let answer = asker.ask(&text).or_else(|_| asker.ask(&text)).unwrap();
            let whole = format!("{} {} {text}", pod.name(), asker.local());
            assert!(answer.text == whole[..length], "{length} bytes from {}", pod.name());
        }
    }
}

#[test]
fn large_datagrams_arrive_whole() {
    large_datagrams(build());
}

#[test]
fn large_datagrams_arrive_whole_through_the_stack() {
    large_datagrams(build().agent(&["--forwarding=stack"]));
}

#[test]
fn large_datagrams_arrive_whole_where_bridged_packets_bypass_netfilter() {
    large_datagrams(build().br_netfilter(false));
}

/// The client's end is replaced in every fragment, and put back in every fragment of the answer. Where a bridge's netfilter hooks
/// have put a datagram together, it is cut again.
#[test]
fn large_datagrams_of_clients_inside_arrive_whole() {
    for builder in [build(), build().topology(Topology::Flannel), build().br_netfilter(false)] {
        let world = builder.start();
        let pods = [(HOLDER, 53), (2, 54)].map(|(node, port)| (port, pod(&world, node, port)));
        let inside = world.pod(HOLDER, "inside");
        let hosts: [&Host; 2] = [&inside, world.testbed.node(HOLDER)];
        for host in hosts {
            for (port, (pod, _echo)) in &pods {
                let asker = Asker::new(host, at(V, *port));
                // The node's own kernel would not cut what `lo` takes whole, and does not learn otherwise.
                asker.may_be_cut();
                for length in [1_500, 4_000, 20_000] {
                    let text: String = ('a'..='z').cycle().take(length).collect();
                    let answer = asker.ask(&text).or_else(|_| asker.ask(&text));
                    let answer =
                        answer.unwrap_or_else(|e| panic!("{length}, {} to {}: {e}", host.name(), pod.name()));
                    let whole = format!("{} {} {text}", pod.name(), answer.seen_as);
                    assert!(
                        answer.text == whole[..length],
                        "{length} bytes, {} to {}",
                        host.name(),
                        pod.name()
                    );
                }
            }
        }
    }
}

/// A datagram of the client's port, cut by hand: each fragment from its IP header on.
fn fragments(from: SocketAddrV4, to: SocketAddrV4, id: u16, payload: &[u8], size: usize) -> Vec<Vec<u8>> {
    let ip =
        etherparse::Ipv4Header::new(0, 64, etherparse::IpNumber::UDP, from.ip().octets(), to.ip().octets());
    let udp =
        etherparse::UdpHeader::with_ipv4_checksum(from.port(), to.port(), &ip.unwrap(), payload).unwrap();
    let whole = [&udp.to_bytes()[..], payload].concat();
    let count = whole.chunks(size).count();
    let cut = whole.chunks(size).enumerate().map(|(n, part)| {
        let mut header = etherparse::Ipv4Header::new(
            part.len().try_into().unwrap(),
            64,
            etherparse::IpNumber::UDP,
            from.ip().octets(),
            to.ip().octets(),
        )
        .unwrap();
        header.identification = id;
        header.dont_fragment = false;
        header.more_fragments = n + 1 < count;
        header.fragment_offset =
            etherparse::IpFragOffset::try_new(u16::try_from(n * size / 8).unwrap()).unwrap();
        header.header_checksum = header.calc_header_checksum();
        let mut bytes = Vec::new();
        header.write(&mut bytes).unwrap();
        bytes.extend_from_slice(part);
        bytes
    });
    cut.collect()
}

/// A client's socket for the answers to what is sent by hand, which must all come from the address.
fn answers(world: &World, to: SocketAddrV4) -> UdpSocket {
    let bind = || -> Result<UdpSocket> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(SOON))?;
        Ok(socket)
    };
    world.testbed.client().enter(bind).unwrap()
}

/// First one first: whatever the order of the rest, it arrives. Otherwise it is left to the holder's stack, and counted; the
/// pods get all of a datagram or nothing, and never another one's.
#[test]
fn fragments_in_any_order_arrive_whole_or_not_at_all() {
    let world = build().start();
    let pods = [(HOLDER, 53), (2, 54)].map(|(node, port)| (port, pod(&world, node, port)));
    let raw = raw::socket(world.testbed.client());
    for (port, (pod, echo)) in &pods {
        let to = at(V, *port);
        let socket = answers(&world, to);
        let std::net::SocketAddr::V4(from) = socket.local_addr().unwrap() else { unreachable!() };
        let mut buffer = [0; 2048];
        let mut heard = |what: &str| {
            let length = socket.recv(&mut buffer).unwrap_or_else(|error| panic!("{what}: {error}"));
            String::from_utf8(buffer[..length].to_vec()).unwrap()
        };
        let payload = |letter: u8| vec![letter; 1_300];
        // No number twice in two seconds, as a sender must.
        let id = port * 100;

        // The rest reversed, and twice.
        let mut parts = fragments(from, to, id, &payload(b'a'), 400);
        parts[1..].reverse();
        parts.push(parts[1].clone());
        parts.iter().for_each(|part| raw::send(&raw, to, part));
        assert!(heard("reversed").ends_with("aaaa"));

        // The last one comes before the first.
        let lost = count(&world, HOLDER, Reason::PassFragment);
        let mut parts = fragments(from, to, id + 1, &payload(b'b'), 400);
        parts.rotate_right(1);
        parts.iter().for_each(|part| raw::send(&raw, to, part));
        wait::until("the one that cannot follow", SOON, || {
            let found = count(&world, HOLDER, Reason::PassFragment) - lost;
            ensure!(found == 1, "{found} left to the stack");
            Ok(())
        })
        .unwrap();
        assert_eq!(echo.seen().len(), 1, "{} got a part for a whole", pod.name());

        // Two datagrams, a part of each in turn.
        let parts = [(id + 2, b'c'), (id + 3, b'd')]
            .map(|(id, letter)| fragments(from, to, id, &payload(letter), 400));
        for (one, other) in parts[0].iter().zip(&parts[1]) {
            raw::send(&raw, to, one);
            raw::send(&raw, to, other);
        }
        for letter in ["cccc", "dddd"] {
            let text = heard(letter);
            assert!(text.ends_with(letter) && text.len() == 1_300, "{text}");
        }
        assert_eq!(echo.seen().len(), 3);
        assert!(echo.seen().iter().all(|client| *client == from));
    }
}
