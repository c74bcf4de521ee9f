//! One agent for each datapath.

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

/// Held as long as the agent lives; the kernel gives it back when the process ends, however it ends.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
}

/// Why there is no lock.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another agent has it.
    #[error("another agent runs this datapath (process {process}, by {path}): stop it first")]
    Taken {
        /// What it wrote about itself.
        process: String,
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be had.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

impl Lock {
    /// Takes the lock below the state directory.
    ///
    /// # Errors
    /// Another process holds it, or the directory is not writable.
    pub fn take(state: &Path) -> Result<Self, LockError> {
        let path = state.join("agent.lock");
        let refused = |source| LockError::File { path: path.clone(), source };
        fs::create_dir_all(state).map_err(refused)?;
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(refused)?;
        let mut file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut process = String::new();
                file.read_to_string(&mut process).map_err(refused)?;
                return Err(LockError::Taken { process: process.trim().to_owned(), path });
            }
            Err((_, errno)) => return Err(refused(errno.into())),
        };
        file.set_len(0).and_then(|()| file.rewind()).map_err(refused)?;
        writeln!(file, "{}", std::process::id()).map_err(refused)?;
        Ok(Self { _file: file })
    }
}
