//! Benches that live in the agent as examples, because they need its insides. They print one JSON object per line.

use crate::{build, sh};
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Builds them all.
pub(super) fn build() -> Result<()> {
    sh::say("building the agent's benches");
    let mut command = sh::cargo();
    command.args(["build", "--release", "--package", "lb-agent", "--examples", "--target-dir"]);
    sh::run(command.arg(build::target()))
}

/// Runs one of those that lie beside the agent's binary.
pub(super) fn run(agent: &Path, name: &str) -> Result<Vec<Value>> {
    let program = agent.with_file_name("examples").join(name);
    let printed = sh::output(&mut Command::new(&program))?;
    let objects = printed.lines().map(|line| {
        serde_json::from_str(line).with_context(|| format!("{}: not JSON: {line}", program.display()))
    });
    objects.collect()
}

/// A number of an object.
pub(super) fn number(object: &Value, field: &str) -> Result<f64> {
    object[field].as_f64().with_context(|| format!("{object} has no number {field}"))
}
