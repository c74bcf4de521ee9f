//! Counters that add up: each run of a program is one outcome, and a Service's packets and bytes are those that a capture
//! has (invariant 9).

use crate::client::{Asker, Talk, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, World, at, build, world};
use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use testbed::cluster::Service;
use testbed::{Pod, wait};

/// What the kernel says: how often the programs that are attached on a node ran since statistics were switched on.
fn runs(world: &World, node: u8) -> Result<u64> {
    let bpftool = |words: &[&str]| -> Result<serde_json::Value> {
        Ok(serde_json::from_str(&world.testbed.node(node).run(&[&["bpftool", "--json"], words].concat())?)?)
    };
    let mut programs = BTreeSet::new();
    for link in fs::read_dir(world.testbed.pins(node).join("links"))? {
        let path = link?.path();
        let link = bpftool(&["link", "show", "pinned", path.to_str().context("not UTF-8")?])?;
        programs.insert(link["prog_id"].as_u64().context("a link without a program")?);
    }
    ensure!(programs.len() == 2, "ingress and egress: {programs:?}");
    programs.into_iter().try_fold(0, |sum, id| {
        let program = bpftool(&["prog", "show", "id", &id.to_string()])?;
        // Left out while it is zero.
        Ok(sum + program["run_cnt"].as_u64().unwrap_or(0))
    })
}

/// What we say.
fn outcomes(world: &World, node: u8) -> Result<u64> {
    Ok(world.maps(node)?.outcomes()?.values().map(|outcome| outcome.packets).sum())
}

/// Both, at a moment when no packet came in between.
fn both(world: &World, node: u8) -> (u64, u64) {
    wait::until("a quiet moment", SOON, || {
        let before = outcomes(world, node)?;
        let runs = runs(world, node)?;
        ensure!(outcomes(world, node)? == before, "packets pass");
        Ok((runs, before))
    })
    .unwrap()
}

#[test]
fn each_run_of_a_program_adds_to_exactly_one_outcome() {
    // As long as this is open; a user who has switched it on by sysctl keeps it.
    let _statistics = aya::sys::enable_stats(aya::sys::Stats::RunTime).unwrap();
    let world = world();
    let pods = [world.pod(HOLDER, "local"), world.pod(2, "remote")];
    let _tcp = pods.each_ref().map(|pod| Echo::tcp(pod, 8080));
    let _udp = pods.each_ref().map(|pod| Echo::udp(pod, 5353));
    let service = Service::new("web", V).tcp(80, 8080).udp(53, 5353).tcp(81, 1);
    world.serve("web", service, &pods.each_ref().map(Pod::endpoint));
    world.serve("nobody", Service::new("nobody", V).tcp(82, 82).udp(82, 82), &[]);
    let before = [1, 2, 3].map(|node| both(&world, node));

    // Something of every kind: forwarded, answered, refused, foreign, broken off.
    let client = world.testbed.client();
    for _ in 0..20 {
        let mut talk = Talk::open(client, at(V, 80)).unwrap();
        talk.tell("send 100000").unwrap();
        talk.take(100_000).unwrap();
        Asker::new(client, at(V, 53)).ask("x").unwrap();
        Talk::open(client, at(V, 80)).unwrap().reset();
        assert_eq!(kind(Talk::open(client, at(V, 81))), ErrorKind::ConnectionRefused);
        assert_eq!(kind(Talk::open(client, at(V, 82))), ErrorKind::ConnectionRefused);
        assert_eq!(kind(Asker::new(client, at(V, 82)).ask("x")), ErrorKind::ConnectionRefused);
        assert_eq!(kind(Talk::open(client, at(V, 83))), ErrorKind::ConnectionRefused);
    }
    for (node, (runs_before, outcomes_before)) in [1, 2, 3].into_iter().zip(before) {
        let (runs, outcomes) = both(&world, node);
        assert_eq!(runs - runs_before, outcomes - outcomes_before, "on n{node}");
        // Each of these passes at least twice: in and out.
        let at_least = if node == 3 { 0 } else { 200 };
        assert!(outcomes - outcomes_before > at_least, "on n{node}: {outcomes}");
    }
}

#[test]
fn a_services_packets_and_bytes_are_those_of_a_capture() {
    let world = build().software_checksums().start();
    let pods = [world.pod(HOLDER, "local"), world.pod(2, "remote")];
    let _tcp = pods.each_ref().map(|pod| Echo::tcp(pod, 8080));
    let _udp = pods.each_ref().map(|pod| Echo::udp(pod, 5353));
    let endpoints = pods.each_ref().map(Pod::endpoint);
    world.serve("web", Service::new("web", V).tcp(80, 8080).udp(53, 5353), &endpoints);
    world.serve("nobody", Service::new("nobody", V).tcp(82, 82), &[]);
    let client = world.testbed.client();
    let capture = client.capture("eth0", "ip").unwrap();
    for _ in 0..20 {
        let mut talk = Talk::open(client, at(V, 80)).unwrap();
        talk.tell("send 50000").unwrap();
        talk.take(50_000).unwrap();
        talk.tell("close").unwrap();
        talk.hear().unwrap_err();
        Asker::new(client, at(V, 53)).ask("a datagram").unwrap();
        assert_eq!(kind(Talk::open(client, at(V, 82))), ErrorKind::ConnectionRefused);
    }
    // The last acknowledgements are under way.
    wait::until("every connection is closed", SOON, || {
        let maps = world.maps(HOLDER)?;
        let open =
            maps.flows.list()?.into_iter().filter(|(key, flow)| {
                key.protocol == lb_common::addr::Protocol::TCP && !flow.state().is_over()
            });
        let open = open.count();
        ensure!(open == 0, "{open} are open");
        Ok(())
    })
    .unwrap();
    let sockets = || -> Result<()> {
        let sockets =
            client.run(&["ss", "-Htn", "state", "fin-wait-1", "state", "last-ack", "state", "closing"])?;
        ensure!(sockets.is_empty(), "{sockets}");
        Ok(())
    };
    wait::until("every FIN is acknowledged", SOON, sockets).unwrap();
    let capture = capture.finish().unwrap();

    let maps = world.maps(HOLDER).unwrap();
    for (key, service) in maps.services.all().unwrap() {
        let stats = maps.service_stats(service.id).unwrap();
        let (port, protocol) = (key.port.number(), key.protocol.name().to_lowercase());
        let captured = |end: &str| -> (u64, u64) {
            let lengths = capture.field(&format!("{protocol}.{end} == {port} && !icmp"), "ip.len").unwrap();
            (lengths.len() as u64, lengths.iter().map(|length| length.parse::<u64>().unwrap()).sum())
        };
        if port == 82 {
            let seen = (stats.packets_in, stats.packets_out, stats.connections, stats.refused);
            assert_eq!(seen, (0, 0, 0, captured("dstport").0), "{key:?}");
            assert_eq!(stats.refused, 20);
            continue;
        }
        assert_eq!((stats.packets_in, stats.bytes_in), captured("dstport"), "{key:?}: in");
        assert_eq!((stats.packets_out, stats.bytes_out), captured("srcport"), "{key:?}: out");
        assert_eq!((stats.connections, stats.refused), (20, 0), "{key:?}");
    }
}
