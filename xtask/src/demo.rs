//! `cargo xtask demo`: the product's story, told by what its users see.

mod cluster;
mod kubernetes;
mod stage;

use crate::{build, setup, sh, topology};
use anyhow::Result;
use cluster::{Cluster, Manifests};
use kubernetes::Kubernetes;
use nix::unistd::geteuid;
use stage::Stage;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use testbed::Topology;
use testbed::kubernetes::{Binaries, CACHE, cache_root};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave everything running until Ctrl-C, and say what to try
    #[arg(long)]
    keep: bool,
    /// On a real Kubernetes API, with kubectl and Helm, instead of a directory of manifests. Its programs are built by Go
    /// the first time, which takes some minutes
    #[arg(long)]
    kubernetes: bool,
    /// The network between the pods
    #[arg(long, value_name = "NAME", default_value_t, value_parser = topology::by_name())]
    topology: Topology,
    /// Show this agent, instead of building one
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let Args { keep, kubernetes, topology, agent } = args;
    let agent = match agent {
        Some(agent) => agent,
        None => {
            setup::run()?;
            build::agent()?
        }
    };
    // Built as the user, so that they are kept in the user's cache.
    let binaries = if kubernetes { Some(programs()?) } else { None };
    if !geteuid().is_root() {
        return again_as_root(&agent, topology, kubernetes, keep);
    }
    match binaries {
        None => {
            let stage = Stage::set(agent, topology, |_| Ok(Manifests))?.story()?;
            end(stage, keep)
        }
        Some(binaries) => {
            let stage = Stage::set(agent, topology, |testbed| Kubernetes::start(testbed, binaries))?;
            stage.objects()?;
            let stage = stage.story()?.nobody_holds()?.api_dies()?;
            end(stage, keep)
        }
    }
}

fn programs() -> Result<Binaries> {
    setup::kubernetes()?;
    Ok(Binaries::find()?)
}

/// Only what follows needs root; what was built stays the user's.
fn again_as_root(agent: &Path, topology: Topology, kubernetes: bool, keep: bool) -> Result<()> {
    sh::say("sudo: the demo makes network namespaces and loads BPF programs");
    let mut command = Command::new("sudo");
    if kubernetes {
        // Sudo clears the environment, and root would look into another home.
        command.arg("env").arg(format!("{CACHE}={}", cache_root()?.display()));
        for variable in ["PATH", "KUBEBUILDER_ASSETS"] {
            if let Ok(value) = env::var(variable) {
                command.arg(format!("{variable}={value}"));
            }
        }
    }
    command.arg(env::current_exe()?).args(["demo", "--topology", topology.name(), "--agent"]).arg(agent);
    for (flag, is_set) in [("--kubernetes", kubernetes), ("--keep", keep)] {
        if is_set {
            command.arg(flag);
        }
    }
    sh::run(&mut command)
}

fn heading(text: &str) {
    println!("\n── {text}");
}

fn end<C: Cluster>(stage: Stage<C>, keep: bool) -> Result<()> {
    println!();
    if keep {
        stage.keep()
    } else {
        drop(stage);
        println!("Everything is removed again. With --keep it goes on running.");
        Ok(())
    }
}
