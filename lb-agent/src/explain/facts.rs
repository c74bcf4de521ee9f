//! What the maps hold of a connection, in words.

use super::socket;
use crate::datapath::copies::Copies;
use lb_common::addr::{Port, Protocol};
use lb_common::backend::{Backend, BackendState};
use lb_common::config::Timeouts;
use lb_common::flow::{Flow, FlowKey, Path, Reply, ReplyKind};
use lb_common::holder::{EndpointHolders, EndpointKey};
use lb_common::maglev;
use serde::Serialize;
use std::net::{Ipv4Addr, SocketAddrV4};

/// The served port that a packet is addressed to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Served {
    /// Index into `rings` and `service_stats`.
    pub id: u32,
    /// Places; none before the agent has written a table, 0 where no endpoint is ready.
    pub table_size: Option<usize>,
    /// Endpoints that new connections may get.
    pub backends: usize,
}

/// An endpoint that this node knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Endpoint {
    /// Whether this node forwards to it.
    pub own: bool,
    /// The other nodes that do.
    pub holders: Vec<HolderOf>,
}

/// Another node that forwards to an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HolderOf {
    /// As this node marks answers to it.
    pub mark: u8,
    /// Its address on the overlay.
    pub overlay_address: Ipv4Addr,
    /// Ethernet source of its forwards.
    #[serde(skip)]
    pub mac: [u8; 6],
}

/// What is remembered of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Known {
    /// The map that it is in.
    pub map: &'static str,
    /// Where it is in its life.
    pub state: &'static str,
    /// Its endpoint; none where that is gone. In an entry of another holder's forward it is the tuple's.
    pub backend: Option<SocketAddrV4>,
    /// Another holder's: its mark.
    pub mark: Option<u8>,
    /// How its packets leave.
    pub path: &'static str,
    /// Since its last packet.
    pub idle_seconds: u32,
    /// After so many it counts as gone.
    pub timeout_seconds: u32,
}

impl Known {
    /// Whether its time is over.
    pub fn is_expired(&self) -> bool {
        self.idle_seconds > self.timeout_seconds
    }
}

/// A backend in the order in which a new connection would try them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// Index in the Maglev table.
    pub place: u32,
    /// Index in `backends`.
    pub slot: u32,
    /// The endpoint; none where the slot is free.
    pub backend: Option<SocketAddrV4>,
    /// active, draining or gone.
    pub state: &'static str,
    /// Whether it runs on this node.
    pub local: bool,
    /// Who has the same tuple with this backend already, in words; it may be over.
    pub tuple_of: Option<String>,
    /// Whether the packet goes there.
    pub chosen: bool,
}

/// So many places are shown: the program tries no more than a few either.
const SHOWN: usize = 16;

/// The served port of the copies.
pub fn served(copies: &Copies) -> Option<Served> {
    let (_, service) = copies.service?;
    let takes_new = |b: &&Backend| b.service == service.id && b.takes_new_flows();
    Some(Served {
        id: service.id,
        table_size: copies.ring.as_ref().map(Vec::len),
        backends: copies.backends.values().filter(takes_new).count(),
    })
}

/// The endpoint that a packet with this tuple is addressed to.
pub fn endpoint(copies: &Copies, key: &FlowKey) -> Option<Endpoint> {
    let endpoint = EndpointKey::new(key.destination, key.destination_port, key.protocol);
    let holders = copies.endpoints.get(&endpoint)?;
    let known = copies.holders.iter().filter(|(_, holder)| holders.contains(holder.mark));
    let mut others: Vec<HolderOf> = known
        .map(|(mac, holder)| HolderOf {
            mark: holder.mark,
            overlay_address: holder.address.into(),
            mac: mac.octets(),
        })
        .collect();
    others.sort_unstable_by_key(|holder| holder.mark);
    Some(Endpoint { own: holders.contains(EndpointHolders::SELF), holders: others })
}

/// All that is remembered of the tuple, whoever's it is and in whichever direction it goes.
pub fn known(copies: &Copies, key: &FlowKey, timeouts: &Timeouts, now: u32) -> Vec<Known> {
    let mut all = Vec::new();
    let own = copies.known_as(key);
    for (map, table) in [("flows", &copies.flows), ("handshakes", &copies.handshakes)] {
        all.extend(table.get(&own).map(|flow| of_flow(map, flow, copies, &own, timeouts, now)));
    }
    let tables = [("replies", &copies.replies), ("handshake_replies", &copies.handshake_replies)];
    for tuple in [*key, key.reversed()] {
        for (map, table) in tables {
            all.extend(table.get(&tuple).map(|reply| of_reply(map, reply, &tuple, timeouts, now)));
        }
    }
    all
}

