//! Connections while endpoints come, fail, terminate and go (invariants 4 and 5).

use crate::client::{Asker, Talk, connect_from, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, World, at, build, world};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use testbed::cluster::{Endpoint, Service};
use testbed::{Pod, wait};

fn web() -> Service {
    Service::new("web", V).tcp(80, 8080)
}

fn dns() -> Service {
    Service::new("dns", V).udp(53, 5353)
}

/// One pod on each node, with a server each.
fn pods(world: &World, server: impl Fn(&Pod) -> Echo) -> Vec<(Pod, Echo)> {
    (1..=3)
        .map(|node| {
            let pod = world.pod(node, &format!("pod-{node}"));
            let server = server(&pod);
            (pod, server)
        })
        .collect()
}

/// Opens connections until every pod has one.
fn one_for_each(pods: &[(Pod, Echo)], mut open: impl FnMut() -> Talk) -> BTreeMap<String, Talk> {
    let mut talks = BTreeMap::new();
    for _ in 0..200 {
        let talk = open();
        talks.entry(talk.pod.clone()).or_insert(talk);
        if talks.len() == pods.len() {
            return talks;
        }
    }
    panic!("200 connections went to {:?}", talks.keys());
}

fn check_all(talks: &mut BTreeMap<String, Talk>, line: &str) {
    for (pod, talk) in talks {
        talk.check(line).unwrap_or_else(|error| panic!("the connection to {pod}: {error:#}"));
    }
}

/// D2, C13: what was established stays where it is, while its backend terminates and while it fails its readiness;
/// new connections go elsewhere.
#[test]
fn an_established_connection_stays_with_a_backend_that_is_not_ready_any_more() {
    let world = world();
    let pods = pods(&world, |pod| Echo::tcp(pod, 8080));
    let ready: Vec<_> = pods.iter().map(|(pod, _)| pod.endpoint()).collect();
    world.serve("web", web(), &ready);
    let client = world.testbed.client();
    let open = || Talk::open(client, at(V, 80)).unwrap();
    let mut talks = one_for_each(&pods, open);

    let [one, two, three] = [&ready[0], &ready[1], &ready[2]].map(Clone::clone);
    let stages = [
        ("the first terminates", vec![one.clone().terminating(), two.clone(), three.clone()]),
        ("the second fails", vec![one.clone().terminating(), two.clone().not_ready(), three.clone()]),
        (
            "the first has stopped serving",
            vec![
                Endpoint { serving: false, ..one.clone().terminating() },
                two.clone().not_ready(),
                three.clone(),
            ],
        ),
    ];
    for (stage, endpoints) in stages {
        world.endpoints("web", &endpoints);
        check_all(&mut talks, stage);
        let eligible: Vec<_> = endpoints.iter().filter(|endpoint| endpoint.ready).collect();
        for _ in 0..20 {
            let pod = open().pod;
            let at = pods.iter().find(|(p, _)| p.name() == pod).unwrap().0.ip();
            assert!(eligible.iter().any(|e| e.address == at), "{stage}: a new connection went to {pod}");
        }
    }
    // Ready again, and newcomers that change the hash's table.
    let four = world.pod(2, "pod-4");
    let _echo = Echo::tcp(&four, 8080);
    world.endpoints("web", &[one, two, three, four.endpoint()]);
    check_all(&mut talks, "all are ready");
    world.endpoints("web", &[four.endpoint(), ready[0].clone(), ready[1].clone(), ready[2].clone()]);
    check_all(&mut talks, "in another order");
}

/// B10, C13: an established connection to a pod that is gone ends by an RST at its next packet; the others go on.
#[test]
fn the_next_packet_to_a_backend_that_is_gone_is_answered_by_a_reset() {
    for gone in [HOLDER, 2] {
        let world = world();
        let mut pods = pods(&world, |pod| Echo::tcp(pod, 8080));
        let endpoints: Vec<_> = pods.iter().map(|(pod, _)| pod.endpoint()).collect();
        world.serve("web", web(), &endpoints);
        let client = world.testbed.client();
        let mut talks = one_for_each(&pods, || Talk::open(client, at(V, 80)).unwrap());

        // The node's power fails: no FIN of the pod, the API forgets it later.
        let (pod, _server) = pods.remove(usize::from(gone) - 1);
        let mut lost = talks.remove(pod.name()).unwrap();
        let left: Vec<_> = endpoints.iter().filter(|e| e.address != pod.ip()).cloned().collect();
        world.testbed.remove_pod(pod).unwrap();
        world.endpoints("web", &left);
        assert_eq!(kind(lost.tell("hello").and_then(|()| lost.hear())), ErrorKind::ConnectionReset);
        check_all(&mut talks, "still here");
        // The same tuple may begin again, elsewhere.
        let port = lost.local().port();
        drop(lost);
        let again = Talk::from_port(client, port, at(V, 80)).unwrap();
        assert!(talks.contains_key(&again.pod), "{}", again.pod);
    }
}

