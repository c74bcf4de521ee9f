//! What tells most foreign packets, without a look-up in a hash map.

use aya_ebpf::{btf_maps::Array, macros::btf_map};
use lb_common::{
    addr::{Ipv4, Mac},
    flow::FlowKey,
    service::ServiceKey,
    sieve::{Bit, SIEVE_WORDS},
};

#[btf_map(name = "sieve")]
static SIEVE: Array<u64, { SIEVE_WORDS as usize }> = Array::new();

/// Whether the packet's destination may be a served port.
#[inline(always)]
pub(crate) fn may_be_served(key: &FlowKey) -> bool {
    holds(Bit::of_service(&ServiceKey::new(key.destination, key.destination_port, key.protocol)))
}

/// Whether the packet's source may be a backend.
#[inline(always)]
pub(crate) fn may_be_answer(key: &FlowKey) -> bool {
    holds(Bit::of_backend(key.source_port))
}

/// Whether the frame's sender may be another holder.
#[inline(always)]
pub(crate) fn may_be_holder(mac: Mac) -> bool {
    holds(Bit::of_holder(mac))
}

/// Whether the packet's destination may be a served port with backends that are masqueraded.
#[inline(always)]
pub(crate) fn may_be_masqueraded(key: &FlowKey) -> bool {
    holds(Bit::of_masqueraded(&ServiceKey::new(key.destination, key.destination_port, key.protocol)))
}

/// Whether the packet's source may be inside the cluster.
#[inline(always)]
pub(crate) fn may_be_inside(source: Ipv4) -> bool {
    holds(Bit::of_inside(source))
}

#[inline(always)]
fn holds(bit: Bit) -> bool {
    // A map that cannot be read hides nothing.
    SIEVE.get(bit.word).is_none_or(|word| word & bit.mask != 0)
}
