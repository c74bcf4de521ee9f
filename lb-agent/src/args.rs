//! The command line; each subcommand's arguments are beside its code.

use clap::{Parser, Subcommand};
use lb_agent::cli::{cleanup, plan, run};

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
    /// Run the agent on this node
    Run(Box<run::Args>),
    /// Print what a node would do with these manifests, and why not where it would not
    Plan(plan::Args),
    /// Remove from this node what agents put there
    Cleanup(Box<cleanup::Args>),
}
