//! What would happen to a packet on this node, and why.
//!
//! What happens is not computed here: the packet program itself says it, on copies of the maps
//! ([`crate::datapath::sandbox`]). Here are the packets that it is tried with, one after the other as a connection would
//! have them, and the facts that it decides by, in words.

pub mod facts;
pub mod packet;
pub mod route;
pub mod story;

use lb_common::addr::{Ipv4, Port};
use std::net::{Ipv4Addr, SocketAddrV4};

fn socket(address: Ipv4, port: Port) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from(address), port.number())
}

/// The name of an interface; `None` where there is none in this network namespace.
pub fn device_name(index: u32) -> Option<String> {
    nix::net::if_::if_indextoname(index).ok()?.into_string().ok()
}
