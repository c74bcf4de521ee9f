//! Kernels, ready to boot, in the cache: `vmlinuz`, and `base.cpio` with busybox, modules and our `init`.

use super::apt::Suite;
use super::cpio::{Archive, MERGED};
use super::kernels::Kernel;
use super::modules;
use crate::sh;
use anyhow::{Context as _, Result};
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

const FLAVOUR: &str = "-cloud-amd64";
/// Counts up when what is kept of a kernel changes.
const RECIPE: u32 = 1;
const INIT: &str = include_str!("init.sh");

/// A kernel that can be booted.
#[derive(Clone, Debug)]
pub(super) struct Image {
    /// As `uname -r` says.
    pub(super) release: String,
    directory: PathBuf,
}

impl Image {
    /// The newest release of a kernel: from the cache, else from Debian.
    ///
    /// # Errors
    /// When Debian cannot be asked and the cache has none.
    pub(super) fn find(cache: &Path, kernel: &Kernel) -> Result<Self> {
        let kept = cache.join(format!("kernels-{RECIPE}"));
        let (suite, release) = match newest(cache, kernel) {
            Ok((suite, release)) => (Some(suite), release),
            Err(error) => {
                let release = newest_kept(&kept, kernel).with_context(|| {
                    format!(
                        "Linux {} cannot be had: {error:#}. Run this once where Debian's archive can be reached, or name \
                         a mirror in {}",
                        kernel.name,
                        super::apt::MIRROR
                    )
                })?;
                sh::say(&format!("{}: taking the cached {release}: {error:#}", kernel.name));
                (None, release)
            }
        };
        let image = Self { directory: kept.join(&release), release };
        if let Some(suite) = suite.filter(|_| !image.directory.is_dir()) {
            sh::say(&format!("{}: fetching {}", kernel.name, image.release));
            image.make(&suite)?;
        }
        Ok(image)
    }

    /// The compressed kernel.
    pub(super) fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// Writes the root file system without what is to be run.
    pub(super) fn write_base(&self, out: &mut impl std::io::Write) -> Result<()> {
        let mut archive = Archive::new(&mut *out);
        for directory in MERGED {
            archive.symlink(Path::new(directory), &format!("usr{directory}"))?;
        }
        archive.device(Path::new("/dev/console"), (5, 1))?;
        archive.file(Path::new("/init"), 0o755, INIT.as_bytes())?;
        let busybox = sh::find_program("busybox").context("busybox is missing")?;
        archive.copy(Path::new("/bin/busybox"), &busybox)?;
        archive.finish()?;
        std::io::copy(&mut File::open(self.directory.join("modules.cpio"))?, out)?;
        Ok(())
    }

    /// The directory appears when it is complete.
    fn make(&self, suite: &Suite) -> Result<()> {
        let unfinished = self.directory.with_file_name(format!("{}.new", self.release));
        let root = unfinished.join("root");
        if unfinished.exists() {
            fs::remove_dir_all(&unfinished)?;
        }
        suite.unpack(&self.release, &root)?;
        let places = [
            root.join("boot").join(format!("vmlinuz-{}", self.release)),
            root.join("usr/lib/modules").join(&self.release).join("vmlinuz"),
        ];
        let kernel = places.iter().find(|place| place.is_file());
        let kernel = kernel.with_context(|| format!("the packages of {} have no kernel", self.release))?;
        fs::copy(kernel, unfinished.join("vmlinuz"))?;
        modules::prepare(&root, &self.release)?;
        let mut archive = Archive::new(BufWriter::new(File::create(unfinished.join("modules.cpio"))?));
        modules::pack(&mut archive, &root, &self.release)?;
        archive.finish()?.into_inner()?.sync_all()?;
        fs::remove_dir_all(&root)?;
        fs::rename(&unfinished, &self.directory)?;
        Ok(())
    }
}

fn newest(cache: &Path, kernel: &Kernel) -> Result<(Suite, String)> {
    let suite = Suite::open(&cache.join("apt"), &kernel.suite)?;
    let release = suite.newest(&kernel.release, FLAVOUR)?;
    Ok((suite, release))
}

fn newest_kept(directory: &Path, kernel: &Kernel) -> Option<String> {
    let entries = fs::read_dir(directory).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names
        .filter(|name| name.starts_with(&kernel.release) && name.ends_with(FLAVOUR))
        .max_by_key(|name| super::apt::numbers(name))
}
