//! A served port never reaches a socket of the node (invariant 2): clients get a pod, or a refusal at once.

use crate::client::{Asker, Talk, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, V, at, world};
use std::io::ErrorKind;
use std::time::{Duration, Instant};
use testbed::cluster::Service;

/// A refusal is an answer, not the end of a wait.
const AT_ONCE: Duration = Duration::from_millis(900);

#[test]
fn a_tcp_client_gets_a_pod_or_a_reset_and_never_the_nodes_own_listener() {
    let world = world();
    let (local, remote) = (world.pod(HOLDER, "local"), world.pod(2, "remote"));
    let (_one, _two) = (Echo::tcp(&local, 8080), Echo::tcp(&remote, 8080));
    let own = Echo::tcp(world.testbed.node(HOLDER), 80);
    let (client, service) = (world.testbed.client(), at(V, 80));
    let web = || Service::new("web", V).tcp(80, 8080);
    for endpoints in [vec![], vec![local.endpoint().not_ready()], vec![remote.endpoint().terminating()]] {
        world.serve("web", web(), &endpoints);
        let begun = Instant::now();
        assert_eq!(kind(Talk::open(client, service)), ErrorKind::ConnectionRefused, "{endpoints:?}");
        assert!(begun.elapsed() < AT_ONCE, "refused after {:?}", begun.elapsed());
    }
    for pod in [&local, &remote] {
        world.endpoints("web", &[pod.endpoint()]);
        for _ in 0..20 {
            assert_eq!(Talk::open(client, service).unwrap().pod, pod.name());
        }
    }
    world.endpoints("web", &[]);
    assert_eq!(kind(Talk::open(client, service)), ErrorKind::ConnectionRefused);
    assert_eq!(own.seen(), [], "a client reached the node's own listener");

    // It was there all the time: without the Service the port is the node's again.
    world.testbed.cluster().remove_service("web").unwrap();
    world.settle();
    assert_eq!(Talk::open(client, service).unwrap().pod, "n1");
}

/// B1, B8: the same socket goes on as soon as there is somebody to answer; before, it is told at once.
#[test]
fn a_udp_client_gets_a_pod_or_port_unreachable_and_never_the_nodes_own_socket() {
    let world = world();
    let (local, remote) = (world.pod(HOLDER, "local"), world.pod(2, "remote"));
    let (_one, _two) = (Echo::udp(&local, 5353), Echo::udp(&remote, 5353));
    let own = Echo::udp_at(world.testbed.node(HOLDER), at(V, 53));
    world.serve("dns", Service::new("dns", V).udp(53, 5353), &[]);
    let client = world.testbed.client();
    let asker = Asker::new(client, at(V, 53));
    for pod in [&local, &remote] {
        // The kernel sends at most one ICMP error a second of its own to one host; ours are not counted.
        for _ in 0..5 {
            let begun = Instant::now();
            assert_eq!(kind(asker.ask("anybody?")), ErrorKind::ConnectionRefused);
            assert!(begun.elapsed() < AT_ONCE, "refused after {:?}", begun.elapsed());
        }
        world.endpoints("dns", &[pod.endpoint()]);
        let answer = asker.ask("and now?").unwrap();
        assert_eq!(answer.pod, pod.name());
        assert_eq!(std::net::SocketAddr::from(answer.seen_as).port(), asker.local().port());
        world.endpoints("dns", &[]);
    }
    assert_eq!(own.seen(), [], "a client reached the node's own socket");

    world.testbed.cluster().remove_service("dns").unwrap();
    world.settle();
    assert_eq!(asker.ask("node?").unwrap().pod, "n1");
}
