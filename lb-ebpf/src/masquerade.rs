//! Connections whose answers would not pass this node by themselves: of clients inside the cluster, and to backends on other
//! nodes' own networks. Their packets get a source of this node ([`lb_common::masquerade`]).
//!
//! A packet's tuple is changed here, and what was at the client's end is kept beside it, for `rewrite`. All that comes
//! after sees a connection of this node's overlay address.

use crate::{
    clock, flow, inside, open,
    outcome::{Step, drop, pass, refuse},
    packet::Packet,
    parse::Parsed,
    service, sieve, socket,
};
use aya_ebpf::{
    bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST},
    btf_maps::HashMap,
    macros::btf_map,
};
use core::ops::ControlFlow;
use lb_common::{
    addr::{Ipv4, Port},
    flow::{FlowKey, Reply},
    interface::Interface,
    limits, maglev,
    masquerade::{self, Client, Masquerade, MasqueradedKey},
    reason::Reason,
};

/// By the tuple that the client sends.
#[btf_map(name = "masquerades")]
static MASQUERADES: HashMap<
    FlowKey,
    Masquerade,
    { limits::MASQUERADES as usize },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();

/// By the port that it was given. Whoever is here owns the port.
#[btf_map(name = "masqueraded")]
static MASQUERADED: HashMap<
    MasqueradedKey,
    Client,
    { limits::MASQUERADES as usize },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();

/// Gives a packet to what may be a served port another source, if its client is inside the cluster, or its backend is where answers to
/// clients do not come back from.
#[inline(always)]
pub(crate) fn request(packet: &Packet<'_>, parsed: &mut Parsed, roles: Interface) -> Step<()> {
    let is_loopback = parsed.key.source.is_loopback();
    let is_inside = is_loopback || inside::is_inside(parsed.key.source, roles);
    if !is_inside && !sieve::may_be_masqueraded(&parsed.key) {
        return ControlFlow::Continue(());
    }
    if let Some(port) = known(&parsed.key) {
        return change(parsed, port);
    }
    let Some(service) = service::find(&parsed.key) else { return ControlFlow::Continue(()) };
    if is_loopback {
        return pass(Reason::PassLoopback);
    }
    let begins = parsed.is_udp() || parsed.tcp.is_opening();
    let now = clock::now();
    if is_inside {
        if parsed.tcp.is_syn_ack() {
            return pass(Reason::PassSynAck);
        }
        if !begins {
            return stray(packet, parsed);
        }
    } else if !begins || flow::is_live(&parsed.key, now) || !open::is_led_aside(&parsed.key, service) {
        return ControlFlow::Continue(());
    }
    let overlay = inside::overlay();
    if overlay == Ipv4::UNSPECIFIED {
        return drop(Reason::DropNoOverlay);
    }
    match allot(&Wish { key: parsed.key, overlay, now }) {
        0 => refuse(Reason::RejectNoPort),
        port => change(parsed, Port::new(port)),
    }
}

/// The tuple by which the connection of a client's is known, if its source is replaced.
#[inline(always)]
pub(crate) fn tuple(key: &FlowKey) -> Option<FlowKey> {
    Some(FlowKey::new(inside::overlay(), known(key)?, key.destination, key.destination_port, key.protocol))
}

/// The address that a backend sees. One that is masqueraded whoever connects is another node, or behind one, and answers by
/// its own routes: over the network that the Service's address is on.
#[inline(always)]
pub(crate) fn outer(key: &FlowKey, is_aside: bool) -> Ipv4 {
    if is_aside && !inside::is_overlay_outside() { key.destination } else { inside::overlay() }
}

/// Whether a packet may be an answer to this node itself.
#[inline(always)]
pub(crate) fn may_be_answer(key: &FlowKey) -> bool {
    masquerade::is_port(key.destination_port)
}

/// Who an answer is for; `None` where the port has another owner by now.
#[inline(always)]
pub(crate) fn client(key: &FlowKey, reply: &Reply) -> Option<Client> {
    let key = MasqueradedKey::new(reply.address, reply.port, key.destination_port, key.protocol);
    // SAFETY: copied out at once.
    unsafe { MASQUERADED.get(key) }.copied()
}

/// A packet in the middle of a connection that this node has not seen the beginning of.
#[inline(always)]
fn stray(packet: &Packet<'_>, parsed: &Parsed) -> Step<()> {
    if socket::is_connected(packet, parsed) {
        return pass(Reason::PassOwnSocket);
    }
    refuse(Reason::RejectUnknownSource)
}

/// The tuple of the connection as backends see it.
#[inline(always)]
fn change(parsed: &mut Parsed, port: Port) -> Step<()> {
    parsed.masquerade(inside::overlay(), port);
    ControlFlow::Continue(())
}

/// The port that the connection was given, if it is still its own.
#[inline(always)]
fn known(key: &FlowKey) -> Option<Port> {
    // SAFETY: copied out at once.
    let port = unsafe { MASQUERADES.get(key) }?.port;
    (owner(key, port)? == Client::new(key.source, key.source_port)).then_some(port)
}

#[inline(always)]
fn owner(key: &FlowKey, port: Port) -> Option<Client> {
    // SAFETY: copied out at once.
    unsafe { MASQUERADED.get(owned(key, port)) }.copied()
}

/// A connection that wants a port.
struct Wish {
    key: FlowKey,
    overlay: Ipv4,
    now: u32,
}

/// Finds a port and notes its owner; 0 for none. A function of its own, so that the verifier walks its loops once.
#[inline(never)]
fn allot(wish: &Wish) -> u16 {
    let key = &wish.key;
    let first = masquerade::first_port(maglev::hash(key));
    let mut number = first;
    for _ in 0..masquerade::TRIES {
        if take(key, Port::new(number)) {
            return number;
        }
        number = masquerade::next_port(number);
    }
    // None is free. What is over keeps its port until the agent's next sweep, or until now.
    number = first;
    for _ in 0..masquerade::OUSTED {
        if oust(wish, Port::new(number)) && take(key, Port::new(number)) {
            return number;
        }
        number = masquerade::next_port(number);
    }
    0
}

/// Notes the connection as the owner of a port that has none.
#[inline(always)]
fn take(key: &FlowKey, port: Port) -> bool {
    let owned = owned(key, port);
    // On its own address a client's own port would look as if nothing were masqueraded.
    if port == key.source_port
        || MASQUERADED.insert(owned, Client::new(key.source, key.source_port), BPF_NOEXIST.into()).is_err()
    {
        return false;
    }
    if MASQUERADES.insert(key, Masquerade::new(port), 0).is_err() {
        let _ = MASQUERADED.remove(owned);
        return false;
    }
    true
}

/// Takes a port from a connection that is over. Where its owner changes between the look and the removal, the new one finds
/// at its next packet that it has no port.
#[inline(always)]
fn oust(wish: &Wish, port: Port) -> bool {
    let key = &wish.key;
    let connection = FlowKey::new(wish.overlay, port, key.destination, key.destination_port, key.protocol);
    if flow::may_be_live(&connection, wish.now) {
        return false;
    }
    let _ = MASQUERADED.remove(owned(key, port));
    true
}

#[inline(always)]
fn owned(key: &FlowKey, port: Port) -> MasqueradedKey {
    MasqueradedKey::new(key.destination, key.destination_port, port, key.protocol)
}
