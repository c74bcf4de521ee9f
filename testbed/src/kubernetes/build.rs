//! Builds the programs of Kubernetes with Go, as dependencies of the module `testbed/kubernetes`.

use super::binaries::Program;
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// What makes the same sources another program; a part of the cache's key.
pub(super) const RECIPE: &[&str] = &["build", "-trimpath", "-v"];

const MODULE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kubernetes");
const TICK: Duration = Duration::from_secs(5);

/// The last release of Go that does not fetch the one a module asks for.
const TOO_OLD: u32 = 20;
const INSTALL: &str = "install Go 1.21 or later, from your distribution (Debian 13: `apt-get install golang`) or from \
                       https://go.dev/dl, or put the programs of Kubernetes into a directory that KUBEBUILDER_ASSETS names";

/// Builds one program into `file`, which appears when it is complete.
///
/// # Errors
/// When there is no Go or it is too old, and when it fails: with the end of what it said.
pub(super) fn build(program: Program, file: &Path) -> Result<()> {
    check_go()?;
    let name = program.name();
    let (module, package) = program.package();
    let unfinished = file.with_extension("new");
    let started = Instant::now();
    say(&format!("building {name} {} with Go, once for this machine", program.release()));
    let mut command = Command::new("go");
    command
        .current_dir(MODULE)
        .env("CGO_ENABLED", "0")
        .args(RECIPE)
        .args(["-ldflags", &linker_flags(program)])
        .arg("-o")
        .arg(&unfinished)
        .arg(format!("{module}{package}"));
    watch(name, &mut command)?;
    fs::rename(&unfinished, file).with_context(|| format!("cannot write {}", file.display()))?;
    say(&format!("built {} in {} s", file.display(), started.elapsed().as_secs()));
    Ok(())
}

/// Whether there is a Go that builds the module or fetches the one that does.
///
/// # Errors
/// When there is not: what to install.
pub(super) fn check_go() -> Result<()> {
    // Outside of the module and without fetching: what is installed.
    let output = Command::new("go").args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local").output();
    let output = output.with_context(|| format!("`go` cannot be run; {INSTALL}"))?;
    check_release(String::from_utf8_lossy(&output.stdout).trim())
}

fn check_release(version: &str) -> Result<()> {
    let minor =
        version.strip_prefix("go1.").and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    let minor: Option<u32> = minor.and_then(|minor| minor.parse().ok());
    let minor =
        minor.with_context(|| format!("Go calls itself {version:?}, which is no release; {INSTALL}"))?;
    ensure!(minor > TOO_OLD, "{version} is too old; {INSTALL}");
    Ok(())
}

/// Without symbols, and with the version that Kubernetes' own build would put in: the API server refuses to guess it.
fn linker_flags(program: Program) -> String {
    let release = program.release();
    let mut parts = release.trim_start_matches('v').split('.');
    let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    match program {
        Program::Etcd => "-s -w".to_owned(),
        Program::Helm => format!("-s -w -X helm.sh/helm/v4/internal/version.version={release}"),
        _ => {
            let version = "k8s.io/component-base/version";
            format!(
                "-s -w -X {version}.gitVersion={release} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"
            )
        }
    }
}

/// Runs it to the end; every few seconds a line says how far it is.
fn watch(name: &str, command: &mut Command) -> Result<()> {
    let mut child =
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().context("cannot run `go build`")?;
    let stderr = child.stderr.take().context("`go build` has no output")?;
    let (sender, lines) = channel();
    let reader = thread::spawn(move || {
        BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    let last = follow(name, &lines);
    // It ends with the channel, whose other end is gone.
    let _ = reader.join();
    let status = child.wait()?;
    if !status.success() {
        bail!("`go build` of {name} failed ({status}): {}", Vec::from(last).join("\n"));
    }
    Ok(())
}

/// Tells what the lines amount to, and returns the last of them.
fn follow(name: &str, lines: &Receiver<String>) -> VecDeque<String> {
    const KEPT: usize = 20;
    let (started, mut told) = (Instant::now(), Instant::now());
    let (mut fetched, mut compiled, mut last) = (0_u32, 0_u32, VecDeque::new());
    loop {
        match lines.recv_timeout(TICK) {
            Ok(line) => {
                let count = if line.starts_with("go: downloading") { &mut fetched } else { &mut compiled };
                *count += 1;
                if last.len() == KEPT {
                    last.pop_front();
                }
                last.push_back(line);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return last,
        }
        if told.elapsed() >= TICK {
            told = Instant::now();
            let seconds = started.elapsed().as_secs();
            say(&format!("{name}: {fetched} modules fetched, {compiled} packages compiled ({seconds} s)"));
        }
    }
}

/// Past the test harness, which keeps what a passing test prints with `eprintln`.
fn say(line: &str) {
    // Nobody to tell is no reason to stop.
    let _ = writeln!(std::io::stderr(), "==> {line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_go_that_fetches_its_successors_is_new_enough() {
        for version in ["go1.21", "go1.21.13", "go1.26.8", "go1.27rc1", "go1.27-custom"] {
            check_release(version).unwrap();
        }
        for version in ["go1.19.8", "go1.20", "devel go1.28-abcdef", ""] {
            let error = check_release(version).unwrap_err().to_string();
            assert!(error.contains("install Go 1.21 or later"), "{version}: {error}");
        }
    }

    #[test]
    fn kubernetes_is_told_its_release() {
        let release = Program::ApiServer.release();
        let flags = linker_flags(Program::ApiServer);
        assert!(flags.contains(&format!("version.gitVersion={release} ")), "{flags}");
        let (_, minor) = flags.rsplit_once("version.gitMinor=").unwrap();
        assert!(release.starts_with(&format!("v1.{minor}.")), "{flags}");
    }
}
