//! `lb-agent plan`: what a node would do with these manifests, without touching anything.

use super::render::{aligned, print};
use crate::model::{Desired, Forward, Node, Port};
use crate::policy::extend::{Options, Wanted, WantedService, WantedState};
use crate::policy::{compute, explain, wanted};
use crate::source::{Objects, manifests};
use anyhow::bail;
use clap::ValueEnum;
use lb_common::addr::{self, Protocol};
use lb_common::service::ServiceKey;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

/// Arguments of `lb-agent plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The node to plan for
    #[arg(long)]
    node: String,
    /// A file or a directory of manifests: Nodes, Services and EndpointSlices
    #[arg(long, value_name = "DIR-or-FILE")]
    manifests: PathBuf,
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Serve ports that the node itself needs, such as 22 and 6443
    #[arg(long)]
    force_reserved_ports: bool,
    /// Use terminating endpoints that still serve when none is ready
    #[arg(long)]
    terminating_fallback: bool,
}

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
    Yaml,
}

/// What the programs among the readers get: the shape of the golden vectors.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    desired: &'a Desired,
    parse_errors: Vec<String>,
}

/// Prints the plan. Problems are part of it, not errors.
///
/// # Errors
/// When the manifests cannot be read, or nothing in them names the node.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let Args { node, manifests: path, output, force_reserved_ports, terminating_fallback } = args;
    let objects = manifests::read(path)?;
    check_node(node, &objects)?;
    let Objects { nodes, services, slices, ignored } = &objects;
    let (nodes, errors): (Vec<Node>, Vec<_>) = nodes.iter().cloned().unzip();
    let parse_errors = errors.into_iter().flatten().map(|error| error.to_string()).collect();
    let desired = compute(node, &nodes, services, slices);
    let answer = Answer { desired: &desired, parse_errors };
    let text = match output {
        Output::Json => serde_json::to_string_pretty(&answer)? + "\n",
        Output::Yaml => serde_saphyr::to_string(&answer)?,
        Output::Table => {
            let options = Options {
                own_ports: BTreeSet::new(),
                force_reserved_ports: *force_reserved_ports,
                terminating_fallback: *terminating_fallback,
            };
            let wanted = wanted(node, &nodes, services, slices, &options);
            let not_served = explain::not_served(node, &nodes, services);
            let table =
                Table { node, answer: &answer, wanted: &wanted, not_served: &not_served, ignored: *ignored };
            table.to_string()
        }
    };
    print(&text)?;
    Ok(())
}

/// A mistyped name would look like a node that has nothing to do.
fn check_node(name: &str, objects: &Objects) -> anyhow::Result<()> {
    let endpoints = objects.slices.iter().flat_map(|slice| &slice.endpoints);
    let runs = endpoints.filter_map(|endpoint| endpoint.node_name.as_deref());
    let known: BTreeSet<&str> =
        objects.nodes.iter().map(|(node, _)| node.name.as_str()).chain(runs).collect();
    if known.contains(name) {
        return Ok(());
    }
    if known.is_empty() {
        bail!("no node {name:?}: the manifests name no node at all");
    }
    let known: Vec<&str> = known.into_iter().collect();
    bail!("no node {name:?} in the manifests; they name: {}", known.join(", "))
}

/// The plan for people.
struct Table<'a> {
    node: &'a str,
    answer: &'a Answer<'a>,
    wanted: &'a Wanted,
    not_served: &'a [(String, String)],
    ignored: usize,
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Answer { desired, parse_errors } = self.answer;
        writeln!(f, "Plan for {}", self.node)?;
        section(f, "Forwards", &self.forwards())?;
        let holder = |holder: &crate::model::Holder| {
            let ip = holder.node.weave_ip.map_or_else(|| "-".to_owned(), |ip| ip.to_string());
            let mac = holder.node.weave_mac.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
            vec![holder.node.name.clone(), ip, mac, format!("mark {}", holder.mark)]
        };
        section(f, "Other holders", &aligned(&desired.holders.iter().map(holder).collect::<Vec<_>>()))?;
        let status = |status: &crate::model::Status| {
            let change =
                status.address.map_or_else(|| "clear".to_owned(), |address| format!("show {address}"));
            vec![format!("{}/{}", status.namespace, status.name), change]
        };
        section(f, "Status writes", &aligned(&desired.status.iter().map(status).collect::<Vec<_>>()))?;
        let not_served = self.not_served.iter().map(|(key, why)| vec![key.clone(), why.clone()]);
        section(f, "Not served here", &aligned(&not_served.collect::<Vec<_>>()))?;
        let problems: Vec<String> =
            parse_errors.iter().chain(&desired.problems).chain(&self.wanted.problems).cloned().collect();
        section(f, "Problems", &problems)?;
        match self.ignored {
            0 => Ok(()),
            1 => writeln!(f, "\n1 object of another kind ignored"),
            ignored => writeln!(f, "\n{ignored} objects of other kinds ignored"),
        }
    }
}

impl Table<'_> {
    fn forwards(&self) -> Vec<String> {
        let mut rows = Vec::new();
        for forward in &self.answer.desired.forwards {
            for port in &forward.ports {
                let service = format!("{}/{}", forward.namespace, forward.name);
                let served = format!("{}:{}/{}", forward.address, port.port, port.protocol);
                let mut row = |endpoint: String, state: &str, place: &str| {
                    rows.push(vec![
                        service.clone(),
                        served.clone(),
                        endpoint,
                        state.to_owned(),
                        place.to_owned(),
                    ]);
                };
                match self.served(forward, port) {
                    None => row("-".to_owned(), "refused", "see problems"),
                    Some(WantedService { backends, .. }) if backends.is_empty() => {
                        row("-".to_owned(), "no endpoint", "connections are rejected");
                    }
                    Some(WantedService { backends, .. }) => {
                        for backend in backends {
                            let state = match backend.state {
                                WantedState::Active => "ready",
                                WantedState::Draining => "draining",
                            };
                            let place = if backend.local { "local" } else { "" };
                            row(format!("{}:{}", backend.address, backend.port), state, place);
                        }
                    }
                }
            }
        }
        aligned(&rows)
    }

    /// The datapath's view of a forward's port; none if it was refused.
    fn served(&self, forward: &Forward, port: &Port) -> Option<&WantedService> {
        let protocol =
            [Protocol::TCP, Protocol::UDP].into_iter().find(|known| known.name() == port.protocol)?;
        let number = addr::Port::new(u16::try_from(port.port).ok()?);
        let served = self.wanted.services.get(&ServiceKey::new(forward.address.into(), number, protocol))?;
        (served.namespace == forward.namespace && served.name == forward.name).then_some(served)
    }
}

/// A headline and its lines; `none` where there are none, so that a reader sees that nothing was left out.
fn section(f: &mut fmt::Formatter<'_>, title: &str, lines: &[String]) -> fmt::Result {
    writeln!(f, "\n{title}")?;
    if lines.is_empty() {
        writeln!(f, "  none")?;
    }
    lines.iter().try_for_each(|line| writeln!(f, "  {line}"))
}
