//! Ticks when something below a path may have changed.

use notify::event::{EventKind, ModifyKind};
use notify::{Event, RecommendedWatcher, RecursiveMode, Watcher as _};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use thiserror::Error;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// Why a path cannot be watched.
#[derive(Debug, Error)]
pub enum WatchError {
    /// The path has no absolute form.
    #[error("{}: {source}", path.display())]
    Path {
        /// As given.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The kernel's watcher cannot be had (too many inotify instances, say).
    #[error("cannot watch files: {source}")]
    Watcher {
        /// What the watcher says.
        source: notify::Error,
    },
}

/// How ticks are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// A tick comes when nothing has changed for so long, so that many writes are one tick.
    pub quiet: Duration,
    /// A tick comes so long after a first change at the latest, though writes go on.
    pub at_most: Duration,
    /// A tick comes after so long without any change: for what the watcher missed, on network file systems say.
    pub period: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(20),
            at_most: Duration::from_millis(500),
            period: Duration::from_secs(30),
        }
    }
}

/// Why a tick came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tick {
    /// Something changed.
    Changed,
    /// The period is over.
    Periodic,
}

/// Watches a file, or a directory with all below it. The path may be absent, come later, and be replaced.
pub struct Watch {
    path: PathBuf,
    timing: Timing,
    signal: Arc<Signal>,
    watcher: RecommendedWatcher,
    watched: Option<Identity>,
    parent_watched: bool,
    /// A change is known, but its tick is not out yet.
    pending: bool,
    /// When the periodic tick is due.
    periodic: Instant,
}

/// What the watcher's thread tells.
#[derive(Debug, Default)]
struct Signal {
    changed: Notify,
    /// The path itself came, went or was replaced, so the kernel's watch may be on something else.
    replaced: AtomicBool,
}

/// Tells a directory from another that took its place; the time of birth because inode numbers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    born: Option<SystemTime>,
}

impl Watch {
    /// Begins to watch.
    ///
    /// # Errors
    /// Only when no watch can work at all; a path that is not there yet is awaited.
    pub fn new(path: &Path, timing: Timing) -> Result<Self, WatchError> {
        let path =
            std::path::absolute(path).map_err(|source| WatchError::Path { path: path.to_owned(), source })?;
        let signal = Arc::new(Signal::default());
        let (told, root) = (Arc::clone(&signal), path.clone());
        let watcher =
            notify::recommended_watcher(move |event: notify::Result<Event>| told.tell(&root, event))
                .map_err(|source| WatchError::Watcher { source })?;
        let periodic = Instant::now() + timing.period;
        let mut watch = Self {
            path,
            timing,
            signal,
            watcher,
            watched: None,
            parent_watched: false,
            pending: false,
            periodic,
        };
        watch.arm();
        Ok(watch)
    }

    /// Waits until something may have changed, or the period is over.
    ///
    /// What changes after the tick gives another one, so whoever reads the files then misses nothing. Nothing is lost
    /// when the future is dropped.
    pub async fn tick(&mut self) -> Tick {
        let Timing { quiet, at_most, period } = self.timing;
        if !self.pending && timeout_at(self.periodic, self.signal.changed.notified()).await.is_ok() {
            self.pending = true;
        }
        if self.pending {
            let latest = Instant::now() + at_most;
            let until_quiet = || latest.min(Instant::now() + quiet);
            while Instant::now() < latest
                && timeout_at(until_quiet(), self.signal.changed.notified()).await.is_ok()
            {}
        }
        self.periodic = Instant::now() + period;
        self.arm();
        if std::mem::take(&mut self.pending) { Tick::Changed } else { Tick::Periodic }
    }

    /// Sees to it that the kernel watches what is at the path now. Failing is no error: the periodic tick tries again.
    fn arm(&mut self) {
        if let Some(parent) = self.path.parent().filter(|_| !self.parent_watched) {
            self.parent_watched = self.watcher.watch(parent, RecursiveMode::NonRecursive).is_ok();
        }
        let replaced = self.signal.replaced.swap(false, Ordering::AcqRel);
        let now = Identity::of(&self.path);
        if now == self.watched && !replaced {
            return;
        }
        // An error means that the kernel has dropped the watch by itself.
        let _ = self.watcher.unwatch(&self.path);
        let armed = now.is_some() && self.watcher.watch(&self.path, RecursiveMode::Recursive).is_ok();
        self.watched = now.filter(|_| armed);
    }
}

impl Signal {
    fn tell(&self, root: &Path, event: notify::Result<Event>) {
        // An error may be a queue that ran over: anything may have changed.
        let event = event.unwrap_or_else(|_| Event::new(EventKind::Any).add_path(root.to_owned()));
        // Our own reading is an access. The parent directory is watched too, and what else is in it does not matter,
        // but for the link by which a mounted ConfigMap changes.
        let matters = |path: &PathBuf| path.starts_with(root) || path.ends_with("..data");
        if event.kind.is_access() || !(event.paths.is_empty() || event.paths.iter().any(matters)) {
            return;
        }
        let changes_root = matches!(
            event.kind,
            EventKind::Any
                | EventKind::Create(_)
                | EventKind::Remove(_)
                | EventKind::Modify(ModifyKind::Name(_))
        );
        if changes_root && event.paths.iter().any(|path| path == root) {
            self.replaced.store(true, Ordering::Release);
        }
        self.changed.notify_one();
    }
}

