//! `cargo xtask test`: every test of the workspace, as root.

use crate::{build, setup, sh};
use anyhow::{Context as _, Result, ensure};
use nix::unistd::geteuid;
use std::env::consts::ARCH;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Instant;
use testbed::kubernetes::{self, Binaries};
use testbed::skip;

pub(crate) fn run() -> Result<()> {
    setup::run()?;
    setup::kubernetes()?;
    build::agent()?;
    build_kubernetes();
    sh::say("building the tests");
    sh::run(tests().arg("--no-run"))?;
    sh::say("running the tests");
    let mut command = tests();
    if !geteuid().is_root() {
        sh::say("sudo: tests make network namespaces and load BPF programs");
        let runner = format!("CARGO_TARGET_{}_UNKNOWN_LINUX_GNU_RUNNER", ARCH.to_uppercase());
        // Cargo builds as the user and runs each test binary by this.
        command.env(runner, "sudo --preserve-env");
    }
    let (tally, succeeded) = watch(&mut command)?;
    let passed = tally.passed.saturating_sub(tally.skipped);
    println!("{passed} passed, {} failed, {} skipped", tally.failed, tally.skipped);
    ensure!(succeeded, "not every test passed");
    ensure!(tally.passed > 0, "no test ran");
    Ok(())
}

/// Has the programs of a Kubernetes API ready before a test asks for them. Without them its tests are skipped, each with
/// the reason; where `CI` is set they fail.
fn build_kubernetes() {
    if let Err(reason) = Binaries::find() {
        sh::say(&format!("tests on a Kubernetes API cannot run: {reason}"));
    }
}

fn tests() -> Command {
    let mut command = sh::cargo();
    command.args(["test", "--no-fail-fast"]);
    // As root the tests would look into another home.
    if let Ok(cache) = kubernetes::cache_root() {
        command.env(kubernetes::CACHE, cache);
    }
    command
}

/// Runs the tests, passes their output on, and counts. Second value: whether cargo was content.
fn watch(command: &mut Command) -> Result<(Tally, bool)> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", sh::line(command)))?;
    let stdout = child.stdout.take().context("the tests have no output")?;
    let (sender, lines) = channel();
    let reader = thread::spawn(move || {
        BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    let started = Instant::now();
    let mut tally = Tally::default();
    loop {
        match lines.recv_timeout(sh::TICK) {
            Ok(line) => {
                println!("{line}");
                tally.add(&line);
            }
            Err(RecvTimeoutError::Timeout) => {
                sh::say(&format!("tests still run ({} s)", started.elapsed().as_secs()));
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    // It ends with the channel, whose other end is gone only after the loop.
    let _ = reader.join();
    Ok((tally, child.wait()?.success()))
}

/// How many tests ended how, over all test binaries.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    /// Among those that passed: they found that this machine lacks what they need.
    skipped: u64,
}

impl Tally {
    /// Adds a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; …`, or that of a skipped test; others count
    /// nothing.
    fn add(&mut self, line: &str) {
        if line.starts_with(skip::MARK) {
            self.skipped += 1;
        }
        let Some(result) = line.strip_prefix("test result: ") else { return };
        let words: Vec<_> = result.split([' ', ';', '.']).collect();
        for pair in words.windows(2) {
            let count = pair[0].parse().unwrap_or(0);
            match pair[1] {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_all_binaries_are_added_up() {
        let mut tally = Tally::default();
        for line in [
            "running 4 tests",
            "test policy::holds ... ok",
            "SKIPPED kubernetes::it_starts: Kubernetes' programs cannot be had: `go` cannot be run",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.20s",
        ] {
            tally.add(line);
        }
        assert_eq!(tally, Tally { passed: 13, failed: 2, skipped: 1 });
    }
}
