//! Archives that the kernel unpacks as its first root file system: cpio's "newc" format
//! (Documentation/driver-api/early-userspace/buffer-format.rst). The kernel takes several, one behind the other.

use anyhow::{Context as _, Result};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;
/// After the last entry.
const TRAILER: &str = "TRAILER!!!";
/// Links to the directory of the same name in `/usr`.
pub(super) const MERGED: [&str; 4] = ["/bin", "/sbin", "/lib", "/lib64"];
/// Headers, names and contents are padded to this.
const ALIGN: usize = 4;

/// An archive that is being written. [`Archive::finish`] completes it.
pub(super) struct Archive<W> {
    out: W,
    directories: BTreeSet<PathBuf>,
    inode: u32,
}

impl<W: Write> Archive<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, directories: BTreeSet::new(), inode: 0 }
    }

    /// A directory and those above it.
    fn directory(&mut self, path: &Path) -> Result<()> {
        let mut above: Vec<_> = path.ancestors().filter(|path| path.parent().is_some()).collect();
        above.reverse();
        for directory in above {
            if self.directories.insert(directory.to_owned()) {
                self.entry(directory, DIRECTORY, (0, 0), &[])?;
            }
        }
        Ok(())
    }

    /// A file with these permissions; `path` is absolute.
    pub(super) fn file(&mut self, path: &Path, permissions: u32, content: &[u8]) -> Result<()> {
        self.parent(path)?;
        self.entry(path, FILE | permissions, (0, 0), content)
    }

    /// What a file of this machine contains, executable.
    pub(super) fn copy(&mut self, path: &Path, from: &Path) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.file(path, 0o755, &content)
    }

    /// A symbolic link.
    pub(super) fn symlink(&mut self, path: &Path, target: &str) -> Result<()> {
        self.parent(path)?;
        self.entry(path, SYMLINK, (0, 0), target.as_bytes())
    }

    /// A character device.
    pub(super) fn device(&mut self, path: &Path, number: (u32, u32)) -> Result<()> {
        self.parent(path)?;
        self.entry(path, CHARACTER_DEVICE, number, &[])
    }

    /// Completes it.
    pub(super) fn finish(mut self) -> Result<W> {
        self.entry(Path::new(TRAILER), 0, (0, 0), &[])?;
        Ok(self.out)
    }

    fn parent(&mut self, path: &Path) -> Result<()> {
        let path = merged(path);
        path.parent().map_or(Ok(()), |parent| self.directory(parent))
    }

    fn entry(&mut self, path: &Path, mode: u32, device: (u32, u32), content: &[u8]) -> Result<()> {
        let path = merged(path);
        let name = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
        let name = name.trim_start_matches('/');
        self.inode += 1;
        let size = u32::try_from(content.len()).with_context(|| format!("{name} is too large"))?;
        let name_size = u32::try_from(name.len() + 1)?;
        let (user, group, links, modified) = (0, 0, 1, 0);
        let (disk, checksum) = ((0, 0), 0);
        let fields = [
            self.inode, mode, user, group, links, modified, size, disk.0, disk.1, device.0, device.1,
            name_size, checksum,
        ];
        let mut header = String::from("070701");
        header.extend(fields.map(|field| format!("{field:08X}")));
        self.padded(&[header.as_bytes(), name.as_bytes(), &[0]].concat())?;
        self.padded(content)
    }

    fn padded(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes)?;
        let padding = bytes.len().next_multiple_of(ALIGN) - bytes.len();
        Ok(self.out.write_all(&[0; ALIGN][..padding])?)
    }
}

/// Where a file is where `/bin` and its kin are links into `/usr`, as [`MERGED`] makes them.
fn merged(path: &Path) -> Cow<'_, Path> {
    if MERGED.iter().any(|top| path.starts_with(top) && path != Path::new(top)) {
        return Cow::Owned(Path::new("/usr").join(path.strip_prefix("/").unwrap_or(path)));
    }
    Cow::Borrowed(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_where_a_merged_usr_has_them() {
        for (path, place) in [
            ("/bin/sh", "/usr/bin/sh"),
            ("/lib64/ld.so", "/usr/lib64/ld.so"),
            ("/lib", "/lib"),
            ("/etc/passwd", "/etc/passwd"),
        ] {
            assert_eq!(merged(Path::new(path)), Path::new(place));
        }
    }

    #[test]
    fn an_entry_is_as_the_format_says() {
        let mut archive = Archive::new(Vec::new());
        archive.file(Path::new("/a/b"), 0o755, b"hello").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % ALIGN, 0);
        let text = String::from_utf8_lossy(&bytes);
        let (directory, rest) = text.split_at(112);
        assert!(directory.starts_with("07070100000001000041ED"), "{directory}");
        assert!(directory.ends_with("a\0"), "{directory}");
        assert!(rest.starts_with("07070100000002000081ED"), "{rest}");
        assert!(rest.contains("a/b\0\0\0hello\0\0\0"), "{rest}");
        assert!(rest.contains(TRAILER), "{rest}");
    }
}
