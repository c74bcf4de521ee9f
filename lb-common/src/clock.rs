//! The clock of the packet program.

use bytemuck::{Pod, Zeroable};

/// Value of the per-CPU `clock` map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Second {
    /// The kernel's tick counter (`jiffies_64`) at the reading.
    pub tick: u64,
    /// Seconds since boot (`CLOCK_MONOTONIC`).
    pub second: u32,
    zero: u32,
}

impl Second {
    /// What the clock said at a tick.
    #[inline(always)]
    pub const fn new(tick: u64, second: u32) -> Self {
        Self { tick, second, zero: 0 }
    }
}

const _: () = assert!(size_of::<Second>() == 16);
