//! Maglev tables: one inner map for each served port, swapped by the agent in one operation.

use aya_ebpf::{
    btf_maps::{Array, ArrayOfMaps},
    macros::btf_map,
};
use lb_common::{limits, maglev, service::RING_SIZE_INDEX};

/// `BPF_F_INNER_MAP` (Linux 5.10, commit 4a8f87e60f6d): the outer map takes inner maps of any size.
const BPF_F_INNER_MAP: usize = 0x1000;

/// Index 0 holds the size; a backend id stands at each of 1..=size.
type Ring = Array<u32, { maglev::MAX_RING as usize }, BPF_F_INNER_MAP>;

#[btf_map(name = "rings")]
static RINGS: ArrayOfMaps<Ring, { limits::SERVICES as usize }> = ArrayOfMaps::new();

/// The number of entries of a served port's table; `None` before the agent has written it.
#[inline(always)]
pub(crate) fn size(service: u32) -> Option<u32> {
    RINGS.get_value(service, &RING_SIZE_INDEX).copied()
}

/// The backend id at `index`, below the size.
#[inline(always)]
pub(crate) fn backend(service: u32, index: u32) -> Option<u32> {
    RINGS.get_value(service, &(index + 1)).copied()
}
