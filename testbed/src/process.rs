//! A program that runs beside the test.

use crate::wait;
use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// A running program, its output in a log file. Killed when dropped.
#[derive(Debug)]
pub struct Process {
    label: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output added to `log`.
    pub(crate) fn start(label: String, command: &mut Command, log: PathBuf) -> Result<Self> {
        let output = File::options().create(true).append(true).open(&log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot run {} as {label}", command.get_program().display()))?;
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

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when it has already ended and been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
