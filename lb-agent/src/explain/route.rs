//! Where the kernel's routing leads a packet, as `ip route get` says it.

use futures::TryStreamExt as _;
use lb_common::addr::Ipv4;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteType};
use rtnetlink::Handle;
use serde::Serialize;
use std::net::Ipv4Addr;

/// Length of the prefix that is one address.
const HOST: u8 = 32;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The packet's destination.
    pub destination: Ipv4Addr,
    /// Its source, where it did not begin here.
    pub source: Option<Ipv4Addr>,
    /// Index of the interface that it came in on, likewise.
    pub input: Option<u32>,
    /// The packet mark.
    pub mark: u32,
}

impl Question {
    /// Where the node itself would send to.
    pub fn about(destination: Ipv4) -> Self {
        Self { destination: destination.into(), source: None, input: None, mark: 0 }
    }
}

/// What the kernel says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Route {
    /// The device.
    pub device: Option<String>,
    /// The router; none where the destination itself is the neighbour.
    pub gateway: Option<Ipv4Addr>,
    /// The routing table.
    pub table: Option<u32>,
    /// Whether the packet is for this node itself.
    pub is_local: bool,
    /// Why there is no way.
    pub refused: Option<String>,
    /// Index of the device.
    #[serde(skip)]
    pub device_index: Option<u32>,
}

/// Asks.
pub async fn ask(handle: &Handle, question: &Question) -> Route {
    // A question about one packet; the flag asks for the table that has the route.
    let mut message = RouteMessage::default();
    message.header.address_family = AddressFamily::Inet;
    message.header.destination_prefix_length = HOST;
    message.header.source_prefix_length = if question.source.is_some() { HOST } else { 0 };
    message.header.flags = RouteFlags::LookupTable;
    message.attributes = vec![RouteAttribute::Destination(RouteAddress::Inet(question.destination))];
    message
        .attributes
        .extend(question.source.map(|source| RouteAttribute::Source(RouteAddress::Inet(source))));
    message.attributes.extend(question.input.map(RouteAttribute::Iif));
    if question.mark != 0 {
        message.attributes.push(RouteAttribute::Mark(question.mark));
    }
    match handle.route().get(message).execute().try_next().await {
        Ok(Some(message)) => read(&message),
        Ok(None) => Route { refused: Some("the kernel gave no answer".to_owned()), ..Route::default() },
        Err(error) => Route { refused: Some(refusal(&error)), ..Route::default() },
    }
}

fn read(message: &RouteMessage) -> Route {
    let is_local = message.header.kind == RouteType::Local;
    let mut route = Route { is_local, table: Some(u32::from(message.header.table)), ..Route::default() };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => {
                route.device_index = Some(*index);
                route.device = super::device_name(*index);
            }
            RouteAttribute::Gateway(RouteAddress::Inet(gateway)) => route.gateway = Some(*gateway),
            RouteAttribute::Table(table) => route.table = Some(*table),
            _ => {}
        }
    }
    route
}

/// What the kernel's error means here.
fn refusal(error: &rtnetlink::Error) -> String {
    let rtnetlink::Error::NetlinkError(message) = error else { return error.to_string() };
    match message.to_io().raw_os_error() {
        Some(libc::ENETUNREACH) => "there is no route".to_owned(),
        Some(libc::EHOSTUNREACH) => {
            "the route says unreachable, or this interface does not forward".to_owned()
        }
        Some(libc::EACCES) => "the route says prohibited".to_owned(),
        Some(libc::EXDEV) => {
            "its source is not behind that interface (rp_filter): the stack drops it".to_owned()
        }
        Some(libc::EINVAL) => {
            "the stack drops it: a blackhole route, or an address that cannot be there".to_owned()
        }
        _ => message.to_string(),
    }
}
