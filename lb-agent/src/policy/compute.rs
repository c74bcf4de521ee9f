//! What one node does, given every Node, Service and EndpointSlice.

use super::index::{self, Holders, Slices, eligible};
use super::marks;
use crate::model::{Desired, Endpoint, EndpointSlice, Forward, Holder, Node, Port, Service, ServicePort};
use crate::model::{Shown, Status};
use std::collections::HashSet;
use std::net::Ipv4Addr;

/// What the node called `self_name` must do.
///
/// Fails closed: an address that not exactly one node holds is served by none. Takes time in proportion to its
/// input, but for the sorting.
pub fn compute(self_name: &str, nodes: &[Node], services: &[Service], slices: &[EndpointSlice]) -> Desired {
    let holders = Holders::of(nodes);
    let slices = Slices::of(slices);
    let mut desired = Desired::default();
    let mut holding: HashSet<&str> = HashSet::new();
    for service in eligible(services) {
        let (address, holder) = match holders.place(service) {
            Ok(placed) => placed,
            Err(unplaced) => {
                desired.problems.push(unplaced.describe(service));
                desired.status.extend(status_of_unplaced(self_name, service, &holders));
                continue;
            }
        };
        holding.insert(&holder.name);
        if holder.name == self_name {
            desired.status.extend(status_of_served(service, address));
            desired.forwards.push(forward(service, address, &slices));
        }
    }
    let others = others(self_name, &holders, &holding, &mut desired.problems);
    desired.holders = with_marks(&others);
    desired
}

/// Nobody forwards, so the status must not claim an address.
pub(super) fn status_of_unplaced(self_name: &str, service: &Service, holders: &Holders) -> Option<Status> {
    let is_ours = service.shown != Shown::Nothing && writer(holders, service.shown) == self_name;
    is_ours.then(|| status(service, None))
}

/// Who clears a status that nobody stands for: the single holder of the address it shows, else the first node.
pub(super) fn writer(holders: &Holders, shown: Shown) -> &str {
    let holder = shown.address().and_then(|address| holders.only_holder(address));
    holder.or_else(|| holders.nodes().first()).map_or("", |node| node.name.as_str())
}

/// The status shows where this node serves.
pub(super) fn status_of_served(service: &Service, address: Ipv4Addr) -> Option<Status> {
    (service.shown != Shown::Address(address)).then(|| status(service, Some(address)))
}

fn status(service: &Service, address: Option<Ipv4Addr>) -> Status {
    Status { namespace: service.namespace.clone(), name: service.name.clone(), address }
}

fn forward(service: &Service, address: Ipv4Addr, slices: &Slices<'_>) -> Forward {
    let port = |port: &ServicePort| Port {
        protocol: port.protocol.clone(),
        port: port.port,
        endpoints: ready_endpoints(service, port, slices),
    };
    Forward {
        namespace: service.namespace.clone(),
        name: service.name.clone(),
        address,
        ports: service.ports.iter().map(port).collect(),
    }
}

fn ready_endpoints(service: &Service, port: &ServicePort, slices: &Slices<'_>) -> Vec<Endpoint> {
    let listed = index::endpoints(slices.of_service(service), port);
    let ready = listed.filter(|(_, endpoint)| endpoint.conditions.is_ready());
    let mut endpoints: Vec<Endpoint> = ready
        .flat_map(|(port, endpoint)| {
            endpoint.addresses.iter().map(move |address| Endpoint { address: *address, port })
        })
        .collect();
    // By text, as the Go agent does: 10.0.0.10:80 before 10.0.0.1:80.
    endpoints.sort_by_cached_key(Endpoint::to_string);
    endpoints.dedup();
    endpoints
}

/// The other nodes that forward something and can take replies.
fn others<'a>(
    self_name: &str,
    holders: &'a Holders,
    holding: &HashSet<&str>,
    problems: &mut Vec<String>,
) -> Vec<&'a Node> {
    let holding =
        holders.nodes().iter().filter(|node| node.name != self_name && holding.contains(node.name.as_str()));
    let (reachable, unreachable): (Vec<&Node>, Vec<&Node>) =
        holding.partition(|node| node.weave_ip.is_some());
    problems.extend(unreachable.into_iter().map(describe_unreachable));
    reachable
}

/// The problem with a holder that has published no overlay.
pub(super) fn describe_unreachable(node: &Node) -> String {
    format!(
        "node {} holds an address but has not published its weave bridge; \
         replies to its forwards cannot reach it",
        node.name
    )
}

/// Past the highest mark, holders are left out.
fn with_marks(nodes: &[&Node]) -> Vec<Holder> {
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    let marks = marks::assign(&names);
    // On a fresh node only the last names can be without a mark, so the two lists run in step.
    nodes.iter().zip(marks).map(|(node, (_, mark))| Holder { node: (*node).clone(), mark }).collect()
}
