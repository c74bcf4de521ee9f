//! weave: one Ethernet for all pods, a bridge per node as its part.

use super::{Network, Overlay, Plug, VXLAN_MTU, mac};
use crate::Options;
use crate::host::Host;
use crate::node::Node;
use anyhow::Result;
use std::net::Ipv4Addr;

/// As weave installs it. The third nat rule is the one that hides clients: whatever enters the overlay from outside gets
/// the node's own address. `WEAVE-NPC` accepts, since no policy isolates a pod.
const RULES: &str = "\
*nat
:WEAVE - [0:0]
-A POSTROUTING -j WEAVE
-A WEAVE -s 10.32.0.0/12 -d 224.0.0.0/4 -j RETURN
-A WEAVE -s 10.32.0.0/12 ! -d 10.32.0.0/12 -j MASQUERADE
-A WEAVE ! -s 10.32.0.0/12 -d 10.32.0.0/12 -j MASQUERADE
COMMIT
";
const FORWARD: &str = "\
*filter
:WEAVE-NPC - [0:0]
-A FORWARD -o weave -j WEAVE-NPC
-A FORWARD -i weave ! -o weave -j ACCEPT
-A FORWARD -o weave -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A WEAVE-NPC -j ACCEPT
COMMIT
";

pub(super) struct Weave;

impl Network for Weave {
    fn pods(&self) -> &'static str {
        "10.32.0.0/12"
    }

    fn overlay(&self, node: &Node) -> Overlay {
        let number = node.number();
        Overlay {
            device: "weave",
            address: Ipv4Addr::new(10, 32, 0, number),
            mac: [0x02, 0x0a, 0x20, 0, 0, number],
        }
    }

    fn bridge(&self) -> Option<&'static str> {
        Some("weave")
    }

    fn set_up(&self, node: &Node, others: &[&Node], _options: &Options) -> Result<()> {
        let own = self.overlay(node);
        node.ip(&format!(
            "link add weave address {} type bridge
             link set weave mtu {VXLAN_MTU}
             addr add {}/12 brd + dev weave
             link set weave up
             link add vxlan-6784 mtu {VXLAN_MTU} type vxlan id 6784 dstport 6784 local {}
             link set vxlan-6784 master weave up\n",
            mac(own.mac),
            own.address,
            node.address()
        ))?;
        // Where a packet goes whose Ethernet address nobody has learned: to every other node.
        let flood: String = others
            .iter()
            .map(|other| format!("fdb append 00:00:00:00:00:00 dev vxlan-6784 dst {}\n", other.address()))
            .collect();
        node.bridge(&flood)
    }

    fn iptables(&self, _node: &Node, options: &Options) -> String {
        if options.forward_drop { RULES.to_owned() + FORWARD } else { RULES.to_owned() }
    }

    fn add_pod(&self, node: &Node, pod: &Host, index: u8) -> Result<Plug> {
        let ip = Ipv4Addr::new(10, 32, node.number(), index);
        let port = format!("vethwepl{index}");
        node.ip(&format!(
            "link add {port} mtu {VXLAN_MTU} type veth peer name eth0 mtu {VXLAN_MTU} netns {}
             link set {port} master weave up
             link set {port} type bridge_slave hairpin on",
            pod.namespace()
        ))?;
        pod.ip(&format!(
            "link set lo up
             addr add {ip}/12 brd + dev eth0
             link set eth0 up
             route add default via {}",
            self.overlay(node).address
        ))?;
        Ok(Plug { ip, port })
    }
}
