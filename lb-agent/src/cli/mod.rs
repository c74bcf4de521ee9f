//! One file per subcommand: its arguments beside its code.

pub mod cleanup;
pub mod datapath_args;
pub mod node_args;
pub mod plan;
pub mod run;
