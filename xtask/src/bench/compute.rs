//! `bench compute`: the policy by itself.

use super::example;
use super::report::Line;
use crate::sh;
use anyhow::{Context as _, Result};
use std::path::Path;

pub(super) fn run(agent: &Path) -> Result<Vec<Line>> {
    sh::say("compute: the policy over 1,000 and 10,000 services");
    let objects = example::run(agent, "compute_bench")?;
    let ms = |what: &str, field: &str, size: f64| {
        let found =
            objects.iter().find(|object| object["what"] == what && object[field].as_f64() == Some(size));
        example::number(found.with_context(|| format!("no {what} of {size}"))?, "ms")
    };
    let (thousand, ten_thousand) = (ms("compute", "services", 1e3)?, ms("compute", "services", 1e4)?);
    Ok(vec![
        Line::new("compute, 1,000 services x 10 endpoints", thousand, "ms"),
        Line::new("compute, 10,000 services x 10 endpoints", ten_thousand, "ms").at_most(50.0),
        Line::new("compute, 10,000 services over 1,000", ten_thousand / thousand, "ratio").at_most(12.0),
        Line::new("what the datapath needs, 10,000 services", ms("wanted", "services", 1e4)?, "ms"),
        Line::new("Maglev table of 10 backends", ms("maglev", "backends", 10.0)?, "ms"),
        Line::new("Maglev table of 1,000 backends", ms("maglev", "backends", 1e3)?, "ms"),
    ])
}
