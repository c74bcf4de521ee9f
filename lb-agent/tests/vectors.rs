//! The golden vectors: the policy answers as the Go agent did, in every case, order and problem texts included.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests, outside #[test] functions")]

use flate2::read::GzDecoder;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use lb_agent::model::{EndpointSlice, Node, Service};
use lb_agent::policy::{compute, marks, node};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read};
use std::net::IpAddr;
use std::path::Path;

#[derive(Deserialize)]
struct Case<I> {
    name: String,
    input: I,
    expected: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ComputeInput {
    #[serde(rename = "self")]
    self_name: String,
    nodes: Vec<core::Node>,
    services: Vec<core::Service>,
    endpoint_slices: Vec<discovery::EndpointSlice>,
}

/// Runs every case of a file, compares, and checks that there are as many as there should be.
fn check<I: DeserializeOwned>(file: &str, cases: usize, answer: impl Fn(I) -> Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(file);
    let plain = File::open(&path).unwrap();
    let reader: Box<dyn Read> =
        if file.ends_with(".gz") { Box::new(GzDecoder::new(plain)) } else { Box::new(plain) };
    let mut seen = 0;
    for line in BufReader::new(reader).lines() {
        let case: Case<I> = serde_json::from_str(&line.unwrap()).unwrap();
        let got = answer(case.input);
        if got != case.expected {
            panic!("{file}: case {seen} {:?} differs\n{}", case.name, differences(&case.expected, &got));
        }
        seen += 1;
    }
    println!("{file}: {seen} cases");
    assert_eq!(seen, cases, "{file}");
}

/// The lines (of the indented text) that differ, each with its number.
fn differences(expected: &Value, got: &Value) -> String {
    let text = |value: &Value| serde_json::to_string_pretty(value).unwrap();
    let (expected, got) = (text(expected), text(got));
    let (expected, got): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), got.lines().collect());
    (0..expected.len().max(got.len()))
        .filter(|i| expected.get(*i) != got.get(*i))
        .take(20)
        .map(|i| {
            let at = |lines: &[&str]| lines.get(i).map_or("", |line| line.trim()).to_owned();
            format!("line {}: expected {} got {}\n", i + 1, at(&expected), at(&got))
        })
        .collect()
}

fn compute_answer(input: ComputeInput) -> Value {
    let ComputeInput { self_name, nodes, services, endpoint_slices } = input;
    let (nodes, errors): (Vec<Node>, Vec<_>) = nodes.iter().map(node::parse).unzip();
    let services: Vec<Service> = services.iter().map(Service::from).collect();
    let slices: Vec<EndpointSlice> = endpoint_slices.iter().map(EndpointSlice::from).collect();
    let errors: Vec<String> = errors.into_iter().flatten().map(|error| error.to_string()).collect();
    json!({ "desired": compute(&self_name, &nodes, &services, &slices), "parseErrors": errors })
}

#[test]
fn compute_edge() {
    check("compute-edge.jsonl", 85, compute_answer);
}

#[test]
fn compute_small() {
    check("compute-small.jsonl.gz", 2_000, compute_answer);
}

#[test]
fn compute_large() {
    check("compute-large.jsonl.gz", 5, compute_answer);
}

#[test]
fn parse_node() {
    check("parse-node.jsonl", 119, |object: core::Node| {
        let (node, error) = node::parse(&object);
        json!({ "node": node, "error": error.map(|error| error.to_string()) })
    });
}

#[test]
fn assign_marks() {
    #[derive(Deserialize)]
    struct Input {
        names: Vec<String>,
    }
    check("assign-marks.jsonl", 41, |input: Input| {
        let names: Vec<&str> = input.names.iter().map(String::as_str).collect();
        let marks = marks::assign(&names);
        let marks: Vec<Value> =
            marks.iter().map(|(name, mark)| json!({ "name": name, "mark": mark })).collect();
        json!({ "marks": marks })
    });
}

/// What Go prints for a `net.IP`; the vectors also show what a caller with IPv6 or nil addresses gets.
struct GoIp(Option<IpAddr>);

impl fmt::Display for GoIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.to_canonical().fmt(f),
            None => f.write_str("<nil>"),
        }
    }
}

#[test]
fn format_addresses() {
    #[derive(Deserialize)]
    struct Input {
        ips: Vec<Option<IpAddr>>,
    }
    check("format-addresses.jsonl", 8, |input: Input| {
        let addresses: Vec<GoIp> = input.ips.into_iter().map(GoIp).collect();
        json!({ "value": node::format_addresses(&addresses) })
    });
}
