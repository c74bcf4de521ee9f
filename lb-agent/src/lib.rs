//! The agent, as a library for its tests.

pub mod cli;
pub mod datapath;
pub mod lock;
pub mod model;
pub mod node;
pub mod policy;
pub mod problems;
pub mod reconcile;
pub mod report;
pub mod run;
pub mod source;
