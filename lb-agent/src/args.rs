//! The command line; each subcommand's arguments are beside its code.

use clap::{Parser, Subcommand};
use lb_agent::cli::{
    backends, cleanup, explain, flows, holders, plan, preflight, reasons, run, services, status,
};

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
    /// Whether this node has what the agent needs, and what to do where it has not
    Preflight(preflight::Args),
    /// The datapath on one screen: how full its tables are, connections, outcomes
    Status(status::Args),
    /// The ports that this node serves, with their counters
    Services(services::Args),
    /// The endpoints behind the served ports
    Backends(backends::Args),
    /// The connections that this node remembers
    Flows(flows::Args),
    /// The other nodes that forward to pods of this one
    Holders(holders::Args),
    /// How packets ended, counted by reason
    Reasons(reasons::Args),
    /// What would happen to a packet on this node, and why
    Explain(explain::Args),
}
