//! One file per subcommand: its arguments beside its code.

pub mod backends;
pub mod cleanup;
pub mod datapath_args;
pub mod explain;
pub mod flows;
pub mod holders;
pub mod node_args;
pub mod plan;
pub mod preflight;
mod program;
pub mod reasons;
mod render;
pub mod run;
pub mod services;
pub mod status;
