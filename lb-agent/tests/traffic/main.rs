//! Traffic of real programs through the real agents of three nodes, in network namespaces. Who is right is said by
//! others than us: the servers' own logs, the kernel's sockets, tcpdump and tshark.
//!
//! Needs root, and the programs that `cargo xtask setup` installs. Each test has a testbed of its own.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking, like the tests themselves"
)]

mod client;
mod echo;
mod raw;
mod world;

mod address;
mod bad_line;
mod bytes;
mod checksums;
mod collisions;
mod corners;
mod counters;
mod devices;
mod endpoints;
mod explain;
mod fragments;
mod holders;
mod inside;
mod moving;
mod networks;
mod not_ours;
mod ports;
mod refusal;
mod tcp_life;
