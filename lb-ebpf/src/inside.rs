//! Who is inside the cluster: pods and nodes, whose answers would not pass this node by themselves.

use crate::sieve;
use aya_ebpf::{
    btf_maps::{Array, LpmTrie, lpm_trie::Key},
    macros::btf_map,
};
use lb_common::{addr::Ipv4, interface::Interface, limits, masquerade::Own};

#[btf_map(name = "inside")]
static INSIDE: LpmTrie<Ipv4, u32, { limits::INSIDE as usize }> = LpmTrie::new();

#[btf_map(name = "own")]
static OWN: Array<Own, 1> = Array::new();

/// Whether a client is. Behind an uplink its address tells; nobody else is behind the other interfaces.
#[inline(always)]
pub(crate) fn is_inside(source: Ipv4, roles: Interface) -> bool {
    roles.is_inside() || (sieve::may_be_inside(source) && INSIDE.get(&Key::new(Ipv4::BITS, source)).is_some())
}

/// This node's overlay address, where answers of pods find their way to; 0.0.0.0 where it is not known yet.
#[inline(always)]
pub(crate) fn overlay() -> Ipv4 {
    OWN.get(0).map_or(Ipv4::UNSPECIFIED, |own| own.overlay)
}

/// Whether that is an address on the network that the nodes are on.
#[inline(always)]
pub(crate) fn is_overlay_outside() -> bool {
    OWN.get(0).is_some_and(|own| own.is_outside != 0)
}
