//! flannel with VXLAN: a subnet and a bridge per node, routes between them, and neighbours that are known beforehand.

use super::{CLUSTER, Network, Overlay, Plug, VXLAN_MTU, mac, plugin};
use crate::host::Host;
use crate::node::Node;
use crate::{Masquerade, Options};
use anyhow::Result;
use std::fmt::Write as _;
use std::net::Ipv4Addr;

pub(super) const BRIDGE: &str = "cni0";

pub(super) struct Flannel;

impl Network for Flannel {
    fn overlay(&self, node: &Node) -> Overlay {
        let number = node.number();
        Overlay {
            device: "flannel.1",
            address: Ipv4Addr::new(10, 244, number, 0),
            mac: [0x02, 0x0a, 0xf4, 0, 0x01, number],
        }
    }

    fn bridge(&self) -> Option<&'static str> {
        Some(BRIDGE)
    }

    fn set_up(&self, node: &Node, others: &[&Node], options: &Options) -> Result<()> {
        let own = self.overlay(node);
        let mut links = format!(
            "link add flannel.1 address {} mtu {VXLAN_MTU} type vxlan id 1 dev {} local {} dstport 8472 nolearning
             addr add {}/32 dev flannel.1
             link set flannel.1 up\n",
            mac(own.mac),
            node.uplink(),
            node.address(),
            own.address
        );
        let mut tunnels = String::new();
        for other in others {
            let Overlay { address, mac: bytes, .. } = self.overlay(other);
            let mac = mac(bytes);
            // Writing to a String cannot fail.
            let _ = writeln!(
                links,
                "neigh add {address} lladdr {mac} dev flannel.1 nud permanent
                 route add {address}/24 via {address} dev flannel.1 onlink"
            );
            let _ =
                writeln!(tunnels, "fdb append {mac} dev flannel.1 dst {} self permanent", other.address());
        }
        node.ip(&links)?;
        node.bridge(&tunnels)?;
        add_bridge(node, VXLAN_MTU)?;
        masquerade(node, options)
    }

    fn iptables(&self, node: &Node, options: &Options) -> String {
        rules(node, options)
    }

    fn add_pod(&self, node: &Node, pod: &Host, _index: u8) -> Result<Plug> {
        plugin::add(node, pod, &delegate(node, VXLAN_MTU))
    }

    fn remove_pod(&self, node: &Node, pod: &Host, _plug: &Plug) -> Result<()> {
        plugin::remove(node, pod, &delegate(node, VXLAN_MTU))
    }
}

/// The pods of a node.
fn subnet(node: &Node) -> String {
    format!("10.244.{}.0/24", node.number())
}

/// As the plugin `bridge` makes it for the first pod of a node. A node of a cluster has had pods.
pub(super) fn add_bridge(node: &Node, mtu: u16) -> Result<()> {
    node.ip(&format!(
        "link add {BRIDGE} mtu {mtu} type bridge
         addr add 10.244.{}.1/24 brd + dev {BRIDGE}
         link set {BRIDGE} up",
        node.number()
    ))
}

/// What flannel's plugin hands on to the plugins `bridge` and `host-local`.
pub(super) fn delegate(node: &Node, mtu: u16) -> serde_json::Value {
    serde_json::json!({
        "cniVersion": "0.3.1",
        "name": "cbr0",
        "type": "bridge",
        "bridge": BRIDGE,
        "mtu": mtu,
        "hairpinMode": true,
        "isGateway": true,
        "isDefaultGateway": true,
        "ipMasq": false,
        "ipam": {
            "type": "host-local",
            "dataDir": plugin::leases(node),
            "ranges": [[{ "subnet": subnet(node) }]],
            "routes": [{ "dst": CLUSTER }],
        },
    })
}

/// The order is that of 0.26 and later. The last rule is the one that hides clients: whatever comes from outside for a pod
/// of another node gets an address of this node; for a pod of this node the rule before it says otherwise.
pub(super) fn rules(node: &Node, options: &Options) -> String {
    const COMMENT: &str = "-m comment --comment";
    let mut text = String::new();
    if options.flannel == Masquerade::Iptables {
        let own = subnet(node);
        let rule = format!("{COMMENT} \"flanneld masq\" -j");
        text = format!(
            "*nat
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING {rule} FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 {rule} RETURN
-A FLANNEL-POSTRTG -s {own} -d {CLUSTER} {rule} RETURN
-A FLANNEL-POSTRTG -s {CLUSTER} -d {own} {rule} RETURN
-A FLANNEL-POSTRTG ! -s {CLUSTER} -d {own} {rule} RETURN
-A FLANNEL-POSTRTG -s {CLUSTER} ! -d 224.0.0.0/4 {rule} MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s {CLUSTER} -d {CLUSTER} {rule} MASQUERADE --random-fully
COMMIT
"
        );
    }
    let rule = format!("{COMMENT} \"flanneld forward\" -j");
    text + &format!(
        "*filter
:FLANNEL-FWD - [0:0]
-A FORWARD {rule} FLANNEL-FWD
-A FLANNEL-FWD -s {CLUSTER} {rule} ACCEPT
-A FLANNEL-FWD -d {CLUSTER} {rule} ACCEPT
COMMIT
"
    )
}

/// In nftables, where that is asked for. Seen in 0.26: the fourth rule lets what comes from outside pass as it is, also for
/// pods of other nodes, so that the last one is never reached by a packet that is forwarded.
pub(super) fn masquerade(node: &Node, options: &Options) -> Result<()> {
    if options.flannel == Masquerade::Iptables {
        return Ok(());
    }
    let own = subnet(node);
    let table = format!(
        "table ip flannel-ipv4 {{
             chain postrtg {{
                 type nat hook postrouting priority srcnat;
                 meta mark 0x4000 return
                 ip saddr {own} ip daddr {CLUSTER} return
                 ip saddr {CLUSTER} ip daddr {own} return
                 ip saddr != {own} ip daddr {CLUSTER} return
                 ip saddr {CLUSTER} ip daddr != 224.0.0.0/4 masquerade fully-random
                 ip saddr != {CLUSTER} ip daddr {CLUSTER} masquerade fully-random
             }}
             chain forward {{
                 type filter hook forward priority filter;
                 ip saddr {CLUSTER} accept
                 ip daddr {CLUSTER} accept
             }}
         }}"
    );
    node.feed(&["nft", "-f", "-"], &table)
}
