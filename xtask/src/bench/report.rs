//! What a bench found: a table for people, JSON for programs.

use crate::sh;
use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

/// One number, and how much it may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: String,
    /// The goal: no more than this.
    #[serde(default)]
    pub(crate) at_most: Option<f64>,
    /// The goal: no less than this.
    #[serde(default)]
    pub(crate) at_least: Option<f64>,
    /// Whether every goal is met; left out where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) met: Option<bool>,
}

impl Line {
    /// A number without a goal.
    pub(crate) fn new(name: impl Into<String>, value: f64, unit: &str) -> Self {
        Self { name: name.into(), value, unit: unit.to_owned(), at_most: None, at_least: None, met: None }
    }

    /// With a goal: no more than this.
    pub(crate) fn at_most(self, most: f64) -> Self {
        Self { at_most: Some(most), ..self }
    }

    /// With a goal: no less than this.
    pub(crate) fn at_least(self, least: f64) -> Self {
        Self { at_least: Some(least), ..self }
    }

    fn judged(mut self) -> Self {
        let goals =
            [self.at_most.map(|most| self.value <= most), self.at_least.map(|least| self.value >= least)];
        self.met = goals.into_iter().flatten().reduce(|a, b| a && b);
        self
    }
}

/// Every number of one part.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Report {
    lines: Vec<Line>,
}

impl Report {
    pub(crate) fn new(lines: Vec<Line>) -> Self {
        Self { lines: lines.into_iter().map(Line::judged).collect() }
    }

    /// From a bench that prints a JSON array.
    pub(crate) fn parse(json: &str) -> Result<Self> {
        serde_json::from_str(json)
            .map(Self::new)
            .context("the bench printed something that is not its report")
    }

    /// The names of the numbers that miss their goal.
    pub(crate) fn missed(&self) -> Vec<String> {
        self.lines.iter().filter(|line| line.met == Some(false)).map(|line| line.name.clone()).collect()
    }

    pub(crate) fn table(&self) -> String {
        let width = self.lines.iter().map(|line| line.name.len()).max().unwrap_or(0);
        let mut table = String::new();
        for Line { name, value, unit, at_most, at_least, met } in &self.lines {
            let mut goal = String::new();
            for (sign, bound) in [("<=", at_most), (">=", at_least)] {
                if let Some(bound) = bound {
                    goal += &format!("  goal {sign} {bound}");
                }
            }
            let verdict = match met {
                Some(true) => "  met",
                Some(false) => "  MISSED",
                None => "",
            };
            let _ = writeln!(table, "{name:width$}  {value:>10.2} {unit:5}{goal}{verdict}");
        }
        table
    }

    /// Writes `target/bench/NAME.json`.
    pub(crate) fn write(&self, name: &str) -> Result<PathBuf> {
        let directory = sh::workspace().join("target/bench");
        fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let file = directory.join(format!("{name}.json"));
        let json = serde_json::to_string_pretty(&self.lines)?;
        fs::write(&file, json + "\n").with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_judged_and_missed_ones_named() {
        let report = Report::parse(
            r#"[{"name": "a", "value": 1.0, "unit": "ns", "at_most": 1.0},
                {"name": "b", "value": 2.0, "unit": "ratio", "at_most": 1.5},
                {"name": "c", "value": 0.9, "unit": "ratio", "at_least": 1.0},
                {"name": "d", "value": 7.0, "unit": "ns", "at_most": null}]"#,
        )
        .unwrap();
        assert_eq!(report.missed(), ["b", "c"]);
        assert_eq!(report.lines[3].met, None);
        let table = report.table();
        assert!(table.contains("goal <= 1.5  MISSED"), "{table}");
        assert!(table.contains("goal <= 1  met"), "{table}");
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(Report::parse("round 1").is_err());
    }
}
