//! Where maps and links are pinned, so that the datapath outlives the agent.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Counts up whenever the layout of a map changes in a way that an older or newer agent would misread. Maps of
/// another layout lie in a directory of their own and are never opened.
pub const LAYOUT: u32 = 3;

/// The default of `--bpffs`.
pub const DEFAULT_DIRECTORY: &str = "/sys/fs/bpf/reweave-lb";

/// The directory of one agent's pins.
#[derive(Clone, Debug)]
pub struct Pins {
    root: PathBuf,
}

impl Pins {
    /// Pins below `root`, which must be on a mounted bpffs.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The directory that holds all of it.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The maps of this layout.
    pub fn maps(&self) -> PathBuf {
        self.root.join(format!("maps-v{LAYOUT}"))
    }

    /// Directories of maps of other layouts: an agent of another version left them.
    ///
    /// # Errors
    /// The directory of pins cannot be read.
    pub fn other_layouts(&self) -> io::Result<Vec<PathBuf>> {
        let ours = self.maps();
        let entries = fs::read_dir(&self.root)?;
        let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
        let is_maps = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("maps-v"))
        };
        Ok(paths.into_iter().filter(|path| is_maps(path) && *path != ours).collect())
    }

    /// The TCX links, one file for each interface and direction.
    pub fn links(&self) -> PathBuf {
        self.root.join("links")
    }
}
