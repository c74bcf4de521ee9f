//! `cargo xtask SUBCOMMAND`: everything that is done with this workspace, one file per subcommand.

mod bench;
mod bpf_toolchain;
mod build;
mod check;
mod demo;
mod generate;
mod image;
mod manifests;
mod setup;
mod sh;
mod test;
mod topology;
mod vm;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Set-up, build, check, test, demo and bench of reweave-lb")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Find out what this machine lacks to build, test and show the project, and install it
    Setup,
    /// Build the agent, with the packet program inside: target/release/lb-agent
    Build,
    /// Formatting and lints of every crate, warnings denied, generated documents, and the chart
    Check,
    /// Write the documents whose content stands in the code, docs/reasons.md and docs/maps.md, and draw deploy/manifests
    Generate(generate::Args),
    /// The container image, target/image/reweave-lb.tar, and whether the agent runs from it
    Image(image::Args),
    /// Every test, as root (asks for sudo if need be)
    Test,
    /// The tests that depend on the kernel, on Debian's kernels from 5.10 to the newest, emulated by qemu
    Vm(vm::Args),
    /// Three nodes, a client outside, real servers in pods: what the load balancer does, in about a minute
    Demo(demo::Args),
    /// What it costs: each number beside its goal, as a table and as target/bench/*.json
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let Args { command } = Args::parse();
    let outcome = match command {
        Command::Setup => setup::run().and_then(|()| setup::kubernetes()),
        Command::Build => build::run(),
        Command::Check => check::run(),
        Command::Generate(args) => generate::run(&args),
        Command::Image(args) => image::run(args),
        Command::Test => test::run(),
        Command::Vm(args) => vm::run(&args),
        Command::Demo(args) => demo::run(args),
        Command::Bench(args) => bench::run(args),
    };
    if let Err(error) = outcome {
        // Without the backtrace: it shows our own walk, the chain says what went wrong.
        eprintln!("==> failed: {error:#}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
