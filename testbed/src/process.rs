//! A program that runs beside the test.

use crate::wait;
use anyhow::{Context as _, Result, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

/// A running program, its output in a log file. Killed when dropped, and when the process that started it dies.
#[derive(Debug)]
pub struct Process {
    label: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output added to `log`. `label` names it in errors.
    ///
    /// # Errors
    /// When it cannot be run, or the log cannot be written.
    pub fn start(label: String, mut command: Command, log: PathBuf) -> Result<Self> {
        let output = File::options().create(true).append(true).open(&log)?;
        let program = command.get_program().to_owned();
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = spawn(command).with_context(|| format!("cannot run {} as {label}", program.display()))?;
        Ok(Self { label, child, log })
    }

    /// The program's own process id.
    pub fn pid(&self) -> Pid {
        // Process ids are below 2^22.
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Where its output goes.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Its output so far.
    ///
    /// # Errors
    /// When the file cannot be read as text.
    pub fn log(&self) -> Result<String> {
        fs::read_to_string(&self.log).with_context(|| format!("cannot read {}", self.log.display()))
    }

    /// Waits until its output contains `text`.
    ///
    /// # Errors
    /// When it does not within `limit`, or the program has ended: with its output.
    pub fn await_log(&mut self, text: &str, limit: Duration) -> Result<()> {
        wait::until(&format!("{} says {text:?}", self.label), limit, || {
            let log = self.log()?;
            if log.contains(text) {
                return Ok(());
            }
            match self.child.try_wait()? {
                Some(status) => bail!("it ended ({status}): {}", log.trim()),
                None => bail!("it said: {}", log.trim()),
            }
        })
    }

    /// Whether it has not ended.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the program has ended and was waited for.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid(), signal).with_context(|| format!("cannot send {signal} to {}", self.label))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it still runs after `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        wait::until(&format!("the end of {}", self.label), limit, || {
            self.child.try_wait()?.context("it still runs")
        })
    }

    /// Asks it to end (SIGTERM) and waits up to ten seconds.
    ///
    /// # Errors
    /// When it does not end.
    pub fn terminate(mut self) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        self.wait(Duration::from_secs(10))
    }

    /// Ends it without asking (SIGKILL), as a crash would.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill(mut self) -> Result<ExitStatus> {
        self.child.kill()?;
        Ok(self.child.wait()?)
    }
}

/// Starts a child that the kernel kills when we die, even by SIGKILL.
///
/// The kernel means the death of the *thread* that started it, and a test's thread ends before its process. So one
/// thread, which stays, starts them all.
fn spawn(mut command: Command) -> io::Result<Child> {
    type Order = (Command, Sender<io::Result<Child>>);
    static STARTER: OnceLock<Sender<Order>> = OnceLock::new();
    die_with_parent(&mut command);
    let starter = STARTER.get_or_init(|| {
        let (sender, orders) = channel::<Order>();
        thread::spawn(move || {
            for (mut command, answer) in orders {
                // Nobody waits for it any more: then the child is not ours to keep either.
                if let Err(unsent) = answer.send(command.spawn())
                    && let Ok(mut child) = unsent.0
                {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
        });
        sender
    });
    let (answer, child) = channel();
    starter.send((command, answer)).map_err(io::Error::other)?;
    child.recv().map_err(io::Error::other)?
}

fn die_with_parent(command: &mut Command) {
    let parent = Pid::this();
    let ask = move || -> io::Result<()> {
        set_pdeathsig(Signal::SIGKILL)?;
        // It may have died before we asked.
        if getppid() == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: between fork and exec the closure only calls prctl and getppid, which are async-signal-safe, and it
    // allocates nothing.
    unsafe { command.pre_exec(ask) };
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when it has already ended and been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
