//! Where an agent keeps what outlives it: shared by every command that runs, looks at or removes a datapath.

use crate::datapath::pins::{DEFAULT_DIRECTORY, Pins};
use crate::node::sysctl::DEFAULT_STATE_DIRECTORY;
use std::path::PathBuf;

/// Where the datapath is pinned.
#[derive(Clone, Debug, clap::Args)]
pub struct PinArgs {
    /// Directory on a mounted bpffs, for the pinned maps and links
    #[arg(long, env = "LB_BPFFS", value_name = "DIR", default_value = DEFAULT_DIRECTORY)]
    bpffs: PathBuf,
}

impl PinArgs {
    /// The pins below it.
    pub fn pins(&self) -> Pins {
        Pins::new(&self.bpffs)
    }
}

/// All of it.
#[derive(Clone, Debug, clap::Args)]
pub struct DatapathArgs {
    #[command(flatten)]
    pins: PinArgs,
    /// Directory for what must be remembered until the next boot: what sysctls were before, which agent runs
    #[arg(long, env = "LB_STATE_DIR", value_name = "DIR", default_value = DEFAULT_STATE_DIRECTORY)]
    pub state_dir: PathBuf,
}

impl DatapathArgs {
    /// The pins.
    pub fn pins(&self) -> Pins {
        self.pins.pins()
    }
}
