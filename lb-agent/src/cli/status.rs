//! `lb-agent status`: the datapath on one screen.

use super::program::{self, Device, Program};
use super::render::{self, Column, Look, Row, numbers, short_bytes, words};
use crate::datapath::attach::Direction;
use crate::datapath::loaded;
use crate::datapath::maps::{Maps, MapsError};
use crate::datapath::pins::LAYOUT;
use lb_common::backend::{Backend, BackendState};
use lb_common::flow::{Flow, Reply, ReplyKind, State};
use lb_common::reason::Kind;
use serde::Serialize;
use std::path::PathBuf;

/// Arguments of `lb-agent status`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    look: Look,
}

#[derive(Serialize)]
struct Status {
    pins: PathBuf,
    layout: u32,
    program: Program,
    interfaces: Vec<Device>,
    tables: Vec<Fill>,
    backends_active: usize,
    backends_draining: usize,
    flows: Vec<InState>,
    outcomes: Vec<Total>,
}

/// How full a table is.
#[derive(Serialize)]
struct Fill {
    table: &'static str,
    entries: usize,
    limit: u32,
}

impl Row for Fill {
    const COLUMNS: &'static [Column] =
        &[words("TABLE"), numbers("ENTRIES"), numbers("LIMIT"), numbers("FULL")];

    fn cells(&self) -> Vec<String> {
        let percent = self.entries as f64 * 100.0 / f64::from(self.limit.max(1));
        vec![
            self.table.to_owned(),
            self.entries.to_string(),
            self.limit.to_string(),
            format!("{percent:.1} %"),
        ]
    }
}

/// Connections in one state: of this node's own addresses, and those that other holders forward to pods here.
#[derive(Serialize)]
struct InState {
    state: &'static str,
    own: usize,
    forwarded_here: usize,
}

impl Row for InState {
    const COLUMNS: &'static [Column] = &[words("CONNECTIONS"), numbers("OWN"), numbers("FORWARDED HERE")];

    fn cells(&self) -> Vec<String> {
        vec![self.state.to_owned(), self.own.to_string(), self.forwarded_here.to_string()]
    }
}

/// Outcomes of one kind.
#[derive(Serialize)]
struct Total {
    kind: &'static str,
    packets: u64,
    bytes: u64,
}

impl Row for Total {
    const COLUMNS: &'static [Column] = &[words("OUTCOME"), numbers("PACKETS"), numbers("BYTES")];

    fn cells(&self) -> Vec<String> {
        vec![self.kind.to_owned(), self.packets.to_string(), short_bytes(self.bytes)]
    }
}

/// Prints the datapath's state.
///
/// # Errors
/// When there is no datapath, or its maps cannot be read.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let maps = args.look.maps()?;
    let loaded = loaded::find(&args.look.pins(), Direction::Ingress.program())?;
    let status = read(&maps, args.look.pins().maps(), Program::new(loaded))?;
    args.look.print(&status, || text(&status))
}

fn read(maps: &Maps, pins: PathBuf, program: Program) -> Result<Status, MapsError> {
    let flows = maps.flows.list()?;
    let handshakes = maps.handshakes.list()?;
    let replies = maps.replies.list()?;
    let handshake_replies = maps.handshake_replies.list()?;
    let backends = maps.backends()?;
    let count = |state| backends.iter().filter(|backend: &&Backend| backend.state() == state).count();
    let (backends_active, backends_draining) = (count(BackendState::Active), count(BackendState::Draining));

    let fill = |table, entries, limit| Fill { table, entries, limit };
    let tables = vec![
        fill("interfaces", maps.interfaces.all()?.len(), maps.interfaces.max_entries()),
        fill("services", maps.services.list()?.len(), maps.services.max_entries()?),
        // Slot 0 is never used.
        fill("backends", backends_active + backends_draining, maps.backend_slots()?.saturating_sub(1)),
        fill("endpoints", maps.endpoints.list()?.len(), maps.endpoints.max_entries()?),
        fill("holders", maps.holders.list()?.len(), maps.holders.max_entries()?),
        fill("flows", flows.len(), maps.flows.max_entries()?),
        fill("replies", replies.len(), maps.replies.max_entries()?),
        fill("handshakes", handshakes.len(), maps.handshakes.max_entries()?),
        fill("handshake_replies", handshake_replies.len(), maps.handshake_replies.max_entries()?),
        fill("masquerades", maps.masquerades.list()?.len(), maps.masquerades.max_entries()?),
    ];

    let own: Vec<State> = flows.iter().chain(&handshakes).map(|(_, flow): &(_, Flow)| flow.state()).collect();
    let forwarded: Vec<State> = replies
        .iter()
        .chain(&handshake_replies)
        .filter(|(_, reply): &&(_, Reply)| reply.kind() == ReplyKind::Mark)
        .map(|(_, reply)| reply.state())
        .collect();
    let within = |states: &[State], wanted| states.iter().filter(|state| **state == wanted).count();
    let flows = State::ALL
        .map(|state| InState {
            state: state.name(),
            own: within(&own, state),
            forwarded_here: within(&forwarded, state),
        })
        .into();

    Ok(Status {
        pins,
        layout: LAYOUT,
        program,
        interfaces: program::devices(&maps.interfaces.all()?),
        tables,
        backends_active,
        backends_draining,
        flows,
        outcomes: totals(maps)?,
    })
}

/// Packets and bytes by what became of them.
fn totals(maps: &Maps) -> Result<Vec<Total>, MapsError> {
    let outcomes = maps.outcomes()?;
    let total =
        |kind: Kind| {
            let zero = Total { kind: kind.name(), packets: 0, bytes: 0 };
            outcomes.iter().filter(|(reason, _)| reason.kind() == kind).fold(zero, |sum, (_, outcome)| {
                Total { packets: sum.packets + outcome.packets, bytes: sum.bytes + outcome.bytes, ..sum }
            })
        };
    Ok([Kind::Forward, Kind::Pass, Kind::Reject, Kind::Drop].map(total).into())
}

fn text(status: &Status) -> String {
    let Status {
        pins,
        layout,
        program,
        interfaces,
        tables,
        backends_active,
        backends_draining,
        flows,
        outcomes,
    } = status;
    let seen: Vec<&InState> = flows.iter().filter(|row| row.own + row.forwarded_here != 0).collect();
    format!(
        "Maps in {}, layout {layout}\nProgram: {}\nInterfaces: {}\n\
         Backends: {backends_active} active, {backends_draining} draining\n\n{}\n{}\n{}",
        pins.display(),
        program.text(),
        program::name_all(interfaces),
        render::table(tables),
        if seen.is_empty() { "No connections\n".to_owned() } else { render::table(&seen) },
        render::table(outcomes),
    )
}
