//! Other holders' forwards to pods of this node: recognised by the holder's link-layer address and by endpoint, and
//! remembered, so that the answers find their way back.

use crate::{
    clock, config,
    entry::Entry,
    outcome::{End, Outcome, Step, drop},
    packet::Packet,
    parse::{Parsed, Tcp},
    reply, sieve,
};
use aya_ebpf::{bindings::BPF_F_NO_PREALLOC, btf_maps::HashMap, macros::btf_map};
use core::ops::ControlFlow;
use lb_common::{
    addr::Mac,
    flow::{FlowKey, Reply, ReplyKind, Side, State},
    holder::{EndpointHolders, EndpointKey, Holder},
    interface::Interface,
    limits, mark,
    reason::Reason,
};

#[btf_map(name = "holders")]
static HOLDERS: HashMap<Mac, Holder, { limits::HOLDERS as usize }> = HashMap::new();

#[btf_map(name = "endpoints")]
static ENDPOINTS: HashMap<
    EndpointKey,
    EndpointHolders,
    { limits::ENDPOINTS as usize },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();

/// Ends the walk of a packet that a holder forwarded to a pod here. Everything else goes on.
#[inline(always)]
pub(crate) fn recognise(packet: &Packet<'_>, parsed: &Parsed, roles: Interface) -> Step<()> {
    if !sieve::may_be_holder(parsed.source_mac) {
        return ControlFlow::Continue(());
    }
    // SAFETY: copied out at once.
    let Some(holder) = unsafe { HOLDERS.get(parsed.source_mac) }.copied() else {
        return ControlFlow::Continue(());
    };
    let is_own = parsed.key.source == holder.address;
    let endpoint = EndpointKey::new(parsed.key.destination, parsed.key.destination_port, parsed.key.protocol);
    // SAFETY: the kernel keeps the memory (RCU) while this run of the program lasts; each bit is read once. A copy of all
    // would take more of the stack than there is.
    match unsafe { ENDPOINTS.get(endpoint) } {
        Some(holders) if holders.contains(holder.mark) => {
            remember(parsed, holder.mark, holders)?;
            config::set_mark_byte(packet, mark::FORWARDED);
            ControlFlow::Break(End::Outcome(Outcome::Next(Reason::HolderForward)))
        }
        _ => {
            // Perhaps a forward to an endpoint of which this node is about to hear. Masqueraded once, the connection would
            // stay so: netfilter asks no rule a second time. On an uplink it may be anything, for a NodePort, say, whose
            // masquerade is needed; and the CNIs that route over one let what goes to this node's pods be.
            if !is_own && !roles.is(Interface::UPLINK) {
                config::set_mark_byte(packet, mark::FORWARDED);
            }
            ControlFlow::Continue(())
        }
    }
}

/// Whether the packet comes from an endpoint that this node forwards to.
#[inline(always)]
pub(crate) fn is_own_endpoint(key: &FlowKey) -> bool {
    forwards(key, EndpointHolders::SELF)
}

/// Whether the holder with `mark` still forwards to the endpoint that sends under `key`.
#[inline(always)]
pub(crate) fn forwards(key: &FlowKey, mark: u8) -> bool {
    let endpoint = EndpointKey::new(key.source, key.source_port, key.protocol);
    // SAFETY: read at once.
    unsafe { ENDPOINTS.get(endpoint) }.is_some_and(|holders| holders.contains(mark))
}

/// Whether the frame is addressed to the holder with this mark.
#[inline(always)]
pub(crate) fn is_next(packet: &Packet<'_>, mark: u8) -> bool {
    let Some(destination) = packet.read(0) else { return false };
    // SAFETY: read at once.
    unsafe { HOLDERS.get(Mac::new(destination)) }.is_some_and(|holder| holder.mark == mark)
}

/// Brings the connection's entry up to date, or makes one.
#[inline(always)]
fn remember(parsed: &Parsed, mark: u8, holders: &EndpointHolders) -> Step<()> {
    let now = clock::now();
    let key = parsed.key.reversed();
    if let Some(entry) = reply::established(&key) {
        let reply = entry.get();
        if belongs(&reply, mark) && !(parsed.tcp.is_opening() && reply.state().is_over()) {
            entry.sent(Side::Client, parsed.tcp, now);
            return ControlFlow::Continue(());
        }
        if !may_take_over(&reply, parsed, (mark, holders), now) {
            return drop(Reason::DropHolderConflict);
        }
        reply::forget(&key);
    }
    if let Some(entry) = reply::handshake(&key) {
        let reply = entry.get();
        if belongs(&reply, mark) {
            entry.seen(now);
            return progress(parsed, &key, &entry, now);
        }
        if !may_take_over(&reply, parsed, (mark, holders), now) {
            return drop(Reason::DropHolderConflict);
        }
    }
    begin(parsed, &key, mark, now)
}

/// The next packet of a handshake that this holder began.
#[inline(always)]
fn progress(parsed: &Parsed, key: &FlowKey, entry: &Entry<Reply>, now: u32) -> Step<()> {
    let reply = entry.get();
    if parsed.tcp.has(Tcp::RST) {
        entry.set_state(State::Reset);
    } else if reply.state().is_over() && parsed.tcp.is_opening() {
        entry.set_state(State::Opening);
    } else if parsed.tcp.completes(reply.state(), reply.expected_ack) {
        let mut established = reply;
        established.set_state(State::Established);
        established.last_seen = now;
        if !reply::establish(key, &established) {
            return drop(Reason::DropTableFull);
        }
        reply::end_handshake(key);
    }
    ControlFlow::Continue(())
}

#[inline(always)]
fn begin(parsed: &Parsed, key: &FlowKey, mark: u8, now: u32) -> Step<()> {
    if parsed.tcp.has(Tcp::RST) {
        return ControlFlow::Continue(());
    }
    let begins = parsed.is_udp() || parsed.tcp.is_opening();
    let state = if begins { State::Opening } else { State::PickedUp };
    if reply::begin(key, &Reply::mark(mark, state, now)) {
        ControlFlow::Continue(())
    } else {
        drop(Reason::DropTableFull)
    }
}

#[inline(always)]
fn belongs(reply: &Reply, mark: u8) -> bool {
    reply.kind() == ReplyKind::Mark && reply.mark == mark
}

/// Whether this holder may take a tuple that another connection has had: one that is over or idle, or that its
/// holder has let go of. Otherwise the one who came first keeps it; two connections cannot share a tuple.
#[inline(always)]
fn may_take_over(reply: &Reply, parsed: &Parsed, (mark, holders): (u8, &EndpointHolders), now: u32) -> bool {
    match reply.kind() {
        ReplyKind::Mark => {
            reply.mark == mark
                || !holders.contains(reply.mark)
                || !reply::is_live(reply, parsed.key.protocol, now)
        }
        // A connection to an address of this node itself, which may have moved away.
        ReplyKind::Translate => {
            !holders.contains(EndpointHolders::SELF)
                || !crate::flow::is_live(&parsed.key.with_destination(reply.address, reply.port), now)
        }
    }
}
