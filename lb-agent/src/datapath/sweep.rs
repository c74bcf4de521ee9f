//! Removes what the packets left behind: expired flows, flows of backends that are gone, replies without a flow.
//!
//! Packets never depend on it: an expired or dead flow is told by itself when its next packet comes. The sweep only
//! gives back the room, and counts on the way.

use super::maps::{Maps, MapsError};
use lb_common::addr::Protocol;
use lb_common::backend::Backend;
use lb_common::config::Timeouts;
use lb_common::flow::{Flow, FlowKey, Reply, ReplyKind, State};
use lb_common::mark::MAX_HOLDERS;
use lb_common::masquerade::{Client, Masquerade, MasqueradedKey};
use std::collections::{BTreeMap, BTreeSet};

/// How long a flow whose backend is gone stays after its last packet, in seconds. Where not the backend has gone but the
/// address, to another node, its backend goes on answering through here until the client's next packet has shown the
/// new holder the connection; a client that only listens sends none unless it hears something.
const LINGER: u32 = 10;

/// What a sweep found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Flows that stay, by state.
    pub flows: BTreeMap<&'static str, u64>,
    /// Entries of other holders' connections that stay.
    pub marked: u64,
    /// Flows removed.
    pub removed_flows: u64,
    /// Replies removed.
    pub removed_replies: u64,
    /// Source ports of clients inside the cluster that came free.
    pub removed_masquerades: u64,
    /// Marks that connections still carry.
    pub marks: BTreeSet<u8>,
    /// Entries that stay in the tables that are too large to be counted at each scrape, by table.
    pub entries: BTreeMap<&'static str, u64>,
}

/// Sweeps both tables once. `now` is in seconds of `CLOCK_MONOTONIC`.
///
/// # Errors
/// A table that cannot be read or written.
pub fn sweep(maps: &mut Maps, timeouts: &Timeouts, now: u32) -> Result<Swept, MapsError> {
    let backends = maps.backends()?;
    let mut swept = Swept::default();
    let mut alive = BTreeSet::new();
    for (key, flow) in maps.flows.list()? {
        if is_over(&key, &flow, &backends, timeouts, now) {
            maps.flows.remove(&key)?;
            swept.removed_flows += 1;
        } else {
            *swept.flows.entry(flow.state().name()).or_default() += 1;
            alive.insert(key);
        }
    }
    let mut replies = 0;
    for (key, reply) in maps.replies.list()? {
        replies += 1;
        if is_orphan(&key, &reply, &alive, timeouts, now) {
            // A flow may have been established since the flows were read.
            if reply.kind() == ReplyKind::Translate && maps.flows.get(&client_key(&key, &reply))?.is_some() {
                continue;
            }
            maps.replies.remove(&key)?;
            swept.removed_replies += 1;
        } else if reply.kind() == ReplyKind::Mark {
            swept.marked += 1;
            swept.marks.insert(reply.mark);
        }
    }
    sweep_masquerades(maps, timeouts, now, &mut swept)?;
    // Nobody takes these away but newer ones; one whose time is over carries nothing any more.
    let handshake_replies = maps.handshake_replies.list()?;
    swept.entries = [
        ("flows", count(alive.len())),
        ("replies", replies - swept.removed_replies),
        ("handshakes", count(maps.handshakes.list()?.len())),
        ("handshake_replies", count(handshake_replies.len())),
        ("masquerades", count(maps.masquerades.list()?.len())),
        ("endpoints", count(maps.endpoints.list()?.len())),
    ]
    .into();
    for (key, reply) in handshake_replies {
        let is_idle = is_idle(key.protocol, reply.state(), reply.last_seen, timeouts, now);
        if reply.kind() == ReplyKind::Mark && !is_idle {
            swept.marks.insert(reply.mark);
        }
    }
    // What is read back from a map may be anything.
    swept.marks.retain(|mark| (1..=MAX_HOLDERS).contains(mark));
    Ok(swept)
}

