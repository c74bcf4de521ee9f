//! Which files count, and their text.

use super::{Fault, ManifestError, NODES, Place, STATUS};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The manifest files below a path, each list sorted.
#[derive(Debug, Default)]
pub(super) struct Files {
    pub(super) base: Vec<PathBuf>,
    pub(super) nodes: Vec<PathBuf>,
    pub(super) status: Vec<PathBuf>,
}

/// A file stands for itself, whatever its name.
pub(super) fn find(path: &Path) -> Result<Files, ManifestError> {
    let unreadable = |source| ManifestError::Unreadable { path: path.to_owned(), source };
    if !fs::metadata(path).map_err(unreadable)?.is_dir() {
        return Ok(Files { base: vec![path.to_owned()], ..Files::default() });
    }
    let mut all = Vec::new();
    collect(path, &mut all).map_err(unreadable)?;
    if all.is_empty() {
        return Err(ManifestError::Empty { path: path.to_owned() });
    }
    all.sort();
    let (nodes, rest) = all.into_iter().partition(|file| file.starts_with(path.join(NODES)));
    let (status, base) = Vec::into_iter(rest).partition(|file| file.starts_with(path.join(STATUS)));
    Ok(Files { base, nodes, status })
}

/// Symbolic links lead to files (as in a mounted ConfigMap), never to directories, which might form a circle.
fn collect(directory: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if entry.file_type()?.is_dir() {
            collect(&path, found)?;
        } else if is_manifest(&path) && fs::metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
            found.push(path);
        }
    }
    Ok(())
}

/// By its ending; `*~` and `*.swp` of editors have others.
fn is_manifest(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml" || ending == "json")
}

/// None if the file has gone since it was found: then it is as if it had not been there.
pub(super) fn text(path: &Path) -> Result<Option<String>, Fault> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let at = Place { file: path.to_owned(), line: None, document: None };
            Err(Fault { at, reason: error.to_string() })
        }
    }
}
