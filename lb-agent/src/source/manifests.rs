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
use crate::model::{ADDRESSES, EndpointSlice, Service, WEAVE};
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

/// Reads a file or a directory.
///
/// # Errors
/// Names every broken file, and every object that is defined twice with both places.
pub fn read(path: &Path) -> Result<Objects, ManifestError> {
    let files = files::find(path)?;
    let mut faults = Vec::new();
    let mut read = |paths: &[PathBuf]| {
        let mut kinds = Kinds::default();
        for path in paths {
            match files::text(path) {
                Ok(Some(text)) => faults.extend(document::read(path, &text, &mut kinds)),
                Ok(None) => {}
                Err(fault) => faults.push(fault),
            }
        }
        kinds
    };
    let (base, reported_nodes, reported_status) =
        (read(&files.base), read(&files.nodes), read(&files.status));
    let mut nodes = unique(base.nodes, &mut faults);
    let mut services = unique(base.services, &mut faults);
    let slices = unique(base.slices, &mut faults);
    lay_nodes_over(&mut nodes, unique(reported_nodes.nodes, &mut faults));
    lay_status_over(&mut services, unique(reported_status.services, &mut faults));
    if !faults.is_empty() {
        faults.sort();
        return Err(ManifestError::Broken { faults });
    }
    let (nodes, errors): (_, Vec<_>) = nodes.values().map(node::parse).unzip();
    Ok(Objects {
        nodes,
        annotation_errors: errors.into_iter().flatten().collect(),
        services: services.values().map(Service::from).collect(),
        slices: slices.values().map(EndpointSlice::from).collect(),
        ignored: base.ignored,
    })
}

/// Namespace (empty for Nodes) and name.
type Key = (String, String);

/// By key; an object that was there before is a fault that names both places.
fn unique<T>(documents: Vec<Document<T>>, faults: &mut Vec<Fault>) -> BTreeMap<Key, T> {
    let mut objects: BTreeMap<Key, (Place, T)> = BTreeMap::new();
    for Document { kind, namespace, name, at, object } in documents {
        match objects.entry((namespace, name)) {
            Entry::Vacant(entry) => {
                entry.insert((at, object));
            }
            Entry::Occupied(entry) => {
                let (namespace, name) = entry.key();
                let slash = if namespace.is_empty() { "" } else { "/" };
                let reason =
                    format!("{kind} {namespace}{slash}{name} is already defined in {}", entry.get().0);
                faults.push(Fault { at, reason });
            }
        }
    }
    objects.into_iter().map(|(key, (_, object))| (key, object)).collect()
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
fn lay_status_over(services: &mut BTreeMap<Key, core::Service>, reported: BTreeMap<Key, core::Service>) {
    for (key, report) in reported {
        if let Some(service) = services.get_mut(&key) {
            service.status = report.status;
        }
    }
}

#[cfg(test)]
mod tests;
