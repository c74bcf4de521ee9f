//! What the agent needs of a node, checked at start: for each need what was found, and what to do about it.

use super::interfaces::{self, Kind, ListError};
use super::return_path::{self, Overlap};
use super::roles::{self, RoleError, RoleOptions, Roles};
use super::{routes, sysctl};
use nix::sys::{statfs, utsname};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The oldest kernel that the packet programs load on (5.10: the oldest with long support that has what they use).
const OLDEST_KERNEL: (u32, u32) = (5, 10);
const BTF: &str = "/sys/kernel/btf/vmlinux";

/// Capability numbers, from `linux/capability.h`.
const NET_ADMIN: u32 = 12;
const SYS_ADMIN: u32 = 21;

const DEVICES: &str = "devices";

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Works, with what the advice says.
    Warn,
    /// Will not work.
    Fail,
}

/// One need of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it ended.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do; empty when there is nothing to do.
    pub advice: String,
}

/// What is checked against.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where maps and links are to be pinned; it need not exist yet.
    pub pins: PathBuf,
    /// How the devices are found.
    pub roles: RoleOptions,
    /// Mark, priority and tables.
    pub return_path: return_path::Options,
    /// The ports that are served, as far as they are known.
    pub service_ports: Vec<u16>,
}

/// What was found on the node.
struct Facts {
    kernel: String,
    btf: bool,
    /// Where pins go, and whether that is on a BPF file system.
    bpffs: (PathBuf, bool),
    jit: Option<String>,
    /// The effective set, one bit for each.
    capabilities: Option<u64>,
    ip_forward: Option<String>,
    roles: Result<Roles, RolesUnknown>,
    /// Empty while the roles are not known.
    devices: Vec<DeviceFacts>,
    /// None where frames are routed to pods.
    bridges_call_iptables: Result<Option<bool>, sysctl::Error>,
    overlaps: Result<Vec<Overlap>, return_path::Error>,
    /// First and last port of the node's outgoing connections.
    local_ports: Option<(u16, u16)>,
    service_ports: Vec<u16>,
}

