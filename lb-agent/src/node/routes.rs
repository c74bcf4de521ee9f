//! The routes by which a node reaches the pods of other nodes, where a CNI has put them into the main table.

use futures::TryStreamExt as _;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol};
use rtnetlink::Handle;
use std::net::Ipv4Addr;

/// A route with one next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Network and length of its prefix, in bits.
    pub destination: (Ipv4Addr, u8),
    /// The next hop.
    pub via: Ipv4Addr,
    /// Index of the device.
    pub device: u32,
    /// Who put it there (`rt_protos`).
    pub protocol: u8,
}

/// Reading the routes failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot list the node's routes: {source}")]
pub struct ListError {
    #[from]
    source: rtnetlink::Error,
}

impl Route {
    /// Whether BIRD or Felix put it there, Calico's two writers of routes.
    pub(super) const fn is_calicos(&self) -> bool {
        const BIRD: u8 = 12;
        const FELIX: u8 = 80;
        matches!(self.protocol, BIRD | FELIX)
    }
}

/// Whether an address is in a network.
pub fn contains((network, prefix): (Ipv4Addr, u8), address: Ipv4Addr) -> bool {
    let differ = network.to_bits() ^ address.to_bits();
    // A prefix of 0 leaves nothing to compare.
    differ.checked_shr(u32::BITS - u32::from(prefix.min(32))).unwrap_or(0) == 0
}

/// Lists the routes of the main table that have a next hop, but for default routes.
///
/// # Errors
/// The kernel refuses a dump.
pub async fn list(handle: &Handle) -> Result<Vec<Route>, ListError> {
    let mut filter = RouteMessage::default();
    filter.header.address_family = AddressFamily::Inet;
    filter.header.table = RouteHeader::RT_TABLE_MAIN;
    filter.header.protocol = RouteProtocol::Unspec;
    let routes: Vec<RouteMessage> = handle.route().get(filter).execute().try_collect().await?;
    Ok(routes.iter().filter_map(read).collect())
}

fn read(message: &RouteMessage) -> Option<Route> {
    let (mut network, mut via, mut device) = (None, None, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => network = Some(*address),
            RouteAttribute::Gateway(RouteAddress::Inet(address)) => via = Some(*address),
            RouteAttribute::Oif(index) => device = Some(*index),
            _ => {}
        }
    }
    Some(Route {
        destination: (network?, message.header.destination_prefix_length),
        via: via?,
        device: device?,
        protocol: message.header.protocol.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_contains_its_own_addresses_alone() {
        let network = |prefix| (Ipv4Addr::new(192, 0, 2, 77), prefix);
        let address = |last| Ipv4Addr::new(192, 0, 2, last);
        for (prefix, last, is_inside) in
            [(0, 1, true), (24, 1, true), (25, 127, true), (25, 128, false), (32, 77, true), (32, 76, false)]
        {
            assert_eq!(contains(network(prefix), address(last)), is_inside, "{prefix} {last}");
        }
        assert!(contains(network(0), Ipv4Addr::BROADCAST));
        assert!(!contains(network(24), Ipv4Addr::new(192, 0, 3, 77)));
    }
}
