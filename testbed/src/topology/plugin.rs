//! The CNI plugins that flannel leaves pods to, `bridge` and `host-local`, run as a container runtime does.

use super::Plug;
use crate::host::Host;
use crate::namespace;
use crate::node::Node;
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Where distributions have them.
const DIRECTORIES: [&str; 3] = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];

/// The directory of the CNI plugins.
///
/// # Errors
/// When none is known to have them.
pub fn directory() -> Result<&'static Path> {
    let has = |directory: &&str| Path::new(directory).join("bridge").is_file();
    let found = DIRECTORIES.iter().find(|directory| has(directory));
    found.map(Path::new).with_context(|| format!("no CNI plugins in {}", DIRECTORIES.join(", ")))
}

/// Where `host-local` notes the addresses that it has given away on a node.
pub(super) fn leases(node: &Node) -> PathBuf {
    node.files().join("leases").join(node.name())
}

/// Adds a pod as `config` says. Runtimes have the plugin `loopback` raise `lo` before.
pub(super) fn add(node: &Node, pod: &Host, config: &Value) -> Result<Plug> {
    pod.ip("link set lo up")?;
    let result: Value = serde_json::from_str(&run("ADD", node, pod, config)?)?;
    let ip = result["ips"][0]["address"].as_str().and_then(|network| network.split('/').next());
    let ip: Option<Ipv4Addr> = ip.and_then(|ip| ip.parse().ok());
    let ours = |interface: &&Value| {
        interface["name"].as_str().is_some_and(|name| name.starts_with("veth"))
            && interface.get("sandbox").is_none_or(|sandbox| sandbox == "")
    };
    let interfaces = result["interfaces"].as_array().map(Vec::as_slice).unwrap_or_default();
    let port = interfaces.iter().find(ours).and_then(|interface| interface["name"].as_str());
    let (Some(ip), Some(port)) = (ip, port) else {
        anyhow::bail!("the plugin's result has no address: {result}")
    };
    Ok(Plug { ip, port: port.to_owned() })
}

/// Removes a pod's device and gives its address back.
pub(super) fn remove(node: &Node, pod: &Host, config: &Value) -> Result<()> {
    run("DEL", node, pod, config).map(drop)
}

fn run(order: &str, node: &Node, pod: &Host, config: &Value) -> Result<String> {
    let directory = directory()?;
    let program = directory.join(config["type"].as_str().unwrap_or_default());
    let mut child = node
        .command(&program)
        .env("CNI_COMMAND", order)
        .env("CNI_CONTAINERID", pod.namespace())
        .env("CNI_NETNS", namespace::path(pod.namespace()))
        .env("CNI_IFNAME", "eth0")
        .env("CNI_PATH", directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
    // Dropped at the end of the statement, which is the end of the input.
    child.stdin.take().context("no standard input")?.write_all(config.to_string().as_bytes())?;
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{} {order} for {}: {}", program.display(), pod.name(), said.trim());
    Ok(said)
}
