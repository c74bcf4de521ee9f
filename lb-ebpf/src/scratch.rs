//! Memory for the packet at hand, beside the stack, which has 512 bytes for all of the program.

use crate::{
    outcome::{Step, pass},
    parse::Parsed,
};
use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use core::mem::MaybeUninit;
use core::ops::ControlFlow;
use lb_common::reason::Reason;

/// Plain bytes: nobody else reads it.
type Bytes = [u64; size_of::<Parsed>().div_ceil(8)];

#[btf_map(name = "scratch")]
static SCRATCH: PerCpuArray<Bytes, 1> = PerCpuArray::new();

/// Keeps what was parsed until the walk ends. From here on the verifier knows nothing of the values, and walks what follows
/// once, not once for each way to parse a packet.
#[inline(always)]
pub(crate) fn keep(parsed: Parsed) -> Step<&'static mut Parsed> {
    let Some(place) = SCRATCH.get_ptr_mut(0) else { return pass(Reason::PassShort) };
    let place: *mut MaybeUninit<Parsed> = place.cast();
    // SAFETY: the entry belongs to this CPU, a TC program is not preempted by another on the same hook, and it is large and
    // aligned enough.
    let kept = unsafe { (*place).write(parsed) };
    barrier();
    ControlFlow::Continue(kept)
}

/// Makes the compiler forget what it knows of memory.
#[inline(always)]
fn barrier() {
    #[cfg(target_arch = "bpf")]
    // SAFETY: no instruction.
    unsafe {
        core::arch::asm!("", options(nostack));
    }
}
