//! The packet program and its maps: loading, attaching, reading back and writing.

pub mod attach;
pub mod load;
pub mod maps;
pub mod pins;
mod sys;
pub mod testrun;
