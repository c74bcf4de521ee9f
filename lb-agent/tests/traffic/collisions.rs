//! Two connections that would be one 5-tuple at the pod, because nobody's source is rewritten.

use crate::client::{Talk, connect_from, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, V2, V3, World, at, world};
use anyhow::ensure;
use lb_common::reason::Reason;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::thread;
use std::time::Duration;
use testbed::cluster::{Endpoint, Service};
use testbed::{Pod, wait};

const PORT: u16 = 40_000;
const ANY: Ipv4Addr = Ipv4Addr::UNSPECIFIED;

/// The same endpoints behind port 80 of two addresses.
fn serve_twice(world: &World, addresses: [Ipv4Addr; 2], endpoints: &[Endpoint]) {
    for (name, address) in ["first", "second"].into_iter().zip(addresses) {
        world.serve(name, Service::new(name, address).tcp(80, 8080), endpoints);
    }
}

/// A1 with a single pod, local or not: there is no tuple left, so the second is refused, and the first does not notice.
#[test]
fn one_client_port_to_two_addresses_of_one_pod_is_refused_the_second_time() {
    for node in [HOLDER, 2] {
        let world = world();
        let pod = world.pod(node, "pod");
        let _echo = Echo::tcp(&pod, 8080);
        serve_twice(&world, [V, V3], &[pod.endpoint()]);
        let client = world.testbed.client();
        let mut first = Talk::from_port(client, PORT, at(V, 80)).unwrap();
        assert_eq!(kind(Talk::from_port(client, PORT, at(V3, 80))), ErrorKind::ConnectionRefused);
        first.check("undisturbed").unwrap();
        let mut other = Talk::from_port(client, PORT + 1, at(V3, 80)).unwrap();
        other.check("another port is free").unwrap();
        // When the first is over, the tuple is free.
        first.tell("close").unwrap();
        first.hear().unwrap_err();
        drop(first);
        world.await_over(PORT);
        let mut second = Talk::from_port(client, PORT, at(V3, 80)).unwrap();
        second.check("mine now").unwrap();
    }
}

/// A1 in UDP: one socket asks both addresses. The second question would be the first one's at the pod, and its answer
/// would come from the wrong address; it is refused.
#[test]
fn one_udp_socket_to_two_addresses_of_one_pod_is_refused_the_second_time() {
    let world = world();
    let pod = world.pod(2, "pod");
    let echo = Echo::udp(&pod, 5353);
    for (name, address) in [("first", V), ("second", V3)] {
        world.serve(name, Service::new(name, address).udp(53, 5353), &[pod.endpoint()]);
    }
    let socket = world.testbed.client().enter(|| Ok(UdpSocket::bind(at(ANY, PORT))?)).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let mut buffer = [0; 100];
    let mut ask = |address| {
        socket.send_to(b"x", at(address, 53)).unwrap();
        socket.recv_from(&mut buffer).unwrap().1
    };
    assert_eq!(ask(V), at(V, 53).into());
    socket.send_to(b"y", at(V3, 53)).unwrap();
    wait::until("the second question is refused", SOON, || {
        let outcomes = world.maps(HOLDER)?.outcomes()?;
        let refused = outcomes.get(&Reason::RejectCollision).map_or(0, |outcome| outcome.packets);
        ensure!(refused == 1, "{refused} refused");
        Ok(())
    })
    .unwrap();
    assert_eq!(ask(V), at(V, 53).into());
    assert_eq!(echo.seen().len(), 2);
}

