//! `bench apply`: one endpoint's change, beside nftables.

use super::example;
use super::moby;
use super::report::Line;
use super::stats::median;
use crate::sh;
use anyhow::Result;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Instant;
use testbed::{Host, Options, Testbed};

const SERVICES: [u32; 3] = [1, 1_000, 10_000];
/// Changes of nftables that are timed for each number of services.
const CHANGES: usize = 15;

pub(super) fn run(agent: &Path) -> Result<Vec<Line>> {
    sh::say("apply: one endpoint's change in real maps");
    let ours = example::run(agent, "apply_bench")?;
    let mut lines = Vec::new();
    for object in &ours {
        let services = example::number(object, "services")?;
        let line = |what: &str, field: &str| {
            let name = format!("{services} services: ours, {what}");
            anyhow::Ok(Line::new(name, example::number(object, field)?, "ms"))
        };
        lines.push(line("until packets see it", "seen_ms")?.at_most(1.0));
        lines.push(line("until packets see it, p99", "seen_p99_ms")?);
        lines.push(line("until the kernel has let go of the former table", "ms")?.at_most(1.0));
        lines.push(line("all services, from empty maps", "fill_ms")?);
    }
    if let [one, .., many] = ours.as_slice() {
        let ratio = example::number(many, "seen_ms")? / example::number(one, "seen_ms")?;
        lines.push(Line::new("ours, 10,000 services over 1", ratio, "ratio").at_most(1.5));
    }
    sh::say("apply: the same change by nft");
    let testbed = Testbed::weave(Options::default())?;
    let host = testbed.router();
    host.feed(&["nft", "-f", "-"], &moby::table())?;
    let mut filled = 1;
    for services in SERVICES {
        host.feed(&["nft", "-f", "-"], &moby::fill(filled, services))?;
        filled = services;
        let (change, process) = changes(host)?;
        lines.push(Line::new(
            format!("{services} services: nft, its process taken off"),
            change - process,
            "ms",
        ));
        lines.push(Line::new(format!("{services} services: nft with nothing to do"), process, "ms"));
    }
    Ok(lines)
}

/// Medians of nft's time for a change of one endpoint of ten, and for no change at all, in turns, in ms.
fn changes(host: &Host) -> Result<(f64, f64)> {
    let service = Ipv4Addr::new(192, 0, 2, 101);
    // Eight and seven: at ten, the kernel takes some sets of intervals for overlaps.
    let all: Vec<_> = (1..=8).map(|last| Ipv4Addr::new(10, 32, 2, last)).collect();
    let (mut before, mut after) = (all.as_slice(), &all[..7]);
    host.feed(&["nft", "-f", "-"], &moby::add(service, before))?;
    let (mut change, mut process) = (Vec::new(), Vec::new());
    for _ in 0..CHANGES {
        change.push(timed(host, &moby::replace(service, before, after))?);
        process.push(timed(host, "")?);
        std::mem::swap(&mut before, &mut after);
    }
    host.feed(&["nft", "-f", "-"], &moby::remove(service, before))?;
    Ok((median(&change), median(&process)))
}

fn timed(host: &Host, rules: &str) -> Result<f64> {
    let begin = Instant::now();
    host.feed(&["nft", "-f", "-"], rules)?;
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}
