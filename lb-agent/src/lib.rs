//! The agent, as a library for its tests.

pub mod cli;
pub mod datapath;
pub mod model;
pub mod node;
pub mod policy;
pub mod report;
pub mod source;
