//! What a bench found: rows with a goal or without, as a table for people and as JSON for programs.

use crate::sh;
use anyhow::{Context as _, Result};
use serde::Serialize;
use std::fmt;
use std::fs;
use std::path::Path;

/// The rows of one part.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    value: f64,
    unit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    goal: Option<Goal>,
    #[serde(skip_serializing_if = "Option::is_none")]
    met: Option<bool>,
}

/// What a value should be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

impl Goal {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "≤ {most}"),
            Self::AtLeast(least) => write!(f, "≥ {least}"),
        }
    }
}

impl Report {
    /// Adds a value that is only shown.
    pub(crate) fn row(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        self.rows.push(Row { name: name.into(), value, unit, goal: None, met: None });
    }

    /// Adds a value that has a goal.
    pub(crate) fn judged(&mut self, name: impl Into<String>, value: f64, unit: &'static str, goal: Goal) {
        let met = Some(goal.is_met(value));
        self.rows.push(Row { name: name.into(), value, unit, goal: Some(goal), met });
    }

    /// Prints the table and writes `target/bench/PART.json`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn finish(&self, part: &str) -> Result<()> {
        println!("\n{}", self.table(part));
        let directory = sh::workspace().join("target/bench");
        let file = directory.join(format!("{part}.json"));
        fs::create_dir_all(&directory)
            .and_then(|()| fs::write(&file, serde_json::to_string_pretty(self)? + "\n"))
            .and_then(|()| give_back(&directory, &file))
            .with_context(|| format!("cannot write {}", file.display()))
    }

    fn table(&self, part: &str) -> String {
        let width = self.rows.iter().map(|row| row.name.chars().count()).chain([part.len()]).max().unwrap_or(0);
        let mut lines = vec![format!("{part:width$}  {:>10} {:8} {:9}", "value", "unit", "goal").trim_end().to_owned()];
        for Row { name, value, unit, goal, met } in &self.rows {
            let goal = goal.map(|goal| goal.to_string()).unwrap_or_default();
            let met = met.map_or("", |met| if met { "met" } else { "NOT met" });
            let line = format!("{name:width$}  {:>10} {unit:8} {goal:9} {met}", readable(*value));
            lines.push(line.trim_end().to_owned());
        }
        lines.join("\n")
    }
}

/// Three or four digits that mean something.
fn readable(value: f64) -> String {
    match value.abs() {
        small if small < 10.0 => format!("{value:.3}"),
        medium if medium < 1_000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Under sudo: the files belong to the user whose target directory it is.
fn give_back(directory: &Path, file: &Path) -> std::io::Result<()> {
    let id = |name| std::env::var(name).ok().and_then(|id: String| id.parse().ok());
    let (user, group) = (id("SUDO_UID"), id("SUDO_GID"));
    if user.is_none() {
        return Ok(());
    }
    [directory, file].into_iter().try_for_each(|path| std::os::unix::fs::chown(path, user, group))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_judged_by_its_own_side() {
        let mut report = Report::default();
        report.row("shown", 12.34, "µs");
        report.judged("fast", 0.5, "ms", Goal::AtMost(1.0));
        report.judged("slow", 1.5, "ms", Goal::AtMost(1.0));
        report.judged("many", 0.9, "×", Goal::AtLeast(1.0));
        assert_eq!(report.rows.iter().map(|row| row.met).collect::<Vec<_>>(), [
            None,
            Some(true),
            Some(false),
            Some(false)
        ]);
        assert_eq!(
            report.table("part"),
            "\
part        value unit     goal
shown        12.3 µs
fast        0.500 ms       ≤ 1       met
slow        1.500 ms       ≤ 1       NOT met
many        0.900 ×        ≥ 1       NOT met"
        );
    }

    #[test]
    fn the_file_says_which_side_a_goal_is_on() {
        let mut report = Report::default();
        report.judged("many", 2.0, "×", Goal::AtLeast(1.0));
        assert_eq!(
            serde_json::to_string(&report).unwrap(),
            r#"{"rows":[{"name":"many","value":2.0,"unit":"×","goal":{"at_least":1.0},"met":true}]}"#
        );
    }
}
