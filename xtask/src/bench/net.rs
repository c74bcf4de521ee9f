//! `bench net`: what the way through the load balancer costs beside plain routing, nftables and an empty program.
//!
//! Absolute times are those of this machine at this moment. So variants take turns in short rounds, each is compared
//! with plain routing of the same round, and the median over the rounds counts.

mod bed;
mod probe;

use super::report::Line;
use super::stats::{median, percentile};
use crate::sh;
use anyhow::{Context as _, Result, ensure};
use bed::{Bed, Variant};
use std::path::Path;
use std::time::Instant;
use testbed::Topology;

const SERVICES: [u32; 3] = [1, 1_000, 10_000];
/// Rounds for datagrams, and datagrams in each.
const ROUNDS: usize = 40;
const KNOWN: u32 = 4_000;
const NEW: u16 = 300;
/// Rounds for connections, and connections in each.
const TCP_ROUNDS: usize = 16;
const CONNECTIONS: usize = 150;
/// Rounds for one connection with much to say, and its bytes.
const BULK_ROUNDS: usize = 8;
const BULK: usize = 64 << 20;

/// Below the kernel's own choice for other sockets, never used twice in one run.
const FIRST_PORT: u16 = 1_024;
/// Where the kernel's choice begins.
const EPHEMERAL: (u16, u16) = (50_000, 65_000);

pub(super) fn run(agent: &Path, topology: Topology) -> Result<Vec<Line>> {
    // No other node's frames reach a node there, neither answers that go back through n1 nor forwards.
    ensure!(topology != Topology::Routed, "with a router between the nodes there is nothing to compare");
    let begin = Instant::now();
    sh::say(&format!("net: a testbed with the network {topology} for each variant"));
    let mut beds = Vec::new();
    for variant in Variant::ALL {
        let bed = Bed::build(variant, agent, topology).with_context(|| variant.name())?;
        let range = format!("{} {}", EPHEMERAL.0, EPHEMERAL.1);
        bed.client().sysctls(&[("ipv4/ip_local_port_range", &range)])?;
        beds.push(bed);
    }
    let mut lines = Vec::new();
    let mut port = FIRST_PORT;
    for services in SERVICES {
        sh::say(&format!("net: {services} services ({} s so far)", begin.elapsed().as_secs()));
        for bed in &mut beds {
            bed.fill(services)
                .with_context(|| format!("{} services for {}", services, bed.variant.name()))?;
        }
        sh::say(&format!("net: packets, connections, bytes ({} s so far)", begin.elapsed().as_secs()));
        let mut found = Phase::new(&beds);
        found.measure(&beds, &mut port)?;
        lines.extend(found.lines(services));
    }
    sh::say(&format!("net: {} s", begin.elapsed().as_secs()));
    Ok(lines)
}

/// What one number of services showed: samples by round, of each variant.
struct Phase {
    variants: Vec<Samples>,
}

struct Samples {
    variant: Variant,
    known: Vec<f64>,
    new: Vec<f64>,
    /// Per second, by round.
    rate: Vec<f64>,
    /// Each connection's time.
    latency: Vec<f64>,
    bulk: Vec<f64>,
}

impl Phase {
    fn new(beds: &[Bed]) -> Self {
        let empty = |bed: &Bed| Samples {
            variant: bed.variant,
            known: Vec::new(),
            new: Vec::new(),
            rate: Vec::new(),
            latency: Vec::new(),
            bulk: Vec::new(),
        };
        Self { variants: beds.iter().map(empty).collect() }
    }

    fn measure(&mut self, beds: &[Bed], port: &mut u16) -> Result<()> {
        let count = beds.len();
        // Nobody is always the first of a round.
        let turns = |rounds: usize| {
            (0..rounds).flat_map(move |round| (0..count).map(move |i| (round, (round + i) % count)))
        };
        for bed in beds {
            probe::known(bed.client(), bed.address(), &bed.server, KNOWN)?;
            probe::connections(bed.client(), bed.address(), &bed.server, CONNECTIONS)?;
        }
        for (round, i) in turns(ROUNDS) {
            let (bed, samples) = (&beds[i], &mut self.variants[i]);
            let first = *port + u16::try_from(round)? * NEW;
            samples.known.push(probe::known(bed.client(), bed.address(), &bed.server, KNOWN)?);
            samples.new.push(probe::new(bed.client(), bed.address(), &bed.server, first..first + NEW)?);
        }
        *port += u16::try_from(ROUNDS)? * NEW;
        for (_, i) in turns(TCP_ROUNDS) {
            let (bed, samples) = (&beds[i], &mut self.variants[i]);
            let times = probe::connections(bed.client(), bed.address(), &bed.server, CONNECTIONS)?;
            samples.rate.push(1e6 * times.len() as f64 / times.iter().sum::<f64>());
            samples.latency.extend(times);
        }
        for (_, i) in turns(BULK_ROUNDS) {
            let (bed, samples) = (&beds[i], &mut self.variants[i]);
            samples.bulk.push(probe::bulk(bed.client(), bed.address(), &bed.server, BULK)?);
        }
        Ok(())
    }

    fn lines(&self, services: u32) -> Vec<Line> {
        let Some((plain, others)) = self.variants.split_first() else { return Vec::new() };
        let line = |what: &str, samples: &Samples, value, unit| {
            Line::new(format!("{services} services: {what}, {}", samples.variant.name()), value, unit)
        };
        let goal = |line: Line, samples: &Samples, goal: fn(Line) -> Line| {
            if samples.variant == Variant::Ours { goal(line) } else { line }
        };
        let mut lines = vec![line("known flow, CPU per packet", plain, median(&plain.known), "ns")];
        for of in others {
            let line = line("known flow, over plain", of, over(&of.known, &plain.known), "ns");
            lines.push(goal(line, of, |line| line.at_most(0.0)));
        }
        lines.push(line("new flow, CPU per packet", plain, median(&plain.new), "ns"));
        for of in others {
            let line = line("new flow, over plain", of, over(&of.new, &plain.new), "ns");
            lines.push(goal(line, of, |line| line.at_most(500.0)));
        }
        lines.push(line("connections per second", plain, median(&plain.rate), "/s"));
        for of in others {
            let line = line("connections, of plain", of, ratio(&of.rate, &plain.rate), "ratio");
            lines.push(goal(line, of, |line| line.at_least(1.0)));
        }
        for of in &self.variants {
            lines.push(line("fresh connection, p50", of, median(&of.latency), "us"));
            lines.push(line("fresh connection, p99", of, percentile(&of.latency, 99), "us"));
        }
        lines.push(line("throughput of one stream", plain, median(&plain.bulk), "Gbit/s"));
        for of in others {
            lines.push(line("throughput, of plain", of, ratio(&of.bulk, &plain.bulk), "ratio"));
        }
        lines
    }
}

/// The median of the rounds' differences.
fn over(samples: &[f64], plain: &[f64]) -> f64 {
    median(&samples.iter().zip(plain).map(|(a, b)| a - b).collect::<Vec<_>>())
}

/// The median of the rounds' ratios.
fn ratio(samples: &[f64], plain: &[f64]) -> f64 {
    median(&samples.iter().zip(plain).map(|(a, b)| a / b).collect::<Vec<_>>())
}
