//! What the kernel says about a node, by the tools that an administrator would ask.

use anyhow::{Context as _, Result, ensure};
use aya::programs::{SchedClassifier, TcAttachType};
use serde_json::Value;
use testbed::Host;

/// The devices with a role in the testbed, by name.
pub(crate) const DEVICES: [&str; 4] = ["eth0", "lo", "vxlan-6784", "weave"];

/// The names of all devices of a node, sorted.
fn devices(host: &Host) -> Result<Vec<String>> {
    let shown: Value = serde_json::from_str(&host.run(&["ip", "-j", "link"])?)?;
    let names =
        shown.as_array().context("ip shows no list")?.iter().filter_map(|link| link["ifname"].as_str());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

/// Programs on the hooks of a node's devices, as in `eth0 tcx/ingress reweave_ingress`, by device, way and order. Asked of the
/// kernel itself, since bpftool knows TCX from 7.3 on only.
pub(crate) fn hooks(host: &Host) -> Result<Vec<String>> {
    hooks_of(host, &devices(host)?.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The same of these devices alone, which is quicker.
fn hooks_of(host: &Host, devices: &[&str]) -> Result<Vec<String>> {
    let mut hooks = Vec::new();
    for &device in devices {
        for (way, attach_type) in [("egress", TcAttachType::Egress), ("ingress", TcAttachType::Ingress)] {
            let (_, programs) = host.enter(|| Ok(SchedClassifier::query_tcx(device, attach_type)?))?;
            let names = programs.iter().map(|p| p.name_as_str().unwrap_or("?").to_owned());
            hooks.extend(names.map(|name| format!("{device} tcx/{way} {name}")));
            let names = filters(host, device, way)?;
            hooks.extend(names.iter().map(|name| format!("{device} clsact/{way} {name}")));
        }
    }
    Ok(hooks)
}

/// The names of filters on a device; those without a program by their kind.
fn filters(host: &Host, device: &str, way: &str) -> Result<Vec<String>> {
    let shown: Value = serde_json::from_str(&host.run(&["tc", "-j", "filter", "show", "dev", device, way])?)?;
    let filters = shown.as_array().context("tc shows no list")?.iter();
    // Each priority also has a line of its own.
    let filters = filters.filter(|filter| filter["options"]["handle"].is_string() || filter["kind"] != "bpf");
    Ok(filters
        .map(|filter| {
            let name = filter["options"]["bpf_name"].as_str().or(filter["kind"].as_str()).unwrap_or("?");
            name.split(':').next().unwrap_or_default().to_owned()
        })
        .collect())
}

/// Exactly one program of ours on each hook; `kind` is `tcx` or `clsact`.
pub(crate) fn check_hooks(host: &Host, kind: &str) -> Result<()> {
    let found = hooks_of(host, &DEVICES)?;
    let ours: Vec<_> = found.iter().filter(|hook| hook.contains("reweave_")).collect();
    let wanted: Vec<String> = DEVICES
        .iter()
        .flat_map(|device| ["egress", "ingress"].map(|way| format!("{device} {kind}/{way} reweave_{way}")))
        // What leaves by the bridge's port has passed the bridge, what leaves by `lo` comes in there.
        .filter(|hook| {
            !["vxlan-6784", "lo"].iter().any(|it| hook.starts_with(&format!("{it} {kind}/egress")))
        })
        .collect();
    ensure!(ours.iter().map(|hook| hook.as_str()).eq(wanted.iter()), "hooks: {found:?}");
    Ok(())
}

/// Routing rules with our protocol number.
pub(crate) fn rules(host: &Host) -> Result<Vec<String>> {
    // Its own filter by protocol shows everything.
    let all = lines(host, &["ip", "-details", "rule"])?;
    Ok(all.into_iter().filter(|rule| rule.contains("proto 213")).collect())
}

/// Routes with our protocol number.
pub(crate) fn routes(host: &Host) -> Result<Vec<String>> {
    lines(host, &["ip", "route", "show", "table", "all", "protocol", "213"])
}

/// Tables of nftables.
pub(crate) fn nft_tables(host: &Host) -> Result<Vec<String>> {
    lines(host, &["nft", "list", "tables"])
}

/// What a program prints, by lines.
pub(crate) fn lines(host: &Host, words: &[&str]) -> Result<Vec<String>> {
    Ok(host.run(words)?.lines().map(|line| line.trim().to_owned()).collect())
}
