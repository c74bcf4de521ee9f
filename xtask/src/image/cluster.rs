//! The image on every node of a testbed, with the DaemonSet's own arguments, capabilities and mounts: that is all that the
//! agent needs there.

use super::bundle;
use crate::{manifests, sh};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use testbed::cluster::Service;
use testbed::{Node, Options, Process, Testbed, http, server, wait};

/// Held by n1 in the testbed.
const ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 101), 80);
/// The agent's own default.
const PROBES: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9213);
const SOON: Duration = Duration::from_secs(30);

/// Preflight, the agent and cleanup, each from the image; a client's request in between.
pub(super) fn runs(root: &Path) -> Result<()> {
    sh::say("the image on three nodes, as the DaemonSet runs it");
    let (install, cleanup) = (pod("deploy/manifests")?, pod("deploy/manifests/cleanup")?);
    // Strict, so that the agent has a sysctl to write.
    let testbed = Testbed::weave(Options { rp_filter: 1, ..Options::default() })?;
    let stage = Stage { testbed: &testbed, root };
    for node in testbed.nodes() {
        let said = stage.container(&install, "initContainers", node)?.finish()?;
        println!("{}: preflight\n{}", node.name(), said.trim_end());
        ensure!(!said.contains("fail "), "preflight has failed checks on {}", node.name());
    }
    let backend = testbed.add_pod(2, "web")?;
    let _server = server::http(&backend, 8080)?;
    testbed.cluster().set_service(Service::new("web", *ADDRESS.ip()).tcp(ADDRESS.port(), 8080))?;
    testbed.cluster().set_endpoints("web", &[backend.endpoint()])?;
    let agents = testbed.nodes().iter().map(|node| stage.container(&install, "containers", node));
    let mut agents = agents.collect::<Result<Vec<_>>>()?;
    for (node, agent) in testbed.nodes().iter().zip(&mut agents) {
        wait::until(&format!("/readyz of {}", node.name()), SOON, || {
            ensure!(agent.process.is_running()?, "the agent has ended: {}", agent.process.log()?.trim());
            let ready = http::get(node, PROBES, "/readyz", SOON).map(drop);
            ready.with_context(|| agent.process.log().unwrap_or_default())
        })?;
    }
    wait::until("an answer through the load balancer", SOON, || {
        http::get(testbed.client(), ADDRESS, "/", SOON).map(drop)
    })?;
    println!("a client has had an answer of a pod on another node");
    drop(agents);
    for node in testbed.nodes() {
        let said = stage.container(&cleanup, "initContainers", node)?.finish()?;
        ensure!(said.contains("rp_filter: 1 again"), "cleanup has not restored the sysctl: {said}");
        let state = stage.state(node);
        ensure!(!testbed.pins(node.number()).join("reweave-lb").exists(), "pins are left: {said}");
        ensure!(fs::read_dir(&state)?.next().is_none(), "something is left in {}", state.display());
    }
    println!("cleanup has removed everything");
    Ok(())
}

/// The pod of the DaemonSet that is drawn in this directory.
fn pod(directory: &str) -> Result<Value> {
    let objects = manifests::drawn(directory)?;
    let set = objects.into_iter().find(|object| object["kind"] == "DaemonSet");
    Ok(set.with_context(|| format!("no DaemonSet in {directory}"))?["spec"]["template"]["spec"].take())
}

struct Stage<'a> {
    testbed: &'a Testbed,
    root: &'a Path,
}

impl Stage<'_> {
    fn directory(&self, node: &Node, what: &str) -> PathBuf {
        self.testbed.directory().join("image").join(node.name()).join(what)
    }

    /// Stands for `/run/reweave-lb` of the node.
    fn state(&self, node: &Node) -> PathBuf {
        self.directory(node, "state")
    }

    /// Starts the first container of that kind on a node.
    fn container(&self, pod: &Value, kind: &str, node: &Node) -> Result<Container> {
        let container = &pod[kind][0];
        let name = container["name"].as_str().context("a container without a name")?;
        let bundle = self.directory(node, name);
        // A copy for each: the runtime makes the places for its mounts in it.
        let root = bundle.join("root");
        let (pins, state, runtime) =
            (self.testbed.pins(node.number()), self.state(node), self.directory(node, "runc"));
        for directory in [&root, &pins, &state, &runtime] {
            fs::create_dir_all(directory)?;
        }
        fs::copy(self.root.join(super::AGENT), root.join(super::AGENT))?;
        let manifests = self.testbed.cluster().directory();
        let on_node =
            [("/sys/fs/bpf", pins), ("/proc/sys/net", "/proc/sys/net".into()), ("/run/reweave-lb", state)];
        // In place of the API.
        let env = [("LB_NODE", node.name().to_owned()), ("LB_MANIFESTS", "/manifests".to_owned())];
        let mut config = bundle::config(pod, container, &root, &on_node, &env)?;
        if let Some(mounts) = config["mounts"].as_array_mut() {
            mounts.push(serde_json::json!({
                "destination": "/manifests", "type": "bind", "source": manifests, "options": ["rbind", "rw"],
            }));
        }
        fs::write(bundle.join("config.json"), config.to_string())?;
        let id = format!("{}-{name}", node.namespace());
        let process = node.spawn(
            name,
            &[
                "runc",
                "--root",
                &runtime.to_string_lossy(),
                "run",
                "--bundle",
                &bundle.to_string_lossy(),
                &id,
            ],
        )?;
        Ok(Container { process, runtime, id })
    }
}

/// Removed when dropped.
struct Container {
    process: Process,
    runtime: PathBuf,
    id: String,
}

impl Container {
    /// Waits for its end, which must be a good one. Answers what it has said.
    fn finish(mut self) -> Result<String> {
        let status = self.process.wait(SOON)?;
        let said = self.process.log()?;
        ensure!(status.success(), "{} has failed: {said}", self.id);
        Ok(said)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let remove = Command::new("runc")
            .arg("--root")
            .arg(&self.runtime)
            .args(["delete", "--force", &self.id])
            .output();
        if let Err(error) = remove {
            eprintln!("container {} is not removed: {error}", self.id);
        }
    }
}
