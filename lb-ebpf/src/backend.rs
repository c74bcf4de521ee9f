//! Backend slots.

use aya_ebpf::{btf_maps::Array, macros::btf_map};
use lb_common::{backend::Backend, limits};

#[btf_map(name = "backends")]
static BACKENDS: Array<Backend, { limits::BACKENDS as usize }> = Array::new();

/// The slot's content, whatever its state.
#[inline(always)]
pub(crate) fn get(id: u32) -> Option<Backend> {
    BACKENDS.get(id).copied()
}
