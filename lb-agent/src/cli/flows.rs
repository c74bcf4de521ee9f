//! `lb-agent flows`: the connections that this node remembers.

use super::render::{self, Column, Look, Row, numbers, plain, words};
use crate::datapath::maps::{Maps, MapsError};
use crate::datapath::sweep;
use lb_common::addr::Ipv4;
use lb_common::backend::Backend;
use lb_common::flow::{Flow, FlowKey, Path, Reply, ReplyKind};
use lb_common::masquerade::{Client, MasqueradedKey};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};

/// Arguments of `lb-agent flows`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only this client's
    #[arg(long, value_name = "IP")]
    client: Option<Ipv4Addr>,
    /// Only those to this address and port
    #[arg(long, value_name = "IP:PORT")]
    service: Option<SocketAddrV4>,
    /// The connections that other holders forward to pods of this node, in place of this node's own
    #[arg(long, conflicts_with = "service")]
    replies: bool,
    /// Print at most so many; 0 prints all
    #[arg(long, value_name = "N", default_value_t = 1000)]
    limit: usize,
    #[command(flatten)]
    look: Look,
}

/// Which of the two tables an entry is in.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Table {
    Established,
    Handshake,
}

impl Table {
    const fn name(self) -> &'static str {
        match self {
            Self::Established => "established",
            Self::Handshake => "handshake",
        }
    }
}

/// A connection to an address of this node.
#[derive(Serialize)]
struct Own {
    client: Ipv4Addr,
    client_port: u16,
    /// What the backend takes the client for, where that is another: of connections whose answers would not come back here.
    seen_as: Option<SocketAddrV4>,
    address: Ipv4Addr,
    port: u16,
    protocol: &'static str,
    backend_id: u32,
    /// None when the slot has been given up or to another endpoint: the flow is dead; so for the port.
    backend: Option<Ipv4Addr>,
    backend_port: Option<u16>,
    state: &'static str,
    path: &'static str,
    idle_seconds: u32,
    table: Table,
}

impl Row for Own {
    const COLUMNS: &'static [Column] = &[
        words("CLIENT"),
        words("SEEN AS"),
        words("SERVICE"),
        words("BACKEND"),
        words("STATE"),
        words("PATH"),
        numbers("IDLE"),
        words("TABLE"),
    ];

    fn cells(&self) -> Vec<String> {
        let backend =
            self.backend.zip(self.backend_port).map(|(address, port)| render::socket(address, port));
        vec![
            render::socket(self.client, self.client_port),
            render::or_dash(self.seen_as.map(|end| end.to_string())),
            render::served(self.address, self.port, self.protocol),
            backend.unwrap_or_else(|| "gone".to_owned()),
            self.state.to_owned(),
            self.path.to_owned(),
            format!("{} s", self.idle_seconds),
            self.table.name().to_owned(),
        ]
    }
}

/// A connection that another holder forwards to a pod of this node.
#[derive(Serialize)]
struct Forwarded {
    client: Ipv4Addr,
    client_port: u16,
    backend: Ipv4Addr,
    backend_port: u16,
    protocol: &'static str,
    mark: u8,
    /// None when the holder has let go of every service.
    holder: Option<Ipv4Addr>,
    state: &'static str,
    idle_seconds: u32,
    table: Table,
}

impl Row for Forwarded {
    const COLUMNS: &'static [Column] = &[
        words("CLIENT"),
        words("BACKEND"),
        numbers("MARK"),
        words("HOLDER"),
        words("STATE"),
        numbers("IDLE"),
        words("TABLE"),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            render::socket(self.client, self.client_port),
            render::served(self.backend, self.backend_port, self.protocol),
            self.mark.to_string(),
            render::or_dash(self.holder.map(|address| address.to_string())),
            self.state.to_owned(),
            format!("{} s", self.idle_seconds),
            self.table.name().to_owned(),
        ]
    }
}

/// Prints the connections, sorted by where their packets come from.
///
/// # Errors
/// When there is no datapath, or its maps cannot be read.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let maps = args.look.maps()?;
    let now = sweep::now();
    if args.replies {
        let entries = collect(maps.replies.list()?, maps.handshake_replies.list()?, |key, reply: &Reply| {
            reply.kind() == ReplyKind::Mark && args.wants_client(key.destination.into())
        });
        args.look.print_rows(&forwarded(&maps, args.limited(&entries), now)?)
    } else {
        let clients = Clients::read(&maps)?;
        let entries = collect(maps.flows.list()?, maps.handshakes.list()?, |key, _| {
            args.wants_client(clients.of(key).0) && args.wants_service(key)
        });
        if entries.is_empty() && args.wants_all() {
            point_at_replies(&maps)?;
        }
        args.look.print_rows(&own(&maps, &clients, args.limited(&entries), now)?)
    }
}

/// A node that holds no address is asked for its connections too.
fn point_at_replies(maps: &Maps) -> Result<(), MapsError> {
    let others = maps.replies.list()?.iter().filter(|(_, reply)| reply.kind() == ReplyKind::Mark).count();
    if others != 0 {
        eprintln!(
            "lb-agent: none to an address of this node; --replies shows {others} that others forward to pods here"
        );
    }
    Ok(())
}

