//! Sysctls of this network namespace.
//!
//! A rule, a route or a table of ours carries our name and can be found by it. A sysctl is only a number: nothing in the
//! kernel says who set it, nor what it was. That is why this is the one place with a record: before the
//! reverse-path filter of a device is changed, its value is written to a file, which outlives the agent (and, below
//! `/run`, goes with the values themselves when the machine restarts). [`Record::restore`] puts it back, unless
//! someone else has changed the value since.
//!
//! Values are read below `/proc/sys`. They are written below a path of the caller's choice: a container's own `/proc/sys`
//! is read-only unless the container is privileged, and the node's, mounted elsewhere, is the same tree. Which
//! namespace it speaks of is decided by the thread that opens a file, not by the mount.

use super::interfaces::Interface;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Where the record is kept, unless told otherwise. Each agent of a machine needs a directory of its own.
pub const DEFAULT_STATE_DIRECTORY: &str = "/run/reweave-lb";
const RECORD: &str = "sysctls.json";

/// Where sysctls are read, and written unless told otherwise.
pub const DEFAULT_PROC_SYS: &str = "/proc/sys";

/// `rp_filter`: a packet's source need not be reachable through the interface that it came in on.
pub const LOOSE: u8 = 2;
/// `rp_filter`: it must be.
pub const STRICT: u8 = 1;

