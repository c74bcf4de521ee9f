//! `bench memory`: the agent and its maps at the default limits, with one service and with 10,000.

use super::report::Line;
use crate::sh;
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use testbed::{Options, Process, Testbed, wait};

const SERVICES: [u32; 2] = [0, 10_000];
/// Held by n1.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 101);
const FIRST_PORT: u32 = 20_000;
const ENDPOINTS: u32 = 10;
/// Services in one file.
const FILE: u32 = 500;
const MIB: f64 = 1_048_576.0;

pub(super) fn run(agent: &Path) -> Result<Vec<Line>> {
    let testbed = Testbed::weave(Options { agent: Some(agent.to_owned()), ..Options::default() })?;
    let mut lines = Vec::new();
    let mut filled = 0;
    for services in SERVICES {
        sh::say(&format!("memory: an agent with {services} services"));
        write_services(&testbed, filled, services)?;
        filled = services;
        let begin = Instant::now();
        let mut process = testbed.start_agent(1, &[])?;
        wait::until(&format!("{services} served ports"), Duration::from_secs(60), || {
            ensure!(process.is_running()?, "the agent has ended: {}", process.log()?.trim());
            let served = served_ports(&testbed)?;
            ensure!(served == services as usize, "{served} are served");
            Ok(())
        })?;
        let seconds = begin.elapsed().as_secs_f64();
        lines.push(Line::new(format!("{services} services: agent, from start to all served"), seconds, "s"));
        for (what, field) in [("resident", "VmRSS:"), ("resident at most", "VmHWM:")] {
            lines.push(Line::new(
                format!("{services} services: agent, {what}"),
                status(&process, field)?,
                "MiB",
            ));
        }
        let maps = maps(&testbed.pins(1))?;
        for (name, bytes) in &maps {
            lines.push(Line::new(format!("{services} services: map {name}"), *bytes as f64 / MIB, "MiB"));
        }
        lines.push(Line::new(
            format!("{services} services: all maps"),
            maps.values().sum::<u64>() as f64 / MIB,
            "MiB",
        ));
        process.kill()?;
    }
    Ok(lines)
}

/// A line in kB of the process's status, in MiB.
fn status(process: &Process, field: &str) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{}/status", process.pid()))?;
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.split_whitespace().next());
    Ok(value.with_context(|| format!("no {field} in the process's status"))?.parse::<f64>()? / 1024.0)
}

/// Bytes that the kernel accounts for each map that is pinned there, and for the tables inside of `rings`.
fn maps(pins: &Path) -> Result<BTreeMap<String, u64>> {
    let directory = fs::read_dir(pins)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("maps-")))
        .with_context(|| format!("no maps below {}", pins.display()))?;
    let mut bytes = BTreeMap::new();
    for entry in fs::read_dir(&directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        bytes.insert(name, memory(&bpftool(&["map", "show", "pinned"], &path)?)?);
    }
    let inside: BTreeSet<u64> = bpftool(&["map", "dump", "pinned"], &directory.join("rings"))?
        .as_array()
        .context("rings are no list")?
        .iter()
        .map(inner_id)
        .collect::<Result<_>>()?;
    let all = bpftool(&["map", "show"], Path::new(""))?;
    let tables = all.as_array().context("maps are no list")?.iter();
    let tables = tables.filter(|map| map["id"].as_u64().is_some_and(|id| inside.contains(&id)));
    bytes.insert("tables in rings".to_owned(), tables.map(memory).sum::<Result<u64>>()?);
    Ok(bytes)
}

/// The id of an inner map, which bpftool prints as four bytes in the machine's order.
fn inner_id(entry: &Value) -> Result<u64> {
    let bytes: Option<Vec<u8>> = entry["value"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default()
        .iter()
        .map(|byte| u8::from_str_radix(byte.as_str()?.strip_prefix("0x")?, 16).ok())
        .collect();
    let bytes = bytes.and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
    Ok(u32::from_ne_bytes(bytes.with_context(|| format!("{entry} names no map"))?).into())
}

fn memory(map: &Value) -> Result<u64> {
    map["bytes_memlock"].as_u64().with_context(|| format!("bpftool does not say how large {map} is"))
}

fn bpftool(words: &[&str], path: &Path) -> Result<Value> {
    let mut command = Command::new("bpftool");
    command.arg("-j").args(words);
    if path != Path::new("") {
        command.arg(path);
    }
    Ok(serde_json::from_str(&sh::output(&mut command)?)?)
}

/// Services `first..end` with a port each of n1's address and ten endpoints on n2.
fn write_services(testbed: &Testbed, first: u32, end: u32) -> Result<()> {
    for start in (first..end).step_by(FILE as usize) {
        let mut text = String::new();
        for number in start..end.min(start + FILE) {
            // Writing to a String cannot fail.
            let _ = write!(text, "{}", service(number));
        }
        testbed.cluster().write(&format!("fill-{start}.yaml"), &text)?;
    }
    Ok(())
}

fn service(number: u32) -> String {
    let first = u32::from(Ipv4Addr::new(10, 40, 0, 0)) + number * ENDPOINTS;
    let endpoints: Vec<_> = (first..first + ENDPOINTS)
        .map(|address| {
            let address = Ipv4Addr::from(address);
            format!("{{addresses: [{address}], nodeName: n2, conditions: {{ready: true, serving: true}}}}")
        })
        .collect();
    format!(
        "---
apiVersion: v1
kind: Service
metadata: {{name: fill-{number}, namespace: default}}
spec:
  type: LoadBalancer
  loadBalancerClass: reweave.levk.dev/node-address
  loadBalancerIP: {ADDRESS}
  ports: [{{protocol: TCP, port: {port}, targetPort: 8080}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: fill-{number}-1, namespace: default, labels: {{kubernetes.io/service-name: fill-{number}}}}}
addressType: IPv4
ports: [{{protocol: TCP, port: 8080}}]
endpoints: [{endpoints}]
",
        port = FIRST_PORT + number,
        endpoints = endpoints.join(", "),
    )
}

/// How many entries n1's `services` map has.
fn served_ports(testbed: &Testbed) -> Result<usize> {
    let printed = testbed.ask_agent(1, &["services", "-o", "json"])?;
    let services: Value = serde_json::from_str(&printed)?;
    services.as_array().map(Vec::len).context("services are no list")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_map_is_named_by_its_bytes() {
        let bytes = 139_035_u32.to_ne_bytes().map(|byte| format!("{byte:#04x}"));
        assert_eq!(inner_id(&serde_json::json!({ "key": [], "value": bytes })).unwrap(), 139_035);
        assert!(inner_id(&serde_json::json!({ "value": ["0x1b"] })).is_err());
    }
}