/// A source port goes with its connection. The connection is noted a moment after the port was given to it, in the same run
/// of the program, so whatever port is read here has it by the time that it is looked for.
fn sweep_masquerades(
    maps: &mut Maps,
    timeouts: &Timeouts,
    now: u32,
    swept: &mut Swept,
) -> Result<(), MapsError> {
    let overlay = maps.inside.own()?.overlay;
    // Before the others are looked at: what is noted between the two is not among them.
    let owners = maps.masqueraded.list()?;
    for (key, Masquerade { port, .. }) in maps.masquerades.list()? {
        let connection = FlowKey::new(overlay, port, key.destination, key.destination_port, key.protocol);
        let owned = MasqueradedKey::new(key.destination, key.destination_port, port, key.protocol);
        let owner = Client::new(key.source, key.source_port);
        let is_owner = maps.masqueraded.get(&owned)? == Some(owner);
        if is_owner && is_connected(maps, &connection, timeouts, now)? {
            continue;
        }
        maps.masquerades.remove(&key)?;
        if is_owner {
            maps.masqueraded.remove(&owned)?;
        }
        swept.removed_masquerades += 1;
    }
    // Of two CPUs that gave one client a port each, the later has the say; the other port has an owner that does not know it.
    for (owned, client) in owners {
        let MasqueradedKey { address, address_port, port, protocol, .. } = owned;
        let key = FlowKey::new(client.address, client.port, address, address_port, protocol);
        let is_known = maps.masquerades.get(&key)?.is_some_and(|given| given.port == port);
        let connection = FlowKey::new(overlay, port, address, address_port, protocol);
        if !is_known
            && maps.masqueraded.get(&owned)? == Some(client)
            && !is_connected(maps, &connection, timeouts, now)?
        {
            maps.masqueraded.remove(&owned)?;
            swept.removed_masquerades += 1;
        }
    }
    Ok(())
}

fn is_connected(maps: &Maps, key: &FlowKey, timeouts: &Timeouts, now: u32) -> Result<bool, MapsError> {
    // In this order: a connection goes from one to the other.
    let is_live = |flow: &Flow| !is_idle(key.protocol, flow.state(), flow.last_seen, timeouts, now);
    Ok(maps.handshakes.get(key)?.is_some_and(|flow| is_live(&flow)) || maps.flows.get(key)?.is_some())
}

fn is_over(key: &FlowKey, flow: &Flow, backends: &[Backend], timeouts: &Timeouts, now: u32) -> bool {
    let serves = backends.get(flow.backend as usize).is_some_and(|backend| backend.serves(flow.generation));
    let is_left = !serves && now.saturating_sub(flow.last_seen) > LINGER;
    is_left || is_idle(key.protocol, flow.state(), flow.last_seen, timeouts, now)
}

fn is_orphan(key: &FlowKey, reply: &Reply, alive: &BTreeSet<FlowKey>, timeouts: &Timeouts, now: u32) -> bool {
    match reply.kind() {
        ReplyKind::Translate => !alive.contains(&client_key(key, reply)),
        ReplyKind::Mark => is_idle(key.protocol, reply.state(), reply.last_seen, timeouts, now),
    }
}

fn is_idle(protocol: Protocol, state: State, last_seen: u32, timeouts: &Timeouts, now: u32) -> bool {
    now.saturating_sub(last_seen) > timeouts.of(state, protocol == Protocol::UDP)
}

fn count(entries: usize) -> u64 {
    entries as u64
}

/// The tuple that the client sends.
fn client_key(key: &FlowKey, reply: &Reply) -> FlowKey {
    key.reversed().with_destination(reply.address, reply.port)
}

/// Seconds of `CLOCK_MONOTONIC`, the clock of the flow entries.
pub fn now() -> u32 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    time.ok().and_then(|time| u32::try_from(time.tv_sec()).ok()).unwrap_or(0)
}
