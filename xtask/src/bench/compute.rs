//! `bench compute`: the policy by itself.

use super::example;
use super::report::{Goal, Report};
use crate::sh;
use anyhow::{Context as _, Result};
use std::path::Path;

pub(super) fn run(agent: &Path) -> Result<Report> {
    sh::say("compute: the policy over 1,000 and 10,000 services");
    let objects = example::run(agent, "compute_bench")?;
    let ms = |what: &str, field: &str, size: f64| {
        let found = objects.iter().find(|object| object["what"] == what && object[field].as_f64() == Some(size));
        example::number(found.with_context(|| format!("no {what} of {size}"))?, "ms")
    };
    let mut report = Report::default();
    let (thousand, ten_thousand) = (ms("compute", "services", 1e3)?, ms("compute", "services", 1e4)?);
    report.row("compute, 1,000 services × 10 endpoints", thousand, "ms");
    report.judged("compute, 10,000 services × 10 endpoints", ten_thousand, "ms", Goal::AtMost(50.0));
    report.judged("compute, 10,000 over 1,000", ten_thousand / thousand, "×", Goal::AtMost(12.0));
    report.row("with what the datapath needs, 10,000 services", ms("wanted", "services", 1e4)?, "ms");
    report.row("Maglev table of 10 backends", ms("maglev", "backends", 10.0)?, "ms");
    report.row("Maglev table of 1,000 backends", ms("maglev", "backends", 1e3)?, "ms");
    Ok(report)
}
