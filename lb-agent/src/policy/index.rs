//! Look-up tables over the input: what keeps the policy linear.

use super::quote::Quoted;
use crate::model::{EndpointSlice, Node, Service, ServicePort, SliceEndpoint, parse_ipv4};
use std::borrow::Borrow;
use std::collections::HashMap;
use std::net::Ipv4Addr;

/// Who holds which address.
#[derive(Default)]
pub(crate) struct Holders {
    /// By name.
    nodes: Vec<Node>,
    /// Positions in `nodes`, ascending.
    by_address: HashMap<Ipv4Addr, Vec<usize>>,
}

impl Holders {
    pub(crate) fn of<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Self {
        let mut nodes: Vec<Node> = nodes.into_iter().cloned().collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        let mut by_address: HashMap<Ipv4Addr, Vec<usize>> = HashMap::new();
        for (position, node) in nodes.iter().enumerate() {
            for address in &node.addresses {
                let holders = by_address.entry(*address).or_default();
                // An address on two interfaces of one node is listed twice, but held once.
                if holders.last() != Some(&position) {
                    holders.push(position);
                }
            }
        }
        Self { nodes, by_address }
    }

    /// Every node, by name.
    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node of this name.
    pub(crate) fn node(&self, name: &str) -> Option<&Node> {
        let position = self.nodes.binary_search_by(|node| node.name.as_str().cmp(name)).ok()?;
        Some(&self.nodes[position])
    }

    /// The one node that holds `address`.
    pub(crate) fn only_holder(&self, address: Ipv4Addr) -> Option<&Node> {
        match self.by_address.get(&address).map(Vec::as_slice) {
            Some([only]) => Some(&self.nodes[*only]),
            _ => None,
        }
    }

    /// The address that a Service asks for and the one node that holds it.
    pub(crate) fn place(&self, service: &Service) -> Result<(Ipv4Addr, &Node), Unplaced<'_>> {
        let Some(address) = parse_ipv4(&service.wanted) else { return Err(Unplaced::NoAddress) };
        match self.by_address.get(&address).map_or(&[][..], Vec::as_slice) {
            [] => Err(Unplaced::NotHeld(address)),
            [only] => Ok((address, &self.nodes[*only])),
            several => {
                let names = several.iter().map(|position| self.nodes[*position].name.as_str());
                Err(Unplaced::HeldBySeveral(address, names.collect()))
            }
        }
    }
}

/// Why nobody serves a Service.
pub(crate) enum Unplaced<'a> {
    NoAddress,
    NotHeld(Ipv4Addr),
    /// By the nodes of these names.
    HeldBySeveral(Ipv4Addr, Vec<&'a str>),
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
            Self::HeldBySeveral(address, names) => {
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

/// The slices of each Service.
pub(crate) struct Slices<'a> {
    by_service: HashMap<(&'a str, &'a str), Vec<&'a EndpointSlice>>,
}

impl<'a> Slices<'a> {
    pub(crate) fn of(slices: &'a [EndpointSlice]) -> Self {
        let mut by_service: HashMap<_, Vec<&EndpointSlice>> = HashMap::new();
        for slice in slices {
            by_service.entry((slice.namespace.as_str(), slice.service.as_str())).or_default().push(slice);
        }
        Self { by_service }
    }

    /// Those of one Service.
    pub(crate) fn of_service<'s>(&'s self, service: &'s Service) -> &'s [&'s EndpointSlice] {
        let key = (service.namespace.as_str(), service.name.as_str());
        self.by_service.get(&key).map_or(&[], Vec::as_slice)
    }
}

/// The endpoints, ready or not, that a Service's IPv4 slices list for one of its ports, each with its port number.
pub(crate) fn endpoints<'a, S: Borrow<EndpointSlice>>(
    slices: &'a [S],
    wanted: &'a ServicePort,
) -> impl Iterator<Item = (i32, &'a SliceEndpoint)> + use<'a, S> {
    slices.iter().map(Borrow::borrow).filter(|slice| slice.ipv4).flat_map(move |slice| {
        let ports =
            slice.ports.iter().filter(|port| port.name == wanted.name && port.protocol == wanted.protocol);
        ports.filter_map(|port| port.port).flat_map(|port| slice.endpoints.iter().map(move |e| (port, e)))
    })
}
