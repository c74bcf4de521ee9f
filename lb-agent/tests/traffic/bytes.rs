//! Every byte arrives, once and in order: through both paths, with the offloads of virtual devices (large packets with
//! sums yet to be made) and without.

use crate::client::{Asker, Talk, failure, kind};
use crate::echo::{Echo, pattern};
use crate::world::{Builder, HOLDER, V, World, at, build, world};
use std::io::ErrorKind;
use testbed::Pod;
use testbed::cluster::Service;

const LENGTH: usize = 8 << 20;
/// Payload of a UDP datagram that fills the overlay's 1450 bytes: less IP header and UDP header.
const FULL: usize = 1450 - 28;

/// A file from a new pod, and the connection that it came by.
fn download(world: &World, node: u8, name: &str) -> (Pod, Echo, Talk) {
    let pod = world.pod(node, name);
    let echo = Echo::tcp(&pod, 8080);
    world.serve("web", Service::new("web", V).tcp(80, 8080), &[pod.endpoint()]);
    let mut talk = Talk::open(world.testbed.client(), at(V, 80)).unwrap();
    talk.tell(&format!("send {LENGTH}")).unwrap();
    assert!(talk.take(LENGTH).unwrap() == pattern(LENGTH), "the download from {name} differs");
    (pod, echo, talk)
}

fn whole_files(builder: Builder) {
    let world = builder.start();
    for (node, name) in [(HOLDER, "local"), (2, "remote")] {
        let (_pod, _echo, mut talk) = download(&world, node, name);
        talk.tell(&format!("take {LENGTH}")).unwrap();
        talk.give(&pattern(LENGTH)).unwrap();
        assert_eq!(talk.hear().unwrap(), "same", "the upload to {name} differs");
    }
}

#[test]
fn files_are_the_same_after_download_and_upload() {
    whole_files(build());
}

#[test]
fn files_are_the_same_without_offloads() {
    whole_files(build().software_checksums());
}

#[test]
fn files_are_the_same_through_the_stack() {
    whole_files(build().agent(&["--forwarding=stack"]));
}

fn udp_pod(world: &World, node: u8) -> (Pod, Echo) {
    let pod = world.pod(node, &format!("pod-{node}"));
    let echo = Echo::udp(&pod, 5353);
    world.serve("dns", Service::new("dns", V).udp(53, 5353), &[pod.endpoint()]);
    (pod, echo)
}

#[test]
fn datagrams_of_every_size_up_to_the_overlays_mtu_arrive() {
    let world = world();
    for node in [HOLDER, 2] {
        let (pod, _echo) = udp_pod(&world, node);
        let asker = Asker::new(world.testbed.client(), at(V, 53));
        for length in (0..FULL).step_by(97).chain([FULL - 1, FULL]) {
            let text = "x".repeat(length);
            let answer = asker.ask(&text).unwrap();
            assert_eq!(answer.pod, pod.name(), "{length} bytes");
            let head = format!("{} {} ", answer.pod, answer.seen_as);
            let whole = format!("{head}{text}");
            assert_eq!(answer.text, whole[..whole.len().min(length.max(64))], "{length} bytes");
        }
    }
}

/// One byte more than the overlay takes: the sender's kernel learns it, and the socket says so; nothing vanishes.
#[test]
fn a_datagram_too_big_for_the_overlay_is_answered_with_its_mtu() {
    let world = world();
    for node in [HOLDER, 2] {
        let (_pod, _echo) = udp_pod(&world, node);
        let client = world.testbed.client();
        client.run(&["ip", "route", "flush", "cache"]).unwrap();
        let asker = Asker::new(client, at(V, 53));
        let told = failure(asker.ask(&"x".repeat(FULL + 1)));
        assert_eq!(told.raw_os_error(), Some(libc::EMSGSIZE), "{told}");
        let route = client.run(&["ip", "route", "get", &V.to_string()]).unwrap();
        assert!(route.contains("mtu 1450"), "{route}");
        asker.ask(&"x".repeat(FULL)).unwrap();
    }
}

/// I4: the client's wire takes more than the overlay. Nobody has to be told so by ICMP.
#[test]
fn the_announced_segment_fits_the_overlay() {
    let world = world();
    for (node, name) in [(HOLDER, "local"), (2, "remote")] {
        let pod = world.pod(node, name);
        let _echo = Echo::tcp(&pod, 8080);
        world.serve("web", Service::new("web", V).tcp(80, 8080), &[pod.endpoint()]);
        let ends = [world.testbed.client().capture("eth0", "tcp"), pod.capture("eth0", "tcp")];
        let ends = ends.map(Result::unwrap);
        Talk::open(world.testbed.client(), at(V, 80)).unwrap().check("hello").unwrap();
        let seen =
            ends.map(|end| end.finish().unwrap().field("tcp.flags.syn == 1", "tcp.options.mss_val").unwrap());
        assert_eq!(seen[0], ["1460", "1410"], "{name}, at the client");
        assert_eq!(seen[1], ["1410", "1410"], "{name}, at the pod");
    }
}

/// A client behind a link that takes less than pods send, and nobody else knows it: the router tells the address, and the pod
/// must hear of it. Otherwise the connection hangs after its handshake.
#[test]
fn a_download_through_a_narrow_link_arrives() {
    const NARROW: u32 = 1200;
    for builder in [build(), build().agent(&["--forwarding=stack"])] {
        let world = builder.start();
        world.testbed.router().ip(&format!("link set eth1 mtu {NARROW}")).unwrap();
        for (node, name) in [(HOLDER, "local"), (2, "remote")] {
            let (pod, _echo, talk) = download(&world, node, name);
            let learnt = pod.run(&["ip", "route", "get", &talk.local().ip().to_string()]).unwrap();
            assert!(learnt.contains(&format!("mtu {NARROW}")), "{name}: {learnt}");
        }
    }
}

/// A pod without a socket: the client hears it, from the address that it asked.
#[test]
fn a_closed_port_of_a_pod_refuses_datagrams() {
    for builder in [build(), build().agent(&["--forwarding=stack"])] {
        let world = builder.start();
        for node in [HOLDER, 2] {
            let pod = world.pod(node, &format!("pod-{node}"));
            world.serve("dns", Service::new("dns", V).udp(53, 5353), &[pod.endpoint()]);
            let asker = Asker::new(world.testbed.client(), at(V, 53));
            assert_eq!(kind(asker.ask("hello")), ErrorKind::ConnectionRefused, "node {node}");
        }
    }
}
