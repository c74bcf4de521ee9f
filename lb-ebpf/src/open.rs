//! From a client's packet to its backend: the flow table first, then the Service and a choice.

use crate::{
    account, backend, clock, config,
    entry::Entry,
    flow,
    outcome::{End, Outcome, Step, drop, pass, refuse},
    packet::Packet,
    parse::{Parsed, Tcp},
    reply, ring, service, socket,
};
use core::ops::ControlFlow;
use lb_common::{
    addr::Ipv4,
    backend::Backend,
    flow::{Flow, FlowKey, Path, Reply, Side, State},
    maglev,
    reason::Reason,
    service::Service,
};

/// How many places of a table are tried when the first choice cannot be used: with two backends, of which one is taken,
/// all but 2^-15 of such connections find the other. More places cost the verifier more than they bring.
const TRIES: u32 = 16;

/// What is known of the packet's connection.
pub(crate) struct Connection {
    /// Slot of the backend.
    pub(crate) id: u32,
    pub(crate) backend: Backend,
    pub(crate) path: Path,
    /// Seconds since boot.
    pub(crate) now: u32,
}

/// The connection that the packet belongs to or begins; `None` where its destination is not a served port.
#[inline(always)]
pub(crate) fn connection(packet: &Packet<'_>, parsed: &Parsed) -> Step<Option<Connection>> {
    let now = clock::now();
    let entry = flow::established(parsed, now);
    // While its backend serves, the Service need not be looked up.
    if let Some(entry) = &entry
        && let Some(connection) = established(parsed, entry, now)
    {
        return ControlFlow::Continue(Some(connection));
    }
    let Some(service) = service::find(&parsed.key) else { return ControlFlow::Continue(None) };
    let connection = of_service(packet, parsed, service, entry.is_some(), now);
    if matches!(connection, ControlFlow::Break(End::Refusal(_) | End::Outcome(Outcome::Dropped(_)))) {
        account::refused(service.id);
    }
    ControlFlow::Continue(Some(connection?))
}

/// The established connection; `None` where its backend is gone.
#[inline(always)]
fn established(parsed: &Parsed, entry: &Entry<Flow>, now: u32) -> Option<Connection> {
    let known = entry.get();
    let backend = serving(&known)?;
    entry.sent(Side::Client, parsed.tcp, now);
    Some(Connection { id: known.backend, backend, path: known.path(), now })
}

/// A connection that is not established, or `is_orphan`: its backend is gone.
#[inline(always)]
fn of_service(
    packet: &Packet<'_>,
    parsed: &Parsed,
    service: Service,
    is_orphan: bool,
    now: u32,
) -> Step<Connection> {
    if is_orphan {
        flow::forget(&parsed.key);
        if !begins(parsed) {
            return refuse(Reason::RejectBackendGone);
        }
    }
    unestablished(packet, parsed, service, now)
}

/// The flow's backend, while it still serves the generation that the flow was given.
#[inline(always)]
pub(crate) fn serving(flow: &Flow) -> Option<Backend> {
    backend::get(flow.backend).filter(|backend| backend.serves(flow.generation))
}

/// Whether the packet may begin a connection.
#[inline(always)]
fn begins(parsed: &Parsed) -> bool {
    parsed.is_udp() || parsed.tcp.is_opening()
}

/// A packet whose connection is not in the flow table: in a handshake, or new here.
#[inline(always)]
fn unestablished(packet: &Packet<'_>, parsed: &Parsed, service: Service, now: u32) -> Step<Connection> {
    if let Some(entry) = flow::handshake(&parsed.key) {
        let known = entry.get();
        if let Some(backend) = serving(&known)
            // A SYN that comes again may choose again, once its backend takes no new flows.
            && (!begins(parsed) || backend.takes_new_flows())
        {
            entry.seen(now);
            if parsed.tcp.has(Tcp::RST) {
                entry.set_state(State::Reset);
            } else if parsed.tcp.completes(known.state(), known.expected_ack) {
                establish(parsed, &known, &backend, now)?;
            }
            return ControlFlow::Continue(Connection { id: known.backend, backend, path: known.path(), now });
        }
    }
    if !begins(parsed) && parsed.tcp.is_syn_ack() {
        return pass(Reason::PassSynAck);
    }
    if !parsed.tcp.is_opening() && socket::is_connected(packet, parsed) {
        return pass(Reason::PassOwnSocket);
    }
    begin(parsed, service, now)
}

