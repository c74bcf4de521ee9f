//! `lb-agent cleanup`: removes from this node what agents put there, and nothing else.

use super::datapath_args::DatapathArgs;
use super::node_args::NodeArgs;
use crate::datapath::attach::{Hooks, best_hook};
use crate::lock::Lock;
use crate::node::{self, nft, return_path};
use crate::report::manifests as report;
use anyhow::Context as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tokio::signal::unix::{SignalKind, signal};

/// Arguments of `cleanup`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    datapath: DatapathArgs,
    #[command(flatten)]
    node_args: NodeArgs,
    /// Also retract what this node has published there, so that no other node counts on it
    #[arg(long, env = "LB_MANIFESTS", value_name = "DIR", requires = "node")]
    manifests: Option<PathBuf>,
    /// This node's name, for --manifests
    #[arg(long, env = "LB_NODE", value_name = "NAME")]
    node: Option<String>,
    /// Afterwards wait to be told to stop: a DaemonSet would start again what ends
    #[arg(long)]
    stay: bool,
}

/// Removes everything, says what, and can be repeated.
///
/// # Errors
/// An agent runs, or something could not be removed; what came before it is removed.
pub fn run(args: Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stay = args.stay;
    let removed = runtime.block_on(remove(args))?;
    for what in &removed {
        println!("removed {what}");
    }
    if removed.is_empty() {
        println!("nothing of lb-agent is on this node");
    }
    if stay {
        runtime.block_on(told_to_stop()).context("wait for a signal")?;
    }
    Ok(())
}

async fn told_to_stop() -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

async fn remove(args: Args) -> anyhow::Result<Vec<String>> {
    let Args { datapath, node_args, manifests, node, stay: _ } = args;
    let (pins, sysctls, state_dir) = (datapath.pins(), datapath.sysctls(), datapath.state_dir);
    let lock = Lock::take(&state_dir)?;
    let netlink = node::connect().context("open a netlink socket")?;
    let mut removed = Vec::new();
    if let (Some(manifests), Some(node)) = (manifests, node)
        && report::write_node(&manifests, &node, "", None)?
    {
        removed.push(format!("the annotations of node {node}"));
    }
    removed.extend(Hooks::new(pins.clone(), &state_dir, best_hook(), netlink.clone()).remove().await?);
    for operation in return_path::remove(&netlink, &node_args.return_path()).await? {
        removed.push(operation.to_string());
    }
    if nft::remove().await? {
        removed.push(format!("nftables table {}", nft::TABLE.to_string_lossy()));
    }
    for change in sysctls.restore()? {
        removed.push(format!("our value of {}: {} again", change.key, change.to));
    }
    remove_tree(pins.root(), "pinned maps", &mut removed)?;
    drop(lock);
    remove_tree(&state_dir, "state directory", &mut Vec::new())?;
    Ok(removed)
}

fn remove_tree(path: &Path, what: &str, removed: &mut Vec<String>) -> anyhow::Result<()> {
    match fs::remove_dir_all(path) {
        Ok(()) => removed.push(format!("{what} {}", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        // A container's mount: what was in it is gone, and the place itself can only be removed from outside.
        Err(error) if is_of_a_mount(&error) && is_empty(path) => {}
        Err(error) => return Err(error).with_context(|| format!("remove {}", path.display())),
    }
    Ok(())
}

/// In a root directory that is read-only the kernel sees that first.
fn is_of_a_mount(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::ReadOnlyFilesystem)
}

fn is_empty(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}
