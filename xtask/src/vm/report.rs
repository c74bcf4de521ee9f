//! Kernel by step, as a table.

use super::steps::{Ending, Outcome, Step};
use std::fmt::Write as _;

/// The first step, which is the machine's own.
pub(super) const BOOT: &str = "boot";

/// What became of one kernel.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) kernel: String,
    pub(super) release: String,
    pub(super) outcomes: Vec<Outcome>,
}

impl Row {
    /// Of a kernel that could not be had, or a machine that could not be started.
    pub(super) fn absent(kernel: &str) -> Self {
        Self { kernel: kernel.to_owned(), release: "cannot be had".to_owned(), outcomes: Vec::new() }
    }

    /// Whether every step was run and passed.
    pub(super) fn is_whole(&self, steps: &[Step]) -> bool {
        names(steps).all(|name| self.outcome(name).is_some_and(Outcome::has_passed))
    }

    fn outcome(&self, step: &str) -> Option<&Outcome> {
        self.outcomes.iter().find(|outcome| outcome.step == step)
    }

    fn cell(&self, step: &str) -> String {
        let Some(outcome) = self.outcome(step) else { return "not run".to_owned() };
        let seconds = outcome.took.as_secs();
        match outcome.ending {
            Ending::Passed => format!("ok {seconds} s"),
            Ending::Failed | Ending::Open => format!("FAILED {seconds} s"),
        }
    }

    /// Instructions that the verifier walked, of each program; empty where the kernel does not count them.
    fn counts(&self) -> String {
        let lines = self.outcomes.iter().flat_map(|outcome| &outcome.output);
        lines.filter_map(|line| count(line)).collect::<Vec<_>>().join(" + ")
    }
}

/// The number in `…reweave_ingress: 82107 instructions verified, budget 104000`.
fn count(line: &str) -> Option<&str> {
    line.split_once(" instructions verified")?.0.rsplit(' ').next()
}

fn names(steps: &[Step]) -> impl Iterator<Item = &str> {
    [BOOT].into_iter().chain(steps.iter().map(|step| step.name))
}

/// One line for each kernel.
pub(super) fn table(rows: &[Row], steps: &[Step]) -> String {
    let head: Vec<_> = ["kernel", "release"]
        .into_iter()
        .chain(names(steps))
        .chain(["instructions"])
        .map(str::to_owned)
        .collect();
    let mut lines = vec![head];
    lines.extend(rows.iter().map(|row| {
        let cells = names(steps).map(|step| row.cell(step));
        [row.kernel.clone(), row.release.clone()].into_iter().chain(cells).chain([row.counts()]).collect()
    }));
    let widths: Vec<usize> = (0..lines[0].len())
        .map(|column| lines.iter().map(|line: &Vec<String>| line[column].len()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for line in lines {
        let padded = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", padded.collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

/// The closing line: steps that passed, and the others.
pub(super) fn tally(rows: &[Row], steps: &[Step]) -> String {
    let all = rows.len() * names(steps).count();
    let passed = rows.iter().flat_map(|row| &row.outcomes).filter(|outcome| outcome.has_passed()).count();
    format!("{passed} passed, {} failed", all.saturating_sub(passed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn outcome(step: &str, ending: Ending, output: &[&str]) -> Outcome {
        let mut outcome = Outcome::begun(step);
        output.iter().for_each(|line| outcome.hear(line));
        outcome.end(ending, Duration::from_secs(7));
        outcome
    }

    fn step(name: &'static str) -> Step {
        Step { name, command: String::new(), limit: Duration::ZERO }
    }

    #[test]
    fn a_step_that_was_not_reached_is_no_success() {
        let steps = [step("verifier"), step("packets")];
        let counts = ["test x ... reweave_ingress: 82107 instructions verified, budget 104000"];
        let whole = Row {
            kernel: "6.1".to_owned(),
            release: "6.1.0".to_owned(),
            outcomes: vec![
                outcome(BOOT, Ending::Passed, &[]),
                outcome("verifier", Ending::Passed, &counts),
                outcome("packets", Ending::Passed, &[]),
            ],
        };
        let mut stuck = whole.clone();
        stuck.outcomes.pop();
        let mut failed = whole.clone();
        failed.outcomes[2].ending = Ending::Failed;
        assert!(whole.is_whole(&steps));
        for row in [&stuck, &failed, &Row::absent("6.1")] {
            assert!(!row.is_whole(&steps), "{row:?}");
        }
        let rows = [whole, stuck, failed, Row::absent("7")];
        let text = table(&rows, &steps);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1], "6.1     6.1.0          ok 7 s   ok 7 s    ok 7 s      82107");
        assert!(lines[2].contains("not run") && lines[3].contains("FAILED 7 s"), "{text}");
        assert_eq!(tally(&rows, &steps), "7 passed, 5 failed");
    }
}
