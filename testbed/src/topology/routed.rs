//! Calico without encapsulation on a fabric that routes to the racks: each node in a subnet and on a link of its own. The
//! router is its BGP neighbour, so no Ethernet address of a node reaches another node.

use super::{MTU, Network, Overlay, Plug, calico};
use crate::Options;
use crate::host::Host;
use crate::node::Node;
use anyhow::Result;
use std::net::Ipv4Addr;

/// Of a node's subnet.
pub(crate) const PREFIX: u8 = 26;

pub(super) struct Routed;

impl Network for Routed {
    fn address(&self, node: u8) -> (Ipv4Addr, u8) {
        (in_subnet(node, 11), PREFIX)
    }

    fn own_link(&self, node: u8) -> Option<Ipv4Addr> {
        Some(in_subnet(node, 1))
    }

    fn announced(&self, node: u8) -> Option<String> {
        Some(calico::block(node))
    }

    fn overlay(&self, node: &Node) -> Overlay {
        Overlay::uplink(node)
    }

    fn bridge(&self) -> Option<&'static str> {
        None
    }

    fn set_up(&self, node: &Node, others: &[&Node], _options: &Options) -> Result<()> {
        calico::set_up_routes(node, others, |_| in_subnet(node.number(), 1))
    }

    fn iptables(&self, _node: &Node, _options: &Options) -> String {
        calico::rules("")
    }

    fn add_pod(&self, node: &Node, pod: &Host, index: u8) -> Result<Plug> {
        calico::add_pod(node, pod, index, MTU)
    }
}

/// 203.0.113.0/24 has room for four of 64 addresses.
fn in_subnet(node: u8, host: u8) -> Ipv4Addr {
    Ipv4Addr::new(203, 0, 113, (node - 1) * 64 + host)
}
