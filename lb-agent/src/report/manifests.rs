//! Reports into a directory of manifests, as files that the other agents read (see [`crate::source::manifests`]).
//!
//! A file appears or changes at once (by renaming) and is not touched when it already says the same, so that agents
//! that watch the directory do not wake each other for nothing.

use crate::model::{ADDRESSES, WEAVE};
use crate::source::manifests::{NODES, STATUS};
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a report could not be written.
#[derive(Debug, Error)]
pub enum ReportError {
    /// The name would lead to another file.
    #[error("{name:?} cannot be the name of a file")]
    Name {
        /// Of the Node, Service or namespace.
        name: String,
    },
    /// The content has no YAML form.
    #[error("{}: {source}", path.display())]
    Encode {
        /// The file.
        path: PathBuf,
        /// What the encoder says.
        source: serde_saphyr::SerializeError,
    },
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// Publishes a node: the values of the addresses annotation and of the overlay annotation, if it has an overlay.
///
/// Answers whether the file changed.
///
/// # Errors
/// When the file cannot be written; the old one is whole then.
pub fn write_node(dir: &Path, name: &str, addresses: &str, weave: Option<&str>) -> Result<bool, ReportError> {
    let mut annotations = json!({ ADDRESSES: addresses });
    if let Some(weave) = weave {
        annotations[WEAVE] = weave.into();
    }
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": name, "annotations": annotations },
    });
    check_name(name)?;
    write(&dir.join(NODES).join(format!("{name}.yaml")), &node)
}

/// Shows an address in a Service's status, or none.
///
/// None is written too, since the Service's own manifest may show one. Answers whether the file changed.
///
/// # Errors
/// When the file cannot be written; the old one is whole then.
pub fn write_status(
    dir: &Path,
    namespace: &str,
    name: &str,
    address: Option<Ipv4Addr>,
) -> Result<bool, ReportError> {
    let ingress = address.map(|address| json!({ "ip": address, "ipMode": "Proxy" }));
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "namespace": namespace, "name": name },
        "status": { "loadBalancer": { "ingress": ingress.into_iter().collect::<Vec<_>>() } },
    });
    check_name(namespace)?;
    check_name(name)?;
    write(&dir.join(STATUS).join(format!("{namespace}.{name}.yaml")), &service)
}

/// Manifests may name anything; a path must not leave its directory, nor be hidden.
fn check_name(name: &str) -> Result<(), ReportError> {
    let usual = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let ok = !name.is_empty() && name.len() <= 253 && !name.starts_with('.') && name.chars().all(usual);
    if ok { Ok(()) } else { Err(ReportError::Name { name: name.to_owned() }) }
}

fn write(path: &Path, object: &Value) -> Result<bool, ReportError> {
    let text = serde_saphyr::to_string(object)
        .map_err(|source| ReportError::Encode { path: path.to_owned(), source })?;
    replace(path, &text).map_err(|source| ReportError::Write { path: path.to_owned(), source })
}

fn replace(path: &Path, text: &str) -> io::Result<bool> {
    match fs::read(path) {
        Ok(old) if old == text.as_bytes() => return Ok(false),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(directory)?;
    // Hidden, so that nobody reads it half written; with our process, so that two agents do not share it.
    let temporary = directory.join(format!(".{}.{}", name.display(), std::process::id()));
    let written = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    }
    written.map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::manifests::read;
    use std::os::unix::fs::MetadataExt as _;
    use tempfile::TempDir;

    fn files(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_node_is_read_back_as_written_and_written_once() {
        let dir = TempDir::new().unwrap();
        let weave = Some("10.32.0.1,fe:00:00:00:00:01");
        assert!(write_node(dir.path(), "node-1", "192.0.2.1,192.0.2.9", weave).unwrap());
        let file = dir.path().join("nodes/node-1.yaml");
        let inode = fs::metadata(&file).unwrap().ino();
        assert!(!write_node(dir.path(), "node-1", "192.0.2.1,192.0.2.9", weave).unwrap());
        assert_eq!(fs::metadata(&file).unwrap().ino(), inode, "not written again");
        assert_eq!(files(&dir.path().join("nodes")), ["node-1.yaml"], "no temporary file stays");

        let objects = read(dir.path()).unwrap();
        let (node, _) = &objects.nodes[0];
        assert_eq!(node.addresses, [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 9)]);
        assert_eq!(node.weave_mac.as_ref().unwrap().to_string(), "fe:00:00:00:00:01");

        assert!(write_node(dir.path(), "node-1", "", None).unwrap());
        let objects = read(dir.path()).unwrap();
        assert_eq!((objects.nodes[0].0.addresses.len(), objects.nodes[0].0.weave_ip), (0, None));
    }

    #[test]
    fn a_status_is_shown_and_cleared() {
        let dir = TempDir::new().unwrap();
        let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nstatus: {loadBalancer: {ingress: [{ip: 192.0.2.7}]}}\n";
        fs::write(dir.path().join("web.yaml"), service).unwrap();
        let shown = || read(dir.path()).unwrap().services[0].shown.address();
        assert_eq!(shown(), Some(Ipv4Addr::new(192, 0, 2, 7)));
        let address = Ipv4Addr::new(192, 0, 2, 1);
        assert!(write_status(dir.path(), "default", "web", Some(address)).unwrap());
        assert_eq!(shown(), Some(address));
        let text = fs::read_to_string(dir.path().join("status/default.web.yaml")).unwrap();
        assert!(text.contains("ipMode: Proxy"), "{text}");
        assert!(write_status(dir.path(), "default", "web", None).unwrap());
        assert_eq!(shown(), None);
        assert!(!write_status(dir.path(), "default", "web", None).unwrap());
    }

    #[test]
    fn a_name_never_leaves_its_directory() {
        let dir = TempDir::new().unwrap();
        for name in ["", ".", "..", "../x", "a/b", ".hidden", "a\0b", "a\nb"] {
            assert!(
                matches!(write_node(dir.path(), name, "", None), Err(ReportError::Name { .. })),
                "{name:?}"
            );
            assert!(write_status(dir.path(), name, "x", None).is_err(), "{name:?}");
            assert!(write_status(dir.path(), "x", name, None).is_err(), "{name:?}");
        }
        assert_eq!(files(dir.path()), [""; 0]);
    }
}
