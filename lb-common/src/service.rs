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
    flags: u32,
}

impl Service {
    const AFFINITY: u32 = 1;
    const MASQUERADES: u32 = 2;

    /// A served port.
    #[inline(always)]
    pub const fn new(id: u32, affinity: bool) -> Self {
        Self { id, flags: if affinity { Self::AFFINITY } else { 0 } }
    }

    /// The same, with backends that are masqueraded among the others.
    #[must_use]
    pub const fn masquerading(mut self, masquerades: bool) -> Self {
        if masquerades {
            self.flags |= Self::MASQUERADES;
        }
        self
    }

    /// Whether some of its backends are [`crate::backend::Backend::is_masqueraded`].
    #[inline(always)]
    pub const fn masquerades(&self) -> bool {
        self.flags & Self::MASQUERADES != 0
    }

    /// Whether all connections of a client's address get one backend, as long as it takes new ones.
    #[inline(always)]
    pub const fn has_affinity(&self) -> bool {
        self.flags & Self::AFFINITY != 0
    }
}

/// Value of a ring, the Maglev table of one served port: two tables, laid side by side, of which one is in use. The other
/// one is written while packets read the first, and then the head, at index 0, is exchanged in one store. So a change needs
/// no new map, whose exchange would make the agent wait until no packet can be using the former one.
///
/// At index 0 stand the size of the table in use and which of the two it is; its places follow at 1..=size, a backend id
/// in each. Size 0 means that no endpoint is ready. There may be more places than are in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct RingPlace {
    words: [u32; 2],
}

/// Index of a ring's head.
pub const RING_HEAD: u32 = 0;

impl RingPlace {
    /// The head of a ring whose table `half` (0 or 1) is in use and has `size` places.
    pub const fn head(size: u32, half: u32) -> Self {
        Self { words: [size, half] }
    }

    /// A head's size and half.
    #[inline(always)]
    pub const fn size_and_half(self) -> (u32, u32) {
        (self.words[0], self.words[1])
    }

    /// The backend id in a place, by the half of the head.
    #[inline(always)]
    pub const fn id(self, half: u32) -> u32 {
        if half == 0 { self.words[0] } else { self.words[1] }
    }

    /// The place with another backend id in one half.
    #[must_use]
    pub const fn with_id(mut self, half: u32, id: u32) -> Self {
        if half == 0 {
            self.words[0] = id;
        } else {
            self.words[1] = id;
        }
        self
    }

    /// From the one word that it is in memory.
    #[inline(always)]
    pub fn from_word(word: u64) -> Self {
        bytemuck::cast(word)
    }
}

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
const _: () = assert!(size_of::<RingPlace>() == 8);
const _: () = assert!(size_of::<ServiceStats>() == 48);
