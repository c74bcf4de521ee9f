//! The command line; each subcommand's arguments are beside its code.

use clap::{Parser, Subcommand};
use lb_agent::cli::plan;

/// The load balancer's agent: one per node.
#[derive(Debug, Parser)]
#[command(name = "lb-agent", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print what a node would do with these manifests, and why not where it would not
    Plan(plan::Args),
}
