//! Constants that the agent sets at load time.

use crate::packet::Packet;
use aya_ebpf::Global;
use lb_common::config::{Config, Timeouts};

#[unsafe(no_mangle)]
static CONFIG: Global<Config> = Global::new(Config::DEFAULT);

#[inline(always)]
pub(crate) fn timeouts() -> Timeouts {
    CONFIG.load().timeouts
}

/// Whether remote backends too are reached through the stack.
#[inline(always)]
pub(crate) fn through_stack() -> bool {
    CONFIG.load().through_stack != 0
}

/// Our byte of the packet mark.
#[inline(always)]
pub(crate) fn mark_byte(packet: &Packet<'_>) -> u8 {
    #[expect(clippy::cast_possible_truncation, reason = "the byte is what is wanted")]
    let byte = (packet.mark() >> CONFIG.load().mark_shift) as u8;
    byte
}

/// Sets our byte and keeps the other bits.
#[inline(always)]
pub(crate) fn set_mark_byte(packet: &Packet<'_>, byte: u8) {
    let shift = CONFIG.load().mark_shift;
    packet.set_mark(packet.mark() & !(0xff << shift) | u32::from(byte) << shift);
}
