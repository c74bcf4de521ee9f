//! Builds the packet program, so that the agent can embed it:
//! `aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/lb-ebpf"))`.

#[path = "../xtask/src/bpf_toolchain.rs"]
mod bpf_toolchain;

use bpf_toolchain::{RUSTC_OVERRIDE, TARGET, TOOLCHAIN_OVERRIDE};
use std::env;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            for line in error.to_string().lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), Box<dyn Error>> {
    let package = env::var("CARGO_MANIFEST_DIR")?;
    let workspace = Path::new(&package).parent().ok_or("the agent's package is not in a workspace")?;
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    let out = env::var("OUT_DIR")?;
    let out = Path::new(&out);

    for name in [RUSTC_OVERRIDE, TOOLCHAIN_OVERRIDE] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    for path in ["lb-ebpf", "lb-common", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", workspace.join(path).display());
    }

    let toolchain = bpf_toolchain::find()?;
    // An updated compiler is a changed input as well.
    println!("cargo::rerun-if-changed={}", toolchain.rustc.display());
    let linker =
        bpf_toolchain::find_linker().ok_or("bpf-linker is not installed; run `cargo xtask setup`")?;
    println!("cargo::rerun-if-changed={}", linker.display());

    // A directory of its own: the outer cargo holds the lock of the usual one.
    let target = out.join("bpf");
    let mut cargo = toolchain.cargo("build", &arch);
    if env::var_os("CARGO_FEATURE_BENCH").is_some() {
        cargo.args(["--features", "bench"]);
    }
    let output = cargo
        .arg("--quiet")
        .arg("--target-dir")
        .arg(&target)
        .current_dir(workspace)
        .output()
        .map_err(|error| format!("cargo beside {} cannot be run: {error}", toolchain.rustc.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("the packet program does not build:\n{said}").into());
    }
    for line in said.lines() {
        println!("cargo::warning={line}");
    }
    fs::copy(target.join(TARGET).join("release/lb-ebpf"), out.join("lb-ebpf"))?;
    Ok(())
}
