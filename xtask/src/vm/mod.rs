//! `cargo xtask vm`: the tests that depend on the kernel, on Debian's kernels, each on an emulated machine.

mod apt;
mod cpio;
mod image;
mod kernels;
mod machine;
mod modules;
mod payload;
mod steps;

use crate::{build, setup, sh};
use anyhow::{Result, ensure};
use image::Image;
use kernels::Kernel;
use payload::Payload;
use std::env::consts::ARCH;
use std::path::PathBuf;
use steps::{Ending, Outcome, Step};
use testbed::kubernetes;

/// What emulates, what is packed, and what packs.
const PROGRAMS: [(&str, &[&str]); 6] = [
    ("qemu-system-x86_64", &["qemu-system-x86"]),
    ("busybox", &["busybox-static"]),
    ("depmod", &["kmod"]),
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
    for kernel in &kernels {
        let outcomes = on(kernel, &cache, &payload, &steps)?;
        for outcome in &outcomes {
            println!("{} {} {:?} {:?}", kernel.name, outcome.step, outcome.ending, outcome.took);
            if outcome.ending != Ending::Passed {
                println!("{}", outcome.output.join("\n"));
            }
        }
    }
    Ok(())
}

fn on(kernel: &Kernel, cache: &std::path::Path, payload: &Payload, steps: &[Step]) -> Result<Vec<Outcome>> {
    let image = Image::find(cache, kernel)?;
    machine::run(&kernel.name, &image, payload, steps)
}

/// For what is made on the way.
fn directory() -> PathBuf {
    build::target().join("vm")
}
