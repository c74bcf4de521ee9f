//! What the packet program (`lb-ebpf`) and the agent (`lb-agent`) must agree on.
//!
//! Everything that lies in a map is defined here once, with its layout locked by compile-time assertions.
//! The byte-order rule: fields that come from a packet are private byte arrays in **network order**, and
//! constructors and getters speak host types, so that neither side converts by hand. Counters, ids and
//! instants are host-order integers, since only this machine reads them.
//!
//! No type in a map has padding, `bool`, `Option`, `usize` or a Rust enum.
#![no_std]

#[cfg(test)]
extern crate std;

pub mod addr;
pub mod backend;
pub mod clock;
pub mod config;
pub mod counters;
pub mod flow;
pub mod fragment;
pub mod holder;
pub mod interface;
pub mod limits;
pub mod maglev;
pub mod mark;
pub mod masquerade;
pub mod pod;
pub mod reason;
pub mod service;
pub mod sieve;
pub mod way;
