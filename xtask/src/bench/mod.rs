//! `cargo xtask bench`: what the load balancer costs, beside what else could be done, in one run.

mod packet;
mod report;

use crate::{setup, sh};
use anyhow::{Result, ensure};

/// Which part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Nanoseconds per packet, by BPF_PROG_TEST_RUN
    Packet,
}

/// `cargo xtask bench [PART]`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The part to run; all of them unless named
    part: Option<Part>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let Args { part } = args;
    setup::run()?;
    let parts = part.map_or_else(|| vec![Part::Packet], |part| vec![part]);
    let mut missed = Vec::new();
    for part in parts {
        let (name, report) = match part {
            Part::Packet => ("packet", packet::run()?),
        };
        print!("{}", report.table());
        let file = report.write(name)?;
        sh::say(&format!("as JSON: {}", file.display()));
        missed.extend(report.missed());
    }
    ensure!(missed.is_empty(), "goals missed: {}", missed.join(", "));
    Ok(())
}
