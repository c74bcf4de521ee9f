//! What an interface is for.

use crate::{
    outcome::{Step, pass},
    packet::Packet,
};
use aya_ebpf::{btf_maps::Array, macros::btf_map};
use core::ops::ControlFlow;
use lb_common::{
    interface::{Interface, InterfaceSlot},
    limits,
    reason::Reason,
};

/// An array, since every packet asks: its look-up needs no call.
#[btf_map(name = "interfaces")]
static INTERFACES: Array<InterfaceSlot, { limits::INTERFACES as usize }> = Array::new();

/// The roles of the interface whose hook this is.
#[inline(always)]
pub(crate) fn roles(packet: &Packet<'_>) -> Step<Interface> {
    match find(packet.interface()) {
        Some(roles) => ControlFlow::Continue(roles),
        None => pass(Reason::PassUnknownInterface),
    }
}

/// Whether clients are behind an interface.
#[inline(always)]
pub(crate) fn is_uplink(index: u32) -> bool {
    find(index).is_some_and(|roles| roles.is(Interface::UPLINK))
}

#[inline(always)]
fn find(index: u32) -> Option<Interface> {
    for place in InterfaceSlot::places(index) {
        if let Some(slot) = INTERFACES.get(place)
            && let Some(roles) = slot.of(index)
        {
            return Some(roles);
        }
    }
    None
}
