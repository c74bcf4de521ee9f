//! A host: a network namespace to run programs in.

use crate::capture::Capture;
use crate::namespace;
use crate::process::Process;
use crate::run::Run;
use anyhow::{Context as _, Result, ensure};
use nix::fcntl::{OFlag, open};
use nix::sched::{CloneFlags, setns};
use nix::sys::stat::Mode;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A host of the testbed. Holds names only: it does not keep anything alive.
#[derive(Clone, Debug)]
pub struct Host {
    name: String,
    namespace: String,
    files: PathBuf,
}

impl Host {
    pub(crate) fn new(run: &Run, name: &str) -> Self {
        Self { name: name.to_owned(), namespace: run.namespace(name), files: run.files() }
    }

    /// Its name: `n1`, `client`, or a pod's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its network namespace, as in `ip -n NAME`.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The directory of the run.
    pub(crate) fn files(&self) -> &Path {
        &self.files
    }

    /// The file for the output of the program with that label.
    pub(crate) fn log_path(&self, label: &str) -> PathBuf {
        self.files.join("logs").join(format!("{}-{label}.log", self.name))
    }

    /// A command that runs here. Its process is the program itself, and it sees the usual `/sys`, bpffs included
    /// (`ip netns exec` would hide it).
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let path = CString::new(namespace::path(&self.namespace).as_os_str().as_bytes()).unwrap_or_default();
        let mut command = Command::new(program);
        let enter = move || -> io::Result<()> {
            let namespace = open(path.as_c_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            Ok(())
        };
        // SAFETY: between fork and exec the closure only calls open, setns and close, which are async-signal-safe, and
        // it allocates nothing.
        unsafe { command.pre_exec(enter) };
        command
    }

    /// Runs a program to its end and returns what it printed.
    ///
    /// # Errors
    /// When it cannot be run or fails: with its standard error.
    pub fn run<S: AsRef<OsStr>>(&self, words: &[S]) -> Result<String> {
        let (program, args) = words.split_first().context("no program to run")?;
        let shown: Vec<_> = words.iter().map(|word| word.as_ref().to_string_lossy()).collect();
        let line = format!("{}: {}", self.name, shown.join(" "));
        let output =
            self.command(program).args(args).output().with_context(|| format!("cannot run {line}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{line}: {}: {}", output.status, said.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts a program; its output goes to the log `HOST-LABEL.log` of the run.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn spawn<S: AsRef<OsStr>>(&self, label: &str, words: &[S]) -> Result<Process> {
        let (program, args) = words.split_first().context("no program to run")?;
        let mut command = self.command(program);
        command.args(args);
        Process::start(format!("{label} on {}", self.name), command, self.log_path(label))
    }

    /// Does `work` here, on a thread of its own: sockets that it opens belong to this host, also later.
    ///
    /// # Errors
    /// When the host is gone, and those of `work`.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        namespace::enter(&self.namespace, work)
    }

    /// Sets values below `/proc/sys/net`, as in `("ipv4/ip_forward", "1")`.
    ///
    /// # Errors
    /// When the kernel has no such name or refuses the value.
    pub fn sysctls(&self, values: &[(&str, &str)]) -> Result<()> {
        namespace::sysctls(&self.namespace, values)
    }

    /// `ip -batch` here: one order a line.
    ///
    /// # Errors
    /// At the first order that fails; those before it are done.
    pub fn ip(&self, orders: &str) -> Result<()> {
        namespace::feed(Command::new("ip").args(["-n", &self.namespace, "-batch", "-"]), orders)
            .with_context(|| self.name.clone())
    }

    /// `bridge -batch` here.
    ///
    /// # Errors
    /// As [`Host::ip`].
    pub fn bridge(&self, orders: &str) -> Result<()> {
        namespace::feed(Command::new("bridge").args(["-n", &self.namespace, "-batch", "-"]), orders)
            .with_context(|| self.name.clone())
    }

    /// A program here that reads its orders from standard input, such as `nft -f -`.
    ///
    /// # Errors
    /// When it cannot be run or fails.
    pub fn feed(&self, words: &[&str], orders: &str) -> Result<()> {
        let (program, args) = words.split_first().context("no program to run")?;
        namespace::feed(self.command(program).args(args), orders).with_context(|| self.name.clone())
    }

    /// Begins to capture packets of a device (`any` for all), as tcpdump's `filter` says.
    ///
    /// # Errors
    /// When tcpdump cannot be run, or does not like the filter.
    pub fn capture(&self, device: &str, filter: &str) -> Result<Capture> {
        Capture::begin(self, device, filter)
    }
}
