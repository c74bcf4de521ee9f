//! A container of the DaemonSet, as a runtime is told to run it: an OCI configuration
//! (<https://github.com/opencontainers/runtime-spec>), with what runtimes add for one without privileges.

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};
use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};

/// The default profile of CRI-O and Podman, which comes with buildah. containerd's is code, and allows the same of what the
/// agent calls: `bpf` and `perf_event_open` with `CAP_SYS_ADMIN`.
const SECCOMP: &str = "/usr/share/containers/seccomp.json";

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
            "seccomp": seccomp(&capabilities)?,
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

/// The default profile for a container with these capabilities: `RuntimeDefault`.
fn seccomp(capabilities: &[String]) -> Result<Value> {
    let text = fs::read(SECCOMP).with_context(|| format!("{SECCOMP} should have come with buildah"))?;
    let profile: Value = serde_json::from_slice(&text).with_context(|| format!("{SECCOMP} is broken"))?;
    let rules = profile["syscalls"].as_array().context("the seccomp profile has no rules")?;
    let rules: Vec<Value> = rules.iter().filter(|rule| applies(rule, capabilities)).map(plain).collect();
    Ok(json!({
        "defaultAction": profile["defaultAction"],
        "architectures": [format!("SCMP_ARCH_{}", ARCH.to_uppercase())],
        "syscalls": rules,
    }))
}

/// Whether a rule is for this machine and for a container with these capabilities.
fn applies(rule: &Value, capabilities: &[String]) -> bool {
    let arch = match ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let list = |when: &str, what: &str| strings(&rule[when][what]).unwrap_or_default();
    let (arches, caps) = (list("includes", "arches"), list("includes", "caps"));
    (arches.is_empty() || arches.iter().any(|name| name == arch))
        && caps.iter().all(|name| capabilities.contains(name))
        && !list("excludes", "arches").iter().any(|name| name == arch)
        && !list("excludes", "caps").iter().any(|name| capabilities.contains(name))
}

/// A rule without its conditions, which OCI does not know.
fn plain(rule: &Value) -> Value {
    let known = ["names", "action", "args", "errnoRet"];
    let kept =
        known.iter().filter(|key| !rule[**key].is_null()).map(|key| ((*key).to_owned(), rule[*key].clone()));
    Value::Object(kept.collect::<Map<_, _>>())
}

fn strings(list: &Value) -> Result<Vec<String>> {
    let list = list.as_array().context("a list is missing in the manifests")?;
    Ok(list.iter().filter_map(Value::as_str).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_the_seccomp_profile_depend_on_capabilities() {
        let admin = &["CAP_SYS_ADMIN".to_owned()];
        let with = json!({ "names": ["bpf"], "includes": { "caps": ["CAP_SYS_ADMIN"] } });
        assert!(applies(&with, admin) && !applies(&with, &[]));
        let without = json!({ "names": ["clone"], "excludes": { "caps": ["CAP_SYS_ADMIN"] } });
        assert!(!applies(&without, admin) && applies(&without, &[]));
        let elsewhere = json!({ "names": ["s390_runtime_instr"], "includes": { "arches": ["s390"] } });
        assert!(!applies(&elsewhere, admin));
        assert_eq!(plain(&with), json!({ "names": ["bpf"] }));
    }

    #[test]
    fn only_known_directories_of_the_node_are_mounted() {
        let pod = json!({ "volumes": [{ "name": "etc", "hostPath": { "path": "/etc" } }] });
        let container = json!({ "volumeMounts": [{ "name": "etc", "mountPath": "/host/etc" }] });
        let error = mounts(&pod, &container, &[]).unwrap_err().to_string();
        assert!(error.contains("/etc of the node"), "{error}");
        assert_eq!(mounts(&pod, &container, &[("/etc", "/tmp".into())]).unwrap().len(), 4);
    }
}