impl Args {
    fn wants_all(&self) -> bool {
        self.client.is_none() && self.service.is_none()
    }

    fn wants_client(&self, client: Ipv4Addr) -> bool {
        self.client.is_none_or(|wanted| wanted == client)
    }

    fn wants_service(&self, key: &FlowKey) -> bool {
        let served = SocketAddrV4::new(key.destination.into(), key.destination_port.number());
        self.service.is_none_or(|wanted| wanted == served)
    }

    /// As many as are asked for. That there are more is said beside the answer, not in it.
    fn limited<'a, T>(&self, entries: &'a [T]) -> &'a [T] {
        if self.limit == 0 || entries.len() <= self.limit {
            return entries;
        }
        let (limit, total) = (self.limit, entries.len());
        eprintln!("lb-agent: {limit} of {total} connections; choose some by address, or raise --limit");
        &entries[..limit]
    }
}

/// The entries of both tables that are wanted, sorted.
fn collect<V>(
    established: Vec<(FlowKey, V)>,
    handshakes: Vec<(FlowKey, V)>,
    is_wanted: impl Fn(&FlowKey, &V) -> bool,
) -> Vec<(FlowKey, V, Table)> {
    let established = established.into_iter().map(|(key, value)| (key, value, Table::Established));
    let handshakes = handshakes.into_iter().map(|(key, value)| (key, value, Table::Handshake));
    let mut all: Vec<_> =
        established.chain(handshakes).filter(|(key, value, _)| is_wanted(key, value)).collect();
    all.sort_by_key(|(key, ..)| *key);
    all
}

/// Who is behind this node's own address as a client, by the port that they were given.
struct Clients {
    overlay: Ipv4,
    by_port: BTreeMap<MasqueradedKey, Client>,
}

impl Clients {
    fn read(maps: &Maps) -> Result<Self, MapsError> {
        let overlay = maps.inside.own()?.overlay;
        Ok(Self { overlay, by_port: maps.masqueraded.list()?.into_iter().collect() })
    }

    /// The client of a connection that is known by this tuple.
    fn of(&self, key: &FlowKey) -> (Ipv4Addr, u16) {
        let port = MasqueradedKey::new(key.destination, key.destination_port, key.source_port, key.protocol);
        let itself = self.by_port.get(&port).filter(|_| key.source == self.overlay);
        let itself = itself.copied().unwrap_or(Client::new(key.source, key.source_port));
        (itself.address.into(), itself.port.number())
    }
}

fn own(
    maps: &Maps,
    clients: &Clients,
    entries: &[(FlowKey, Flow, Table)],
    now: u32,
) -> Result<Vec<Own>, MapsError> {
    let backends = maps.backends()?;
    let rows = entries.iter().map(|(key, flow, table)| {
        let (source, source_port, protocol) = plain(key.source, key.source_port, key.protocol);
        let (client, client_port) = clients.of(key);
        let backend = backend_of(&backends, flow);
        let seen_as = source_of(source, backend, key);
        let is_itself = (client, client_port) == (source, source_port);
        Own {
            client,
            client_port,
            seen_as: (!is_itself).then(|| SocketAddrV4::new(seen_as, source_port)),
            address: key.destination.into(),
            port: key.destination_port.number(),
            protocol,
            backend_id: flow.backend,
            backend: backend.map(|backend| backend.address.into()),
            backend_port: backend.map(|backend| backend.port.number()),
            state: flow.state().name(),
            path: match flow.path() {
                Path::Redirect => "redirect",
                Path::Stack => "stack",
            },
            idle_seconds: now.saturating_sub(flow.last_seen),
            table: *table,
        }
    });
    Ok(rows.collect())
}

/// The address that a backend takes the client for: one that is masqueraded itself is connected to from the Service's own.
fn source_of(source: Ipv4Addr, backend: Option<&Backend>, key: &FlowKey) -> Ipv4Addr {
    if backend.is_some_and(Backend::is_masqueraded) { key.destination.into() } else { source }
}

/// The flow's backend, as the packet program would find it.
fn backend_of<'a>(backends: &'a [Backend], flow: &Flow) -> Option<&'a Backend> {
    let slot = backends.get(usize::try_from(flow.backend).ok()?)?;
    slot.serves(flow.generation).then_some(slot)
}

fn forwarded(
    maps: &Maps,
    entries: &[(FlowKey, Reply, Table)],
    now: u32,
) -> Result<Vec<Forwarded>, MapsError> {
    let holders: BTreeMap<u8, Ipv4Addr> =
        maps.holders.list()?.into_iter().map(|(_, holder)| (holder.mark, holder.address.into())).collect();
    let rows = entries.iter().map(|(key, reply, table)| {
        let (backend, backend_port, protocol) = plain(key.source, key.source_port, key.protocol);
        Forwarded {
            client: key.destination.into(),
            client_port: key.destination_port.number(),
            backend,
            backend_port,
            protocol,
            mark: reply.mark,
            holder: holders.get(&reply.mark).copied(),
            state: reply.state().name(),
            idle_seconds: now.saturating_sub(reply.last_seen),
            table: *table,
        }
    });
    Ok(rows.collect())
}
