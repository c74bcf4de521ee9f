//! Which node speaks of a problem that several of them see, so that not every one writes the same Event.

use super::compute::writer;
use super::index::Holders;
use crate::model::Service;

/// For a Service: its holder, which may see more than the others; else who would clear its status.
pub(crate) fn of_service<'a>(holders: &'a Holders, service: &Service) -> &'a str {
    match holders.place(service) {
        Ok((_, holder)) => &holder.name,
        Err(_) => writer(holders, service.shown),
    }
}

/// For another node: the first of those that see it, by name.
pub(crate) fn of_node<'a>(holders: &'a Holders, about: &str) -> Option<&'a str> {
    holders.nodes().iter().map(|node| node.name.as_str()).find(|name| *name != about)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Node, Shown};
    use std::net::Ipv4Addr;

    fn address(last: u8) -> Ipv4Addr {
        Ipv4Addr::new(192, 0, 2, last)
    }

    fn mk_nodes(nodes: &[(&str, u8)]) -> Holders {
        let node = |(name, last): &(&str, u8)| Node {
            name: (*name).to_owned(),
            addresses: vec![address(*last)],
            ..Node::default()
        };
        Holders::of(&nodes.iter().map(node).collect::<Vec<_>>())
    }

    #[test]
    fn one_node_speaks_of_a_service() {
        let nodes = mk_nodes(&[("a", 1), ("b", 2), ("c", 2), ("d", 4)]);
        for (wanted, shown, speaker) in [
            (address(4), Shown::Nothing, "d"),
            (address(2), Shown::Nothing, "a"),
            (address(2), Shown::Address(address(4)), "d"),
            (address(9), Shown::Address(address(2)), "a"),
        ] {
            let service = Service { wanted: wanted.to_string(), shown, ..Service::default() };
            assert_eq!(of_service(&nodes, &service), speaker, "{wanted} {shown:?}");
        }
    }

    #[test]
    fn the_first_other_node_speaks_of_a_node() {
        let nodes = mk_nodes(&[("b", 2), ("a", 1)]);
        assert_eq!((of_node(&nodes, "b"), of_node(&nodes, "a")), (Some("a"), Some("b")));
        assert_eq!(of_node(&mk_nodes(&[("a", 1)]), "a"), None);
    }
}
