//! Which node speaks of a problem that several of them see, so that not every one writes the same Event.

use super::compute::writer;
use super::index::Holders;
use crate::model::{Node, Service};

/// For a Service: its holder, which may see more than the others; else who would clear its status.
pub fn of_service(nodes: &[Node], service: &Service) -> String {
    let holders = Holders::of(nodes);
    match holders.place(service) {
        Ok((_, holder)) => holder.name.clone(),
        Err(_) => writer(&holders, service.shown).to_owned(),
    }
}

/// For another node: the first of those that see it, by name.
pub fn of_node<'a>(nodes: &'a [Node], about: &str) -> Option<&'a str> {
    nodes.iter().map(|node| node.name.as_str()).filter(|name| *name != about).min()
}
