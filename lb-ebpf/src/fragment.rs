//! Fragments (RFC 791, section 3.2). The first one has the ports, goes the way of any packet, and is noted with what became of
//! it; those that come after it share that. One that comes before is left to the stack, which never gets a first one to join it
//! to, so that nobody is handed a datagram that is not theirs.

use crate::{
    account, answer, clock, config, flow, forward,
    open::serving,
    outcome::{Outcome, Step, drop, pass},
    packet::Packet,
    parse::Parsed,
    plan::{self, Exit},
    rewrite,
    wire::Frame,
};
use aya_ebpf::{btf_maps::LruHashMap, macros::btf_map};
use core::ops::ControlFlow;
use lb_common::{
    addr::Ipv4,
    flow::{FlowKey, ReplyKind},
    fragment::{Fate, Fragment, FragmentKey},
    limits,
    reason::Reason,
};

#[btf_map(name = "fragments")]
static FRAGMENTS: LruHashMap<FragmentKey, Fragment, { limits::FRAGMENTS as usize }> = LruHashMap::new();

/// Notes what became of a first fragment. A number that is used again stands for the new datagram.
#[inline(always)]
pub(crate) fn note(packet: &Packet<'_>, parsed: &Parsed, key: &FragmentKey, outcome: Outcome) {
    let (Some(fate), Some(left)) = (Fate::after(outcome.reason()), packet.read::<Frame>(0)) else {
        let _ = FRAGMENTS.remove(key);
        return;
    };
    let addresses = (Ipv4::new(left.ip.source), Ipv4::new(left.ip.destination));
    let known = Fragment::new(&parsed.key, addresses, config::mark_byte(packet), fate, clock::now());
    // Without memory for it the others are left to the stack.
    let _ = FRAGMENTS.insert(key, &known, 0);
}

/// Sends a later fragment after its first one.
#[inline(always)]
pub(crate) fn follow(packet: &Packet<'_>, parsed: &Parsed, key: &FragmentKey) -> Step<Outcome> {
    // SAFETY: copied out at once.
    let known = unsafe { FRAGMENTS.get(key) }.copied();
    let Some(known) = known.filter(|known| known.holds(clock::now())) else {
        return pass(Reason::PassFragment);
    };
    let fate = known.fate();
    match fate {
        Fate::Drop => drop(Reason::DropFragment),
        Fate::HolderForward | Fate::HolderReply => {
            config::set_mark_byte(packet, known.mark);
            pass(fate.reason())
        }
        Fate::ForwardRedirect | Fate::ForwardStack | Fate::ReplyRedirect | Fate::ReplyTranslated => {
            carry(packet, parsed, &known, fate)
        }
    }
}

/// With the addresses and by the exit of the first one.
#[inline(always)]
fn carry(packet: &Packet<'_>, parsed: &Parsed, known: &Fragment, fate: Fate) -> Step<Outcome> {
    let key = FlowKey::new(
        parsed.key.source,
        known.source_port,
        parsed.key.destination,
        known.destination_port,
        parsed.key.protocol,
    );
    let is_forward = fate.is_forward();
    let service = if is_forward { forward_of(&key, known) } else { reply_of(&key, known) };
    let Some(service) = service else { return drop(Reason::DropFragment) };
    let exit = if fate.is_redirect() { redirect(packet, parsed, known)? } else { Exit::stack(known.mark) };
    if is_forward {
        account::packet_in(service, parsed);
    } else {
        account::packet_out(service, parsed);
    }
    let (old, new) = ((key.source, key.destination), (known.source, known.destination));
    if !rewrite::addresses(packet, &parsed.ip, old, new, exit.counts_hop()) {
        return drop(Reason::DropRewrite);
    }
    ControlFlow::Continue(plan::leave(packet, exit, fate.reason()))
}

/// The service, while the flow still leads to the backend that the first one went to.
#[inline(always)]
fn forward_of(key: &FlowKey, known: &Fragment) -> Option<u32> {
    let flow = flow::established_by_key(key).or_else(|| flow::handshake(key))?;
    serving(&flow.get()).filter(|backend| backend.address == known.destination).map(|backend| backend.service)
}

/// The service, while the backend's packets still become the address's.
#[inline(always)]
fn reply_of(key: &FlowKey, known: &Fragment) -> Option<u32> {
    let reply = answer::find(key)?.entry.get();
    (reply.kind() == ReplyKind::Translate && reply.address == known.source).then_some(reply.service)
}

/// The kernel is asked for each: one may be larger than the first, and they are rare.
#[inline(always)]
fn redirect(packet: &Packet<'_>, parsed: &Parsed, known: &Fragment) -> Step<Exit> {
    if parsed.ip.ttl <= 1 {
        return drop(Reason::DropTtl);
    }
    match forward::route(packet, parsed, known.source, known.destination) {
        forward::Route::Via(way) => ControlFlow::Continue(Exit::redirect(way)),
        forward::Route::TooBig { .. } => drop(Reason::DropTooBig),
        forward::Route::Local | forward::Route::None => drop(Reason::DropNoRoute),
    }
}