#[derive(Debug, thiserror::Error)]
enum RolesUnknown {
    #[error(transparent)]
    List(#[from] ListError),
    #[error(transparent)]
    Routes(#[from] routes::ListError),
    #[error(transparent)]
    Role(#[from] RoleError),
}

struct DeviceFacts {
    name: String,
    forwards: Result<bool, sysctl::Error>,
    /// Whether the agent makes the reverse-path filter loose.
    is_loosened: bool,
    rp_filter: Result<u8, sysctl::Error>,
}

/// Whether what this check misses may come later by itself, as the CNI's devices do after a boot.
pub fn may_come(check: &Check) -> bool {
    check.name == DEVICES
}

/// Checks the node; changes nothing.
pub async fn check(handle: &rtnetlink::Handle, options: &Options) -> Vec<Check> {
    judge(&gather(handle, options).await)
}

async fn gather(handle: &rtnetlink::Handle, options: &Options) -> Facts {
    let roles = find_roles(handle, &options.roles).await;
    let devices = roles.as_ref().map(device_facts).unwrap_or_default();
    Facts {
        kernel: utsname::uname().map(|u| u.release().to_string_lossy().into_owned()).unwrap_or_default(),
        btf: Path::new(BTF).exists(),
        bpffs: on_bpffs(&options.pins),
        jit: sysctl::read("net/core/bpf_jit_enable").ok(),
        capabilities: effective_capabilities().ok(),
        ip_forward: sysctl::read("net/ipv4/ip_forward").ok(),
        bridges_call_iptables: roles
            .as_ref()
            .ok()
            .and_then(Roles::bridge)
            .map(sysctl::bridges_call_iptables)
            .transpose(),
        roles,
        devices,
        overlaps: return_path::check_overlap(handle, &options.return_path).await,
        local_ports: sysctl::read("net/ipv4/ip_local_port_range").ok().as_deref().and_then(parse_range),
        service_ports: options.service_ports.clone(),
    }
}

async fn find_roles(handle: &rtnetlink::Handle, options: &RoleOptions) -> Result<Roles, RolesUnknown> {
    let interfaces = interfaces::list(handle).await?;
    Ok(roles::find(handle, &interfaces, options).await??)
}

fn device_facts(roles: &Roles) -> Vec<DeviceFacts> {
    // Not the pods' own veths, which may be hundreds, and which the CNI sets up as it needs them.
    let bridges = roles.pods.iter().filter(|device| device.kind == Kind::Bridge);
    // Ports of a bridge route nothing.
    let is_another = |device: &&interfaces::Interface| {
        roles.bridge().is_none() && roles.uplink.iter().all(|uplink| uplink.index != device.index)
    };
    let devices = bridges.chain(&roles.uplink).chain(roles.overlay.iter().filter(is_another));
    let facts = |device: &interfaces::Interface| DeviceFacts {
        name: device.name.clone(),
        forwards: sysctl::forwards(&device.name),
        is_loosened: roles.with_foreign_sources().contains(&device.name.as_str()),
        rp_filter: sysctl::rp_filter(&device.name),
    };
    devices.map(facts).collect()
}

/// The directory nearest to the pins that is there, and whether it is on a BPF file system.
fn on_bpffs(pins: &Path) -> (PathBuf, bool) {
    let nearest = pins.ancestors().find(|directory| directory.exists()).unwrap_or(pins);
    let is_bpffs = statfs::statfs(nearest).is_ok_and(|fs| fs.filesystem_type() == statfs::BPF_FS_MAGIC);
    (nearest.to_owned(), is_bpffs)
}

fn effective_capabilities() -> io::Result<u64> {
    parse_capabilities(&fs::read_to_string("/proc/thread-self/status")?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no CapEff"))
}

fn parse_capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

fn parse_range(range: &str) -> Option<(u16, u16)> {
    let (first, last) = range.split_once(char::is_whitespace)?;
    Some((first.parse().ok()?, last.trim().parse().ok()?))
}

/// Major and minor number of a release such as `6.1.0-18-cloud-amd64`.
fn parse_kernel(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn judge(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![
        kernel(&facts.kernel),
        btf(facts.btf),
        bpffs(&facts.bpffs.0, facts.bpffs.1),
        jit(facts.jit.as_deref()),
        capabilities(facts.capabilities),
        devices(&facts.roles),
        ip_forward(facts.ip_forward.as_deref()),
    ];
    checks.extend(facts.devices.iter().flat_map(|device| [forwarding(device), rp_filter(device)]));
    if facts.roles.is_ok() {
        checks.extend(bridge_netfilter(&facts.bridges_call_iptables));
    }
    checks.extend(overlaps(&facts.overlaps));
    checks.push(local_ports(facts.local_ports, &facts.service_ports));
    checks
}

fn ok(name: &'static str, found: impl Into<String>) -> Check {
    Check { name, verdict: Verdict::Ok, found: found.into(), advice: String::new() }
}

fn warn(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
    Check { name, verdict: Verdict::Warn, found: found.into(), advice: advice.into() }
}

fn fail(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
    Check { name, verdict: Verdict::Fail, found: found.into(), advice: advice.into() }
}

fn kernel(release: &str) -> Check {
    let name = "kernel";
    let (major, minor) = OLDEST_KERNEL;
    match parse_kernel(release) {
        Some(version) if version >= OLDEST_KERNEL => ok(name, release),
        Some(_) => fail(name, release, format!("use a kernel of {major}.{minor} or later")),
        None => warn(
            name,
            format!("a release that cannot be read: {release:?}"),
            format!("make sure that the kernel is {major}.{minor} or later"),
        ),
    }
}

fn btf(present: bool) -> Check {
    let name = "BTF";
    if present {
        return ok(name, BTF);
    }
    fail(
        name,
        format!("{BTF} is missing"),
        "use a kernel built with CONFIG_DEBUG_INFO_BTF=y (every current distribution's is), and mount /sys in the container",
    )
}

fn bpffs(directory: &Path, is_bpffs: bool) -> Check {
    let name = "bpffs";
    let directory = directory.display();
    if is_bpffs {
        return ok(name, directory.to_string());
    }
    fail(
        name,
        format!("{directory} is not on a BPF file system, so the packet programs would end with the agent"),
        "mount it on the node: mount -t bpf bpf /sys/fs/bpf (and in /etc/fstab, so that it stays); in a container, mount \
         the node's into it and name its place with --bpffs",
    )
}

fn jit(value: Option<&str>) -> Check {
    let name = "BPF JIT";
    match value {
        Some("0") => warn(
            name,
            "off: packet programs are interpreted, several times slower",
            "switch it on: sysctl -w net.core.bpf_jit_enable=1",
        ),
        Some(value) => ok(name, format!("on ({value})")),
        None => {
            ok(name, "not visible here: the kernel shows it in the machine's first network namespace only")
        }
    }
}

fn capabilities(effective: Option<u64>) -> Check {
    let name = "capabilities";
    let Some(effective) = effective else {
        return warn(name, "cannot be read", "mount /proc, and run as root");
    };
    let has = |number: u32| effective & (1 << number) != 0;
    let mut missing = Vec::new();
    if !has(NET_ADMIN) {
        missing.push("CAP_NET_ADMIN");
    }
    if !has(SYS_ADMIN) {
        // CAP_BPF and CAP_PERFMON load the programs, but only this one opens programs and maps by their ids
        // (`BPF_PROG_GET_FD_BY_ID`, `BPF_MAP_GET_FD_BY_ID`; seen on 6.18), which is how the agent reads back hooks and
        // inner maps.
        missing.push("CAP_SYS_ADMIN");
    }
    if missing.is_empty() {
        return ok(name, "enough to load packet programs and set rules");
    }
    fail(
        name,
        format!("missing: {}", missing.join(", ")),
        "run as root, or add them to the container's securityContext.capabilities",
    )
}

fn devices(roles: &Result<Roles, RolesUnknown>) -> Check {
    let name = DEVICES;
    match roles {
        Ok(roles) => {
            let names = |devices: &[interfaces::Interface]| {
                devices.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ")
            };
            let (uplink, overlay) = (names(&roles.uplink), names(&roles.overlay));
            // Cut short: a pod each.
            let pods = match roles.pods.as_slice() {
                [] => "none yet".to_owned(),
                pods @ ([_] | [_, _]) => names(pods),
                [first, .., last] => format!("{} devices, {} to {}", roles.pods.len(), first.name, last.name),
            };
            ok(name, format!("{}; uplink {uplink}; pods {pods}; overlay {overlay}", roles.network))
        }
        Err(error) => fail(
            name,
            error.to_string(),
            format!(
                "see above, or name them with {}, {}, {} and {}",
                roles::CNI_FLAG,
                roles::UPLINK_FLAG,
                roles::PODS_FLAG,
                roles::OVERLAY_FLAG
            ),
        ),
    }
}

fn ip_forward(value: Option<&str>) -> Check {
    let name = "IP forwarding";
    match value {
        Some("1") => ok(name, "on"),
        found => fail(
            name,
            format!("net.ipv4.ip_forward is {}", found.unwrap_or("not readable")),
            "switch it on: sysctl -w net.ipv4.ip_forward=1 (and in /etc/sysctl.d, so that it stays)",
        ),
    }
}

fn forwarding(device: &DeviceFacts) -> Check {
    let name = "forwarding of a device";
    let key = format!("net/ipv4/conf/{}/forwarding", device.name);
    match &device.forwards {
        Ok(true) => ok(name, format!("{}: on", device.name)),
        Ok(false) => fail(name, format!("{}: off", device.name), format!("switch it on: sysctl -w {key}=1")),
        Err(error) => warn(name, error.to_string(), format!("make sure that {key} is 1")),
    }
}

fn rp_filter(device: &DeviceFacts) -> Check {
    let name = "reverse-path filter";
    match &device.rp_filter {
        Ok(value) if *value == sysctl::STRICT && !device.is_loosened => {
            ok(name, format!("{}: strict, which nothing of ours meets", device.name))
        }
        Ok(value) if *value == sysctl::STRICT => warn(
            name,
            format!("{}: strict, so packets whose way back is another device are dropped", device.name),
            format!(
                "the agent makes it loose and cleanup restores it; to do it yourself: sysctl -w net/ipv4/conf/{}/rp_filter={}",
                device.name,
                sysctl::LOOSE
            ),
        ),
        Ok(value) => ok(name, format!("{}: {}", device.name, if *value == 0 { "off" } else { "loose" })),
        Err(error) => warn(name, error.to_string(), "make sure that rp_filter is not 1"),
    }
}

/// None where nothing of ours is only bridged.
fn bridge_netfilter(calls: &Result<Option<bool>, sysctl::Error>) -> Option<Check> {
    let name = "bridge netfilter";
    let check = match calls {
        Ok(None) => return None,
        Ok(Some(true)) => ok(name, "on: netfilter sees bridged frames"),
        // Both work; Kubernetes' own checks ask for the first.
        Ok(Some(false)) => {
            ok(name, "off: replies of pods to other nodes' forwards are kept out of connection tracking")
        }
        Err(error) => warn(name, error.to_string(), "make /proc/sys/net/bridge readable"),
    };
    Some(check)
}

fn overlaps(found: &Result<Vec<Overlap>, return_path::Error>) -> Vec<Check> {
    let name = "mark, rules and tables";
    match found {
        Ok(overlaps) if overlaps.is_empty() => vec![ok(name, "no other program uses ours")],
        Ok(overlaps) => overlaps
            .iter()
            .map(|overlap| {
                let judge = if overlap.fatal { fail } else { warn };
                judge(name, overlap.found.clone(), overlap.advice.clone())
            })
            .collect(),
        Err(error) => {
            vec![fail(name, error.to_string(), "run with CAP_NET_ADMIN in the node's network namespace")]
        }
    }
}

fn local_ports(range: Option<(u16, u16)>, service_ports: &[u16]) -> Check {
    let name = "ports of outgoing connections";
    let Some((first, last)) = range else {
        return warn(name, "cannot be read", "mount /proc");
    };
    let mut inside: Vec<String> =
        service_ports.iter().filter(|port| (first..=last).contains(*port)).map(ToString::to_string).collect();
    inside.dedup();
    if inside.is_empty() {
        return ok(name, format!("{first} to {last}: no served port among them"));
    }
    // No failure: a connection that the node itself has open is recognised. But a new client might meet it.
    Check {
        advice: format!(
            "keep the node from using them itself: sysctl -w net.ipv4.ip_local_reserved_ports={}",
            inside.join(",")
        ),
        ..ok(name, format!("{first} to {last}, with served ports among them: {}", inside.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> Facts {
        let device = |name: &str, is_loosened| DeviceFacts {
            name: name.to_owned(),
            forwards: Ok(true),
            is_loosened,
            rp_filter: Ok(0),
        };
        Facts {
            kernel: "5.10.0-28-cloud-amd64".to_owned(),
            btf: true,
            bpffs: ("/sys/fs/bpf".into(), true),
            jit: Some("1".to_owned()),
            capabilities: Some(1 << NET_ADMIN | 1 << SYS_ADMIN),
            ip_forward: Some("1".to_owned()),
            roles: Ok(roles()),
            devices: vec![device("weave", true), device("eth0", false)],
            bridges_call_iptables: Ok(Some(true)),
            overlaps: Ok(Vec::new()),
            local_ports: Some((32_768, 60_999)),
            service_ports: vec![80],
        }
    }

    fn roles() -> Roles {
        let interface = |name: &str| interfaces::Interface {
            index: 1,
            name: name.to_owned(),
            mac: None,
            kind: Kind::Bridge,
            master: None,
            mtu: 1500,
            up: true,
            calls_iptables: false,
            addresses: Vec::new(),
        };
        Roles {
            network: roles::Network::Bridged,
            uplink: vec![interface("eth0")],
            pods: vec![interface("weave")],
            overlay: vec![interface("vxlan0")],
            overlay_address: std::net::Ipv4Addr::LOCALHOST,
            overlay_mac: [0; 6],
        }
    }

    #[test]
    fn a_healthy_node_passes() {
        let bad: Vec<Check> = judge(&healthy()).into_iter().filter(|c| c.verdict != Verdict::Ok).collect();
        assert_eq!(bad, []);
    }

    #[test]
    fn each_fault_is_found_and_says_what_to_do() {
        type Fault = fn(&mut Facts);
        let faults: &[(Fault, &str, Verdict, &str)] = &[
            (|f| f.kernel = "5.4.0-1".to_owned(), "kernel", Verdict::Fail, "5.10"),
            (|f| f.kernel = "4.19.0".to_owned(), "kernel", Verdict::Fail, "5.10"),
            (|f| f.kernel = "odd".to_owned(), "kernel", Verdict::Warn, "5.10"),
            (|f| f.btf = false, "BTF", Verdict::Fail, "CONFIG_DEBUG_INFO_BTF"),
            (|f| f.bpffs.1 = false, "bpffs", Verdict::Fail, "mount -t bpf"),
            (|f| f.jit = Some("0".to_owned()), "BPF JIT", Verdict::Warn, "bpf_jit_enable=1"),
            (|f| f.capabilities = Some(1 << SYS_ADMIN), "capabilities", Verdict::Fail, "securityContext"),
            (|f| f.capabilities = Some(1 << NET_ADMIN), "capabilities", Verdict::Fail, "securityContext"),
            (|f| f.ip_forward = Some("0".to_owned()), "IP forwarding", Verdict::Fail, "ip_forward=1"),
            (
                |f| f.devices[1].forwards = Ok(false),
                "forwarding of a device",
                Verdict::Fail,
                "eth0/forwarding=1",
            ),
            (|f| f.devices[0].rp_filter = Ok(1), "reverse-path filter", Verdict::Warn, "weave/rp_filter=2"),
            (
                |f| {
                    let name = "weave".to_owned();
                    f.roles = Err(RoleError::WithoutAddress { name, flag: roles::PODS_FLAG }.into());
                },
                "devices",
                Verdict::Fail,
                "--pods-device",
            ),
            (
                |f| {
                    f.overlaps =
                        Ok(vec![Overlap { fatal: true, found: String::new(), advice: "move".to_owned() }]);
                },
                "mark, rules and tables",
                Verdict::Fail,
                "move",
            ),
            (
                |f| f.service_ports.push(40_000),
                "ports of outgoing connections",
                Verdict::Ok,
                "reserved_ports=40000",
            ),
        ];
        for (number, (fault, name, verdict, advice)) in faults.iter().enumerate() {
            let mut facts = healthy();
            fault(&mut facts);
            let checks = judge(&facts);
            let hit =
                checks.iter().any(|c| c.name == *name && c.verdict == *verdict && c.advice.contains(advice));
            assert!(hit, "fault {number}, {name}: {checks:#?}");
        }
    }

    #[test]
    fn what_is_not_ok_always_has_advice() {
        let mut facts = healthy();
        facts.kernel = String::new();
        facts.capabilities = None;
        facts.ip_forward = None;
        facts.local_ports = None;
        for check in judge(&facts) {
            assert!(check.verdict == Verdict::Ok || !check.advice.is_empty(), "{check:?}");
        }
    }

    #[test]
    fn the_kernels_own_formats() {
        assert_eq!(
            parse_capabilities("Name:\tx\nCapEff:\t0000000000001000\nCapBnd:\t0\n"),
            Some(1 << NET_ADMIN)
        );
        assert_eq!(parse_capabilities("Name:\tx\n"), None);
        assert_eq!(parse_range("32768\t60999"), Some((32_768, 60_999)));
        assert_eq!(parse_range("32768"), None);
        assert_eq!(parse_kernel("6.18.44-fc-v669"), Some((6, 18)));
        assert_eq!(parse_kernel(""), None);
    }
}