/// Work on sysctls failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value cannot be read.
    #[error("cannot read the sysctl {key}: {source}")]
    Read {
        /// Its path below `/proc/sys`.
        key: String,
        /// Why.
        source: io::Error,
    },
    /// A value cannot be written.
    #[error(
        "cannot set the sysctl {key} to {value} below {}: {source}. In a container, mount the node's /proc/sys/net \
         elsewhere, writable, and name the place with --proc-sys", proc_sys.display()
    )]
    Write {
        /// Its path below `proc_sys`.
        key: String,
        /// Where it was written.
        proc_sys: PathBuf,
        /// The value.
        value: String,
        /// Why.
        source: io::Error,
    },
    /// A value is not the number that it should be.
    #[error("the sysctl {key} is {value:?}, not a number")]
    Value {
        /// Its path below `/proc/sys`.
        key: String,
        /// What was read.
        value: String,
    },
    /// The record cannot be kept, so nothing is changed.
    #[error("cannot keep the record of changed sysctls in {path}: {source}", path = path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The record is not what we wrote.
    #[error(
        "the record of changed sysctls in {path} is broken: {source}. Look at the rp_filter values of this node, then \
         remove the file", path = path.display()
    )]
    Broken {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

/// Reads a value, without the line's end. The key is the path below `/proc/sys`, with slashes (a device's name may
/// have dots).
///
/// # Errors
/// There is no such sysctl in this namespace, or it cannot be read.
pub fn read(key: &str) -> Result<String, Error> {
    // The kernel answers for the namespace of the thread that asks: never from a pool of threads.
    match fs::read_to_string(Path::new(DEFAULT_PROC_SYS).join(key)) {
        Ok(value) => Ok(value.trim_end().to_owned()),
        Err(source) => Err(Error::Read { key: key.to_owned(), source }),
    }
}

fn rp_filter_key(device: &str) -> String {
    format!("net/ipv4/conf/{device}/rp_filter")
}

fn accept_local_key(device: &str) -> String {
    format!("net/ipv4/conf/{device}/accept_local")
}

fn read_number(key: &str) -> Result<u8, Error> {
    let value = read(key)?;
    value.parse().map_err(|_| Error::Value { key: key.to_owned(), value })
}

/// The reverse-path filter that is in force on a device: the larger of its own value and that of `all`.
///
/// # Errors
/// The device does not exist, or the value cannot be read.
pub fn rp_filter(device: &str) -> Result<u8, Error> {
    Ok(read_number(&rp_filter_key("all"))?.max(read_number(&rp_filter_key(device))?))
}

/// Whether a device forwards IPv4 packets that come in on it.
///
/// # Errors
/// The device does not exist, or the value cannot be read.
pub fn forwards(device: &str) -> Result<bool, Error> {
    Ok(read_number(&format!("net/ipv4/conf/{device}/forwarding"))? != 0)
}

/// Whether netfilter's IPv4 chains see the frames that this bridge only bridges: `br_netfilter` is there, and asked
/// to by its sysctl or by the bridge itself.
///
/// # Errors
/// The value is there but cannot be read.
pub fn bridges_call_iptables(bridge: &Interface) -> Result<bool, Error> {
    match read_number("net/bridge/bridge-nf-call-iptables") {
        Ok(value) => Ok(value != 0 || bridge.calls_iptables),
        Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// A value that was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Path below `/proc/sys`.
    pub key: String,
    /// Before.
    pub from: String,
    /// After.
    pub to: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} -> {}", self.key, self.from, self.to)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    original: String,
    ours: String,
}

type Entries = BTreeMap<String, Entry>;

/// The sysctls that we have changed, and what they were.
#[derive(Clone, Debug)]
pub struct Record {
    directory: PathBuf,
    proc_sys: PathBuf,
}

impl Record {
    /// The record in this directory, which need not exist yet.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), proc_sys: DEFAULT_PROC_SYS.into() }
    }

    /// The same record, but values are written below this path.
    #[must_use]
    pub fn written_below(self, proc_sys: impl Into<PathBuf>) -> Self {
        Self { proc_sys: proc_sys.into(), ..self }
    }

    /// Makes the reverse-path filter loose on those of the devices where it is strict; says what was changed.
    ///
    /// # Errors
    /// A value cannot be read or written, or the record not kept; devices before it in the list are done.
    pub fn loosen(&self, devices: &[&str]) -> Result<Vec<Change>, Error> {
        let mut changes = Vec::new();
        for device in devices {
            if rp_filter(device)? != STRICT {
                continue;
            }
            // 2 is the larger of 1 and 2, so it holds whatever `all` says.
            changes.push(self.change(rp_filter_key(device), LOOSE)?);
        }
        Ok(changes)
    }

    /// Lets packets from this node's own addresses come in on `lo`: answers to its own processes, which packets put there.
    /// No other host's packet comes in on it.
    ///
    /// # Errors
    /// As for [`Record::loosen`].
    pub fn open_loopback(&self) -> Result<Vec<Change>, Error> {
        let mut changes = self.loosen(&["lo"])?;
        let accepts = |device| read_number(&accept_local_key(device));
        if accepts("all")?.max(accepts("lo")?) == 0 {
            changes.push(self.change(accept_local_key("lo"), 1)?);
        }
        Ok(changes)
    }

    fn change(&self, key: String, to: u8) -> Result<Change, Error> {
        let (from, to) = (read(&key)?, to.to_string());
        let mut entries = self.load()?;
        entries.insert(key.clone(), Entry { original: from.clone(), ours: to.clone() });
        // First the record: if we are stopped between the two, there is nothing to restore, and restore sees that.
        self.save(&entries)?;
        self.write(&key, &to)?;
        Ok(Change { key, from, to })
    }

    /// Puts back what was changed and still is as we left it, and removes the record; says what was changed.
    ///
    /// # Errors
    /// A value cannot be written; the record is kept then.
    pub fn restore(&self) -> Result<Vec<Change>, Error> {
        let mut changes = Vec::new();
        for (key, Entry { original, ours }) in self.load()? {
            // A device that is gone took its values along; a value that differs is someone else's by now.
            if read(&key).is_ok_and(|value| value == ours) {
                self.write(&key, &original)?;
                changes.push(Change { key, from: ours, to: original });
            }
        }
        match fs::remove_file(self.path()) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(self.error(source)),
            _ => {}
        }
        // Ours alone if it is empty; if not, someone uses it.
        let _ = fs::remove_dir(&self.directory);
        Ok(changes)
    }

    fn write(&self, key: &str, value: &str) -> Result<(), Error> {
        fs::write(self.proc_sys.join(key), value).map_err(|source| Error::Write {
            key: key.to_owned(),
            proc_sys: self.proc_sys.clone(),
            value: value.to_owned(),
            source,
        })
    }

    fn path(&self) -> PathBuf {
        self.directory.join(RECORD)
    }

    fn error(&self, source: io::Error) -> Error {
        Error::Record { path: self.path(), source }
    }

    fn load(&self) -> Result<Entries, Error> {
        match fs::read(self.path()) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map_err(|source| Error::Broken { path: self.path(), source })
            }
            Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(Entries::new()),
            Err(source) => Err(self.error(source)),
        }
    }

    fn save(&self, entries: &Entries) -> Result<(), Error> {
        // A reader, or a crash, meets the old file or the new one.
        let replace = || {
            fs::create_dir_all(&self.directory)?;
            let draft = self.directory.join(format!("{RECORD}.new"));
            let mut file = fs::File::create(&draft)?;
            file.write_all(&serde_json::to_vec_pretty(entries)?)?;
            file.sync_all()?;
            fs::rename(draft, self.path())
        };
        replace().map_err(|source| self.error(source))
    }
}
