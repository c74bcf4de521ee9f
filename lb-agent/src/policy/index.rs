//! Look-up tables over the input, built once per computation: what keeps the policy linear.

use super::quote::Quoted;
use crate::model::{EndpointSlice, Node, Service, ServicePort, SliceEndpoint, parse_ipv4};
use std::collections::HashMap;
use std::net::Ipv4Addr;

/// Who holds which address.
pub(crate) struct Holders<'a> {
    /// By name.
    nodes: Vec<&'a Node>,
    by_address: HashMap<Ipv4Addr, Vec<&'a Node>>,
}

impl<'a> Holders<'a> {
    pub(crate) fn of(nodes: &'a [Node]) -> Self {
        let mut nodes: Vec<&Node> = nodes.iter().collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        let mut by_address: HashMap<Ipv4Addr, Vec<&Node>> = HashMap::new();
        for node in &nodes {
            for address in &node.addresses {
                let holders = by_address.entry(*address).or_default();
                // An address on two interfaces of one node is listed twice, but held once.
                if !holders.last().is_some_and(|last| std::ptr::eq(*last, *node)) {
                    holders.push(node);
                }
            }
        }
        Self { nodes, by_address }
    }

    /// Every node, by name.
    pub(crate) fn nodes(&self) -> &[&'a Node] {
        &self.nodes
    }

    /// The nodes that hold `address`, by name.
    pub(crate) fn of_address(&self, address: Ipv4Addr) -> &[&'a Node] {
        self.by_address.get(&address).map_or(&[], Vec::as_slice)
    }

    /// The address that a Service asks for and the one node that holds it.
    pub(crate) fn place(&self, service: &Service) -> Result<(Ipv4Addr, &'a Node), Unplaced<'_>> {
        let Some(address) = parse_ipv4(&service.wanted) else { return Err(Unplaced::NoAddress) };
        match self.of_address(address) {
            [] => Err(Unplaced::NotHeld(address)),
            [only] => Ok((address, only)),
            several => Err(Unplaced::HeldBySeveral(address, several)),
        }
    }
}

/// Why nobody serves a Service.
pub(crate) enum Unplaced<'a> {
    NoAddress,
    NotHeld(Ipv4Addr),
    HeldBySeveral(Ipv4Addr, &'a [&'a Node]),
}

impl Unplaced<'_> {
    /// The problem, for people.
    pub(crate) fn describe(&self, service: &Service) -> String {
        format!("{}: {}", service.key(), self.reason(service))
    }

    /// The same without the Service's name.
    pub(crate) fn reason(&self, service: &Service) -> String {
        match self {
            Self::NoAddress => format!(
                "spec.loadBalancerIP must name an IPv4 address a node holds (got {})",
                Quoted(&service.wanted)
            ),
            Self::NotHeld(address) => format!("no node holds {address}"),
            Self::HeldBySeveral(address, nodes) => {
                let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
                format!("{address} is held by several nodes ({}); serving it from none", names.join(", "))
            }
        }
    }
}

/// Services that ask for this agent, by `namespace/name` (as one text, so that `a-b/x` comes before `a/x`).
pub(crate) fn eligible(services: &[Service]) -> Vec<&Service> {
    let mut eligible: Vec<&Service> = services.iter().filter(|service| service.eligible).collect();
    eligible.sort_by_cached_key(|service| service.key());
    eligible
}

/// The IPv4 slices of each Service.
pub(crate) struct Slices<'a> {
    by_service: HashMap<(&'a str, &'a str), Vec<&'a EndpointSlice>>,
}

impl<'a> Slices<'a> {
    pub(crate) fn of(slices: &'a [EndpointSlice]) -> Self {
        let mut by_service: HashMap<_, Vec<&EndpointSlice>> = HashMap::new();
        for slice in slices.iter().filter(|slice| slice.ipv4) {
            by_service.entry((slice.namespace.as_str(), slice.service.as_str())).or_default().push(slice);
        }
        Self { by_service }
    }

    /// The endpoints, ready or not, that a Service's slices list for one of its ports, each with its port number.
    pub(crate) fn endpoints<'s>(
        &'s self,
        service: &'s Service,
        wanted: &'s ServicePort,
    ) -> impl Iterator<Item = (i32, &'a SliceEndpoint)> + use<'a, 's> {
        let key = (service.namespace.as_str(), service.name.as_str());
        let slices = self.by_service.get(&key).into_iter().flatten();
        slices.flat_map(move |slice| {
            let ports = slice
                .ports
                .iter()
                .filter(|port| port.name == wanted.name && port.protocol == wanted.protocol);
            ports.filter_map(|port| port.port).flat_map(|port| slice.endpoints.iter().map(move |e| (port, e)))
        })
    }
}
