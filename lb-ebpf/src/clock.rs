//! The clock of flow entries.

use aya_ebpf::helpers::bpf_ktime_get_ns;

/// Seconds since boot, `CLOCK_MONOTONIC`: what `last_seen` is compared with.
#[inline(always)]
pub(crate) fn now() -> u32 {
    // SAFETY: the helper takes no argument and cannot fail.
    let nanoseconds = unsafe { bpf_ktime_get_ns() };
    #[expect(clippy::cast_possible_truncation, reason = "136 years")]
    let seconds = (nanoseconds / 1_000_000_000) as u32;
    seconds
}
