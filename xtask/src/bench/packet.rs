//! Nanoseconds per packet: `lb-agent/benches/packet`, which is not part of this program, because it embeds the packet
//! program, and `cargo xtask setup` must run before that can be built.

use super::report::Report;
use crate::sh;
use anyhow::Result;
use nix::unistd::geteuid;
use std::env::consts::ARCH;

pub(crate) fn run() -> Result<Report> {
    sh::say("building the bench of the packet program");
    sh::run(bench().arg("--no-run"))?;
    sh::say("packets: about a minute, quicker on a quiet machine");
    let mut command = bench();
    command.stderr(std::process::Stdio::inherit());
    if !geteuid().is_root() {
        sh::say("sudo: the bench loads BPF programs and makes network namespaces");
        command.env(format!("CARGO_TARGET_{}_UNKNOWN_LINUX_GNU_RUNNER", ARCH.to_uppercase()), "sudo");
    }
    Report::parse(&sh::output(&mut command)?)
}

fn bench() -> std::process::Command {
    let mut command = sh::cargo();
    // What is measured runs in the kernel: the profile of tests does, and is built already.
    command.args([
        "bench",
        "--profile",
        "dev",
        "--package",
        "lb-agent",
        "--features",
        "bench",
        "--bench",
        "packet",
    ]);
    command
}