/// B3: a datagram after the change goes to a live pod, from the same socket; other sockets stay where they are.
#[test]
fn a_udp_socket_moves_to_a_live_pod_with_its_next_datagram() {
    let world = world();
    let mut pods = pods(&world, |pod| Echo::udp(pod, 5353));
    let endpoints: Vec<_> = pods.iter().map(|(pod, _)| pod.endpoint()).collect();
    world.serve("dns", dns(), &endpoints);
    let askers: Vec<_> = (0..30).map(|_| Asker::new(world.testbed.client(), at(V, 53))).collect();
    let where_all_go = || askers.iter().map(|a| a.ask("x").unwrap().pod).collect::<Vec<_>>();
    let before = where_all_go();
    assert_eq!(before.iter().collect::<BTreeSet<_>>().len(), 3, "{before:?}");
    assert_eq!(where_all_go(), before, "a socket stays with its pod");

    let (pod, _server) = pods.remove(1);
    let gone = pod.name().to_owned();
    let left: Vec<_> = endpoints.iter().filter(|e| e.address != pod.ip()).cloned().collect();
    world.testbed.remove_pod(pod).unwrap();
    world.endpoints("dns", &left);
    let after = where_all_go();
    for (before, after) in before.iter().zip(&after) {
        if *before == gone {
            assert_ne!(*after, gone);
        } else {
            assert_eq!(after, before, "the change touched another socket's flow");
        }
    }
    assert_eq!(where_all_go(), after);
}

/// B1, B2: a sender that never stops keeps no dead flow alive: it is told, the entries go, and it is served again.
#[test]
fn a_sender_that_never_stops_is_refused_while_nobody_is_there_and_keeps_no_dead_flow() {
    let world = world();
    let (one, two) = (world.pod(2, "one"), world.pod(HOLDER, "two"));
    let (_one, _two) = (Echo::udp(&one, 5353), Echo::udp(&two, 5353));
    world.serve("dns", dns(), &[one.endpoint()]);
    let asker = Asker::new(world.testbed.client(), at(V, 53));
    assert_eq!(asker.ask("x").unwrap().pod, "one");
    let entries = || {
        let maps = world.maps(HOLDER)?;
        Ok(maps.flows.list()?.len() + maps.replies.list()?.len())
    };
    assert_eq!(wait::until("the flow", SOON, entries).unwrap(), 2);

    world.endpoints("dns", &[]);
    wait::until("the flow's entries are gone", SOON, || {
        // Every look is a datagram as well, which must not keep the flow alive.
        assert_eq!(kind(asker.ask("x")), ErrorKind::ConnectionRefused);
        let left = entries()?;
        anyhow::ensure!(left == 0, "{left} entries");
        Ok(())
    })
    .unwrap();
    world.endpoints("dns", &[two.endpoint()]);
    assert_eq!(asker.ask("x").unwrap().pod, "two");
}

/// D3, D4: what is called ready gets connections even while it terminates (`publishNotReadyAddresses`); and where nobody
/// is ready, an operator may choose that those who terminate but still serve do, but never those who do not serve.
#[test]
fn who_terminates_gets_connections_where_it_is_ready_or_the_last_to_serve() {
    let world = build().terminating_fallback().start();
    let pods = pods(&world, |pod| Echo::tcp(pod, 8080));
    let [one, two, three] = [0, 1, 2].map(|n| pods[n].0.endpoint());
    let not_serving = |endpoint: Endpoint| Endpoint { serving: false, ..endpoint.terminating() };
    let stages = [
        (vec![Endpoint { terminating: true, ..one.clone() }, two.clone().terminating()], Some("pod-1")),
        (vec![one.clone().not_ready(), two.terminating(), not_serving(three.clone())], Some("pod-2")),
        (vec![one.not_ready(), not_serving(three)], None),
    ];
    for (endpoints, expected) in stages {
        world.serve("web", web(), &endpoints);
        for _ in 0..20 {
            let talk = Talk::open(world.testbed.client(), at(V, 80));
            match expected {
                Some(pod) => assert_eq!(talk.unwrap().pod, pod),
                None => assert_eq!(kind(talk), ErrorKind::ConnectionRefused),
            }
        }
    }
}

/// `sessionAffinity: ClientIP`: all connections of a client go to one pod, while that takes new ones; other clients go to
/// other pods.
#[test]
fn a_client_with_affinity_stays_with_its_pod() {
    const CLIENTS: u8 = 32;
    let world = world();
    let pods = pods(&world, |pod| Echo::tcp(pod, 8080));
    let mut endpoints: Vec<_> = pods.iter().map(|(pod, _)| pod.endpoint()).collect();
    world.serve("web", web().sticky(), &endpoints);
    let client = world.testbed.client();
    let pod_of = |client_address| {
        let stream = connect_from(client, (client_address, 0), at(V, 80), SOON).unwrap();
        Talk::begin(stream).unwrap().pod
    };
    let all = |client_address| -> BTreeSet<String> { (0..12).map(|_| pod_of(client_address)).collect() };
    let own = Ipv4Addr::new(198, 51, 100, 10);
    let first = all(own);
    assert_eq!(first.len(), 1, "{first:?}");

    let others = (0..CLIENTS).map(|n| Ipv4Addr::new(198, 51, 100, 100 + n));
    for address in others.clone() {
        client.ip(&format!("address add {address}/32 dev eth0")).unwrap();
    }
    let used: BTreeSet<String> = others.map(pod_of).collect();
    assert_eq!(used.len(), pods.len(), "{CLIENTS} clients use {used:?} alone");

    let chosen = pods.iter().position(|(pod, _)| first.contains(pod.name())).unwrap();
    endpoints[chosen].ready = false;
    world.endpoints("web", &endpoints);
    let second = all(own);
    assert!(second.len() == 1 && second != first, "{second:?}");
    endpoints[chosen].ready = true;
    world.endpoints("web", &endpoints);
    assert_eq!(all(own), first, "it is the client's pod again");
}
