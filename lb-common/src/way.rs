//! Where packets leave by redirect, as the kernel's routing said it last.

use crate::addr::Ipv4;
use bytemuck::{Pod, Zeroable};

/// A next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Index of the device.
    pub interface: u32,
    /// The neighbour on it.
    pub next_hop: Ipv4,
    /// Up to this length an IP packet passes, bytes; for a longer one the kernel has to be asked.
    pub passes: u16,
}

impl Way {
    /// Nowhere: nothing passes.
    pub const NONE: Self = Self { interface: 0, next_hop: Ipv4::new([0; 4]), passes: 0 };
}

/// Value of the `ways` map, index = backend id: the way to a backend, for the rest of the second in which the kernel was
/// asked, so that a changed route is followed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BackendWay {
    /// 0 where it was never asked for.
    interface: u32,
    next_hop: Ipv4,
    /// Of the slot: another endpoint may be somewhere else.
    generation: u32,
    /// Seconds since boot (`CLOCK_MONOTONIC`).
    second: u32,
    passes: u16,
    zero: u16,
}

impl BackendWay {
    /// The way to the endpoint that the slot has in `generation`.
    #[inline(always)]
    pub const fn new(way: Way, generation: u32, second: u32) -> Self {
        let Way { interface, next_hop, passes } = way;
        Self { interface, next_hop, generation, second, passes, zero: 0 }
    }

    /// The way, if it holds now for a packet of `length` bytes.
    #[inline(always)]
    pub const fn way(&self, generation: u32, second: u32, length: u16) -> Option<Way> {
        if self.interface == 0
            || self.second != second
            || self.generation != generation
            || length > self.passes
        {
            return None;
        }
        Some(Way { interface: self.interface, next_hop: self.next_hop, passes: self.passes })
    }

    /// The way that was kept last for what the slot has in `generation`, whether it still holds or not.
    #[inline(always)]
    pub const fn recent(&self, generation: u32) -> Way {
        if self.generation != generation {
            return Way::NONE;
        }
        Way { interface: self.interface, next_hop: self.next_hop, passes: self.passes }
    }

    /// The way that was kept last, whether it still holds or not: for people.
    pub const fn last(&self) -> Option<Way> {
        if self.interface == 0 {
            return None;
        }
        Some(Way { interface: self.interface, next_hop: self.next_hop, passes: self.passes })
    }
}

const _: () = assert!(size_of::<BackendWay>() == 20);
