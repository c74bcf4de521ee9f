//! Maglev tables: one inner map for each served port.

use aya_ebpf::{
    btf_maps::{Array, ArrayOfMaps},
    macros::btf_map,
};
use lb_common::{
    limits, maglev,
    service::{RING_HEAD, RingPlace},
};

/// `BPF_F_INNER_MAP` (Linux 5.10, commit 4a8f87e60f6d): the outer map takes inner maps of any size.
const BPF_F_INNER_MAP: usize = 0x1000;

/// A word for each [`RingPlace`]. Not the struct: from Linux 5.15 to 6.2 an inner map whose BTF names a struct is no equal of
/// those without BTF, which the agent makes, and the outer map refuses them (EINVAL; seen on 6.1: `timer_off` is ENOENT in
/// one and EINVAL in the other, and `bpf_map_meta_equal` compares it).
type Ring = Array<u64, { maglev::MAX_RING as usize }, BPF_F_INNER_MAP>;

#[btf_map(name = "rings")]
static RINGS: ArrayOfMaps<Ring, { limits::SERVICES as usize }> = ArrayOfMaps::new();

/// The table that a served port uses now.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) service: u32,
    half: u32,
    /// Number of places; 0 where no endpoint is ready.
    pub(crate) size: u32,
}

/// The table of a served port; `None` before the agent has written one.
#[inline(always)]
pub(crate) fn table(service: u32) -> Option<Table> {
    let (size, half) = place(service, RING_HEAD)?.size_and_half();
    Some(Table { service, half, size })
}

impl Table {
    /// The backend id at `index`, below the size.
    #[inline(always)]
    pub(crate) fn backend(&self, index: u32) -> Option<u32> {
        Some(place(self.service, index + 1)?.id(self.half))
    }
}

/// Both halves of a place in one load, as the agent stores them.
#[inline(always)]
fn place(service: u32, index: u32) -> Option<RingPlace> {
    let word = core::ptr::from_ref(RINGS.get_value(service, &index)?);
    // SAFETY: a value of the map, aligned to eight bytes as every value of a map is.
    Some(RingPlace::from_word(unsafe { word.read_volatile() }))
}
