//! `bench net`: what the way through the load balancer costs beside plain routing, nftables and an empty program.
//!
//! Absolute times are those of this machine at this moment. So variants take turns in short rounds, each is compared
//! with plain routing of the same round, and the median over the rounds counts.

mod bed;
mod probe;

use super::report::{Goal, Report};
use super::stats::{median, percentile};
use crate::sh;
use anyhow::{Context as _, Result};
use bed::{Bed, Variant};
pub(super) use bed::{served_ports, write_services};
use std::path::Path;
use std::time::Instant;

const SERVICES: [u32; 1] = [1];
/// Rounds for datagrams, and datagrams in each.
const ROUNDS: usize = 40;
const KNOWN: u32 = 4_000;
const NEW: u16 = 300;
/// Rounds for connections, and connections in each.
const TCP_ROUNDS: usize = 20;
const CONNECTIONS: usize = 200;
/// Rounds for one connection with much to say, and its bytes.
const BULK_ROUNDS: usize = 8;
const BULK: usize = 64 << 20;

/// Below the kernel's own choice for other sockets, never used twice in one run.
const FIRST_PORT: u16 = 1_024;
/// Where the kernel's choice begins.
const EPHEMERAL: (u16, u16) = (50_000, 65_000);

pub(super) fn run(agent: &Path) -> Result<Report> {
    let begin = Instant::now();
    sh::say("net: four testbeds, one for each variant");
    let mut beds = Vec::new();
    for variant in Variant::ALL {
        let bed = Bed::build(variant, agent).with_context(|| variant.name())?;
        let range = format!("{} {}", EPHEMERAL.0, EPHEMERAL.1);
        bed.client().sysctls(&[("ipv4/ip_local_port_range", &range)])?;
        beds.push(bed);
    }
    let mut report = Report::default();
    let mut port = FIRST_PORT;
    for services in SERVICES {
        sh::say(&format!("net: {services} services ({} s so far)", begin.elapsed().as_secs()));
        for bed in &mut beds {
            bed.fill(services).with_context(|| format!("{} services for {}", services, bed.variant.name()))?;
        }
        sh::say(&format!("net: packets, connections, bytes ({} s so far)", begin.elapsed().as_secs()));
        let mut found = Phase::new(&beds);
        found.measure(&beds, &mut port)?;
        found.report(services, &mut report);
    }
    sh::say(&format!("net: {} s", begin.elapsed().as_secs()));
    Ok(report)
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
        let turns = |rounds: usize| (0..rounds).flat_map(move |round| (0..count).map(move |i| (round, (round + i) % count)));
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

    fn report(&self, services: u32, report: &mut Report) {
        let Some((plain, others)) = self.variants.split_first() else { return };
        let named = |what: &str, variant: Variant| format!("{services:6} services: {what}, {}", variant.name());
        let is_ours = |samples: &Samples| samples.variant == Variant::Ours;
        let mut add = |name: String, value: f64, unit: &'static str, goal: Option<Goal>| match goal {
            Some(goal) => report.judged(name, value, unit, goal),
            None => report.row(name, value, unit),
        };
        add(named("known flow, CPU per packet", plain.variant), median(&plain.known), "ns", None);
        for samples in others {
            let goal = is_ours(samples).then_some(Goal::AtMost(0.0));
            add(named("known flow, over plain", samples.variant), over(&samples.known, &plain.known), "ns", goal);
        }
        add(named("new flow, CPU per packet", plain.variant), median(&plain.new), "ns", None);
        for samples in others {
            let goal = is_ours(samples).then_some(Goal::AtMost(500.0));
            add(named("new flow, over plain", samples.variant), over(&samples.new, &plain.new), "ns", goal);
        }
        add(named("connections per second", plain.variant), median(&plain.rate), "/s", None);
        for samples in others {
            let goal = is_ours(samples).then_some(Goal::AtLeast(1.0));
            add(named("connections, of plain", samples.variant), of(&samples.rate, &plain.rate), "×", goal);
        }
        for samples in &self.variants {
            add(named("fresh connection p50", samples.variant), median(&samples.latency), "µs", None);
            add(named("fresh connection p99", samples.variant), percentile(&samples.latency, 99), "µs", None);
        }
        add(named("throughput of one stream", plain.variant), median(&plain.bulk), "Gbit/s", None);
        for samples in others {
            add(named("throughput, of plain", samples.variant), of(&samples.bulk, &plain.bulk), "×", None);
        }
    }
}

/// The median of the rounds' differences.
fn over(samples: &[f64], plain: &[f64]) -> f64 {
    median(&samples.iter().zip(plain).map(|(a, b)| a - b).collect::<Vec<_>>())
}

/// The median of the rounds' ratios.
fn of(samples: &[f64], plain: &[f64]) -> f64 {
    median(&samples.iter().zip(plain).map(|(a, b)| a / b).collect::<Vec<_>>())
}
