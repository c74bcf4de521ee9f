//! A testbed with an empty cluster, and what can be installed in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use testbed::kubernetes::{Binaries, Bound, ControlPlane, Options as PlaneOptions};
use testbed::{Options, Testbed, skip};

/// How long what must come about may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// As the chart has it, and the manifests.
pub(crate) const NAMESPACE: &str = "kube-system";
/// Of the DaemonSet, its ServiceAccount and the release.
pub(crate) const NAME: &str = "reweave-lb";

/// The kinds of Prometheus' operator that the chart has, with the fields that it sets, so that a strict server finds others.
const MONITORING: &str = include_str!("monitoring-crds.yaml");

/// See the module. Everything goes when it is dropped, in this order.
pub(crate) struct World {
    pub(crate) plane: ControlPlane,
    pub(crate) testbed: Testbed,
}

impl World {
    /// With Nodes, and with the kinds that the chart's optional parts need; none if this machine cannot have Kubernetes.
    pub(crate) fn new() -> Option<Self> {
        let binaries = skip::unless(Binaries::find())?;
        let agent = Some(env!("CARGO_BIN_EXE_lb-agent").into());
        let testbed = Testbed::weave(Options { agent, ..Options::default() }).unwrap();
        let plane = ControlPlane::start(&testbed, binaries, PlaneOptions::default()).unwrap();
        plane.add_nodes(&testbed).unwrap();
        plane.apply(MONITORING).unwrap();
        plane
            .kubectl(&[
                "wait",
                "--for=condition=Established",
                "--timeout=60s",
                "customresourcedefinitions",
                "--all",
            ])
            .unwrap();
        Some(Self { plane, testbed })
    }

    /// With all that `deploy/manifests` has.
    pub(crate) fn installed() -> Option<Self> {
        let world = Self::new()?;
        world.kubectl(&["apply", "--kustomize", show(&manifests())]);
        Some(world)
    }

    pub(crate) fn kubectl(&self, words: &[&str]) -> String {
        self.plane.kubectl(words).unwrap()
    }

    /// The kubeconfig that the agent has in the DaemonSet's pod on a node.
    pub(crate) fn kubeconfig_on(&self, node: &str) -> PathBuf {
        let pod = self.plane.add_daemon_pod(NAMESPACE, NAME, node).unwrap();
        self.plane.service_account(NAMESPACE, NAME, Bound::Pod(&pod)).unwrap()
    }
}

pub(crate) fn chart() -> PathBuf {
    deploy().join("chart/reweave-lb")
}

pub(crate) fn manifests() -> PathBuf {
    deploy().join("manifests")
}

fn deploy() -> PathBuf {
    fs::canonicalize(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy")).unwrap()
}

pub(crate) fn show(path: &Path) -> &str {
    path.to_str().unwrap()
}
