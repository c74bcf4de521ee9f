//! The chart, drawn: what `kubectl apply -k` and `-f` take from `deploy/manifests`.

use crate::sh;
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use testbed::kubernetes::{Binaries, Program, Unavailable};

/// Where `helm install` and we put it.
const NAMESPACE: &str = "kube-system";

const FILE: &str = "install.yaml";

/// A directory of `deploy/manifests` with the chart drawn in one way, and how.
struct Variant {
    directory: &'static str,
    /// A file of the chart's `ci`; without it, the chart's defaults.
    values: Option<&'static str>,
}

const VARIANTS: [Variant; 4] = [
    Variant { directory: "deploy/manifests", values: None },
    Variant { directory: "deploy/manifests/monitoring", values: Some("monitoring") },
    Variant { directory: "deploy/manifests/cleanup", values: Some("cleanup") },
    // For tests: nobody wants all of it.
    Variant { directory: "deploy/manifests/everything", values: Some("everything") },
];

impl Variant {
    /// Relative to the workspace.
    fn file(&self) -> String {
        format!("{}/{FILE}", self.directory)
    }

    /// What `helm install` would create.
    fn draw(&self, helm: &Path) -> Result<String> {
        let mut command = Command::new(helm);
        command.args(["template", "reweave-lb"]).arg(chart()).args([
            "--namespace",
            NAMESPACE,
            "--api-versions",
            "monitoring.coreos.com/v1",
        ]);
        if let Some(values) = self.values {
            command.arg("--values").arg(chart().join("ci").join(format!("{values}-values.yaml")));
        }
        let drawn = sh::output(&mut command)?;
        // Nobody manages with Helm what is applied by kubectl.
        let drawn =
            drawn.replace("app.kubernetes.io/managed-by: Helm\n", "app.kubernetes.io/managed-by: kubectl\n");
        Ok(format!("# Drawn from deploy/chart/reweave-lb by `cargo xtask generate`. Do not edit.\n{drawn}"))
    }
}

fn chart() -> PathBuf {
    sh::workspace().join("deploy/chart/reweave-lb")
}

/// What draws: Helm, and the kustomize in kubectl. Of the releases that tests on a Kubernetes API use.
pub(crate) fn programs() -> Result<Binaries, Unavailable> {
    Binaries::find_only(&[Program::Helm, Program::Kubectl])
}

/// Every file that is drawn, relative to the workspace, with its content.
pub(crate) fn all(programs: &Binaries) -> Result<Vec<(String, String)>> {
    let helm = programs.path(Program::Helm);
    VARIANTS.iter().map(|variant| Ok((variant.file(), variant.draw(helm)?))).collect()
}

/// What can be told of the chart without a cluster: Helm finds no fault in it, refuses what is misspelt, and kustomize
/// makes of each directory what is drawn there.
pub(crate) fn check(programs: &Binaries) -> Result<()> {
    let helm = programs.path(Program::Helm);
    for Variant { values, .. } in &VARIANTS {
        let mut command = Command::new(helm);
        command.args(["lint", "--strict", "--quiet"]).arg(chart());
        if let Some(values) = values {
            command.arg("--values").arg(chart().join("ci").join(format!("{values}-values.yaml")));
        }
        sh::run(&mut command)?;
    }
    same_version()?;
    refuses(helm, "agent.uplnk=eth0", "uplnk")?;
    refuses(helm, "agent.max-flows=many", "max-flows")?;
    refuses(helm, "tolerance=1", "tolerance")?;
    refuses(helm, "podMonitor.enabled=true", "agent.listen")?;
    let kubectl = programs.path(Program::Kubectl);
    for variant in &VARIANTS {
        let directory = sh::workspace().join(variant.directory);
        if !directory.join("kustomization.yaml").is_file() {
            continue;
        }
        let built = sh::output(Command::new(kubectl).arg("kustomize").arg(&directory))?;
        ensure!(
            in_order(&objects(&built)?) == in_order(&drawn(variant.directory)?),
            "`kubectl apply -k {}` would not apply what is in its install.yaml",
            variant.directory
        );
    }
    Ok(())
}

/// The objects that are drawn in a directory of `deploy/manifests`.
pub(crate) fn drawn(directory: &str) -> Result<Vec<Value>> {
    let file = sh::workspace().join(directory).join(FILE);
    objects(&fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?)
}

/// The objects of a stream of documents.
fn objects(yaml: &str) -> Result<Vec<Value>> {
    let mut documents: Vec<Value> = serde_saphyr::from_multiple(yaml).context("the manifests are no YAML")?;
    documents.retain(|document| !document.is_null());
    ensure!(!documents.is_empty(), "there are no objects in the manifests");
    Ok(documents)
}

/// As text, in an order that does not depend on who has written them.
fn in_order(objects: &[Value]) -> Vec<String> {
    let mut objects: Vec<String> = objects.iter().map(Value::to_string).collect();
    objects.sort_unstable();
    objects
}

/// A mistake in the values must be an error that names it.
fn refuses(helm: &Path, setting: &str, names: &str) -> Result<()> {
    let output = Command::new(helm).arg("template").arg(chart()).args(["--set", setting]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "the chart accepts {setting}");
    ensure!(said.contains(names), "the chart refuses {setting} without naming {names}: {said}");
    Ok(())
}

/// The chart is released with the agent.
fn same_version() -> Result<()> {
    let text = fs::read_to_string(chart().join("Chart.yaml"))?;
    let chart: Value = serde_saphyr::from_str(&text).context("Chart.yaml is no YAML")?;
    for key in ["version", "appVersion"] {
        let found = chart[key].as_str().unwrap_or_default();
        ensure!(found == env!("CARGO_PKG_VERSION"), "Chart.yaml: {key} is {found}, the workspace's is not");
    }
    Ok(())
}
