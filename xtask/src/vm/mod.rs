//! `cargo xtask vm`: the tests that depend on the kernel, on Debian's kernels, each on an emulated machine.

mod apt;
mod cpio;
mod image;
mod kernels;
mod machine;
mod modules;
mod payload;
mod report;
mod steps;

use crate::{build, setup, sh};
use anyhow::{Context as _, Result, ensure};
use image::Image;
use kernels::Kernel;
use payload::Payload;
use report::Row;
use std::env::consts::ARCH;
use std::path::{Path, PathBuf};
use steps::Step;
use testbed::kubernetes;

/// What emulates, what is packed, and what packs. Large, so that `cargo xtask setup` does without.
const PROGRAMS: [(&str, &[&str]); 7] = [
    ("qemu-system-x86_64", &["qemu-system-x86"]),
    ("busybox", &["busybox-static"]),
    ("depmod", &["kmod"]),
    ("dpkg-deb", &["dpkg"]),
    ("strip", &["binutils"]),
    ("xz", &["xz-utils"]),
    ("zstd", &["zstd"]),
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Kernels by their names in xtask/kernels.yaml; all unless given
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Only these steps
    #[arg(long = "step", value_name = "STEP", value_parser = steps::NAMES)]
    steps: Vec<String>,
    /// Only tests whose names contain this, with what they print
    #[arg(long, value_name = "TEXT")]
    test: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(ARCH == "x86_64", "the kernels are for x86-64, and this machine is {ARCH}");
    let kernels = kernels::named(&args.kernels)?;
    setup::run()?;
    setup::need(&PROGRAMS)?;
    let payload = Payload::gather(&steps::TESTS)?;
    let steps = steps::steps(&payload, &args.steps, args.test.as_deref())?;
    let cache = kubernetes::cache_root()?.join("vm");
    let mut rows = Vec::new();
    for kernel in &kernels {
        let row = on(kernel, &cache, &payload, &steps);
        if let Err(error) = &row {
            sh::say(&format!("{}: {error:#}", kernel.name));
        }
        rows.push(row.unwrap_or_else(|_| Row::absent(&kernel.name)));
    }
    print!("{}", report::table(&rows, &steps));
    println!("{}", report::tally(&rows, &steps));
    ensure!(rows.iter().all(|row| row.is_whole(&steps)), "not every step passed on every kernel");
    Ok(())
}

fn on(kernel: &Kernel, cache: &Path, payload: &Payload, steps: &[Step]) -> Result<Row> {
    let image = Image::find(cache, kernel)?;
    let outcomes = machine::run(kernel, &image, payload, steps)
        .with_context(|| format!("no machine with Linux {}", image.release))?;
    for outcome in outcomes.iter().filter(|outcome| !outcome.has_passed()) {
        let shown = outcome.output.join("\n");
        println!("--- {} on Linux {}:\n{shown}", outcome.step, image.release);
    }
    Ok(Row { kernel: kernel.name.clone(), release: image.release, outcomes })
}

/// For what is made on the way.
fn directory() -> PathBuf {
    build::target().join("vm")
}
