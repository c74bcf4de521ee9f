//! Agents on a real API server: what they read, what they write, what they may. Needs root, what `cargo xtask setup`
//! installs, and Kubernetes' programs (see `testbed::kubernetes`).
//!
//! A control plane takes seconds and hundreds of megabytes, so each test shows a whole story with one.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, like the tests themselves")]

mod identity;
mod outage;
mod scale;
mod serving;
mod status;
mod world;
