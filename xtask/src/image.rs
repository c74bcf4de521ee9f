//! `cargo xtask image`: the container image, packed without a registry, looked into, and run as the DaemonSet runs it.

mod bundle;
mod cluster;

use crate::{build, setup, sh};
use anyhow::{Context as _, Result, ensure};
use nix::unistd::geteuid;
use serde_json::Value;
use std::env;
use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What packs and what runs, with the packages that have them.
const PROGRAMS: [(&str, &[&str]); 2] = [("buildah", &["buildah"]), ("runc", &["runc"])];
const NAME: &str = concat!("reweave-lb:", env!("CARGO_PKG_VERSION"));
/// The one file in the image.
const AGENT: &str = "lb-agent";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Pack this agent, instead of building one
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let agent = match args.agent {
        Some(agent) => agent,
        None => {
            setup::run()?;
            setup::need(&PROGRAMS)?;
            static_agent()?
        }
    };
    if !geteuid().is_root() {
        return again_as_root(&agent);
    }
    let archive = pack(&agent)?;
    let root = unpack(&archive)?;
    runs_in_an_empty_root(&root)?;
    cluster::runs(&root)?;
    sh::say(&format!("packed {}: load it by `docker load`, or push it by `skopeo copy`", archive.display()));
    Ok(())
}

/// Only what follows needs root; what was built stays the user's.
fn again_as_root(agent: &Path) -> Result<()> {
    sh::say("sudo: packing and running an image");
    sh::run(Command::new("sudo").arg(env::current_exe()?).args(["image", "--agent"]).arg(agent))
}

fn directory() -> PathBuf {
    build::target().join("image")
}

/// The release agent with the C library inside. The target is named so that the flag does not reach what runs at build
/// time, such as procedural macros, which cannot be static.
fn static_agent() -> Result<PathBuf> {
    sh::say("building the static agent");
    let target = format!("{ARCH}-unknown-linux-gnu");
    let mut command = sh::cargo();
    command
        .args(["build", "--release", "--package", "lb-agent", "--target", &target, "--target-dir"])
        .arg(build::target())
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    sh::run(&mut command)?;
    Ok(build::target().join(target).join("release").join(AGENT))
}

/// The last stage of the Dockerfile, with the agent in the place of the stage that would build it.
fn pack(agent: &Path) -> Result<PathBuf> {
    sh::say("packing the image");
    let directory = directory();
    let context = directory.join("context");
    emptied(&context.join("out"))?;
    fs::copy(agent, context.join("out").join(AGENT))
        .with_context(|| format!("cannot copy {}", agent.display()))?;
    let archive = directory.join("reweave-lb.tar");
    absent(fs::remove_file(&archive))?;
    let mut built = buildah();
    built
        .args(["build", "--isolation", "chroot", "--quiet", "--tag", NAME, "--file"])
        .arg(sh::workspace().join("deploy/Dockerfile"))
        .arg(format!("--build-context=build={}", context.display()))
        .arg(&context);
    sh::run(&mut built)?;
    sh::run(
        buildah().args(["push", "--quiet", NAME]).arg(format!("docker-archive:{}:{NAME}", archive.display())),
    )?;
    Ok(archive)
}

/// With a store of its own, which goes with `target`.
fn buildah() -> Command {
    let mut command = Command::new("buildah");
    let store = directory().join("store");
    command.args(["--storage-driver", "vfs", "--root"]).arg(&store).arg("--runroot").arg(store.join("run"));
    command
}

/// Unpacks the archive as a runtime would, and makes sure that nothing but the agent is in it.
fn unpack(archive: &Path) -> Result<PathBuf> {
    let (unpacked, root) = (directory().join("archive"), directory().join("root"));
    emptied(&unpacked)?;
    emptied(&root)?;
    let extract = |from: &Path, to: &Path| {
        sh::run(Command::new("tar").arg("--extract").arg("--file").arg(from).arg("--directory").arg(to))
    };
    extract(archive, &unpacked)?;
    let read = |file: &str| -> Result<Value> {
        Ok(serde_json::from_slice(&fs::read(unpacked.join(file)).with_context(|| format!("no {file}"))?)?)
    };
    let image = &read("manifest.json")?[0];
    let config = read(image["Config"].as_str().context("the image has no configuration")?)?;
    ensure!(
        config["config"]["Entrypoint"][0] == format!("/{AGENT}"),
        "the entry point is not the agent: {config}"
    );
    for layer in image["Layers"].as_array().context("the image has no layers")? {
        extract(&unpacked.join(layer.as_str().context("a layer without a name")?), &root)?;
    }
    let names = fs::read_dir(&root)?.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
    ensure!(names == [AGENT], "the image should hold {AGENT} and nothing else: {names:?}");
    Ok(root)
}

/// A program that needed a library, or any other file, would not start here.
fn runs_in_an_empty_root(root: &Path) -> Result<()> {
    let said = sh::output(Command::new("chroot").arg(root).args([&format!("/{AGENT}"), "--version"]))?;
    ensure!(said.trim() == concat!("lb-agent ", env!("CARGO_PKG_VERSION")), "--version says {said:?}");
    sh::say(&format!("alone in a root directory: {}", said.trim()));
    Ok(())
}

/// A directory with nothing in it.
fn emptied(directory: &Path) -> Result<()> {
    absent(fs::remove_dir_all(directory))?;
    fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))
}

fn absent(outcome: std::io::Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}
