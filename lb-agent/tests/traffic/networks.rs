//! Other networks than weave's: the devices and roles are found, pods see the client's own address, and the client sees
//! nobody but the address; also where devices come and go.

use crate::client::{Asker, Talk};
use crate::echo::Echo;
use crate::world::{Builder, HOLDER, SOON, V, World, at, build};
use anyhow::{Context as _, ensure};
use lb_common::addr::Mac;
use lb_common::interface::Interface;
use std::time::Instant;
use testbed::cluster::Service;
use testbed::{Masquerade, Pod, Topology, Uplink, wait};

/// A pod on the holder, and one on each other node.
struct Served {
    world: World,
    pods: Vec<Pod>,
    _echoes: Vec<Echo>,
}

impl Served {
    fn new(builder: Builder) -> Self {
        Self::after(builder, |_| {})
    }

    /// With pods that come after something else.
    fn after(builder: Builder, first: impl FnOnce(&World)) -> Self {
        let world = builder.start();
        first(&world);
        let pods: Vec<Pod> = [HOLDER, 2, 3].map(|node| world.pod(node, &format!("pod-{node}"))).into();
        let echoes = pods.iter().flat_map(|pod| [Echo::tcp(pod, 8080), Echo::udp(pod, 5353)]).collect();
        let served = Self { world, pods, _echoes: echoes };
        served.world.serve("web", Service::new("web", V).tcp(80, 8080).udp(53, 5353), &[]);
        served
    }

    /// Every pod by itself: a connection that is used, and a datagram. Both come from the client.
    fn check(&self) {
        for pod in &self.pods {
            self.world.endpoints("web", &[pod.endpoint()]);
            self.check_pod(pod);
        }
    }

    fn check_pod(&self, pod: &Pod) {
        let (client, address) = (self.world.testbed.client(), self.world.testbed.client_address());
        for _ in 0..4 {
            let mut talk = Talk::open(client, at(V, 80)).with_context(|| pod.name().to_owned()).unwrap();
            assert_eq!((talk.pod.as_str(), talk.seen_as), (pod.name(), at(address, talk.local().port())));
            talk.check("once more").unwrap();
            let asker = Asker::new(client, at(V, 53));
            let answer = asker.ask("x").with_context(|| pod.name().to_owned()).unwrap();
            assert_eq!((answer.pod.as_str(), *answer.seen_as.ip()), (pod.name(), address));
        }
    }

    /// The same, and nobody else is seen by the client.
    fn check_with_capture(&self) {
        let capture = self.world.testbed.client().capture("eth0", "ip").unwrap();
        self.check();
        let capture = capture.finish().unwrap();
        let strangers = "ip.dst == 198.51.100.10 && ip.src != 192.0.2.101";
        assert_eq!(capture.packets(strangers).unwrap(), [""; 0], "the client saw somebody else");
        // A flow whose answers take one way and whose questions another would look like this.
        assert_eq!(capture.packets("tcp.analysis.retransmission || icmp").unwrap(), [""; 0]);
    }
}

fn clients_are_seen(builder: Builder) {
    Served::new(builder).check_with_capture();
}

#[test]
fn clients_are_seen_on_flannel() {
    clients_are_seen(build().topology(Topology::Flannel).rp_filter(1));
}

#[test]
fn clients_are_seen_on_flannel_with_nftables_through_the_stack() {
    let builder = build().topology(Topology::Flannel).rp_filter(2).agent(&["--forwarding=stack"]);
    clients_are_seen(builder.options(|options| options.flannel = Masquerade::Nftables));
}

#[test]
fn clients_are_seen_on_host_gw() {
    clients_are_seen(build().topology(Topology::HostGw).rp_filter(1));
}

#[test]
fn clients_are_seen_on_host_gw_with_addresses_on_a_second_uplink() {
    let builder = build().topology(Topology::HostGw).rp_filter(0);
    clients_are_seen(builder.options(|options| options.uplink = Uplink::Second));
}

#[test]
fn clients_are_seen_on_host_gw_through_the_stack() {
    clients_are_seen(build().topology(Topology::HostGw).rp_filter(2).agent(&["--forwarding=stack"]));
}

#[test]
fn clients_are_seen_on_calico_with_vxlan() {
    clients_are_seen(build().topology(Topology::CalicoVxlan).rp_filter(1));
}

#[test]
fn clients_are_seen_on_calico_with_vxlan_through_the_stack() {
    let builder = build().topology(Topology::CalicoVxlan).rp_filter(0);
    let builder = builder.agent(&["--forwarding=stack", "--attach=clsact"]);
    // Calico's chains accept what is for this node's pods; the rest is the policy's to judge, also what a holder leads
    // through the stack to another node.
    clients_are_seen(builder.options(|options| options.forward_drop = false));
}

#[test]
fn clients_are_seen_on_calico_without_a_tunnel() {
    clients_are_seen(build().topology(Topology::Calico).rp_filter(1));
}

#[test]
fn clients_are_seen_on_calico_without_a_tunnel_through_the_stack() {
    let builder = build().topology(Topology::Calico).rp_filter(2).agent(&["--forwarding=stack"]);
    clients_are_seen(builder.options(|options| options.forward_drop = false));
}

/// Nodes hold addresses before they have a pod, and the bridge that the CNI makes for the first one is found at once, by
/// the kernel's word: the period is a day.
#[test]
fn the_first_pod_of_a_node_is_served_at_once() {
    for (topology, cni) in [(Topology::Flannel, "--cni=auto"), (Topology::HostGw, "--cni=host-gw")] {
        let served = Served::after(build().topology(topology).agent(&[cni]).by_events(), |world| {
            for node in world.testbed.nodes() {
                node.ip("link del cni0").unwrap();
            }
            let pods = |roles: &Interface| roles.is(Interface::PODS);
            wait::until("no device of pods is known", SOON, || {
                for node in [HOLDER, 2, 3] {
                    ensure!(!world.maps(node)?.interfaces.all()?.values().any(pods), "n{node}");
                }
                Ok(())
            })
            .unwrap();
        });
        served.check();
    }
}

