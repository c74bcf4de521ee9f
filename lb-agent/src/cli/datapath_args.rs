//! Where an agent keeps what outlives it: shared by every command that runs, looks at or removes a datapath.

use crate::datapath::pins::{DEFAULT_DIRECTORY, Pins};
use crate::node::sysctl::{self, DEFAULT_PROC_SYS, DEFAULT_STATE_DIRECTORY};
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
    /// Where sysctls are written: in a container, where the node's is mounted, since its own is read-only
    #[arg(long, env = "LB_PROC_SYS", value_name = "DIR", default_value = DEFAULT_PROC_SYS)]
    proc_sys: PathBuf,
}

impl DatapathArgs {
    /// The pins.
    pub fn pins(&self) -> Pins {
        self.pins.pins()
    }

    /// The sysctls that were changed.
    pub fn sysctls(&self) -> sysctl::Record {
        sysctl::Record::new(&self.state_dir).written_below(&self.proc_sys)
    }
}
