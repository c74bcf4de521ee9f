//! Objects from a file or a directory of ordinary manifests: YAML with any number of documents, or JSON; single
//! objects, `kind: List`, or `ServiceList` and the like.
//!
//! A directory is read with its subdirectories. Two of them are special: what agents report goes there (see
//! [`crate::report::manifests`]), and lies over the manifests when they are read again:
//! - `nodes/` has Nodes with the annotations of ours, merged into a Node of that name or making one;
//! - `status/` has Services of which only the status counts.
//!
//! Reading is all or nothing: one broken file and the caller keeps the state that it has.

mod document;
mod files;

use self::document::{Document, Kinds};
use super::Objects;
use crate::model::{ADDRESSES, Service, WEAVE};
use crate::policy::node;
use k8s_openapi::api::core::v1 as core;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The subdirectory of reported Nodes.
pub const NODES: &str = "nodes";
/// The subdirectory of reported statuses.
pub const STATUS: &str = "status";

/// Why manifests cannot be used.
#[derive(Debug, Error)]
pub enum ManifestError {
    /// The file or directory cannot be read at all.
    #[error("manifests {}: {source}", path.display())]
    Unreadable {
        /// As given.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// There is nothing to read: more likely a mistake than the wish to serve nothing.
    #[error("manifests {}: no .yaml, .yml or .json file in it", path.display())]
    Empty {
        /// As given.
        path: PathBuf,
    },
    /// Some files are broken; all that was found, one in a line.
    #[error("{}", faults.iter().map(Fault::to_string).collect::<Vec<_>>().join("\n"))]
    Broken {
        /// In the order of files and lines.
        faults: Vec<Fault>,
    },
}

/// One thing that is wrong in one file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// Where it is.
    pub at: Place,
    /// What it is.
    pub reason: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, reason } = self;
        write!(f, "{at}: {reason}")
    }
}

/// A place in a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1; none where the whole file is meant.
    pub line: Option<u64>,
    /// The line that the document begins with, if that is another.
    pub document: Option<u64>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ": line {line}")?;
        }
        if let Some(document) = self.document.filter(|document| Some(*document) != self.line) {
            write!(f, " (document from line {document})")?;
        }
        Ok(())
    }
}

/// Reads a file or a directory once.
///
/// # Errors
/// As [`Reader::read`].
pub fn read(path: &Path) -> Result<Objects, ManifestError> {
    Reader::default().read(path)
}

/// Reads again and again, and parses only the files whose text has changed.
#[derive(Default)]
pub struct Reader {
    parsed: BTreeMap<PathBuf, Parsed>,
}

/// A file's text and what was in it.
struct Parsed {
    text: String,
    kinds: Kinds,
    faults: Vec<Fault>,
}

impl Reader {
    /// Reads a file or a directory.
    ///
    /// # Errors
    /// Names every broken file, and every object that is defined twice with both places.
    pub fn read(&mut self, path: &Path) -> Result<Objects, ManifestError> {
        let files = files::find(path)?;
        let mut faults = self.parse([&files.base, &files.nodes, &files.status].into_iter().flatten());
        let base: Vec<&Kinds> = self.kinds(&files.base).collect();
        let mut nodes = unique(base.iter().flat_map(|kinds| &kinds.nodes), &mut faults);
        let mut services = unique(base.iter().flat_map(|kinds| &kinds.services), &mut faults);
        let slices = unique(base.iter().flat_map(|kinds| &kinds.slices), &mut faults);
        let reported = unique(self.kinds(&files.nodes).flat_map(|kinds| &kinds.nodes), &mut faults);
        lay_nodes_over(&mut nodes, reported);
        let reported = unique(self.kinds(&files.status).flat_map(|kinds| &kinds.services), &mut faults);
        lay_status_over(&mut services, &reported);
        if !faults.is_empty() {
            faults.sort();
            return Err(ManifestError::Broken { faults });
        }
        Ok(Objects {
            nodes: nodes.values().map(node::parse).collect(),
            services: services.into_values().collect(),
            slices: slices.into_values().collect(),
            ignored: base.iter().map(|kinds| kinds.ignored).sum(),
        })
    }

    /// Brings what is parsed up to these files, and answers with all that is wrong in them.
    fn parse<'p>(&mut self, files: impl Iterator<Item = &'p PathBuf>) -> Vec<Fault> {
        let mut old = std::mem::take(&mut self.parsed);
        let mut faults = Vec::new();
        for path in files {
            let text = match files::text(path) {
                Ok(Some(text)) => text,
                Ok(None) => continue,
                Err(fault) => {
                    faults.push(fault);
                    continue;
                }
            };
            let parsed = old.remove(path).filter(|old| old.text == text).unwrap_or_else(|| {
                let (kinds, faults) = document::read(path, &text);
                Parsed { text, kinds, faults }
            });
            faults.extend_from_slice(&parsed.faults);
            self.parsed.insert(path.clone(), parsed);
        }
        faults
    }

    fn kinds(&self, files: &[PathBuf]) -> impl Iterator<Item = &Kinds> {
        files.iter().filter_map(|path| self.parsed.get(path)).map(|parsed| &parsed.kinds)
    }
}

/// Namespace (empty for Nodes) and name.
type Key = (String, String);

/// By key; an object that was there before is a fault that names both places.
fn unique<'d, T: Clone + 'd>(
    documents: impl Iterator<Item = &'d Document<T>>,
    faults: &mut Vec<Fault>,
) -> BTreeMap<Key, T> {
    let mut first: BTreeMap<Key, &Document<T>> = BTreeMap::new();
    for document in documents {
        match first.entry((document.namespace.clone(), document.name.clone())) {
            Entry::Vacant(entry) => {
                entry.insert(document);
            }
            Entry::Occupied(entry) => {
                let Document { kind, namespace, name, at, .. } = document;
                let slash = if namespace.is_empty() { "" } else { "/" };
                let reason =
                    format!("{kind} {namespace}{slash}{name} is already defined in {}", entry.get().at);
                faults.push(Fault { at: at.clone(), reason });
            }
        }
    }
    first.into_iter().map(|(key, document)| (key, document.object.clone())).collect()
}

/// Only our two annotations count, so that a report can never change what else a Node says.
fn lay_nodes_over(nodes: &mut BTreeMap<Key, core::Node>, reported: BTreeMap<Key, core::Node>) {
    for (key, report) in reported {
        let node = nodes.entry(key).or_insert_with_key(|(_, name)| {
            let mut node = core::Node::default();
            node.metadata.name = Some(name.clone());
            node
        });
        let annotations = node.metadata.annotations.get_or_insert_default();
        let published = report.metadata.annotations.unwrap_or_default();
        let ours = published.into_iter().filter(|(name, _)| name == ADDRESSES || name == WEAVE);
        annotations.extend(ours);
    }
}

/// A status of a Service that is no longer there is left over, and says nothing.
fn lay_status_over(services: &mut BTreeMap<Key, Service>, reported: &BTreeMap<Key, Service>) {
    for (key, report) in reported {
        if let Some(service) = services.get_mut(key) {
            (service.shown, service.is_shown_by_proxy) = (report.shown, report.is_shown_by_proxy);
        }
    }
}

#[cfg(test)]
mod tests;
