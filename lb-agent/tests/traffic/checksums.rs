//! H5: whoever makes the checksums, a device or the kernel, no host ever throws one away, and every byte arrives: for clients
//! outside, whose packets keep their source, and inside, whose source is replaced.

use crate::client::{Asker, Talk};
use crate::echo::{Echo, pattern};
use crate::world::{Builder, HOLDER, V, World, at, build};
use testbed::cluster::Service;
use testbed::{Host, Pod, Topology, Uplink};

const LENGTH: usize = 1 << 20;
/// Of datagrams: up to 76 bytes the kernel sums up at once whatever a device said.
const DATAGRAMS: [usize; 3] = [64, 200, 1_300];

/// Counters of wrong checksums that are not zero.
fn wrong_sums(host: &Host) -> Vec<String> {
    let counters = host.run(&["cat", "/proc/net/snmp"]).unwrap();
    let lines: Vec<Vec<&str>> = counters.lines().map(|line| line.split_whitespace().collect()).collect();
    let pairs =
        lines.chunks(2).flat_map(|pair| pair[0].iter().zip(&pair[1]).map(|words| (pair[0][0], words)));
    let wrong = pairs.filter(|(_, (name, count))| **name == "InCsumErrors" && **count != "0");
    wrong.map(|(protocol, (_, count))| format!("{} {protocol} {count}", host.name())).collect()
}

fn offload(host: &Host, device: &str, feature: &str, on: bool) {
    host.run(&["ethtool", "-K", device, feature, if on { "on" } else { "off" }]).unwrap();
}

/// Both ends of a pod's cable.
fn offload_pod(world: &World, pod: &Pod, on: bool) {
    offload(pod, "eth0", "tx", on);
    offload(world.testbed.node(pod.node()), pod.port(), "tx", on);
}

/// Both protocols, both ways.
fn exchange(host: &Host, pod: &Pod, port: u16) {
    let mut talk = Talk::open(host, at(V, port)).unwrap();
    assert_eq!(talk.pod, pod.name());
    talk.tell(&format!("send {LENGTH}")).unwrap();
    assert!(talk.take(LENGTH).unwrap() == pattern(LENGTH), "{} from {}", host.name(), pod.name());
    talk.tell(&format!("take {LENGTH}")).unwrap();
    talk.give(&pattern(LENGTH)).unwrap();
    assert_eq!(talk.hear().unwrap(), "same", "{} to {}", host.name(), pod.name());
    let asker = Asker::new(host, at(V, port));
    for length in DATAGRAMS {
        let answer = asker.ask(&"x".repeat(length));
        let answer = answer.unwrap_or_else(|error| panic!("{} to {}: {error}", host.name(), pod.name()));
        assert_eq!((answer.pod.as_str(), answer.text.len()), (pod.name(), length));
    }
}

fn bytes_arrive(builder: Builder, overlay: &str) {
    let world = builder.start();
    let pods = [(HOLDER, 80), (2, 81)].map(|(node, port)| (world.pod(node, &format!("pod-{node}")), port));
    let _echoes: Vec<_> = pods.iter().map(|(pod, _)| (Echo::tcp(pod, 8080), Echo::udp(pod, 8080))).collect();
    for (pod, port) in &pods {
        let service = Service::new(pod.name(), V).tcp(*port, 8080).udp(*port, 8080);
        world.serve(pod.name(), service, &[pod.endpoint()]);
    }
    let inside = world.pod(HOLDER, "inside");
    let hosts: [&Host; 3] = [world.testbed.client(), &inside, world.testbed.node(HOLDER)];
    for (overlay_on, pods_on) in [(true, true), (false, true), (true, false), (false, false)] {
        for node in world.testbed.nodes() {
            offload(node, overlay, "tx-checksum-ip-generic", overlay_on);
        }
        for pod in pods.iter().map(|(pod, _)| pod).chain([&inside]) {
            offload_pod(&world, pod, pods_on);
        }
        for host in hosts {
            for (pod, port) in &pods {
                exchange(host, pod, *port);
            }
        }
        let nodes = world.testbed.nodes().iter().map(|node| &**node);
        let all = hosts.into_iter().chain(nodes).chain(pods.iter().map(|(pod, _)| &**pod));
        let wrong: Vec<String> = all.flat_map(wrong_sums).collect();
        assert_eq!(wrong, [""; 0], "overlay {overlay_on}, pods {pods_on}");
    }
}

#[test]
fn every_sum_is_right_on_weave() {
    bytes_arrive(build(), "vxlan-6784");
}

#[test]
fn every_sum_is_right_on_flannel() {
    bytes_arrive(build().topology(Topology::Flannel), "flannel.1");
}

/// The bridge has netfilter sum up what comes in, and the kernel keeps that sum with the packet when it is redirected to a pod.
#[test]
fn every_sum_is_right_with_a_bridge_for_an_uplink() {
    let bridge = build().options(|options| options.uplink = Uplink::Bridge);
    bytes_arrive(bridge.agent(&["--address-include=br0"]), "vxlan-6784");
}
