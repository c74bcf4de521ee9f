//! Fragments (RFC 791, section 3.2). The first one has the ports, goes the way of any packet, and is noted with what became of
//! it; those that come after it share that. One that comes before is left to the stack, which never gets a first one to join it
//! to, so that nobody is handed a datagram that is not theirs.
//!
//! What is done for fragments alone is in functions of their own, and keeps what it knows with the packet: in the middle of the
//! walk it would double the verifier's work.

use crate::{
    account, answer, backend, clock, config, flow, masquerade,
    open::serving,
    outcome::{End, Outcome, Step},
    packet::{ETH_LEN, Packet},
    parse::{Ip, Parsed, Tcp},
    plan::{self, Exit},
    rewrite,
    wire::Ipv4Header,
};
use aya_ebpf::{bindings::__sk_buff, btf_maps::LruHashMap, macros::btf_map, programs::TcContext};
use core::ops::ControlFlow;
use lb_common::{
    addr::{Ipv4, Mac, Port, Protocol},
    flow::{FlowKey, ReplyKind},
    fragment::{Fate, Fragment, FragmentKey, Hook, Part},
    limits,
    masquerade::Client,
    reason::{Kind, Reason},
    way::Way,
};

#[btf_map(name = "fragments")]
static FRAGMENTS: LruHashMap<FragmentKey, Fragment, { limits::FRAGMENTS as usize }> = LruHashMap::new();

/// Ends the walk of a later fragment.
#[inline(always)]
pub(crate) fn begin(packet: &Packet<'_>, hook: Hook) -> Step<()> {
    let Some(reason) = keep_or_follow(packet.skb(), hook) else { return ControlFlow::Continue(()) };
    ControlFlow::Break(End::Outcome(match reason {
        Reason::ForwardRedirect | Reason::ReplyRedirect => Outcome::Redirected(reason),
        other if matches!(other.kind(), Kind::Drop) => Outcome::Dropped(reason),
        _ => Outcome::Next(reason),
    }))
}

/// Keeps of a first fragment what is to be noted at the end of its walk. Sends a later one after its first one, and says what
/// became of it.
#[inline(never)]
fn keep_or_follow(skb: *mut __sk_buff, hook: Hook) -> Option<Reason> {
    let ctx = TcContext::new(skb);
    let packet = Packet::new(&ctx);
    // It has been parsed before.
    let header = packet.read::<Ipv4Header>(ETH_LEN)?;
    let (source, destination) = (Ipv4::new(header.source), Ipv4::new(header.destination));
    let key = FragmentKey::new((source, destination), Protocol::new(header.protocol), header.id, hook);
    let ip = Ip::new(&header);
    if ip.is_later_fragment() {
        return follow(&packet, &key, ip.part());
    }
    let ports = packet.load::<[u8; 4]>(ip.l4_offset())?;
    let [a, b, c] = key.to_words();
    packet.keep(Some([a, b, c, u32::from_ne_bytes(ports)]));
    None
}

/// Notes what became of a first fragment. A number that is used again stands for the new datagram. What the reason means is left
/// to those that follow: a decision here would make the verifier tell apart all walks that lead here. One that is answered has the answer's
/// length, which only matters for when its entry ends.
#[inline(never)]
pub(crate) fn note(skb: *mut __sk_buff, reason: Reason) {
    let ctx = TcContext::new(skb);
    let packet = Packet::new(&ctx);
    let Some(left) = packet.read::<Ipv4Header>(ETH_LEN) else { return };
    let [source, destination, rest, ports] = packet.kept();
    let [a, b, c, d] = ports.to_ne_bytes();
    let ports = (Port::from_bytes([a, b]), Port::from_bytes([c, d]));
    let addresses = (Ipv4::new(left.source), Ipv4::new(left.destination));
    let length = Ip::new(&left).part().length;
    let known = Fragment::new(ports, addresses, config::mark_byte(&packet), reason, clock::now(), length);
    // Without memory for it the others are left to the stack.
    let _ = FRAGMENTS.insert(FragmentKey::from_words([source, destination, rest]), known, 0);
}

