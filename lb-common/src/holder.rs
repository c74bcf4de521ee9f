//! Holders on other nodes, and the endpoints of this node that they forward to.

use crate::addr::{Ipv4, Port, Protocol};
use bytemuck::{Pod, Zeroable};

/// Value of the `holders` map, key [`crate::addr::Mac`] of the holder's overlay device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Holder {
    /// The holder's overlay address: next hop of the replies.
    pub address: Ipv4,
    /// 1..=250, see [`crate::mark`].
    pub mark: u8,
    zero: [u8; 3],
}

impl Holder {
    /// A value; the spare bytes are zero.
    pub const fn new(address: Ipv4, mark: u8) -> Self {
        Self { address, mark, zero: [0; 3] }
    }
}

/// Key of the `endpoints` map: an endpoint of a Service, of whichever holder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C)]
pub struct EndpointKey {
    /// The pod's address.
    pub address: Ipv4,
    /// The pod's port.
    pub port: Port,
    /// TCP or UDP.
    pub protocol: Protocol,
    zero: u8,
}

impl EndpointKey {
    /// A key; the spare byte is zero.
    #[inline(always)]
    pub const fn new(address: Ipv4, port: Port, protocol: Protocol) -> Self {
        Self { address, port, protocol, zero: 0 }
    }
}

/// Value of the `endpoints` map: which holders forward to it, one bit for each mark. Bit 0 ([`EndpointHolders::SELF`])
/// is this node itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct EndpointHolders {
    marks: [u64; 4],
}

impl EndpointHolders {
    /// In place of a mark: this node forwards to the endpoint.
    pub const SELF: u8 = 0;

    /// Adds a holder.
    pub const fn insert(&mut self, mark: u8) {
        self.marks[(mark >> 6) as usize] |= 1 << (mark & 63);
    }

    /// Whether the holder with `mark` forwards to the endpoint.
    #[inline(always)]
    pub const fn contains(&self, mark: u8) -> bool {
        self.marks[(mark >> 6) as usize] & (1 << (mark & 63)) != 0
    }
}

const _: () = assert!(size_of::<Holder>() == 8 && size_of::<EndpointKey>() == 8);
const _: () = assert!(size_of::<EndpointHolders>() == 32);
