//! What kubelets would write: Nodes, and the Pods that run on them.

use super::control_plane::ControlPlane;
use crate::{Pod, Testbed};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::net::Ipv4Addr;

/// Where the testbed's pods are.
const NAMESPACE: &str = "default";

impl ControlPlane {
    /// Adds the testbed's nodes, ready, with their addresses.
    ///
    /// # Errors
    /// When the server refuses; so for the others.
    pub fn add_nodes(&self, testbed: &Testbed) -> Result<()> {
        let nodes: String =
            testbed.nodes().iter().map(|node| node_manifest(node.name(), node.address())).collect();
        self.apply_with_status(&nodes)
    }

    /// Adds a pod of the testbed, running and ready, in the namespace `default`, with the label `app`.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn add_pod(&self, pod: &Pod, app: &str) -> Result<()> {
        self.apply_with_status(&pod_manifest(pod, app, true))
    }

    /// Says whether a pod that was added is ready.
    ///
    /// # Errors
    /// When there is no such pod.
    pub fn set_ready(&self, pod: &Pod, app: &str, ready: bool) -> Result<()> {
        self.apply_status(&pod_manifest(pod, app, ready))
    }

    /// Asks for a pod's end, as `kubectl delete` does: it is terminating until [`ControlPlane::remove_pod`], which is what
    /// its kubelet would do when it has ended.
    ///
    /// # Errors
    /// When there is no such pod.
    pub fn terminate_pod(&self, pod: &Pod) -> Result<()> {
        self.kubectl(&["delete", "pod", pod.name(), "--namespace", NAMESPACE, "--wait=false"]).map(drop)
    }

    /// Removes a pod from the API, at once.
    ///
    /// # Errors
    /// When there is no such pod.
    pub fn remove_pod(&self, pod: &Pod) -> Result<()> {
        let words = ["delete", "pod", pod.name(), "--namespace", NAMESPACE, "--grace-period=0", "--force"];
        self.kubectl(&words).map(drop)
    }

    /// Adds the pod of a DaemonSet for a node, as its controller and the scheduler would, and returns its name. Nothing runs
    /// in it; a token can be bound to it.
    ///
    /// # Errors
    /// When there is no such DaemonSet, or the server refuses its pod.
    pub fn add_daemon_pod(&self, namespace: &str, set: &str, node: &str) -> Result<String> {
        let template = self.kubectl(&[
            "get",
            "daemonset",
            set,
            "--namespace",
            namespace,
            "--output=jsonpath={.spec.template}",
        ])?;
        let mut template: Value = serde_json::from_str(&template).context("no pod template")?;
        let name = format!("{set}-{node}");
        template["spec"]["nodeName"] = json!(node);
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name, "namespace": namespace, "labels": template["metadata"]["labels"] },
            "spec": template["spec"],
        });
        self.apply(&pod.to_string())?;
        Ok(name)
    }

    fn apply_with_status(&self, manifests: &str) -> Result<()> {
        self.apply(manifests)?;
        self.apply_status(manifests)
    }

    fn apply_status(&self, manifests: &str) -> Result<()> {
        let words = ["apply", "--server-side", "--force-conflicts", "--subresource=status", "-f", "-"];
        self.feed_kubectl(&words, manifests)
    }
}

fn node_manifest(name: &str, address: Ipv4Addr) -> String {
    format!(
        "---
apiVersion: v1
kind: Node
metadata:
  name: {name}
  labels: {{kubernetes.io/hostname: {name}}}
status:
  addresses:
  - {{type: InternalIP, address: {address}}}
  - {{type: Hostname, address: {name}}}
  conditions:
  - {{type: Ready, status: 'True', reason: Testbed, message: a network namespace}}
"
    )
}

fn pod_manifest(pod: &Pod, app: &str, ready: bool) -> String {
    let (name, node, ip) = (pod.name(), pod.node(), pod.ip());
    let ready = if ready { "True" } else { "False" };
    let mut text = format!(
        "---
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: {NAMESPACE}
  labels: {{app: {app}}}
spec:
  nodeName: n{node}
  containers:
  - {{name: server, image: none}}
status:
  phase: Running
  podIP: {ip}
  podIPs:
  - {{ip: {ip}}}
  conditions:
"
    );
    for condition in ["Initialized", "PodScheduled"] {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  - {{type: {condition}, status: 'True'}}");
    }
    for condition in ["ContainersReady", "Ready"] {
        let _ = writeln!(text, "  - {{type: {condition}, status: '{ready}'}}");
    }
    text
}
