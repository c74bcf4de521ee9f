//! lb-agent: reads the command line, runs the subcommand, and says what went wrong.

mod args;

use args::{Cli, Command};
use clap::Parser as _;
use lb_agent::cli::plan;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let result = match command {
        Command::Plan(args) => plan::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lb-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}
