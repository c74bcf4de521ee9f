//! `bench change`: single endpoints change in a large cluster, from the store of objects to the maps.

use super::example;
use super::report::Line;
use crate::sh;
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::path::Path;

pub(super) fn run(agent: &Path) -> Result<Vec<Line>> {
    sh::say("change: 50 endpoints a second, beside 5,000 services x 10 endpoints");
    let objects = example::run(agent, "change_bench")?;
    let of = |wanted: &dyn Fn(&Value) -> bool| {
        objects.iter().find(|object| wanted(object)).context("the bench left a number out")
    };
    let fill = of(&|object| object["what"] == "fill")?;
    let mut lines = vec![Line::new("everything, from empty maps", example::number(fill, "ms")?, "ms")];
    for (with_period, when) in [(false, "changes alone"), (true, "with the period's comparison")] {
        let object = of(&|object| object["what"] == "change" && object["period"] == with_period)?;
        let line = |what: &str, field: &str, unit: &str| {
            anyhow::Ok(Line::new(format!("{when}: {what}"), example::number(object, field)?, unit))
        };
        lines.extend([
            line("until the map has it", "p50_ms", "ms")?,
            line("until the map has it, p99", "p99_ms", "ms")?.at_most(50.0),
            line("until the map has it, at most", "most_ms", "ms")?,
            line("CPU time of the loop", "cpu_percent", "%")?,
            line("resident", "resident_mib", "MiB")?.at_most(100.0),
        ]);
        if with_period {
            lines.push(line("longest that a change waits for a part of it", "longest_pause_ms", "ms")?);
        }
    }
    Ok(lines)
}
