//! Backend slots.

use aya_ebpf::{btf_maps::Array, macros::btf_map};
use lb_common::{
    backend::Backend,
    limits,
    way::{BackendWay, Way},
};

#[btf_map(name = "backends")]
static BACKENDS: Array<Backend, { limits::BACKENDS as usize }> = Array::new();

/// One way for all connections of a backend: with a thousand clients of it in a second, the kernel is asked once.
#[btf_map(name = "ways")]
static WAYS: Array<BackendWay, { limits::BACKENDS as usize }> = Array::new();

/// The slot's content, whatever its state.
#[inline(always)]
pub(crate) fn get(id: u32) -> Option<Backend> {
    BACKENDS.get(id).copied()
}

/// The way to the slot's endpoint, if the kernel has named it in this second and it holds for a packet of `length` bytes.
#[inline(always)]
pub(crate) fn way(id: u32, generation: u32, now: u32, length: u16) -> Option<Way> {
    WAYS.get(id)?.way(generation, now, length)
}

/// The way that the kernel named last, if it is not long ago: for a packet that belongs to one that has just gone there.
#[inline(always)]
pub(crate) fn recent_way(id: u32, generation: u32) -> Way {
    WAYS.get(id).map_or(Way::NONE, |kept| kept.recent(generation))
}

/// Keeps the way until the next second.
#[inline(always)]
pub(crate) fn set_way(id: u32, generation: u32, now: u32, way: Way) {
    if let Some(kept) = WAYS.get_ptr_mut(id) {
        // SAFETY: an element of an array, of this type. Two CPUs that write at once write what the kernel told both.
        unsafe { *kept = BackendWay::new(way, generation, now) };
    }
}
