//! Counters: one outcome for each packet, and packets and bytes of each served port.
//!
//! A counter that cannot be found never changes a verdict.

use crate::parse::Parsed;
use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use lb_common::{
    counters::Outcome,
    limits,
    reason::{Reason, SLOTS},
    service::ServiceStats,
};

#[btf_map(name = "outcomes")]
static OUTCOMES: PerCpuArray<Outcome, { SLOTS as usize }> = PerCpuArray::new();

#[btf_map(name = "service_stats")]
static SERVICE_STATS: PerCpuArray<ServiceStats, { limits::SERVICES as usize }> = PerCpuArray::new();

/// Counts the end of the walk of a packet of `length` bytes.
#[inline(always)]
pub(crate) fn count(length: u32, reason: Reason) {
    if let Some(outcome) = OUTCOMES.get_ptr_mut(reason.number()) {
        // SAFETY: the slot belongs to this CPU, and a TC program is not preempted by another on the same hook.
        unsafe {
            (*outcome).packets += 1;
            (*outcome).bytes += u64::from(length);
        }
    }
}

#[inline(always)]
fn with(service: u32, change: impl FnOnce(&mut ServiceStats)) {
    if let Some(stats) = SERVICE_STATS.get_ptr_mut(service) {
        // SAFETY: as in `count`.
        change(unsafe { &mut *stats });
    }
}

/// A packet of a client that goes to a backend.
#[inline(always)]
pub(crate) fn packet_in(service: u32, parsed: &Parsed) {
    with(service, |stats| {
        stats.packets_in += 1;
        stats.bytes_in += u64::from(parsed.ip.total_length);
    });
}

/// A packet of a backend that goes to a client.
#[inline(always)]
pub(crate) fn packet_out(service: u32, parsed: &Parsed) {
    with(service, |stats| {
        stats.packets_out += 1;
        stats.bytes_out += u64::from(parsed.ip.total_length);
    });
}

/// A flow that entered the flow table.
#[inline(always)]
pub(crate) fn connection(service: u32) {
    with(service, |stats| stats.connections += 1);
}

/// A packet that was refused or dropped after its service was found.
#[inline(always)]
pub(crate) fn refused(service: u32) {
    with(service, |stats| stats.refused += 1);
}