impl Identity {
    fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self { device: metadata.dev(), inode: metadata.ino(), born: metadata.created().ok() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    const TIMING: Timing = Timing {
        quiet: Duration::from_millis(20),
        at_most: Duration::from_millis(200),
        // Never within a test: a tick must come from a change.
        period: Duration::from_secs(3_600),
    };

    /// Fails if no tick comes.
    async fn changed(watch: &mut Watch) {
        let tick = tokio::time::timeout(Duration::from_secs(10), watch.tick()).await;
        assert_eq!(tick.expect("a tick"), Tick::Changed);
    }

    async fn nothing(watch: &mut Watch) {
        let tick = tokio::time::timeout(Duration::from_millis(150), watch.tick()).await;
        assert!(tick.is_err(), "an unexpected tick");
    }

    #[tokio::test]
    async fn many_writes_are_one_tick_and_reading_is_none() {
        let dir = TempDir::new().unwrap();
        let mut watch = Watch::new(dir.path(), TIMING).unwrap();
        for i in 0..50 {
            fs::write(dir.path().join(format!("{i}.yaml")), "x").unwrap();
        }
        changed(&mut watch).await;
        fs::read(dir.path().join("1.yaml")).unwrap();
        fs::read_dir(dir.path()).unwrap().for_each(drop);
        nothing(&mut watch).await;
    }

    #[tokio::test]
    async fn a_file_in_a_new_subdirectory_is_seen() {
        let dir = TempDir::new().unwrap();
        let mut watch = Watch::new(dir.path(), TIMING).unwrap();
        fs::create_dir(dir.path().join("status")).unwrap();
        changed(&mut watch).await;
        fs::write(dir.path().join("status/a.yaml"), "x").unwrap();
        changed(&mut watch).await;
        fs::rename(dir.path().join("status/a.yaml"), dir.path().join("status/b.yaml")).unwrap();
        changed(&mut watch).await;
        fs::remove_file(dir.path().join("status/b.yaml")).unwrap();
        changed(&mut watch).await;
    }

    #[tokio::test]
    async fn a_directory_that_is_replaced_stays_watched() {
        let parent = TempDir::new().unwrap();
        let (path, new) = (parent.path().join("manifests"), parent.path().join("new"));
        fs::create_dir(&path).unwrap();
        let mut watch = Watch::new(&path, TIMING).unwrap();
        for round in 0..3 {
            fs::create_dir(&new).unwrap();
            nothing(&mut watch).await;
            fs::remove_dir_all(&path).unwrap();
            fs::rename(&new, &path).unwrap();
            changed(&mut watch).await;
            nothing(&mut watch).await;
            fs::write(path.join("a.yaml"), format!("{round}")).unwrap();
            changed(&mut watch).await;
        }
    }

    /// It is the same directory as before, but the kernel's watch went with the move.
    #[tokio::test]
    async fn a_directory_that_was_away_for_a_moment_stays_watched() {
        let parent = TempDir::new().unwrap();
        let (path, away) = (parent.path().join("manifests"), parent.path().join("away"));
        fs::create_dir(&path).unwrap();
        let mut watch = Watch::new(&path, TIMING).unwrap();
        fs::rename(&path, &away).unwrap();
        fs::rename(&away, &path).unwrap();
        changed(&mut watch).await;
        fs::write(path.join("a.yaml"), "x").unwrap();
        changed(&mut watch).await;
    }

    #[tokio::test]
    async fn a_directory_that_comes_later_is_seen() {
        let parent = TempDir::new().unwrap();
        let path = parent.path().join("manifests");
        let mut watch = Watch::new(&path, TIMING).unwrap();
        fs::create_dir(&path).unwrap();
        changed(&mut watch).await;
        fs::write(path.join("a.yaml"), "x").unwrap();
        changed(&mut watch).await;
    }

    #[tokio::test]
    async fn a_single_file_is_watched_across_its_replacement() {
        let dir = TempDir::new().unwrap();
        let (path, temporary) = (dir.path().join("all.yaml"), dir.path().join("other"));
        fs::write(&path, "1").unwrap();
        let mut watch = Watch::new(&path, TIMING).unwrap();
        for _ in 0..2 {
            fs::write(&temporary, "2").unwrap();
            nothing(&mut watch).await;
            fs::rename(&temporary, &path).unwrap();
            changed(&mut watch).await;
        }
        fs::write(&path, "3").unwrap();
        changed(&mut watch).await;
    }

    #[tokio::test]
    async fn a_tick_whose_future_was_dropped_comes_again() {
        let dir = TempDir::new().unwrap();
        let timing = Timing { quiet: Duration::from_millis(100), ..TIMING };
        let mut watch = Watch::new(dir.path(), timing).unwrap();
        fs::write(dir.path().join("a.yaml"), "x").unwrap();
        // Dropped while it waits for quiet.
        assert!(tokio::time::timeout(Duration::from_millis(50), watch.tick()).await.is_err());
        changed(&mut watch).await;
    }

    #[tokio::test]
    async fn the_periodic_tick_comes_without_a_change() {
        let dir = TempDir::new().unwrap();
        let timing = Timing { period: Duration::from_millis(50), ..TIMING };
        let mut watch = Watch::new(dir.path(), timing).unwrap();
        assert_eq!(watch.tick().await, Tick::Periodic);
        assert_eq!(watch.tick().await, Tick::Periodic);
    }
}
