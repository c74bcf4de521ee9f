use crate::namespace::Namespace;
use lb_agent::node::interfaces::{Kind, RoleOptions, Selection, find_roles, host_addresses, list};
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
    let roles = find_roles(&interfaces, &RoleOptions::default()).unwrap();
    assert_eq!((roles.uplink.as_slice(), &roles.pods), (&[eth0.clone()][..], weave));
    assert_eq!((roles.overlay.as_slice(), roles.overlay_address), (&[vxlan.clone()][..], v4([10, 32, 0, 1])));

    node.sh("ip link set eth0 down");
    let interfaces = node.block_on(|| async { list(&connect().unwrap()).await.unwrap() });
    assert_eq!(host_addresses(&interfaces, &Selection::default()), [Ipv4Addr::UNSPECIFIED; 0]);
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
