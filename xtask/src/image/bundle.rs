//! A container of the DaemonSet, as a runtime is told to run it: an OCI configuration
//! (<https://github.com/opencontainers/runtime-spec>), with what containerd adds for one without privileges.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// What is on the node, for the directories that the DaemonSet mounts from it: (its path, ours).
pub(super) type Node<'a> = &'a [(&'a str, PathBuf)];

/// The configuration of `container`, whose image is unpacked in `root`. `env` comes after the container's own.
///
/// # Errors
/// When the container mounts what `node` does not have.
pub(super) fn config(
    pod: &Value,
    container: &Value,
    root: &Path,
    node: Node<'_>,
    env: &[(&str, String)],
) -> Result<Value> {
    let security = &container["securityContext"];
    let capabilities: Vec<String> =
        strings(&security["capabilities"]["add"])?.iter().map(|name| format!("CAP_{name}")).collect();
    let mut args = vec!["/lb-agent".to_owned()];
    args.extend(strings(&container["args"])?);
    let own = container["env"].as_array().context("the container has no environment")?;
    // Those without a value are the downward API's, which the caller knows.
    let own = own.iter().filter_map(|variable| {
        Some(format!("{}={}", variable["name"].as_str()?, variable["value"].as_str()?))
    });
    let env: Vec<String> = own.chain(env.iter().map(|(name, value)| format!("{name}={value}"))).collect();
    Ok(json!({
        "ociVersion": "1.0.2",
        "root": { "path": root, "readonly": security["readOnlyRootFilesystem"] },
        "process": {
            "user": { "uid": security["runAsUser"], "gid": 0 },
            "cwd": "/",
            "args": args,
            "env": env,
            "capabilities": { "bounding": capabilities, "effective": capabilities, "permitted": capabilities },
            "noNewPrivileges": security["allowPrivilegeEscalation"] == false,
        },
        "mounts": mounts(pod, container, node)?,
        "linux": {
            // Of the network there is none: `hostNetwork`.
            "namespaces": [{ "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
        },
    }))
}

fn mounts(pod: &Value, container: &Value, node: Node<'_>) -> Result<Vec<Value>> {
    let mut mounts = vec![
        json!({ "destination": "/proc", "type": "proc", "source": "proc" }),
        json!({ "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"] }),
        json!({ "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"] }),
    ];
    let volumes = pod["volumes"].as_array().context("the pod has no volumes")?;
    for mount in container["volumeMounts"].as_array().context("the container mounts nothing")? {
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]);
        let path = volume.and_then(|volume| volume["hostPath"]["path"].as_str());
        let path = path.with_context(|| format!("{mount} is of no directory of the node"))?;
        let ours = node.iter().find(|(theirs, _)| *theirs == path);
        let (_, ours) =
            ours.with_context(|| format!("{path} of the node is mounted: tell why it is needed"))?;
        let propagation = if mount["mountPropagation"] == "HostToContainer" { "rslave" } else { "rprivate" };
        mounts.push(json!({
            "destination": mount["mountPath"], "type": "bind", "source": ours, "options": ["rbind", "rw", propagation],
        }));
    }
    Ok(mounts)
}

fn strings(list: &Value) -> Result<Vec<String>> {
    let list = list.as_array().context("a list is missing in the manifests")?;
    Ok(list.iter().filter_map(Value::as_str).map(str::to_owned).collect())
}