/// A1 with another pod: the second connection goes there.
#[test]
fn one_client_port_to_two_addresses_of_two_pods_finds_the_other_pod() {
    let world = world();
    let pods = [world.pod(2, "remote"), world.pod(HOLDER, "local")];
    let _servers = pods.each_ref().map(|pod| Echo::tcp(pod, 8080));
    serve_twice(&world, [V, V3], &pods.each_ref().map(Pod::endpoint));
    let client = world.testbed.client();
    for port in PORT..PORT + 20 {
        let mut first = Talk::from_port(client, port, at(V, 80)).unwrap();
        let mut second = Talk::from_port(client, port, at(V3, 80)).unwrap();
        assert_ne!(first.pod, second.pod, "from port {port}");
        first.check("mine").unwrap();
        second.check("mine too").unwrap();
        assert_eq!((first.seen_as, second.seen_as), (first.local(), second.local()));
    }
}

/// A2: two holders, one pod. The one that came second gets nothing through, and takes nothing away; when the first is
/// over the second is served. The pod is on neither holder's node, on the first's, on the second's.
#[test]
fn one_client_port_through_two_holders_to_one_pod_belongs_to_the_first() {
    for node in [3, 1, 2] {
        let world = world();
        let pod = world.pod(node, "pod");
        let echo = Echo::tcp(&pod, 8080);
        serve_twice(&world, [V, V2], &[pod.endpoint()]);
        let client = world.testbed.client();
        let mut first = Talk::from_port(client, PORT, at(V, 80)).unwrap();
        let second = connect_from(client, (ANY, PORT), at(V2, 80), Duration::from_millis(1500));
        second.expect_err("the second connection must not get through");
        first.check("undisturbed").unwrap();
        assert_eq!(echo.seen().len(), 1, "the pod on n{node} accepted the second");
        let mut other = Talk::from_port(client, PORT + 1, at(V2, 80)).unwrap();
        other.check("another port is free").unwrap();

        first.tell("close").unwrap();
        first.hear().unwrap_err();
        drop(first);
        world.await_over(PORT);
        let mut second = Talk::from_port(client, PORT, at(V2, 80)).unwrap();
        second.check("mine now").unwrap();
    }
}

/// A3: the SYN-ACKs get lost, the client repeats its SYNs, and the Service grows meanwhile: each SYN goes to the backend
/// that has already seen it.
#[test]
fn a_repeated_syn_keeps_its_backend() {
    const CLIENTS: usize = 8;
    let world = world();
    let first = world.pod(2, "first");
    let first_echo = Echo::tcp(&first, 8080);
    world.serve("web", Service::new("web", V).tcp(80, 8080), &[first.endpoint()]);
    let client = world.testbed.client();
    client
        .feed(
            &["nft", "-f", "-"],
            "table ip lossy {
               counter lost { }
               chain input {
                 type filter hook input priority 0
                 tcp flags & (syn | ack) == (syn | ack) counter name lost drop
               }
             }",
        )
        .unwrap();
    let others: Vec<_> = (1..=3).map(|node| world.pod(node, &format!("other-{node}"))).collect();
    let other_echoes: Vec<_> = others.iter().map(|pod| Echo::tcp(pod, 8080)).collect();
    thread::scope(|scope| {
        let talks: Vec<_> =
            (0..CLIENTS).map(|_| scope.spawn(|| Talk::open(client, at(V, 80)).unwrap())).collect();
        wait::until("every SYN-ACK was lost once", SOON, || {
            let lost = client.run(&["nft", "list", "counter", "ip", "lossy", "lost"])?;
            let count: usize = lost
                .split_whitespace()
                .skip_while(|word| *word != "packets")
                .nth(1)
                .unwrap_or("0")
                .parse()?;
            ensure!(count >= CLIENTS, "{lost}");
            Ok(())
        })
        .unwrap();
        let all: Vec<_> = others.iter().chain([&first]).map(Pod::endpoint).collect();
        world.endpoints("web", &all);
        client.run(&["nft", "delete", "table", "ip", "lossy"]).unwrap();
        for talk in talks {
            let mut talk = talk.join().unwrap();
            assert_eq!(talk.pod, "first");
            talk.check("hello").unwrap();
        }
    });
    assert_eq!(first_echo.seen().len(), CLIENTS);
    assert!(other_echoes.iter().all(|echo| echo.seen().is_empty()));
}
