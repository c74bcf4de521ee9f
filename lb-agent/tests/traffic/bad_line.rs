//! Lines that lose, repeat and reorder packets, by the kernel's netem, which not every kernel has. `cargo xtask vm` runs these.

use crate::client::Talk;
use crate::echo::{Echo, pattern};
use crate::world::{Builder, HOLDER, V, World, at, build};
use testbed::cluster::Service;

const LENGTH: usize = 1 << 20;

/// Every line is bad: between client and router, between router and nodes, and the overlay.
fn spoil(world: &World) {
    let bad = ["netem", "delay", "2ms", "1ms", "reorder", "30%", "loss", "1%", "duplicate", "2%"];
    let (router, nodes) = (world.testbed.router(), [HOLDER, 2].map(|node| world.testbed.node(node)));
    for device in ["eth0", "eth1"] {
        router.run(&[&["tc", "qdisc", "add", "dev", device, "root"], &bad[..]].concat()).unwrap();
    }
    for node in nodes {
        node.run(&[&["tc", "qdisc", "add", "dev", "vxlan-6784", "root"], &bad[..]].concat()).unwrap();
    }
}

/// C10: what comes late or twice is outside of the window that connection tracking knows, and it calls that invalid; then it
/// does not translate it. Our translation depends on the tuple alone: nothing reaches the client from a pod's own address, and
/// neither end sees a reset.
fn files_arrive(builder: Builder) {
    let world = builder.start();
    spoil(&world);
    let client = world.testbed.client();
    let strays = client.capture("eth0", "net 10.32.0.0/12 or tcp[tcpflags] & tcp-rst != 0").unwrap();
    let mut talks = Vec::new();
    for (node, name) in [(HOLDER, "local"), (2, "remote")] {
        let pod = world.pod(node, name);
        let echo = Echo::tcp(&pod, 8080);
        world.serve("web", Service::new("web", V).tcp(80, 8080), &[pod.endpoint()]);
        let mut talk = Talk::open(client, at(V, 80)).unwrap();
        assert_eq!((talk.pod.as_str(), talk.seen_as), (name, talk.local()));
        talk.tell(&format!("send {LENGTH}")).unwrap();
        assert!(talk.take(LENGTH).unwrap() == pattern(LENGTH), "the download from {name} differs");
        talk.tell(&format!("take {LENGTH}")).unwrap();
        talk.give(&pattern(LENGTH)).unwrap();
        assert_eq!(talk.hear().unwrap(), "same", "the upload to {name} differs");
        talks.push((talk, echo, pod));
    }
    let file = strays.finish().unwrap();
    let packets = client.run(&["tcpdump", "-n", "-r", file.path().to_str().unwrap()]).unwrap();
    assert_eq!(packets, "");
}

#[test]
#[ignore = "needs netem: cargo xtask vm"]
fn files_arrive_by_redirect() {
    files_arrive(build());
}

#[test]
#[ignore = "needs netem: cargo xtask vm"]
fn files_arrive_through_the_stack() {
    files_arrive(build().agent(&["--forwarding=stack"]));
}
