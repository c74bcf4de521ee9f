//! `cargo xtask build`: the release agent.

use crate::{setup, sh};
use anyhow::Result;
use std::path::PathBuf;

pub(crate) fn run() -> Result<()> {
    setup::run()?;
    let agent = agent()?;
    sh::say(&format!("built {}", agent.display()));
    Ok(())
}

/// Builds the release agent and says where it is.
pub(crate) fn agent() -> Result<PathBuf> {
    sh::say("building the agent, with the packet program inside");
    sh::run(sh::cargo().args(["build", "--release", "--package", "lb-agent", "--target-dir"]).arg(target()))?;
    Ok(target().join("release/lb-agent"))
}

/// Named to cargo as well, so that the agent is where the README says whatever the user's configuration.
pub(crate) fn target() -> PathBuf {
    sh::workspace().join("target")
}
