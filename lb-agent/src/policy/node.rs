//! What a node publishes about itself, in two annotations.

use super::quote::Quoted;
use crate::model::{ADDRESSES, HardwareAddress, Node, WEAVE, parse_ipv4};
use k8s_openapi::api::core::v1 as core;
use std::fmt::Display;
use std::net::Ipv4Addr;
use thiserror::Error;

/// An annotation that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AnnotationError {
    /// An item of the addresses annotation.
    #[error("node {node}: {ADDRESSES}: {} is not an IPv4 address", Quoted(item))]
    Address {
        /// The Node's name.
        node: String,
        /// The item, untrimmed.
        item: String,
    },
    /// The overlay annotation.
    #[error("node {node}: {WEAVE}: want \"<ip>,<mac>\", got {}", Quoted(value))]
    Weave {
        /// The Node's name.
        node: String,
        /// The whole value.
        value: String,
    },
}

impl AnnotationError {
    /// The Node's name.
    pub fn node(&self) -> &str {
        match self {
            Self::Address { node, .. } | Self::Weave { node, .. } => node,
        }
    }
}

/// Reads a Node's annotations. A node that has published nothing (yet) holds nothing and cannot take replies.
///
/// After an error the node holds what stood before it: addresses in front of a bad one, and no overlay.
pub fn parse(object: &core::Node) -> (Node, Option<AnnotationError>) {
    let mut node = Node {
        name: object.metadata.name.clone().unwrap_or_default(),
        networks: networks(object),
        ..Node::default()
    };
    let error = read_annotations(object, &mut node).err();
    (node, error)
}

/// The IPv4 ones. What is not a network counts for nothing: it comes from the API server, which checks it.
fn networks(object: &core::Node) -> Vec<(Ipv4Addr, u8)> {
    let of_pods = object.spec.iter().filter_map(|spec| spec.pod_cidrs.as_ref()).flatten();
    let of_pods = of_pods.filter_map(|network| parse_network(network));
    let own = object.status.iter().filter_map(|status| status.addresses.as_ref()).flatten();
    let own = own.filter(|address| address.type_ == "InternalIP");
    of_pods.chain(own.filter_map(|address| Some((parse_ipv4(&address.address)?, 32)))).collect()
}

fn parse_network(text: &str) -> Option<(Ipv4Addr, u8)> {
    let (address, prefix) = text.split_once('/')?;
    let prefix = prefix.parse().ok().filter(|prefix| *prefix <= 32)?;
    Some((parse_ipv4(address)?, prefix))
}

fn read_annotations(object: &core::Node, node: &mut Node) -> Result<(), AnnotationError> {
    let annotation = |name| {
        let annotations = object.metadata.annotations.as_ref();
        annotations.and_then(|all| all.get(name)).map(String::as_str).filter(|value| !value.is_empty())
    };
    for item in annotation(ADDRESSES).into_iter().flat_map(|value| value.split(',')) {
        let address = parse_ipv4(item.trim())
            .ok_or_else(|| AnnotationError::Address { node: node.name.clone(), item: item.to_owned() })?;
        node.addresses.push(address);
    }
    if let Some(value) = annotation(WEAVE) {
        let (ip, mac) = parse_weave(value)
            .ok_or_else(|| AnnotationError::Weave { node: node.name.clone(), value: value.to_owned() })?;
        (node.weave_ip, node.weave_mac) = (Some(ip), Some(mac));
    }
    Ok(())
}

/// A comma too many ends up in the hardware address, which refuses it.
fn parse_weave(value: &str) -> Option<(Ipv4Addr, HardwareAddress)> {
    let (ip, mac) = value.split_once(',')?;
    Some((parse_ipv4(ip)?, HardwareAddress::parse(mac)?))
}

/// The value of the addresses annotation: sorted as text, so that it changes only when the set does.
pub fn format_addresses<A: Display>(addresses: &[A]) -> String {
    let mut texts: Vec<String> = addresses.iter().map(A::to_string).collect();
    texts.sort_unstable();
    texts.join(",")
}

/// The value of the overlay annotation.
pub fn format_weave(ip: Ipv4Addr, mac: &HardwareAddress) -> String {
    format!("{ip},{mac}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_its_own_networks_before_it_has_published_anything() {
        let object = core::Node {
            spec: Some(core::NodeSpec {
                pod_cidrs: Some(vec![
                    "10.244.1.0/24".to_owned(),
                    "fd00::/64".to_owned(),
                    "10.0.0.0/99".to_owned(),
                ]),
                ..Default::default()
            }),
            status: Some(core::NodeStatus {
                addresses: Some(
                    [("InternalIP", "192.0.2.11"), ("InternalIP", "fd00::1"), ("ExternalIP", "203.0.113.1")]
                        .map(|(type_, address)| core::NodeAddress {
                            type_: type_.to_owned(),
                            address: address.to_owned(),
                        })
                        .into(),
                ),
                ..Default::default()
            }),
            ..Default::default()
        };
        let (node, error) = parse(&object);
        assert!(error.is_none());
        let expected = [([10, 244, 1, 0], 24), ([192, 0, 2, 11], 32)];
        assert_eq!(node.networks, expected.map(|(address, prefix)| (Ipv4Addr::from(address), prefix)));
    }
}
