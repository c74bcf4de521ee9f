//! The agent's life on the nodes of a testbed: started, stopped, killed, upgraded, starved, flooded, lied to, cleaned up.
//! Needs root and what `cargo xtask setup` installs.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, like the tests themselves")]

mod bad_input;
mod cleanup;
mod clients;
mod flood;
mod foreign;
mod hooks;
mod idle;
mod inside;
mod limits;
mod marks;
mod mend;
mod neighbours;
mod networks;
mod node;
mod restart;
mod timeouts;
mod world;
