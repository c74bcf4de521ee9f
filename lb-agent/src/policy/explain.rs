//! Why a node does not serve a Service, for people.

use super::index::{Holders, eligible};
use crate::model::{Node, Service};

/// The Services of our class that `self_name` does not serve: `namespace/name`, and why not. By key.
pub fn not_served(self_name: &str, nodes: &[Node], services: &[Service]) -> Vec<(String, String)> {
    let holders = Holders::of(nodes);
    let explain = |service: &Service| match holders.place(service) {
        Ok((_, holder)) if holder.name == self_name => None,
        Ok((address, holder)) => Some(format!("{address} is held by {}", holder.name)),
        Err(unplaced) => Some(unplaced.reason(service)),
    };
    eligible(services).into_iter().filter_map(|service| Some((service.key(), explain(service)?))).collect()
}
