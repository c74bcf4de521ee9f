//! From a backend's packet to its client, on the node that holds the address and on the one where the pod runs.

use crate::{
    account, backend, clock, config,
    entry::Entry,
    flow, forward, holder, inside, masquerade,
    outcome::{End, Outcome, Step, drop, pass},
    packet::Packet,
    parse::{Parsed, Tcp},
    plan::{Exit, Plan},
    reply, sieve,
};
use core::ops::ControlFlow;
use lb_common::{
    backend::BackendState,
    flow::{Flow, FlowKey, Path, Reply, ReplyKind, Side, State},
    interface::Interface,
    masquerade::Client,
    reason::Reason,
    way::Way,
};

/// A packet on the pods' side or the overlay that is not for a served port: perhaps an answer.
#[inline(always)]
pub(crate) fn from_backend(packet: &Packet<'_>, parsed: &mut Parsed, roles: Interface) -> Step<Plan> {
    if !sieve::may_be_answer(&parsed.key) {
        return pass(Reason::PassForeign);
    }
    parsed.outer = parsed.key.destination;
    if !roles.is(Interface::OVERLAY) && !roles.is(Interface::PODS) {
        // Whoever answers here answers this node: see `masquerade::outer`.
        parsed.key.destination = inside::overlay();
    }
    let Some(found) = find(&parsed.key) else {
        parsed.key.destination = parsed.outer;
        return unknown(packet, parsed, roles);
    };
    let reply = found.entry.get();
    match reply.kind() {
        ReplyKind::Mark if roles.is(Interface::PODS) => to_holder(packet, parsed, &found, &reply),
        ReplyKind::Mark => pass(Reason::PassForeign),
        ReplyKind::Translate if reply.path() == Path::Stack => pass(Reason::PassReplyToStack),
        ReplyKind::Translate => to_client(packet, parsed, &found, &reply),
    }
}

/// A packet on its way out of the uplink: an answer that the stack has routed is translated now. One to another holder's
/// forward leaves to that holder, or not at all.
#[inline(always)]
pub(crate) fn leaving(packet: &Packet<'_>, parsed: &mut Parsed) -> Step<Plan> {
    if !sieve::may_be_answer(&parsed.key) {
        return pass(Reason::PassForeign);
    }
    let Some(found) = find(&parsed.key) else { return pass(Reason::PassForeign) };
    let reply = found.entry.get();
    if reply.kind() == ReplyKind::Mark {
        return if holder::is_next(packet, reply.mark) {
            pass(Reason::PassForeign)
        } else {
            drop(Reason::DropPastHolder)
        };
    }
    follow(parsed, &found, &reply)?;
    parsed.outer = parsed.key.destination;
    parsed.client = Client::new(parsed.outer, parsed.key.destination_port);
    ControlFlow::Continue(plan(&reply, Exit::stack(0), Reason::ReplyTranslated))
}

/// A reply entry, and which table it is in.
pub(crate) struct Found {
    pub(crate) entry: Entry<Reply>,
    is_established: bool,
}

#[inline(always)]
pub(crate) fn find(key: &FlowKey) -> Option<Found> {
    if let Some(entry) = reply::established(key) {
        return Some(Found { entry, is_established: true });
    }
    reply::handshake(key).map(|entry| Found { entry, is_established: false })
}

/// An answer that another node routed here because of our mark, but whose flow is not known any more, would leave
/// with the pod's address. All else is not ours.
#[inline(always)]
fn unknown(packet: &Packet<'_>, parsed: &Parsed, roles: Interface) -> Step<Plan> {
    if roles.is(Interface::OVERLAY)
        && holder::is_own_endpoint(&parsed.key)
        && let forward::Route::Via(way) =
            forward::route(packet, parsed, parsed.key.source, parsed.key.destination)
        && crate::interface::is_uplink(way.interface)
    {
        return drop(Reason::DropReplyUnknown);
    }
    pass(Reason::PassForeign)
}

/// To the client, from the address, past the stack.
#[inline(always)]
fn to_client(packet: &Packet<'_>, parsed: &mut Parsed, found: &Found, reply: &Reply) -> Step<Plan> {
    follow(parsed, found, reply)?;
    parsed.client = Client::new(parsed.key.destination, parsed.key.destination_port);
    if reply.is_masqueraded() {
        let Some(client) = masquerade::client(&parsed.key, reply) else {
            return drop(Reason::DropReplyUnknown);
        };
        parsed.client = client;
    }
    if !reply.is_masqueraded()
        && let Some(way) = found.entry.way(forward::wire_length(packet, parsed))
    {
        return redirect(parsed, reply, way);
    }
    match forward::route(packet, parsed, reply.address, parsed.client.address) {
        forward::Route::Via(way) => {
            found.entry.set_way(way);
            // This packet has established the connection, perhaps: there the way is not known yet.
            if !found.is_established
                && let Some(entry) = reply::established(&parsed.key)
            {
                entry.set_way(way);
            }
            redirect(parsed, reply, way)
        }
        // The stack tells the pod, in the pod's terms: the packet has not been translated yet.
        forward::Route::TooBig { .. } if parsed.ip.dont_fragment() && !reply.is_masqueraded() => {
            pass(Reason::PassReplyToStack)
        }
        forward::Route::TooBig { .. } if reply.is_masqueraded() && !parsed.ip.dont_fragment() => {
            ControlFlow::Continue(plan(reply, Exit::stack_by_lo(), Reason::ReplyRedirect))
        }
        // By redirect nobody fragments, and conntrack has not seen the connection.
        forward::Route::TooBig { .. } => drop(Reason::DropTooBig),
        forward::Route::Local if reply.is_masqueraded() => {
            found.entry.set_way(forward::TO_SELF);
            redirect(parsed, reply, forward::TO_SELF)
        }
        forward::Route::Local | forward::Route::None => drop(Reason::DropNoRoute),
    }
}

