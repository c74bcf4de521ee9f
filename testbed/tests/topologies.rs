//! Every topology without a load balancer: who reaches whom, and what the CNI by itself does to the client's address.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use anyhow::Context as _;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::thread;
use std::time::Duration;
use testbed::{Host, Masquerade, Options, Pod, Testbed, Topology, Uplink, dns, http, server};

const SOON: Duration = Duration::from_secs(5);
/// Held by n1.
const HELD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 101);

/// Does the same on testbeds of several kinds, at the same time. All end before the test fails.
fn on_each(kinds: &[Options], work: impl Fn(&Testbed, &Options) + Sync) {
    let work = &work;
    let failed: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = kinds
            .iter()
            .map(|options| (options, scope.spawn(|| work(&Testbed::new(options.clone()).unwrap(), options))))
            .collect();
        threads.into_iter().filter_map(|(kind, thread)| thread.join().is_err().then_some(kind)).collect()
    });
    assert!(failed.is_empty(), "failed on {failed:#?}");
}

fn on_all(work: impl Fn(&Testbed, &Options) + Sync) {
    on_each(&Topology::ALL.map(with), work);
}

fn with(topology: Topology) -> Options {
    Options { topology, ..Options::default() }
}

/// Both ways that flannel writes its masquerade.
fn with_every_masquerade() -> Vec<Options> {
    let mut kinds = Topology::ALL.map(with).to_vec();
    for topology in [Topology::Flannel, Topology::HostGw] {
        kinds.push(Options { flannel: Masquerade::Nftables, ..with(topology) });
    }
    kinds
}

/// Whom the server at an address sees when this host asks.
#[track_caller]
fn seen(host: &Host, server: Ipv4Addr) -> String {
    let answer = http::get(host, SocketAddrV4::new(server, 8080), "/client", SOON);
    let answer = answer.with_context(|| host.namespace().to_owned()).unwrap();
    answer.split(':').next().unwrap().to_owned()
}

