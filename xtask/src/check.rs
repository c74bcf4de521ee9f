//! `cargo xtask check`: formatting, generated documents, the chart, and lints.

use crate::{bpf_toolchain, generate, manifests, setup, sh};
use anyhow::{Result, ensure};
use std::env::consts::ARCH;

pub(crate) fn run() -> Result<()> {
    setup::run()?;
    sh::say("formatting of every crate");
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    sh::say("documents whose content stands in the code, and the manifests drawn from the chart");
    generate::run(&generate::Args::CHECK)?;
    sh::say("the chart, and what kustomize makes of its manifests");
    manifests::check()?;
    sh::say("lints of the crates for the host, their tests included");
    sh::run(sh::cargo().args(["clippy", "--all-targets", "--", "--deny", "warnings"]))?;
    sh::say("lints of the packet program, for the BPF target");
    packet_program()
}

/// By the toolchain that builds it, in a target directory of its own: another compiler's would be thrown away.
fn packet_program() -> Result<()> {
    let toolchain = bpf_toolchain::find()?;
    let clippy = toolchain.rustc.with_file_name("cargo-clippy");
    ensure!(clippy.is_file(), "{} is missing; run `cargo xtask setup`", clippy.display());
    let target = sh::workspace().join("target/bpf");
    sh::run(
        toolchain
            .cargo("clippy", ARCH)
            .current_dir(sh::workspace())
            .arg("--target-dir")
            .arg(target)
            .args(["--", "--deny", "warnings"]),
    )
}