/// Moves a connection from the handshake tables to the flow table, or refuses it.
#[inline(always)]
fn establish(parsed: &Parsed, known: &Flow, backend: &Backend, now: u32) -> Step<()> {
    let mut flow = *known;
    flow.set_state(State::Established);
    flow.last_seen = now;
    let reply_key = parsed.key.with_destination(backend.address, backend.port).reversed();
    let reply = Reply::translate(
        parsed.key.destination,
        parsed.key.destination_port,
        known.service,
        known.path(),
        now,
    )
    .masqueraded(parsed.is_masqueraded());
    if !reply::establish(&reply_key, &reply) {
        return refuse(Reason::RejectTableFull);
    }
    if !flow::establish(&parsed.key, &flow) {
        reply::forget(&reply_key);
        return refuse(Reason::RejectTableFull);
    }
    flow::end_handshake(&parsed.key);
    reply::end_handshake(&reply_key);
    account::connection(known.service);
    ControlFlow::Continue(())
}

/// Chooses a backend for a connection that is new here, and remembers it.
#[inline(always)]
fn begin(parsed: &Parsed, service: Service, now: u32) -> Step<Connection> {
    let (id, backend) = choose(parsed, service, now)?;
    // The stack would take a packet from an address of this node that comes in for a forged one.
    let is_for_stack = !parsed.is_masqueraded() && (config::through_stack() || backend.is_local());
    let path = if is_for_stack { Path::Stack } else { Path::Redirect };
    // A reset belongs to no connection that is worth remembering.
    let connection = Connection { id, backend, path, now };
    if parsed.tcp.has(Tcp::RST) {
        return ControlFlow::Continue(connection);
    }
    let state = if begins(parsed) { State::Opening } else { State::PickedUp };
    let flow = Flow::new(service.id, id, backend.generation, path, state, now);
    let reply_key = parsed.key.with_destination(backend.address, backend.port).reversed();
    let reply = Reply::translate(parsed.key.destination, parsed.key.destination_port, service.id, path, now)
        .masqueraded(parsed.is_masqueraded());
    if !flow::begin(&parsed.key, &flow) || !reply::begin(&reply_key, &reply) {
        return drop(Reason::DropTableFull);
    }
    ControlFlow::Continue(connection)
}

/// The first backend in the hash's order that takes new flows and has no other connection with this client tuple.
#[inline(always)]
fn choose(parsed: &Parsed, service: Service, now: u32) -> Step<(u32, Backend)> {
    let Some(table) = ring::table(service.id) else { return drop(Reason::DropNoRing) };
    if table.size == 0 {
        return refuse(Reason::RejectNoEndpoint);
    }
    let hash = maglev::hash_of(&parsed.client_key(), service.has_affinity());
    let place = Place { key: parsed.key, table, hash, now, client: parsed.client.address };
    let id = find_free(&place);
    match backend::get(id) {
        Some(backend) if id != 0 => ControlFlow::Continue((id, backend)),
        _ => refuse(Reason::RejectCollision),
    }
}

/// Whether the first choice for a connection that is new here is a backend that it needs another source for.
#[inline(always)]
pub(crate) fn is_led_aside(key: &FlowKey, service: Service) -> bool {
    let Some(table) = ring::table(service.id) else { return false };
    let hash = maglev::hash_of(key, service.has_affinity());
    let id = if table.size == 0 { None } else { table.backend(maglev::index(hash, table.size)) };
    id.and_then(backend::get).is_some_and(|backend| backend.is_masqueraded() && backend.takes_new_flows())
}

/// Where a choice begins.
struct Place {
    key: FlowKey,
    table: ring::Table,
    hash: u32,
    now: u32,
    /// Not whether it is the source: the verifier would walk all places for either answer.
    client: Ipv4,
}

/// The id of the backend, 0 for none. A function of its own, so that the verifier walks its loop once.
#[inline(never)]
fn find_free(place: &Place) -> u32 {
    let mut hash = place.hash;
    for _ in 0..TRIES {
        let id = place.table.backend(maglev::index(hash, place.table.size)).unwrap_or(0);
        if is_free(place, id) {
            return id;
        }
        hash = maglev::next(hash);
    }
    0
}

/// The agent writes a backend before the tables that name it, and takes it away after them, so one that is not there
/// is named by a table from before, and the next place has a better one.
#[inline(always)]
fn is_free(place: &Place, id: u32) -> bool {
    match backend::get(id) {
        Some(backend)
            if backend.takes_new_flows()
                && backend.service == place.table.service
                && (place.client != place.key.source || !backend.is_masqueraded()) =>
        {
            let reply = place.key.with_destination(backend.address, backend.port).reversed();
            reply::claim(&reply, &place.key, place.now)
        }
        _ => false,
    }
}