/// What is known of the datagram, which ends with this part where that completes it: its number may be used again at once, and
/// what then comes before its first one must not go where this one went.
#[inline(always)]
fn known(key: &FragmentKey, part: Part) -> Option<Fragment> {
    let entry = FRAGMENTS.get_ptr_mut(key)?;
    // SAFETY: the pointer came from a lookup in this run of the program. Copied out at once, since the entry may be recycled; two
    // CPUs at once lose at worst a part of the count.
    let (known, is_complete) = unsafe {
        let is_complete = (*entry).completes(part);
        (*entry, is_complete)
    };
    if is_complete {
        let _ = FRAGMENTS.remove(key);
    }
    Some(known)
}

#[inline(always)]
fn follow(packet: &Packet<'_>, key: &FragmentKey, part: Part) -> Option<Reason> {
    let known = known(key, part).filter(|known| known.holds(clock::now()));
    let Some((known, fate)) = known.and_then(|known| Some((known, known.fate()?))) else {
        return Some(Reason::PassFragment);
    };
    match fate {
        Fate::Drop => Some(Reason::DropFragment),
        Fate::HolderForward | Fate::HolderReply => {
            config::set_mark_byte(packet, known.mark);
            Some(fate.reason())
        }
        Fate::ForwardRedirect | Fate::ForwardStack | Fate::ReplyRedirect | Fate::ReplyTranslated => {
            carry(packet, &known, fate)
        }
    }
}

/// With the addresses and by the exit of the first one.
#[inline(always)]
fn carry(packet: &Packet<'_>, known: &Fragment, fate: Fate) -> Option<Reason> {
    let parsed = parsed(packet, known)?;
    let tuple = parsed.key;
    let connection = if fate.is_forward() { forward_of(&tuple, known) } else { reply_of(&tuple, known) };
    let Some((service, way)) = connection else { return Some(Reason::DropFragment) };
    let exit = if fate.is_redirect() {
        if parsed.ip.ttl <= 1 {
            return Some(Reason::DropTtl);
        }
        if parsed.ip.total_length > way.passes {
            return Some(Reason::DropTooBig);
        }
        Exit::redirect(way)
    } else {
        Exit::stack(known.mark)
    };
    if fate.is_forward() {
        account::packet_in(service, &parsed);
    } else {
        account::packet_out(service, &parsed);
    }
    let old = (parsed.key.source, parsed.key.destination);
    let new = (known.source, known.destination);
    if !rewrite::addresses(packet, &parsed.ip, old, new, exit.counts_hop()) {
        return Some(Reason::DropRewrite);
    }
    Some(plan::leave(packet, exit, fate.reason()).reason())
}

/// As if it had the ports of the first one.
#[inline(always)]
fn parsed(packet: &Packet<'_>, known: &Fragment) -> Option<Parsed> {
    // Read again: to remember all of it would take more of the stack than there is.
    let header = packet.read::<Ipv4Header>(ETH_LEN)?;
    Some(Parsed {
        key: FlowKey::new(
            Ipv4::new(header.source),
            known.source_port,
            Ipv4::new(header.destination),
            known.destination_port,
            Protocol::new(header.protocol),
        ),
        client: Client::new(Ipv4::new(header.source), known.source_port),
        outer: Ipv4::new(header.source),
        source_mac: Mac::new([0; 6]),
        ip: Ip::new(&header),
        checksum: 0,
        tcp: Tcp::default(),
    })
}

/// The service, and the way to the backend that the first one was redirected to, while the flow leads there.
#[inline(always)]
fn forward_of(tuple: &FlowKey, known: &Fragment) -> Option<(u32, Way)> {
    let tuple = if tuple.source == known.source { *tuple } else { masquerade::tuple(tuple)? };
    let flow = flow::established_by_key(&tuple).or_else(|| flow::handshake(&tuple))?.get();
    let backend = serving(&flow).filter(|backend| backend.address == known.destination)?;
    Some((backend.service, backend::recent_way(flow.backend, flow.generation)))
}

/// The service, and the way to the client that the first one was redirected to, while the backend's packets become the
/// address's.
#[inline(always)]
fn reply_of(tuple: &FlowKey, known: &Fragment) -> Option<(u32, Way)> {
    let reply = answer::find(tuple)?.entry.get();
    (reply.kind() == ReplyKind::Translate && reply.address == known.source)
        .then(|| (reply.service, reply.last_way()))
}
