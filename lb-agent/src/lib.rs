//! The agent, as a library for its tests.

pub mod node;
