use crate::namespace::Namespace;
use lb_agent::node::interfaces::{Kind, Selection, host_addresses, list};
use lb_agent::node::roles::{Network, RoleError, RoleOptions, Roles, find};
use lb_agent::node::{connect, sysctl};
use std::net::Ipv4Addr;

#[test]
fn what_the_kernel_lists_is_what_was_made() {
    let node = Namespace::weave_node();
    node.sh("ip address add 192.0.2.7/32 dev eth0; ip -6 address add fd00::1/64 dev eth0; ip link set weave mtu 1376");
    let interfaces = node.block_on(|| async { list(&connect().unwrap()).await.unwrap() });

    let find = |name: &str| interfaces.iter().find(|i| i.name == name).unwrap();
    let (eth0, weave, vxlan) = (find("eth0"), find("weave"), find("vxlan-6784"));
    assert_eq!((&eth0.kind, &weave.kind, &vxlan.kind), (&Kind::Veth, &Kind::Bridge, &Kind::Vxlan));
    let v4 = |a: [u8; 4]| Ipv4Addr::from(a);
    assert_eq!(eth0.addresses, [(v4([192, 0, 2, 1]), 24), (v4([192, 0, 2, 7]), 32)]);
    assert_eq!((vxlan.master, weave.master, weave.mtu), (Some(weave.index), None, 1376));
    assert!(find("lo").up && eth0.up && eth0.mac.is_some());

    assert_eq!(host_addresses(&interfaces, &Selection::default()), [v4([192, 0, 2, 1]), v4([192, 0, 2, 7])]);
    let roles = roles(&node).unwrap();
    assert_eq!((roles.uplink.as_slice(), roles.pods.as_slice()), (&[eth0.clone()][..], &[weave.clone()][..]));
    assert_eq!((roles.overlay.as_slice(), roles.overlay_address), (&[vxlan.clone()][..], v4([10, 32, 0, 1])));

    node.sh("ip link set eth0 down");
    let interfaces = node.block_on(|| async { list(&connect().unwrap()).await.unwrap() });
    assert_eq!(host_addresses(&interfaces, &Selection::default()), [Ipv4Addr::UNSPECIFIED; 0]);
}

fn roles(node: &Namespace) -> Result<Roles, RoleError> {
    node.block_on(|| async {
        let netlink = connect().unwrap();
        find(&netlink, &list(&netlink).await.unwrap(), &RoleOptions::default()).await.unwrap()
    })
}

/// What flannel leaves on a node that has no pod yet, and what becomes of it.
#[test]
fn flannels_devices_are_found_from_the_first_moment_and_followed() {
    let node = Namespace::new();
    node.sh("ip link add eth0 type veth peer name outside
         ip address add 192.0.2.1/24 dev eth0
         for device in eth0 outside; do ip link set $device up; done");
    assert!(matches!(roles(&node), Err(RoleError::Unknown { .. })));
    let flannel = "ip link add flannel.1 type vxlan id 1 dstport 8472 dev eth0
         ip address add 10.244.1.0/32 dev flannel.1; ip link set flannel.1 up
         ip route add 10.244.2.0/24 via 10.244.2.0 dev flannel.1 onlink";
    node.sh(flannel);
    let first = roles(&node).unwrap();
    assert_eq!((first.network, first.pods.len()), (Network::Tunnelled, 0));
    assert_eq!(first.overlay_address, Ipv4Addr::new(10, 244, 1, 0));

    node.sh("ip link add cni0 type bridge; ip address add 10.244.1.1/24 dev cni0; ip link set cni0 up");
    let with_pods = roles(&node).unwrap();
    assert_eq!((with_pods.pods.len(), with_pods.overlay_mac), (1, first.overlay_mac));

    node.sh(&format!("ip link del flannel.1\n{flannel}"));
    let anew = roles(&node).unwrap();
    assert_ne!((anew.overlay[0].index, anew.overlay_mac), (first.overlay[0].index, first.overlay_mac));

    // A node of the same network that is reached without the tunnel, as by DirectRouting.
    node.sh("ip route add 10.244.2.0/24 via 192.0.2.2 metric 5; ip route add 203.0.113.0/24 via 192.0.2.9");
    assert!(matches!(roles(&node), Err(RoleError::TwoWays { .. })), "{:?}", roles(&node));
}

#[test]
fn routes_to_other_nodes_pods_over_an_uplink_make_it_the_overlay() {
    let node = Namespace::new();
    node.sh("for n in 0 1; do ip link add eth$n type veth peer name outside$n; done
         ip address add 203.0.113.1/24 dev eth0; ip address add 192.0.2.99/32 dev eth1; ip address add 192.0.2.1/24 dev eth1
         for device in eth0 outside0 eth1 outside1; do ip link set $device up; done
         ip route add default via 203.0.113.254
         ip link add cni0 type bridge; ip address add 10.244.1.1/24 dev cni0; ip link set cni0 up
         ip route add 198.51.100.0/25 via 203.0.113.9");
    assert!(matches!(roles(&node), Err(RoleError::Unknown { .. })), "a route of another size");
    node.sh("ip route add 10.244.2.0/24 via 192.0.2.2");
    let found = roles(&node).unwrap();
    let names: Vec<&str> = found.uplink.iter().map(|uplink| uplink.name.as_str()).collect();
    assert_eq!((found.network, names.as_slice()), (Network::Routed, &["eth0", "eth1"][..]));
    assert_eq!(
        (found.overlay[0].name.as_str(), found.overlay_address),
        ("eth1", Ipv4Addr::new(192, 0, 2, 1))
    );
    let way = |last| found.way_back(Ipv4Addr::new(192, 0, last, 2)).map(|device| device.name.as_str());
    assert_eq!((way(2), way(3)), (Some("eth1"), None));
}

#[test]
fn bridged_frames_are_seen_when_the_sysctl_or_the_bridge_says_so() {
    let node = Namespace::weave_node();
    let calls = || {
        node.block_on(|| async {
            let interfaces = list(&connect().unwrap()).await.unwrap();
            sysctl::bridges_call_iptables(interfaces.iter().find(|i| i.name == "weave").unwrap()).unwrap()
        })
    };
    node.sh("echo 0 > /proc/sys/net/bridge/bridge-nf-call-iptables");
    assert!(!calls());
    node.sh("ip link set weave type bridge nf_call_iptables 1");
    assert!(calls());
    node.sh("ip link set weave type bridge nf_call_iptables 0; echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables");
    assert!(calls());
}
