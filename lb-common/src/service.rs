//! Services: what a packet's destination is looked up in.

use crate::addr::{Ipv4, Port, Protocol};
use bytemuck::{Pod, Zeroable};

/// Key of the `services` map: one served port of an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C)]
pub struct ServiceKey {
    /// The address that a node holds.
    pub address: Ipv4,
    /// The Service's port.
    pub port: Port,
    /// TCP or UDP.
    pub protocol: Protocol,
    zero: u8,
}

impl ServiceKey {
    /// A key; the spare byte is zero.
    #[inline(always)]
    pub const fn new(address: Ipv4, port: Port, protocol: Protocol) -> Self {
        Self { address, port, protocol, zero: 0 }
    }
}

/// Value of the `services` map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Service {
    /// Index into `rings` and `service_stats`, below [`crate::limits::SERVICES`].
    pub id: u32,
    /// Reserved for per-service choices (direct return, affinity); zero today.
    pub flags: u32,
}

/// Index 0 of a ring holds its size; the table's entries follow at 1..=size. Zero entries means that no
/// endpoint is ready. Kept inside the inner map so that one swap changes both together.
pub const RING_SIZE_INDEX: u32 = 0;

/// Value of the per-CPU `service_stats` map, index [`Service::id`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ServiceStats {
    /// Packets of clients forwarded to a backend.
    pub packets_in: u64,
    /// Bytes of those, from the IP header on.
    pub bytes_in: u64,
    /// Packets of backends translated on their way to a client.
    pub packets_out: u64,
    /// Bytes of those, from the IP header on.
    pub bytes_out: u64,
    /// Flows that entered the flow table.
    pub connections: u64,
    /// Packets that were answered with a reset or an ICMP error, or dropped, after the service was found.
    pub refused: u64,
}

const _: () = assert!(size_of::<ServiceKey>() == 8 && align_of::<ServiceKey>() == 4);
const _: () = assert!(size_of::<Service>() == 8);
const _: () = assert!(size_of::<ServiceStats>() == 48);
