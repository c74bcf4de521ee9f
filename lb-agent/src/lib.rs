//! The agent, as a library for its tests.

pub mod node;
pub mod cli;
pub mod model;
pub mod policy;
pub mod report;
pub mod source;
