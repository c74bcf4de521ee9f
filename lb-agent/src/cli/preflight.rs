//! `lb-agent preflight`: whether this node has what the agent needs, and what to do where it has not.

use super::node_args::NodeArgs;
use super::render::{Column, Look, Row, words};
use crate::node;
use crate::node::preflight::{Check, Options, Verdict, check, may_come};
use anyhow::{Context as _, bail};
use serde::Serialize;

/// Arguments of `lb-agent preflight`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    look: Look,
    #[command(flatten)]
    node: NodeArgs,
    /// Do not fail where only that is missing which may still come by itself, as the CNI's devices do after a boot:
    /// `run` waits for it
    #[arg(long)]
    allow_pending: bool,
}

#[derive(Serialize)]
struct Line {
    verdict: &'static str,
    name: &'static str,
    found: String,
    /// Empty when there is nothing to do.
    advice: String,
}

impl Row for Line {
    const COLUMNS: &'static [Column] = &[words("VERDICT"), words("CHECK"), words("FOUND")];

    fn cells(&self) -> Vec<String> {
        vec![self.verdict.to_owned(), self.name.to_owned(), self.found.clone()]
    }

    fn note(&self) -> Option<&str> {
        (!self.advice.is_empty()).then_some(&self.advice)
    }
}

/// Prints what was found; changes nothing.
///
/// # Errors
/// When a check failed, or none could be made.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let options = Options {
        pins: args.look.pins().root().to_owned(),
        roles: args.node.role_options(),
        return_path: args.node.return_path(),
        service_ports: service_ports(&args.look),
    };
    // On this thread alone: another could be in another network namespace.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let checks = runtime.block_on(async {
        let handle = node::connect().context("cannot ask the kernel about its network")?;
        anyhow::Ok(check(&handle, &options).await)
    })?;
    let counts = |check: &&Check| check.verdict == Verdict::Fail && !(args.allow_pending && may_come(check));
    let failed = checks.iter().filter(counts).count();
    let total = checks.len();
    let lines: Vec<Line> = checks.into_iter().map(Line::from).collect();
    args.look.print_rows(&lines)?;
    if failed != 0 {
        bail!("{failed} of {total} checks failed: the agent would not work on this node");
    }
    Ok(())
}

/// The ports of a datapath that is here already. Usually there is none yet, which is no failure.
fn service_ports(look: &Look) -> Vec<u16> {
    let services = look.maps().and_then(|maps| maps.services.all()).unwrap_or_default();
    let mut ports: Vec<u16> = services.keys().map(|key| key.port.number()).collect();
    // The same port of several addresses, or with both protocols, is one.
    ports.sort_unstable();
    ports.dedup();
    ports
}

impl From<Check> for Line {
    fn from(Check { name, verdict, found, advice }: Check) -> Self {
        let verdict = match verdict {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "fail",
        };
        Self { verdict, name, found, advice }
    }
}
