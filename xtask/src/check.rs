//! `cargo xtask check`: formatting, generated documents, the chart, and lints.

use crate::{bpf_toolchain, generate, manifests, setup, sh};
use anyhow::{Result, bail, ensure};
use std::env::consts::ARCH;
use testbed::kubernetes::Unavailable;
use testbed::skip;

pub(crate) fn run() -> Result<()> {
    setup::run()?;
    setup::kubernetes()?;
    sh::say("formatting of every crate");
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    sh::say("documents whose content stands in the code");
    generate::documents(&generate::Args::CHECK)?;
    let left_out = chart()?;
    sh::say("lints of the crates for the host, their tests included");
    sh::run(sh::cargo().args(["clippy", "--all-targets", "--", "--deny", "warnings"]))?;
    sh::say("lints of the packet program, for the BPF target");
    packet_program()?;
    if let Some(reason) = left_out {
        sh::say(&format!("all is well, but the chart was NOT checked. {reason}"));
    }
    Ok(())
}

/// The chart, and the manifests that are drawn from it; or why that was left out, where there can be no Helm. In CI that is
/// a failure.
fn chart() -> Result<Option<Unavailable>> {
    sh::say("the chart, and the manifests that are drawn from it");
    match manifests::programs() {
        Ok(programs) => {
            generate::drawn(&generate::Args::CHECK, &programs)?;
            manifests::check(&programs)?;
            Ok(None)
        }
        Err(reason) if skip::is_ci() => bail!("in CI the chart is checked. {reason}"),
        Err(reason) => Ok(Some(reason)),
    }
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
