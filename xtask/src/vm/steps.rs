//! What is run on each kernel, and how it ended.

use super::payload::Payload;
use anyhow::Result;
use std::time::Duration;

/// Test binaries of `lb-agent` that the steps run.
pub(super) const TESTS: [&str; 2] = ["packets", "traffic"];

/// Names of the steps, in order.
pub(super) const NAMES: [&str; 4] = ["verifier", "packets", "traffic", "devices"];

/// Of the traffic tests some that call no tshark, which is not packed, and make no large files, which takes emulated machines
/// longer than those tests wait. `devices` has smaller ones.
const TRAFFIC: &str = "every_node_s_pod refusal:: other_ports_of_the_address";

/// One step.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) name: &'static str,
    /// For a shell.
    pub(super) command: String,
    /// Emulated machines are slow, and others may be at work beside it.
    pub(super) limit: Duration,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Open,
    Passed,
    Failed,
}

/// What became of a step.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    pub(super) step: String,
    pub(super) ending: Ending,
    pub(super) took: Duration,
    /// What it printed.
    pub(super) output: Vec<String>,
}

impl Outcome {
    pub(super) fn begun(step: &str) -> Self {
        Self { step: step.to_owned(), ending: Ending::Open, took: Duration::ZERO, output: Vec::new() }
    }

    pub(super) fn is_open(&self) -> bool {
        self.ending == Ending::Open
    }

    pub(super) fn has_passed(&self) -> bool {
        self.ending == Ending::Passed
    }

    pub(super) fn hear(&mut self, line: &str) {
        self.output.push(line.to_owned());
    }

    pub(super) fn end(&mut self, ending: Ending, took: Duration) {
        self.ending = ending;
        self.took = took;
    }
}

/// The steps with these names, all without names; of the tests those with `test` in their names.
pub(super) fn steps(payload: &Payload, names: &[String], test: Option<&str>) -> Result<Vec<Step>> {
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    let step = |name, binary: &str, arguments: &str, filters: &str, limit| -> Result<Step> {
        // With a filter of the user's in place of the step's.
        let filters = test.unwrap_or(filters);
        let binary = payload.test(binary)?.display();
        let command = format!("{binary} --test-threads 1 --nocapture {arguments} {filters}");
        Ok(Step { name, command, limit })
    };
    let all = [
        step("verifier", "packets", "", "verifier::verifier_cost", minutes(5))?,
        step("packets", "packets", "--skip verifier:: --skip fuzz:: --skip explain::", "", minutes(20))?,
        step("traffic", "traffic", "", TRAFFIC, minutes(20))?,
        step("devices", "traffic", "--ignored", "", minutes(20))?,
    ];
    Ok(all
        .into_iter()
        .filter(|step| names.is_empty() || names.iter().any(|name| name == step.name))
        .collect())
}
