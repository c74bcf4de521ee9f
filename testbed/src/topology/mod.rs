//! The networks between pods: what a node is like after the CNI has been there. What is common to all is in
//! [`Node`](crate::Node), the way to them from outside in `outside`.

mod calico;
mod flannel;
mod host_gw;
mod plugin;
mod routed;
mod weave;

pub use plugin::directory as plugin_directory;
pub(crate) use routed::PREFIX as PREFIX_OF_OWN_LINK;

use crate::Options;
use crate::host::Host;
use crate::node::Node;
use anyhow::Result;
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// Of Ethernet.
const MTU: u16 = 1500;
/// Of Ethernet less the 50 bytes of VXLAN over IPv4.
const VXLAN_MTU: u16 = 1450;
/// All pods of CNIs other than weave.
const CLUSTER: &str = "10.244.0.0/16";

/// A network between the pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Topology {
    /// weave: the pods of all nodes on one bridge, whose parts are joined by VXLAN.
    #[default]
    Weave,
    /// flannel, backend `vxlan`: a bridge per node, routes between them over VXLAN.
    Flannel,
    /// flannel, backend `host-gw`: a bridge per node, routes between them over the nodes' own network.
    HostGw,
    /// Calico, `vxlanMode: Always`: a route and a device per pod, routes between nodes over VXLAN.
    CalicoVxlan,
    /// Calico without encapsulation, nodes on one network: a route and a device per pod, routes between nodes.
    Calico,
    /// The same with every node in a subnet of its own: the router knows where the pods are.
    Routed,
}

impl Topology {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Weave, Self::Flannel, Self::HostGw, Self::CalicoVxlan, Self::Calico, Self::Routed];

    /// As on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weave => "weave",
            Self::Flannel => "flannel",
            Self::HostGw => "host-gw",
            Self::CalicoVxlan => "calico-vxlan",
            Self::Calico => "calico",
            Self::Routed => "routed",
        }
    }

    pub(crate) fn network(self) -> &'static dyn Network {
        match self {
            Self::Weave => &weave::Weave,
            Self::Flannel => &flannel::Flannel,
            Self::HostGw => &host_gw::HostGw,
            Self::CalicoVxlan => &calico::Vxlan,
            Self::Calico => &calico::OneNetwork,
            Self::Routed => &routed::Routed,
        }
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Topology {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|topology| topology.name() == name).ok_or_else(|| {
            anyhow::anyhow!("no topology {name:?}; there are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// What a CNI does on a node whose own network is up, and how it adds a pod.
pub(crate) trait Network: Sync {
    /// The node's own address, with the length of its network's prefix.
    fn address(&self, node: u8) -> (Ipv4Addr, u8) {
        (Ipv4Addr::new(192, 0, 2, 10 + node), 24)
    }

    /// The subnet and the address of the router on a link to this node alone; nothing where nodes and router share a switch.
    fn own_link(&self, _node: u8) -> Option<Ipv4Addr> {
        None
    }

    /// All pods of the cluster.
    fn pods(&self) -> &'static str {
        CLUSTER
    }

    /// The pods of a node that the router knows to be there, as a fabric does whose neighbour the CNI is.
    fn announced(&self, _node: u8) -> Option<String> {
        None
    }

    /// Where other nodes send what is for this one, rather than for one of its pods: the device, its addresses.
    fn overlay(&self, node: &Node) -> Overlay;

    /// The bridge that all pods of a node are on.
    fn bridge(&self) -> Option<&'static str>;

    /// Devices, routes and neighbours.
    fn set_up(&self, node: &Node, others: &[&Node], options: &Options) -> Result<()>;

    /// Its rules, as `iptables-restore` reads them; those of kube-proxy are there.
    fn iptables(&self, node: &Node, options: &Options) -> String;

    /// Gives a host a device `eth0` with an address, as the `index`th pod of the node, from 1 on.
    fn add_pod(&self, node: &Node, pod: &Host, index: u8) -> Result<Plug>;

    /// Takes it away.
    fn remove_pod(&self, node: &Node, _pod: &Host, plug: &Plug) -> Result<()> {
        node.ip(&format!("link del {}", plug.port))
    }
}

/// See [`Network::overlay`].
pub(crate) struct Overlay {
    pub(crate) device: &'static str,
    pub(crate) address: Ipv4Addr,
    pub(crate) mac: [u8; 6],
}

impl Overlay {
    /// The node's own network.
    fn uplink(node: &Node) -> Overlay {
        Self { device: node.uplink(), address: node.address(), mac: node.mac() }
    }
}

/// How a pod is connected.
#[derive(Clone, Debug)]
pub(crate) struct Plug {
    pub(crate) ip: Ipv4Addr,
    /// The node's end.
    pub(crate) port: String,
}

/// As `ip` reads it.
pub(crate) fn mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for topology in Topology::ALL {
            assert_eq!(topology.name().parse::<Topology>().unwrap(), topology);
        }
        let error = "cilium".parse::<Topology>().unwrap_err().to_string();
        assert!(error.contains("host-gw, calico-vxlan"), "{error}");
    }
}
