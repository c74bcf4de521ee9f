//! What a real API server cannot be made to do at will: a scripted one refuses, hangs, lies and goes silent.
//!
//! Each test answers every request by itself, so that one that should not have come fails it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests, outside #[test] functions")]

mod api;
mod command_line;
mod report;
mod source;
