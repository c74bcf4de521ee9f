//! `cargo xtask SUBCOMMAND`: everything that is done with this workspace, one file per subcommand.

mod bench;
mod bpf_toolchain;
mod build;
mod check;
mod demo;
mod generate;
mod setup;
mod sh;
mod test;

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
    /// Formatting and lints of every crate, warnings denied, and generated documents
    Check,
    /// Write the documents whose content stands in the code: docs/reasons.md, docs/maps.md
    Generate(generate::Args),
    /// Every test, as root (asks for sudo if need be)
    Test,
    /// Three nodes, a client outside, real servers in pods: what the load balancer does, in about a minute
    Demo(demo::Args),
    /// What it costs: each number beside its goal, as a table and as target/bench/*.json
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let Args { command } = Args::parse();
    let outcome = match command {
        Command::Setup => setup::run().map(|()| setup::say_what_kubernetes_needs()),
        Command::Build => build::run(),
        Command::Check => check::run(),
        Command::Generate(args) => generate::run(&args),
        Command::Test => test::run(),
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
