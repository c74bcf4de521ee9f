//! The `outcomes` map.

use bytemuck::{Pod, Zeroable};

/// Value of the per-CPU `outcomes` map, index = [`crate::reason::Reason::number`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Outcome {
    /// Packets that ended so.
    pub packets: u64,
    /// Their bytes, from the Ethernet header on.
    pub bytes: u64,
}
