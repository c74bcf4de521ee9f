//! One file per subcommand: its arguments beside its code.

pub mod plan;
