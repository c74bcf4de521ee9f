//! `lb-agent reasons`: how packets ended, counted by reason.

use super::render::{Column, Look, Row, numbers, short_bytes, words};
use lb_common::counters::Outcome;
use lb_common::reason::Reason;
use serde::Serialize;

/// Arguments of `lb-agent reasons`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Those without a packet too
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    look: Look,
}

#[derive(Serialize)]
struct Count {
    number: u32,
    reason: &'static str,
    kind: &'static str,
    packets: u64,
    bytes: u64,
    description: &'static str,
}

impl Row for Count {
    const COLUMNS: &'static [Column] =
        &[words("REASON"), words("KIND"), numbers("PACKETS"), numbers("BYTES"), words("DESCRIPTION")];

    fn cells(&self) -> Vec<String> {
        vec![
            self.reason.to_owned(),
            self.kind.to_owned(),
            self.packets.to_string(),
            short_bytes(self.bytes),
            self.description.to_owned(),
        ]
    }
}

/// Prints the counters.
///
/// # Errors
/// When there is no datapath, or its maps cannot be read.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let outcomes = args.look.maps()?.outcomes()?;
    let rows: Vec<Count> = Reason::ALL
        .iter()
        .map(|reason| (*reason, outcomes.get(reason).copied().unwrap_or_default()))
        .filter(|(_, Outcome { packets, .. })| args.all || *packets != 0)
        .map(|(reason, Outcome { packets, bytes })| Count {
            number: reason.number(),
            reason: reason.label(),
            kind: reason.kind().name(),
            packets,
            bytes,
            description: reason.describe(),
        })
        .collect();
    args.look.print_rows(&rows)
}
