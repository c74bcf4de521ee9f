//! The packet program and its maps: loading, attaching, reading back and writing.

pub mod attach;
mod clsact;
pub mod copies;
pub mod inside;
pub mod load;
pub mod loaded;
pub mod maps;
pub mod pins;
pub mod plan;
mod rings;
pub mod roles;
pub mod sandbox;
pub mod sieve;
pub mod sweep;
mod sys;
mod tcx;
pub mod testrun;
