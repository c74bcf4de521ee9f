//! The agent, as a library for its tests.

pub mod model;
pub mod policy;