fn of_flow(
    map: &'static str,
    flow: &Flow,
    copies: &Copies,
    key: &FlowKey,
    timeouts: &Timeouts,
    now: u32,
) -> Known {
    let backend = copies.backends.get(&flow.backend).filter(|backend| backend.serves(flow.generation));
    Known {
        map,
        state: flow.state().name(),
        backend: backend.map(|backend| socket(backend.address, backend.port)),
        mark: None,
        path: path(flow.path()),
        idle_seconds: now.saturating_sub(flow.last_seen),
        timeout_seconds: timeouts.of(flow.state(), key.protocol == Protocol::UDP),
    }
}

fn of_reply(map: &'static str, reply: &Reply, tuple: &FlowKey, timeouts: &Timeouts, now: u32) -> Known {
    let is_mark = reply.kind() == ReplyKind::Mark;
    Known {
        map,
        // Of this node's own connections the flow has the state.
        state: if is_mark { reply.state().name() } else { "as its flow" },
        backend: Some(socket(tuple.source, tuple.source_port)),
        mark: is_mark.then_some(reply.mark),
        path: path(reply.path()),
        idle_seconds: now.saturating_sub(reply.last_seen),
        timeout_seconds: timeouts.of(reply.state(), tuple.protocol == Protocol::UDP),
    }
}

const fn path(path: Path) -> &'static str {
    match path {
        Path::Redirect => "redirect",
        Path::Stack => "stack",
    }
}

/// The backends that a new connection would try, each once, in the order of the hash. `source` and `goes_to` are the ends of the
/// packet as it went on.
pub fn choices(
    copies: &Copies,
    key: &FlowKey,
    source: Option<SocketAddrV4>,
    goes_to: Option<SocketAddrV4>,
) -> Vec<Choice> {
    let mut tuple = *key;
    if let Some(source) = source {
        (tuple.source, tuple.source_port) = ((*source.ip()).into(), Port::new(source.port()));
    }
    let Some(ring) = copies.ring.as_ref().filter(|ring| !ring.is_empty()) else { return Vec::new() };
    let size = u32::try_from(ring.len()).unwrap_or(u32::MAX);
    let mut choices: Vec<Choice> = Vec::new();
    let has_affinity = copies.service.is_some_and(|(_, service)| service.has_affinity());
    let mut hash = maglev::hash_of(key, has_affinity);
    for _ in 0..SHOWN {
        let place = maglev::index(hash, size);
        let slot = ring.get(place as usize).copied().unwrap_or(0);
        if choices.iter().all(|choice| choice.slot != slot) {
            choices.push(choice(copies, &tuple, (place, slot), goes_to));
        }
        hash = maglev::next(hash);
    }
    choices
}

fn choice(
    copies: &Copies,
    key: &FlowKey,
    (place, slot): (u32, u32),
    goes_to: Option<SocketAddrV4>,
) -> Choice {
    let found = copies.backends.get(&slot).filter(|backend| backend.state() != BackendState::Absent);
    let backend = found.map(|backend| socket(backend.address, backend.port));
    Choice {
        place,
        slot,
        backend,
        state: match found.map(Backend::state) {
            Some(BackendState::Active) => "active",
            Some(BackendState::Draining) => "draining",
            Some(BackendState::Absent) | None => "gone",
        },
        local: found.is_some_and(Backend::is_local),
        tuple_of: found.and_then(|backend| tuple_of(copies, key, backend)),
        chosen: backend.is_some() && backend == goes_to,
    }
}

/// Who else has the tuple that the backend would answer with.
fn tuple_of(copies: &Copies, key: &FlowKey, backend: &Backend) -> Option<String> {
    let answer = key.with_destination(backend.address, backend.port).reversed();
    let reply = copies.replies.get(&answer).or_else(|| copies.handshake_replies.get(&answer))?;
    match reply.kind() {
        ReplyKind::Mark => Some(format!("a connection of the holder with mark {}", reply.mark)),
        ReplyKind::Translate => {
            let owner = key.with_destination(reply.address, reply.port);
            (owner != *key)
                .then(|| format!("this client's connection to {}", socket(reply.address, reply.port)))
        }
    }
}
