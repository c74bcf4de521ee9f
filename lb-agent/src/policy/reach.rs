//! Which other nodes this one can exchange forwards and answers with.
//!
//! Where nodes route to each other's pods, a holder is known by the Ethernet address of its frames. Behind a router they
//! have the router's, so the other node would not know whom to send the answers to, and they would reach the client
//! with the pod's address. What is led there gets the holder as its source.

use crate::model::Node;
use crate::node::routes::contains;
use std::net::Ipv4Addr;

/// Where the overlay of this node ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Every node is a neighbour on the overlay.
    #[default]
    Everybody,
    /// Those with an overlay address in one of these networks are.
    Networks {
        /// The device that these are on.
        device: String,
        /// Addresses of this node there, with the length of their prefix in bits.
        networks: Vec<(Ipv4Addr, u8)>,
    },
}

impl Reach {
    /// Whether the node with this overlay address is a neighbour.
    pub fn takes_in(&self, overlay_address: Ipv4Addr) -> bool {
        match self {
            Self::Everybody => true,
            Self::Networks { networks, .. } => {
                networks.iter().any(|network| contains(*network, overlay_address))
            }
        }
    }

    /// Whether packets can be exchanged with this node, seen from the node of the other name. Where it matters, one that has
    /// published no overlay yet must be waited for.
    pub(super) fn includes(&self, node: &Node, own_name: &str) -> bool {
        let is_near = |address| self.takes_in(address);
        node.name == own_name || node.weave_ip.map_or(*self == Self::Everybody, is_near)
    }

    /// The problem with a node that is none, seen from the node of the other name. A node that has published no overlay
    /// may still turn out to be one.
    pub(super) fn problem(&self, node: &Node, own_name: &str) -> Option<String> {
        let (address, Self::Networks { device, networks }) = (node.weave_ip?, self) else { return None };
        if node.name == own_name || self.takes_in(address) {
            return None;
        }
        let networks: Vec<String> = networks.iter().map(|(ip, prefix)| format!("{ip}/{prefix}")).collect();
        Some(format!(
            "node {}: its overlay address {address} is not on the network of {device} on node {own_name} ({}), and behind \
             a router neither knows the other's packets: what one forwards to the other's pods gets its own address as the \
             source, and they do not see clients. Put both on one network, or let the CNI use VXLAN",
            node.name,
            networks.join(", ")
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_on_another_network_is_named_with_this_one() {
        let reach = Reach::Networks {
            device: "eth0".to_owned(),
            networks: vec![(Ipv4Addr::new(192, 0, 2, 1), 24), (Ipv4Addr::new(10, 0, 0, 1), 8)],
        };
        let node = |weave_ip: Option<[u8; 4]>| Node {
            name: "n2".to_owned(),
            weave_ip: weave_ip.map(Ipv4Addr::from),
            ..Node::default()
        };
        for near in [None, Some([192, 0, 2, 2]), Some([10, 9, 9, 9])] {
            assert_eq!(reach.problem(&node(near), "n1"), None, "{near:?}");
        }
        let far = node(Some([198, 51, 100, 2]));
        let problem = reach.problem(&far, "n1").unwrap();
        for part in ["node n2: ", "198.51.100.2", "eth0 on node n1", "192.0.2.1/24, 10.0.0.1/8"] {
            assert!(problem.contains(part), "{problem:?} lacks {part:?}");
        }
        assert_eq!(reach.problem(&far, "n2"), None, "a node reaches itself");
        assert_eq!(Reach::Everybody.problem(&far, "n1"), None);
    }
}