#[inline(always)]
fn redirect(parsed: &Parsed, reply: &Reply, way: Way) -> Step<Plan> {
    if parsed.ip.ttl <= 1 {
        return drop(Reason::DropTtl);
    }
    ControlFlow::Continue(plan(reply, Exit::redirect(way), Reason::ReplyRedirect))
}

/// The source becomes the address again.
#[inline(always)]
fn plan(reply: &Reply, exit: Exit, reason: Reason) -> Plan {
    Plan {
        end: Side::Backend,
        address: reply.address,
        port: reply.port,
        service: reply.service,
        exit,
        reason,
    }
}

/// Brings the flow up to date. A reply whose flow is gone is an index without an owner.
#[inline(always)]
fn follow(parsed: &Parsed, found: &Found, reply: &Reply) -> Step<()> {
    let now = clock::now();
    if found.is_established {
        // The reply's own clock spares the flow table a look-up for every packet of one second.
        if reply.last_seen == now && !parsed.tcp.is_turning() {
            return ControlFlow::Continue(());
        }
        let flow = flow::established_by_key(&client_key(parsed, reply));
        let Some(flow) = flow.filter(|flow| is_from_backend(parsed, &flow.get())) else {
            reply::forget(&parsed.key);
            return drop(Reason::DropReplyUnknown);
        };
        found.entry.seen(now);
        flow.sent(Side::Backend, parsed.tcp, now);
        return ControlFlow::Continue(());
    }
    let key = client_key(parsed, reply);
    let Some(entry) = flow::handshake(&key) else { return drop(Reason::DropReplyUnknown) };
    let flow = entry.get();
    if !is_from_backend(parsed, &flow) {
        return drop(Reason::DropReplyUnknown);
    }
    entry.seen(now);
    found.entry.seen(now);
    if parsed.tcp.has(Tcp::RST) {
        entry.set_state(State::Reset);
    } else if parsed.tcp.is_syn_ack() {
        entry.answered(parsed.tcp.sequence);
    } else if is_proof(parsed, flow.state()) {
        return establish(parsed, &key, &flow, reply, now);
    }
    ControlFlow::Continue(())
}

/// Whether the packet comes from the backend that the flow has now, not from one that it had before. Of a backend that is
/// gone from this node, with its Service perhaps to another holder, the slot tells the generation still: its answers go
/// on, or else a client that only listens would never speak to the new holder.
#[inline(always)]
fn is_from_backend(parsed: &Parsed, flow: &Flow) -> bool {
    backend::get(flow.backend).is_some_and(|backend| match backend.state() {
        BackendState::Absent => backend.generation == flow.generation,
        BackendState::Active | BackendState::Draining => {
            backend.address == parsed.key.source && backend.port == parsed.key.source_port
        }
    })
}

/// Whether a backend's packet alone proves the connection: any answer in UDP, and one other than a reset where
/// another holder had begun it.
#[inline(always)]
fn is_proof(parsed: &Parsed, state: State) -> bool {
    parsed.is_udp() || state == State::PickedUp
}

/// Moves the connection to the flow table. Where that is full it stays where it is, as long as it is not evicted.
#[inline(always)]
fn establish(parsed: &Parsed, key: &FlowKey, known: &Flow, reply: &Reply, now: u32) -> Step<()> {
    let mut flow = *known;
    flow.set_state(State::Established);
    flow.last_seen = now;
    if !reply::establish(&parsed.key, reply) {
        return drop(Reason::DropTableFull);
    }
    if !flow::establish(key, &flow) {
        reply::forget(&parsed.key);
        return drop(Reason::DropTableFull);
    }
    flow::end_handshake(key);
    reply::end_handshake(&parsed.key);
    account::connection(known.service);
    ControlFlow::Continue(())
}

/// The tuple that the client sends.
#[inline(always)]
fn client_key(parsed: &Parsed, reply: &Reply) -> FlowKey {
    parsed.key.reversed().with_destination(reply.address, reply.port)
}

/// Back to the holder that forwarded the connection here: the mark chooses the route.
#[inline(always)]
fn to_holder(packet: &Packet<'_>, parsed: &Parsed, found: &Found, reply: &Reply) -> Step<Plan> {
    let now = clock::now();
    if found.is_established {
        found.entry.sent(Side::Backend, parsed.tcp, now);
    } else if parsed.tcp.has(Tcp::RST) {
        found.entry.set_state(State::Reset);
    } else if parsed.tcp.is_syn_ack() {
        found.entry.answered(parsed.tcp.sequence);
    } else if is_proof(parsed, reply.state()) {
        let mut established = *reply;
        established.set_state(State::Established);
        established.last_seen = now;
        if !reply::establish(&parsed.key, &established) {
            return drop(Reason::DropTableFull);
        }
        reply::end_handshake(&parsed.key);
    }
    config::set_mark_byte(packet, reply.mark);
    ControlFlow::Break(End::Outcome(Outcome::Next(Reason::HolderReply)))
}
