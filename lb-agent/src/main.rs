//! lb-agent: reads the command line, runs the subcommand, and says what went wrong.

mod args;

use args::{Cli, Command};
use clap::Parser as _;
use lb_agent::cli::{
    backends, cleanup, explain, flows, holders, plan, preflight, reasons, run, services, status,
};
use std::io::IsTerminal as _;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let result = match command {
        Command::Run(args) => {
            start_logging();
            run::run(*args)
        }
        Command::Plan(args) => plan::run(&args),
        Command::Cleanup(args) => cleanup::run(*args),
        Command::Preflight(args) => preflight::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Services(args) => services::run(&args),
        Command::Backends(args) => backends::run(&args),
        Command::Flows(args) => flows::run(&args),
        Command::Holders(args) => holders::run(&args),
        Command::Reasons(args) => reasons::run(&args),
        Command::Explain(args) => explain::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lb-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// To stderr; `RUST_LOG` chooses, `info` by default. What kube's client says of each failure, our problems say once.
fn start_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,kube_client=off"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
}
