//! Calico: no bridge. Each pod has a device and a route, and believes in a router that proxy ARP makes of the node.

use super::{CLUSTER, MTU, Network, Overlay, Plug, VXLAN_MTU, mac};
use crate::Options;
use crate::host::Host;
use crate::node::Node;
use anyhow::{Result, ensure};
use std::fmt::Write as _;
use std::net::Ipv4Addr;

/// Of a node's block of 64 addresses: the first is the tunnel's, and none is broadcast.
const PODS: u8 = 63;

/// The mark bits are Calico's by default: 0x10000 accepted, 0x40000 from a pod.
///
/// `cali-PREROUTING` is what strict reverse path filtering of pods became since 3.15: it is there whatever the sysctl says.
/// The policies and profiles of pods allow everything.
const RULES: &str = "\
*raw
:cali-PREROUTING - [0:0]
-A PREROUTING -j cali-PREROUTING
-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i cali+ -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
COMMIT
*filter
:cali-FORWARD - [0:0]
:cali-from-wl-dispatch - [0:0]
:cali-to-wl-dispatch - [0:0]
-I FORWARD -j cali-FORWARD
-A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
-A cali-FORWARD -i cali+ -j cali-from-wl-dispatch
-A cali-FORWARD -o cali+ -j cali-to-wl-dispatch
-A cali-from-wl-dispatch -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-from-wl-dispatch -m conntrack --ctstate INVALID -j DROP
-A cali-from-wl-dispatch -j MARK --set-xmark 0x10000/0x10000
-A cali-to-wl-dispatch -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-to-wl-dispatch -m conntrack --ctstate INVALID -j DROP
-A cali-to-wl-dispatch -j MARK --set-xmark 0x10000/0x10000
COMMIT
";
/// What the node itself sends into the tunnel under another of its addresses gets the tunnel's.
const TUNNEL: &str = "-A cali-POSTROUTING -o vxlan.calico -m addrtype ! --src-type LOCAL --limit-iface-out \
                      -m addrtype --src-type LOCAL -j MASQUERADE --random-fully\n";

pub(super) struct Vxlan;

impl Network for Vxlan {
    fn overlay(&self, node: &Node) -> Overlay {
        let number = node.number();
        Overlay {
            device: "vxlan.calico",
            address: Ipv4Addr::new(10, 244, number, 0),
            mac: [0x66, 0x0a, 0xf4, 0, 0, number],
        }
    }

    fn bridge(&self) -> Option<&'static str> {
        None
    }

    fn set_up(&self, node: &Node, others: &[&Node], _options: &Options) -> Result<()> {
        let own = self.overlay(node);
        let mut links = format!(
            "link add vxlan.calico address {} mtu {VXLAN_MTU} type vxlan id 4096 dev {} local {} dstport 4789 nolearning
             addr add {}/32 dev vxlan.calico
             link set vxlan.calico up
             {}\n",
            mac(own.mac),
            node.uplink(),
            node.address(),
            own.address,
            blackhole(node)
        );
        let mut tunnels = String::new();
        for other in others {
            let Overlay { address, mac: bytes, .. } = self.overlay(other);
            let mac = mac(bytes);
            // Writing to a String cannot fail.
            let _ = writeln!(
                links,
                "neigh add {address} lladdr {mac} dev vxlan.calico nud permanent
                 route add {} via {address} dev vxlan.calico onlink proto 80",
                block(other.number())
            );
            let _ =
                writeln!(tunnels, "fdb append {mac} dev vxlan.calico dst {} self permanent", other.address());
        }
        node.ip(&links)?;
        node.bridge(&tunnels)
    }

    fn iptables(&self, _node: &Node, _options: &Options) -> String {
        rules(TUNNEL)
    }

    fn add_pod(&self, node: &Node, pod: &Host, index: u8) -> Result<Plug> {
        add_pod(node, pod, index, VXLAN_MTU)
    }
}

/// Nodes on one network, which announce their blocks to each other.
pub(super) struct OneNetwork;

impl Network for OneNetwork {
    fn overlay(&self, node: &Node) -> Overlay {
        Overlay::uplink(node)
    }

    fn bridge(&self) -> Option<&'static str> {
        None
    }

    fn set_up(&self, node: &Node, others: &[&Node], _options: &Options) -> Result<()> {
        set_up_routes(node, others, Node::address)
    }

    fn iptables(&self, _node: &Node, _options: &Options) -> String {
        rules("")
    }

    fn add_pod(&self, node: &Node, pod: &Host, index: u8) -> Result<Plug> {
        add_pod(node, pod, index, MTU)
    }
}

/// The addresses of a node's pods.
pub(super) fn block(node: u8) -> String {
    format!("10.244.{node}.0/26")
}

/// What keeps packets for pods that are gone from the default route, and the router from sending them back.
fn blackhole(node: &Node) -> String {
    format!("route add blackhole {} proto 80", block(node.number()))
}

/// Routes to the other nodes' blocks, as BIRD installs them.
pub(super) fn set_up_routes(node: &Node, others: &[&Node], via: impl Fn(&Node) -> Ipv4Addr) -> Result<()> {
    let mut routes = format!("{}\n", blackhole(node));
    for other in others {
        let (block, via) = (block(other.number()), via(other));
        let _ = writeln!(routes, "route add {block} via {via} dev {} proto bird", node.uplink());
    }
    node.ip(&routes)
}

/// Calico masquerades what leaves the pool. What comes from outside keeps its source.
pub(super) fn rules(tunnel: &str) -> String {
    format!(
        "{RULES}*nat
:cali-POSTROUTING - [0:0]
:cali-nat-outgoing - [0:0]
-I POSTROUTING -j cali-POSTROUTING
-A cali-POSTROUTING -j cali-nat-outgoing
{tunnel}-A cali-nat-outgoing -s {CLUSTER} ! -d {CLUSTER} -j MASQUERADE --random-fully
COMMIT
"
    )
}

/// Every node's end has the same Ethernet address, so pods can move; the values below `/proc` are Felix's.
pub(super) fn add_pod(node: &Node, pod: &Host, index: u8, mtu: u16) -> Result<Plug> {
    ensure!(index <= PODS, "{} has no more addresses in its block", node.name());
    let ip = Ipv4Addr::new(10, 244, node.number(), index);
    let port = format!("cali{index:011x}");
    node.ip(&format!(
        "link add {port} mtu {mtu} address ee:ee:ee:ee:ee:ee type veth peer name eth0 mtu {mtu} netns {}",
        pod.namespace()
    ))?;
    let name = |key: &str| format!("ipv4/conf/{port}/{key}");
    node.sysctls(&[
        (&name("rp_filter"), "1"),
        (&name("route_localnet"), "1"),
        (&name("proxy_arp"), "1"),
        (&name("forwarding"), "1"),
        (&format!("ipv4/neigh/{port}/proxy_delay"), "0"),
    ])?;
    node.ip(&format!("link set {port} up\nroute add {ip}/32 dev {port} scope link proto 80"))?;
    pod.ip(&format!(
        "link set lo up
         addr add {ip}/32 dev eth0
         link set eth0 up
         route add 169.254.1.1 dev eth0 scope link
         route add default via 169.254.1.1 dev eth0"
    ))?;
    Ok(Plug { ip, port })
}
