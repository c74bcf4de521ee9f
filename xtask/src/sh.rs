//! Running other programs, and saying so.

use anyhow::{Context as _, Result, ensure};
use nix::unistd::geteuid;
use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The longest time without a line.
pub(crate) const TICK: Duration = Duration::from_secs(10);

/// One line of progress, told apart from the output of the programs that run.
pub(crate) fn say(line: &str) {
    eprintln!("==> {line}");
}

/// The directory of the workspace, which every subcommand works in.
pub(crate) fn workspace() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// The cargo that runs us, in the workspace.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
    // What `cargo run` has set is about xtask: build scripts that look at it would run anew each time, and all that is built on
    // them be compiled anew.
    for (name, _) in env::vars_os() {
        let of_xtask = ["CARGO_MANIFEST_", "CARGO_PKG_", "CARGO_BIN_", "CARGO_CRATE_"];
        if name.to_str().is_some_and(|name| of_xtask.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(name);
        }
    }
    command
}

/// A program that needs root: as it is when we are root, else through sudo. `why` is for the person who is asked for
/// a password.
pub(crate) fn as_root(program: impl AsRef<OsStr>, why: &str) -> Command {
    if geteuid().is_root() {
        return Command::new(program);
    }
    say(&format!("sudo: {why}"));
    let mut command = Command::new("sudo");
    command.arg(program);
    command
}

/// Runs to the end with the output on the terminal, and says every ten seconds that it still does: a linker, say, is
/// silent for long. An error names the command.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let program = PathBuf::from(command.get_program());
    let program = program.file_name().unwrap_or_default().display();
    let started = Instant::now();
    let (ended, ticks) = channel::<()>();
    let status = thread::scope(|scope| {
        scope.spawn(move || {
            // Ends when the other end of the channel is dropped.
            while ticks.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                say(&format!("{program} is still at it ({} s)", started.elapsed().as_secs()));
            }
        });
        let status = command.status();
        drop(ended);
        status
    });
    let status = status.with_context(|| format!("cannot run {}", line(command)))?;
    ensure!(status.success(), "{} failed: {status}", line(command));
    Ok(())
}

/// Runs to the end and returns what it printed. An error names the command and has its standard error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {}", line(command)))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} failed: {}: {}", line(command), output.status, said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether it runs and succeeds; its output is not shown.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The command line, as a person would type it.
pub(crate) fn line(command: &Command) -> String {
    let words: Vec<_> =
        [command.get_program()].into_iter().chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

/// Where a program is: in `PATH`, or among the administrator's, which are not in everybody's `PATH`.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}
