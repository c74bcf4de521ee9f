//! One run: the name that all it makes begins with, its directories, and how all of that goes away again.
//!
//! A run holds a lock for as long as its process lives. Whoever can take the lock of a run knows that it is dead,
//! whatever became of its process id since.

use crate::namespace;
use anyhow::{Context as _, Result};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::thread;

/// Logs, configurations, the cluster's manifests, agents' state.
const FILES: &str = "/run/reweave-lb-test";
/// Agents' pins.
const PINS: &str = "/sys/fs/bpf/reweave-lb-test";
/// What the names of all runs begin with.
const PREFIX: &str = "rw";

/// The runs of this process that a signal must end.
static LIVE: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// See the module. Dropping it removes everything.
#[derive(Debug)]
pub(crate) struct Run {
    name: String,
    _lock: File,
}

impl Run {
    /// Removes what dead runs left, and begins a new one.
    pub(crate) fn begin() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        end_on_signals()?;
        let name = format!("{PREFIX}{}-{}", Pid::this(), NEXT.fetch_add(1, Ordering::Relaxed));
        fs::create_dir_all(FILES).with_context(|| format!("cannot make {FILES}; the testbed needs root"))?;
        // Between making a lock file and locking it a run would look dead to another one that sweeps.
        let guard = lock_file(&Path::new(FILES).join("lock"))?;
        guard.lock()?;
        sweep()?;
        let lock = lock_file(&lock_path(&name))?;
        lock.lock()?;
        LIVE.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone());
        let run = Self { name, _lock: lock };
        fs::create_dir_all(run.files().join("logs"))?;
        fs::create_dir_all(run.pins()).context("no bpffs on /sys/fs/bpf? run `cargo xtask setup`")?;
        Ok(run)
    }

    /// The name of a host's namespace.
    pub(crate) fn namespace(&self, host: &str) -> String {
        format!("{}-{host}", self.name)
    }

    /// The run's directory.
    pub(crate) fn files(&self) -> PathBuf {
        Path::new(FILES).join(&self.name)
    }

    /// The run's directory in bpffs.
    pub(crate) fn pins(&self) -> PathBuf {
        Path::new(PINS).join(&self.name)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if thread::panicking() {
            show_logs(&self.files().join("logs"));
        }
        if let Err(error) = remove(&self.name) {
            eprintln!("testbed: {} is not all gone: {error:#}", self.name);
        }
        LIVE.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

fn lock_path(name: &str) -> PathBuf {
    Path::new(FILES).join(format!("{name}.lock"))
}

fn lock_file(path: &Path) -> Result<File> {
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

/// Removes the runs whose process is gone.
fn sweep() -> Result<()> {
    for entry in fs::read_dir(FILES)? {
        let file = entry?.file_name();
        let Some(name) = file.to_str().and_then(|file| file.strip_suffix(".lock")) else { continue };
        match lock_file(&lock_path(name))?.try_lock() {
            Ok(()) => remove(name)?,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Removes all that a run made. Twice does no harm.
fn remove(name: &str) -> Result<()> {
    let prefix = format!("{name}-");
    if let Ok(namespaces) = fs::read_dir(namespace::DIRECTORY) {
        for entry in namespaces {
            let file = entry?.file_name();
            if let Some(namespace) = file.to_str().filter(|file| file.starts_with(&prefix)) {
                namespace::remove(namespace)?;
            }
        }
    }
    for directory in [Path::new(PINS).join(name), Path::new(FILES).join(name)] {
        absent_is_fine(fs::remove_dir_all(&directory))
            .with_context(|| format!("cannot remove {}", directory.display()))?;
    }
    // The last to go: without it nobody would look for the rest.
    absent_is_fine(fs::remove_file(lock_path(name)))?;
    // Only when no other run is there; it is not ours to insist.
    let _ = fs::remove_dir(PINS);
    Ok(())
}

fn absent_is_fine(outcome: std::io::Result<()>) -> std::io::Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// From now on SIGINT, SIGTERM and SIGHUP remove this process's runs before they end it.
fn end_on_signals() -> Result<()> {
    static BEGUN: Once = Once::new();
    let mut outcome = Ok(());
    BEGUN.call_once(|| {
        outcome = Signals::new([SIGINT, SIGTERM, SIGHUP]).map(|mut signals| {
            thread::spawn(move || {
                for signal in signals.forever() {
                    let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    for name in live {
                        // The other threads are still at work, and may add something while the first round goes.
                        if let Err(error) = remove(&name).and_then(|()| remove(&name)) {
                            eprintln!("testbed: {name} is not all gone: {error:#}");
                        }
                    }
                    // Ends the process as if nobody had caught the signal; it returns only on an unknown signal.
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
            });
        });
    });
    outcome.context("cannot watch for signals")
}

/// The ends of the logs, for the person who reads why a test failed: the files are about to go.
fn show_logs(directory: &Path) {
    const LINES: usize = 30;
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut logs: Vec<_> = entries.filter_map(Result::ok).map(|entry| entry.path()).collect();
    logs.sort();
    for log in logs {
        let Ok(text) = fs::read_to_string(&log) else { continue };
        let lines: Vec<_> = text.lines().collect();
        if !lines.is_empty() {
            eprintln!("--- {}\n{}", log.display(), lines[lines.len().saturating_sub(LINES)..].join("\n"));
        }
    }
}
