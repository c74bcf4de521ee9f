//! `cargo xtask bench`: what the load balancer costs, beside what else could be done, in one run.

mod apply;
mod change;
mod compute;
mod example;
mod memory;
mod moby;
mod net;
mod packet;
mod report;
mod stats;

use crate::{build, setup, sh, topology};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use nix::unistd::geteuid;
use report::Report;
use std::env;
use std::path::PathBuf;
use std::process::Command;
use testbed::Topology;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure; everything by default
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// The network between the pods, for `net`
    #[arg(long, value_name = "NAME", default_value_t, value_parser = topology::by_name())]
    topology: Topology,
    /// Measure this agent and the examples beside it, instead of building them
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Nanoseconds per packet, by BPF_PROG_TEST_RUN
    Packet,
    /// Packets, connections and throughput in the testbed, beside plain routing and nftables
    Net,
    /// One endpoint's change in the maps, beside nftables
    Apply,
    /// Many changes of single endpoints, from the objects to the maps
    Change,
    /// The policy
    Compute,
    /// The agent and its maps
    Memory,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Packet => "packet",
            Self::Net => "net",
            Self::Apply => "apply",
            Self::Change => "change",
            Self::Compute => "compute",
            Self::Memory => "memory",
        }
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    let Args { parts, topology, agent } = args;
    let parts = if parts.is_empty() { Part::value_variants().to_vec() } else { parts };
    let agent = match agent {
        Some(agent) => agent,
        None => {
            setup::run()?;
            let agent = build::agent()?;
            example::build()?;
            agent
        }
    };
    if !geteuid().is_root() {
        return again_as_root(&parts, topology, agent);
    }
    let mut missed = Vec::new();
    for part in parts {
        let report = match part {
            Part::Packet => packet::run()?,
            Part::Net => Report::new(net::run(&agent, topology)?),
            Part::Apply => Report::new(apply::run(&agent)?),
            Part::Change => Report::new(change::run(&agent)?),
            Part::Compute => Report::new(compute::run(&agent)?),
            Part::Memory => Report::new(memory::run(&agent)?),
        };
        print!("{}", report.table());
        let name = match (part, topology) {
            (Part::Net, topology) if topology != Topology::default() => format!("net-{topology}"),
            (part, _) => part.name().to_owned(),
        };
        let file = report.write(&name)?;
        sh::say(&format!("as JSON: {}", file.display()));
        missed.extend(report.missed());
    }
    ensure!(missed.is_empty(), "goals missed: {}", missed.join(", "));
    Ok(())
}

/// Only what follows needs root; what was built stays the user's.
fn again_as_root(parts: &[Part], topology: Topology, agent: PathBuf) -> Result<()> {
    sh::say("sudo: benches make network namespaces and load BPF programs");
    let mut command = Command::new("sudo");
    command.arg(env::current_exe()?).arg("bench").args(parts.iter().map(|part| part.name()));
    command.args(["--topology", topology.name(), "--agent"]).arg(agent);
    sh::run(&mut command)
}
