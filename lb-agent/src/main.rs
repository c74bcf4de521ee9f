//! lb-agent: reads the command line, runs the subcommand, and says what went wrong.

mod args;

use args::{Cli, Command};
use clap::Parser as _;
use lb_agent::cli::{backends, flows, holders, plan, preflight, reasons, services, status};
use std::process::ExitCode;

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let result = match command {
        Command::Plan(args) => plan::run(&args),
        Command::Preflight(args) => preflight::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Services(args) => services::run(&args),
        Command::Backends(args) => backends::run(&args),
        Command::Flows(args) => flows::run(&args),
        Command::Holders(args) => holders::run(&args),
        Command::Reasons(args) => reasons::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lb-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}
