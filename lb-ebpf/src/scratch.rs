//! Memory for the packet at hand, beside the stack, which has 512 bytes for all of the program.

use crate::{
    outcome::{Step, pass},
    parse::Parsed,
};
use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use core::mem::MaybeUninit;
use core::ops::ControlFlow;
use lb_common::reason::Reason;

/// The addresses of an Ethernet header, as they stand there.
pub(crate) type Ethernet = [[u16; 3]; 2];

struct Scratch {
    parsed: MaybeUninit<Parsed>,
    ethernet: Ethernet,
}

/// Plain bytes: nobody else reads it.
type Bytes = [u64; size_of::<Scratch>().div_ceil(8)];

#[btf_map(name = "scratch")]
static SCRATCH: PerCpuArray<Bytes, 1> = PerCpuArray::new();

#[inline(always)]
fn scratch() -> Option<&'static mut Scratch> {
    let place: *mut Scratch = SCRATCH.get_ptr_mut(0)?.cast();
    // SAFETY: the entry belongs to this CPU, a TC program is not preempted by another on the same hook, it is large and
    // aligned enough, and any bytes are a value.
    Some(unsafe { &mut *place })
}

/// Keeps what was parsed until the walk ends. From here on the verifier knows nothing of the values, and walks what follows
/// once, not once for each way to parse a packet.
#[inline(always)]
pub(crate) fn keep(parsed: Parsed) -> Step<&'static mut Parsed> {
    let Some(scratch) = scratch() else { return pass(Reason::PassShort) };
    let kept = scratch.parsed.write(parsed);
    barrier();
    ControlFlow::Continue(kept)
}

/// Keeps the Ethernet addresses of the next hop; zeros where the kernel does not know them yet.
#[inline(always)]
pub(crate) fn keep_ethernet(destination: [u16; 3], source: [u16; 3]) {
    if let Some(scratch) = scratch() {
        scratch.ethernet = [destination, source];
    }
}

/// Those that were kept last.
#[inline(always)]
pub(crate) fn ethernet() -> Option<Ethernet> {
    scratch().map(|scratch| scratch.ethernet).filter(|[destination, _]| *destination != [0; 3])
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
