//! The commands that look at a node, against a real datapath: pinned maps on a BPF file system. Needs root.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, like the tests themselves")]

mod datapath;
mod dumps;
mod explain;
mod http;
mod look;
mod metrics;
mod preflight;

use std::process::{Command, Output};

/// Runs the agent's binary.
fn agent(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lb-agent")).args(words).output().unwrap()
}

/// Standard output of a run that must go well, without a word beside it.
fn stdout(output: Output) -> String {
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), errors.as_str()), (Some(0), ""));
    String::from_utf8(output.stdout).unwrap()
}