/// How many packets a device has received.
fn received(node: &Host, device: &str) -> u64 {
    let text = node.run(&["ip", "-s", "link", "show", device]).unwrap();
    text.lines().nth(3).unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Two on n1, one on n2, each with a server.
fn pods(testbed: &Testbed) -> ([Pod; 3], [server::Server; 3]) {
    let pods = [(1, "a"), (1, "b"), (2, "c")].map(|(node, name)| testbed.add_pod(node, name).unwrap());
    let servers = pods.each_ref().map(|pod| server::http(pod, 8080).unwrap());
    (pods, servers)
}

fn sends_from_pods_to_pods(pods: &[Pod]) {
    for (from, to) in pods.iter().flat_map(|from| pods.iter().map(move |to| (from, to))) {
        assert_eq!(seen(from, to.ip()), from.ip().to_string(), "{} to {}", from.name(), to.name());
    }
}

#[test]
fn pods_and_nodes_reach_pods_as_themselves_and_the_outside_as_their_node() {
    on_all(|testbed, &Options { topology, .. }| {
        let (pods, _servers) = pods(testbed);
        sends_from_pods_to_pods(&pods);

        let node = testbed.node(1);
        let bridge = match topology {
            Topology::Weave => node.overlay(),
            Topology::Flannel | Topology::HostGw => Ipv4Addr::new(10, 244, 1, 1),
            Topology::CalicoVxlan | Topology::Calico | Topology::Routed => node.address(),
        };
        assert_eq!(seen(node, pods[0].ip()), bridge.to_string(), "{topology}");
        assert_eq!(seen(node, pods[2].ip()), node.overlay().to_string(), "{topology}");

        let client = testbed.client();
        let _outside = server::http(client, 8080).unwrap();
        for pod in &pods {
            let node = testbed.node(pod.node()).address().to_string();
            assert_eq!(seen(pod, testbed.client_address()), node, "{topology}");
        }
    });
}

#[test]
fn the_client_reaches_nodes_and_what_they_hold_wherever_it_moves() {
    on_all(|testbed, _| {
        let _servers: Vec<_> = testbed.nodes().iter().map(|node| server::http(node, 8080).unwrap()).collect();
        let client = testbed.client();
        let other = testbed.add_host("other", Ipv4Addr::new(192, 0, 2, 2)).unwrap();
        let reaches = |host: &Host, address, node: &str| {
            let answer = http::get(host, SocketAddrV4::new(address, 8080), "/", SOON).unwrap();
            assert_eq!(answer, node, "{} asks {address}", host.namespace());
        };
        for node in testbed.nodes() {
            reaches(client, node.address(), node.name());
            reaches(&other, node.address(), node.name());
            assert_eq!(seen(client, node.address()), testbed.client_address().to_string());
        }
        reaches(client, HELD, "n1");
        testbed.move_address(HELD, 1, 3).unwrap();
        reaches(client, HELD, "n3");
        reaches(&other, HELD, "n3");
        for node in testbed.nodes() {
            reaches(node, HELD, "n3");
        }
    });
}

/// Plain behaviour, to tell the CNI's faults from the load balancer's: the client's packets come to a node by a route. What
/// weave and flannel in iptables do to them is what the load balancer exists to change. By UDP: where the source stays,
/// answers of the other node's pod go past the first node, whose kube-proxy drops TCP that it sees half of.
#[test]
fn plain_cnis_show_pods_these_sources_of_an_outside_client() {
    on_each(&with_every_masquerade(), |testbed, options| {
        let node = testbed.node(1);
        testbed.router().ip(&format!("route add {} via {}", testbed.pod_network(), node.address())).unwrap();
        let (client, node) = (testbed.client_address(), node.overlay());
        let (local, remote) = match (options.topology, options.flannel) {
            (Topology::Weave, _) => (node, node),
            (Topology::Flannel | Topology::HostGw, Masquerade::Iptables) => (client, node),
            // Its rules end before the masquerade.
            (Topology::Flannel | Topology::HostGw, Masquerade::Nftables) => (client, client),
            (Topology::CalicoVxlan | Topology::Calico | Topology::Routed, _) => (client, client),
        };
        for (number, source) in [(1, local), (2, remote)] {
            let pod = testbed.add_pod(number, &format!("on-n{number}")).unwrap();
            let server = server::dns(&pod).unwrap();
            let address = SocketAddrV4::new(pod.ip(), 53);
            assert_eq!(
                dns::ask(testbed.client(), address, server::WHO, SOON).unwrap(),
                pod.name(),
                "{options:?}"
            );
            assert_eq!(server.clients().unwrap().last(), Some(&source.to_string()), "{options:?}");
        }
    });
}

#[test]
fn with_policy_drop_pods_go_on_and_only_the_rest_is_not_forwarded() {
    let kinds: Vec<_> = with_every_masquerade()
        .into_iter()
        .map(|options| Options { forward_drop: true, rp_filter: 1, ..options })
        .collect();
    on_each(&kinds, |testbed, options| {
        let (pods, _servers) = pods(testbed);
        sends_from_pods_to_pods(&pods);
        let _outside = server::http(testbed.client(), 8080).unwrap();
        for pod in &pods {
            seen(pod, testbed.client_address());
        }
        // From one host that is no pod to another, through a node.
        let n1 = testbed.node(1);
        let (from, to) = (testbed.node(3), testbed.client_address());
        let via = testbed.add_host("via", Ipv4Addr::new(192, 0, 2, 3)).unwrap();
        if options.topology != Topology::Routed {
            via.ip(&format!("route add {to}/32 via {}", n1.address())).unwrap();
            let answer = http::get(&via, SocketAddrV4::new(to, 8080), "/", Duration::from_millis(300));
            assert!(answer.is_err(), "{answer:?}");
            seen(from, to);
        }
    });
}

#[test]
fn addresses_are_reached_on_a_second_uplink_and_on_a_bridge() {
    let kinds: Vec<_> = Topology::ALL
        .into_iter()
        .flat_map(|topology| {
            [Uplink::Second, Uplink::Bridge].map(|uplink| Options { uplink, ..with(topology) })
        })
        .collect();
    on_each(&kinds, |testbed, options| {
        let _servers = [1, 3].map(|node| server::http(testbed.node(node), 8080).unwrap());
        let device = if options.uplink == Uplink::Second { "eth1" } else { "br0" };
        for holder in [1, 3] {
            let node = testbed.node(holder);
            if holder == 3 {
                testbed.move_address(HELD, 1, 3).unwrap();
            }
            let before = received(node, device);
            for _ in 0..10 {
                assert_eq!(seen(testbed.client(), HELD), testbed.client_address().to_string());
            }
            // Of each at least the SYN, the request, an acknowledgement and the end.
            assert!(received(node, device) >= before + 40, "{options:?}");
        }
        let (pods, _servers) = pods(testbed);
        sends_from_pods_to_pods(&pods[1..]);
    });
}

/// Names, numbers and values that the agent and other programs know a CNI by.
#[test]
fn nodes_look_as_the_cni_leaves_them() {
    on_all(|testbed, &Options { topology, .. }| {
        let pod = testbed.add_pod(1, "pod").unwrap();
        let node = testbed.node(1);
        let show = |words: &str| {
            let words: Vec<_> = words.split(' ').collect();
            node.run(&words).unwrap()
        };
        let routes = show("ip route");
        let has = |text: &str, part: &str| assert!(text.contains(part), "{topology}: no {part:?} in {text}");
        has(&show(&format!("ip addr show dev {}", node.overlay_device())), &node.overlay().to_string());
        match topology {
            Topology::Weave => has(&routes, "10.32.0.0/12 dev weave"),
            Topology::Flannel => {
                has(&routes, "10.244.2.0/24 via 10.244.2.0 dev flannel.1 onlink");
                has(
                    &show("ip -d link show flannel.1"),
                    "vxlan id 1 local 192.0.2.11 dev eth0 srcport 0 0 dstport 8472 nolearning",
                );
                has(&show("ip neigh show dev flannel.1"), "10.244.3.0 lladdr 02:0a:f4:00:01:03 PERMANENT");
                has(
                    &show("bridge fdb show dev flannel.1"),
                    "02:0a:f4:00:01:03 dst 192.0.2.13 self permanent",
                );
                has(&show(&format!("ip link show {}", pod.port())), "mtu 1450");
            }
            Topology::HostGw => {
                has(&routes, "10.244.2.0/24 via 192.0.2.12 dev eth0");
                has(&show(&format!("ip link show {}", pod.port())), "mtu 1500");
            }
            Topology::CalicoVxlan => {
                has(&routes, "10.244.2.0/26 via 10.244.2.0 dev vxlan.calico proto 80 onlink");
                has(&routes, "blackhole 10.244.1.0/26 proto 80");
                has(&show("ip -d link show vxlan.calico"), "vxlan id 4096");
            }
            Topology::Calico => has(&routes, "10.244.2.0/26 via 192.0.2.12 dev eth0 proto bird"),
            Topology::Routed => has(&routes, "10.244.2.0/26 via 203.0.113.1 dev eth0 proto bird"),
        }
        if node.pods_bridge().is_none() {
            has(&routes, &format!("{} dev {} proto 80 scope link", pod.ip(), pod.port()));
            has(&show(&format!("ip link show {}", pod.port())), "ee:ee:ee:ee:ee:ee");
            has(&pod.run(&["ip", "route"]).unwrap(), "default via 169.254.1.1 dev eth0");
        }
    });
}
