//! `bench apply`: one endpoint's change, beside nftables.

use super::example;
use super::moby;
use super::report::{Goal, Report};
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

pub(super) fn run(agent: &Path) -> Result<Report> {
    sh::say("apply: one endpoint's change in real maps");
    let ours = example::run(agent, "apply_bench")?;
    let mut report = Report::default();
    for object in &ours {
        let services = example::number(object, "services")?;
        let ms = example::number(object, "ms")?;
        report.judged(format!("{services:6} services: ours"), ms, "ms", Goal::AtMost(1.0));
        report.row(format!("{services:6} services: ours, p99"), example::number(object, "p99_ms")?, "ms");
    }
    if let [one, .., many] = ours.as_slice() {
        let ratio = example::number(many, "ms")? / example::number(one, "ms")?;
        report.judged("ours, 10,000 services over 1", ratio, "×", Goal::AtMost(1.5));
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
        report.row(format!("{services:6} services: nft, its process taken off"), change - process, "ms");
        report.row(format!("{services:6} services: nft with nothing to do"), process, "ms");
    }
    Ok(report)
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
