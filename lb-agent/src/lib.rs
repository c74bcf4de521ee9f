//! The agent, as a library for its tests.
