//! The clock of flow entries.

use aya_ebpf::{
    btf_maps::PerCpuArray,
    helpers::{bpf_jiffies64, bpf_ktime_get_ns},
    macros::btf_map,
};
use lb_common::clock::Second;

/// The second that each CPU read last. The clock itself is asked once in a tick: reading it costs as much as a look-up in
/// a hash map, while the verifier makes a plain load of the tick counter (`bpf_jiffies64`, Linux 5.5).
#[btf_map(name = "clock")]
static CLOCK: PerCpuArray<Second, 1> = PerCpuArray::new();

/// Seconds since boot, `CLOCK_MONOTONIC`, late by at most a tick: what `last_seen` is compared with.
#[inline(always)]
pub(crate) fn now() -> u32 {
    // SAFETY: the helper takes no argument and cannot fail.
    let tick = unsafe { bpf_jiffies64() };
    let Some(known) = CLOCK.get_ptr_mut(0) else { return read() };
    // SAFETY: the entry belongs to this CPU, and a TC program is not preempted by another on the same hook.
    let known = unsafe { &mut *known };
    if known.tick != tick {
        *known = Second::new(tick, read());
    }
    known.second
}

#[inline(always)]
fn read() -> u32 {
    // SAFETY: the helper takes no argument and cannot fail.
    let nanoseconds = unsafe { bpf_ktime_get_ns() };
    #[expect(clippy::cast_possible_truncation, reason = "136 years")]
    let seconds = (nanoseconds / 1_000_000_000) as u32;
    seconds
}
