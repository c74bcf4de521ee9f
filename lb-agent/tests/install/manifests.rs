//! What is drawn in `deploy/manifests`, for a server that refuses what it does not know.

use crate::world::{World, manifests, show};
use std::fs;
use std::path::PathBuf;

/// `install.yaml` of the directory and of those below.
fn drawn() -> Vec<PathBuf> {
    let below = fs::read_dir(manifests()).unwrap().map(|entry| entry.unwrap().path());
    let directories = below.filter(|path| path.is_dir()).chain([manifests()]);
    let mut files: Vec<_> = directories.map(|directory| directory.join("install.yaml")).collect();
    files.sort();
    files
}

#[test]
fn a_strict_server_takes_every_object() {
    let Some(world) = World::new() else { return };
    let strictly = |words: &[&str]| {
        let trial = ["apply", "--server-side", "--dry-run=server", "--validate=strict"];
        world.plane.kubectl(&[&trial, words].concat())
    };
    let files = drawn();
    assert!(files.iter().any(|file| file.ends_with("everything/install.yaml")), "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let objects = text.lines().filter(|line| line.starts_with("kind: ")).count();
        let said = strictly(&["--filename", show(&file)]).unwrap();
        assert_eq!(said.lines().count(), objects, "{}: {said}", file.display());
    }

    // Strict it is, about Kubernetes' kinds and about the operator's.
    for (kind, good, bad) in [
        ("DaemonSet", "priorityClassName:", "priorityClass:"),
        ("PodMonitor", "podMetricsEndpoints:", "podMetricEndpoints:"),
        ("ValidatingAdmissionPolicy", "!variables.isUpdate ||", "!variables.isUpdated ||"),
    ] {
        let text = fs::read_to_string(manifests().join("everything/install.yaml")).unwrap();
        let object =
            text.split("\n---\n").find(|object| object.contains(&format!("\nkind: {kind}\n"))).unwrap();
        let broken = object.replace(good, bad);
        assert_ne!(broken, object);
        let file = world.testbed.directory().join("broken.yaml");
        fs::write(&file, broken).unwrap();
        strictly(&["--filename", show(&file)]).unwrap_err();
    }
}

#[test]
fn kubectl_installs_and_removes_by_kustomization() {
    let Some(world) = World::installed() else { return };
    let (all, file) = (manifests(), manifests().join("install.yaml"));
    let names = || world.kubectl(&["get", "--filename", show(&file), "--ignore-not-found", "--output=name"]);
    let installed = names();
    assert!(installed.contains("daemonset.apps/reweave-lb\n"), "{installed}");
    // A policy whose expressions do not fit the objects' types says so in its status.
    let warnings = "--output=jsonpath={.items[*].status.typeChecking.expressionWarnings}";
    assert_eq!(world.kubectl(&["get", "validatingadmissionpolicies", warnings]), "");

    world.kubectl(&["apply", "--kustomize", show(&all.join("monitoring"))]);
    world.kubectl(&["apply", "--kustomize", show(&all.join("cleanup"))]);
    let arguments = "--output=jsonpath={.spec.template.spec.containers[0].args}";
    let daemon_set = ["get", "--namespace=kube-system", "daemonset", "reweave-lb", arguments];
    assert_eq!(world.kubectl(&daemon_set), r#"["cleanup","--stay"]"#);

    world.kubectl(&["delete", "--wait", "--kustomize", show(&all.join("monitoring"))]);
    assert_eq!(names(), "");
}
