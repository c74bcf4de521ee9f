//! What an interface is for.

use crate::{
    outcome::{Step, pass},
    packet::Packet,
};
use aya_ebpf::{btf_maps::HashMap, macros::btf_map};
use core::ops::ControlFlow;
use lb_common::{interface::Interface, limits, reason::Reason};

#[btf_map(name = "interfaces")]
static INTERFACES: HashMap<u32, Interface, { limits::INTERFACES as usize }> = HashMap::new();

/// The roles of the interface whose hook this is.
#[inline(always)]
pub(crate) fn roles(packet: &Packet<'_>) -> Step<Interface> {
    // SAFETY: copied out at once.
    match unsafe { INTERFACES.get(packet.interface()) } {
        Some(interface) => ControlFlow::Continue(*interface),
        None => pass(Reason::PassUnknownInterface),
    }
}

/// Whether clients are behind an interface.
#[inline(always)]
pub(crate) fn is_uplink(index: u32) -> bool {
    // SAFETY: copied out at once.
    unsafe { INTERFACES.get(index) }.is_some_and(|interface| interface.is(Interface::UPLINK))
}
