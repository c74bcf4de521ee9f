//! The `node` module against the running kernel, in network namespaces of the tests' own. Needs root, `ip` and `nft`.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, like the tests themselves")]

mod interfaces;
mod maps;
mod masquerades;
mod namespace;
mod nft;
mod plans;
mod preflight;
mod return_path;
mod sysctl;
mod watch;
