//! The packet program of reweave-lb: one ingress and one egress program for every interface; what an interface
//! is for comes from the `interfaces` map.
//!
//! The entry points only turn an outcome into the hook's action and count it. `pipeline` is the place to begin.
#![cfg_attr(target_arch = "bpf", no_std)]
#![cfg_attr(target_arch = "bpf", no_main)]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]
#![expect(
    clippy::cast_possible_truncation,
    reason = "sizes of headers, far below the narrowest type here; `try_from` would bring a branch and a panic"
)]
#![expect(clippy::needless_pass_by_value, reason = "the classifier macro hands its context over")]

mod account;
mod answer;
mod backend;
#[cfg(feature = "bench")]
mod bench;
mod clock;
mod config;
mod entry;
mod flow;
mod forward;
mod fragment;
mod holder;
mod icmp;
mod inside;
mod interface;
mod masquerade;
mod mss;
mod open;
mod outcome;
mod packet;
mod parse;
mod pipeline;
mod plan;
mod reject;
mod reply;
mod rewrite;
mod ring;
mod scratch;
mod service;
mod sieve;
mod socket;
mod wire;

use aya_ebpf::{macros::classifier, programs::TcContext};
use outcome::Outcome;
use packet::Packet;

/// TC ingress of every interface with a role.
#[classifier]
#[inline(always)]
pub(crate) fn reweave_ingress(ctx: TcContext) -> i32 {
    let packet = Packet::new(&ctx);
    let length = packet.len();
    finish(length, pipeline::ingress(&packet))
}

/// TC egress of every interface with a role.
#[classifier]
#[inline(always)]
pub(crate) fn reweave_egress(ctx: TcContext) -> i32 {
    let packet = Packet::new(&ctx);
    let length = packet.len();
    finish(length, pipeline::egress(&packet))
}

/// `length` is that of the packet as it came: an answer made of it has another.
#[inline(always)]
fn finish(length: u32, outcome: Outcome) -> i32 {
    account::count(length, outcome.reason());
    match outcome {
        Outcome::Redirected(_) => outcome::TC_ACT_REDIRECT,
        Outcome::Next(_) => outcome::TC_ACT_UNSPEC,
        Outcome::Dropped(_) => outcome::TC_ACT_SHOT,
    }
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Unreachable: nothing in this crate can panic after optimisation, or the verifier would refuse the loop.
    loop {}
}

// The helpers that look at skbs and sockets are offered to GPL-compatible programs only.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[cfg(not(target_arch = "bpf"))]
fn main() {}
