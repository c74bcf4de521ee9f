//! flannel's `host-gw`: its pods and its rules, and plain routes over the nodes' own network.

use super::flannel::{self, BRIDGE, delegate};
use super::{MTU, Network, Overlay, Plug, plugin};
use crate::Options;
use crate::host::Host;
use crate::node::Node;
use anyhow::Result;

pub(super) struct HostGw;

impl Network for HostGw {
    fn overlay(&self, node: &Node) -> Overlay {
        Overlay::uplink(node)
    }

    fn bridge(&self) -> Option<&'static str> {
        Some(BRIDGE)
    }

    fn set_up(&self, node: &Node, others: &[&Node], options: &Options) -> Result<()> {
        let route = |other: &&Node| {
            format!(
                "route add 10.244.{}.0/24 via {} dev {}\n",
                other.number(),
                other.address(),
                node.uplink()
            )
        };
        node.ip(&others.iter().map(route).collect::<String>())?;
        flannel::add_bridge(node, MTU)?;
        flannel::masquerade(node, options)
    }

    fn iptables(&self, node: &Node, options: &Options) -> String {
        flannel::rules(node, options)
    }

    fn add_pod(&self, node: &Node, pod: &Host, _index: u8) -> Result<Plug> {
        plugin::add(node, pod, &delegate(node, MTU))
    }

    fn remove_pod(&self, node: &Node, pod: &Host, _plug: &Plug) -> Result<()> {
        plugin::remove(node, pod, &delegate(node, MTU))
    }
}
