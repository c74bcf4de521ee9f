//! The Kubernetes API: how to reach it, what its errors mean, how it is doing. What is read from it is in
//! [`crate::source::kubernetes`], what is written to it in [`crate::report::kubernetes`].

pub mod backoff;
pub mod client;
pub mod error;
pub mod stats;
