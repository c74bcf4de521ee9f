//! Where an agent keeps what outlives it: shared by every command that runs, looks at or removes a datapath.

use crate::datapath::pins;
use crate::node::sysctl;
use std::path::PathBuf;

/// Directories.
#[derive(Clone, Debug, clap::Args)]
pub struct DatapathArgs {
    /// Directory on a mounted bpffs, for the pinned maps and links
    #[arg(long, env = "LB_BPFFS", value_name = "DIR", default_value = pins::DEFAULT_DIRECTORY)]
    pub bpffs: PathBuf,
    /// Directory for what must be remembered until the next boot: what sysctls were before, which agent runs
    #[arg(long, env = "LB_STATE_DIR", value_name = "DIR", default_value = sysctl::DEFAULT_STATE_DIRECTORY)]
    pub state_dir: PathBuf,
}