/// The same for a pod's own device: it has both programs long before the pod can serve.
#[test]
fn a_pods_own_device_is_found_at_once() {
    let world = build().topology(Topology::Calico).by_events().start();
    for n in 1..=20 {
        let pod = world.pod(2, &format!("pod-{n}"));
        let begun = Instant::now();
        wait::until("the pod's device has its role", SOON, || {
            let shown = world.testbed.node(2).run(&["ip", "-o", "link", "show", pod.port()])?;
            let index: u32 = shown.split(':').next().context("no index")?.parse()?;
            let roles = world.maps(2)?.interfaces.all()?;
            ensure!(roles.get(&index) == Some(&Interface::PODS), "{index}: {roles:?}");
            Ok(())
        })
        .unwrap();
        eprintln!("after {:?}", begun.elapsed());
    }
}

/// flanneld began anew on the holder: another device, another Ethernet address, as it tells the others.
#[test]
fn a_tunnel_that_is_made_anew_serves_again() {
    let served = Served::new(build().topology(Topology::Flannel).by_events());
    served.check();
    let testbed = &served.world.testbed;
    let (n1, number) = (testbed.node(HOLDER), testbed.node(HOLDER).overlay());
    let before = n1.run(&["ip", "-o", "link", "show", "flannel.1"]).unwrap();
    let mut links = format!(
        "link del flannel.1
         link add flannel.1 address 02:0a:f4:99:99:01 mtu 1450 type vxlan id 1 dev eth0 local {} dstport 8472 nolearning
         addr add {number}/32 dev flannel.1
         link set flannel.1 up\n",
        n1.address()
    );
    let mut tunnels = String::new();
    for other in testbed.nodes().iter().filter(|node| node.number() != HOLDER) {
        let (address, mac) =
            (other.overlay(), other.overlay_mac().map(|byte| format!("{byte:02x}")).join(":"));
        links += &format!(
            "neigh add {address} lladdr {mac} dev flannel.1 nud permanent
             route add {address}/24 via {address} dev flannel.1 onlink\n"
        );
        tunnels += &format!("fdb append {mac} dev flannel.1 dst {} self permanent\n", other.address());
        other
            .run(&[
                "sh",
                "-ec",
                &format!(
                    "ip neigh replace {number} lladdr 02:0a:f4:99:99:01 dev flannel.1 nud permanent
                     bridge fdb append 02:0a:f4:99:99:01 dev flannel.1 dst {} self permanent",
                    n1.address()
                ),
            ])
            .unwrap();
    }
    n1.ip(&links).unwrap();
    n1.feed(&["bridge", "-batch", "-"], &tunnels).unwrap();
    assert_ne!(n1.run(&["ip", "-o", "link", "show", "flannel.1"]).unwrap(), before);
    served.world.settle();
    wait::until("the other nodes know the holder by its new address", SOON, || {
        for node in [2, 3] {
            let holders = served.world.maps(node)?.holders.all()?;
            ensure!(holders.contains_key(&Mac::new([2, 0x0a, 0xf4, 0x99, 0x99, 1])), "n{node}: {holders:?}");
        }
        Ok(())
    })
    .unwrap();
    served.check();
}

/// Behind a router nobody's Ethernet address is seen: what is led to the other nodes has the holder as its source, and both are
/// named. The pod on the holder sees the client, and a client never hears a pod's own address.
#[test]
fn pods_behind_routers_see_the_holder_and_both_nodes_are_named() {
    let mut world = build().topology(Topology::Routed).rp_filter(1).start_unsettled();
    let pods: Vec<Pod> = [HOLDER, 2].map(|node| world.pod(node, &format!("pod-{node}"))).into();
    let _echoes: Vec<Echo> = pods.iter().map(|pod| Echo::tcp(pod, 8080)).collect();
    let cluster = world.testbed.cluster();
    cluster.set_service(Service::new("web", V).tcp(80, 8080)).unwrap();
    cluster.set_endpoints("web", &pods.iter().map(Pod::endpoint).collect::<Vec<_>>()).unwrap();
    let client = world.testbed.client();
    let capture = client.capture("eth0", "ip").unwrap();
    let (n1, n2) = (world.testbed.node(HOLDER).address(), world.testbed.node(2).address());
    let sources = [("pod-1", world.testbed.client_address()), ("pod-2", n1)];
    for source in sources {
        wait::until(&format!("{source:?} answers"), crate::world::START, || {
            let talk = Talk::open(client, at(V, 80))?;
            let seen = (talk.pod.as_str(), *talk.seen_as.ip());
            assert!(sources.contains(&seen), "{talk:?}");
            ensure!(seen == source, "{talk:?}");
            Ok(())
        })
        .unwrap();
    }
    for (node, other, far) in [(HOLDER, "n2", n2), (2, "n1", n1)] {
        let own = format!("node n{node}");
        wait::until("the agents name each other", SOON, || {
            let log = world.agent(node).log()?;
            let is_it = |line: &str| {
                line.contains(&format!("node {other}: its overlay address {far}")) && line.contains(&own)
            };
            ensure!(log.lines().any(is_it), "{log}");
            Ok(())
        })
        .unwrap();
    }
    let capture = capture.finish().unwrap();
    let pods = "ip.dst == 198.51.100.10 && ip.src == 10.244.0.0/16";
    assert_eq!(capture.packets(pods).unwrap(), [""; 0], "the client saw a pod");
}
