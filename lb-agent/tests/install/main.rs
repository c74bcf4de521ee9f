//! What is installed, on a real API server: whether it takes every object, whether Helm brings them and takes them away, and
//! what an agent with the rights of the chart can do there. Needs root, and Kubernetes' programs (see
//! `testbed::kubernetes`).
//!
//! A control plane takes seconds and hundreds of megabytes, so each test shows a whole story with one.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, like the tests themselves")]

mod agent;
mod helm;
mod manifests;
mod rights;
mod world;
