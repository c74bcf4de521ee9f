//! ICMP errors about packets of forwarded connections (RFC 792; RFC 5508, section 4), both ways. Whoever sent the packet must
//! hear of it, in its own terms: without them a connection over a path that takes smaller packets hangs (RFC 1191).

use crate::{
    answer, config, flow, forward, inside, masquerade,
    open::serving,
    outcome::{End, Outcome, Step, drop, pass},
    packet::{ETH_LEN, IPV4_LEN, Packet},
    parse::{Ip, Parsed, Tcp},
    plan::{self, Exit},
    rewrite::{self, add, carried, difference, fold, updated, updated_udp},
    wire::{Frame, Ipv4Header, L4Head},
};
use core::ops::ControlFlow;
use lb_common::{
    addr::{Ipv4, Mac, Port, Protocol},
    flow::{FlowKey, Path, Reply, ReplyKind},
    interface::Interface,
    mark,
    masquerade::Client,
    reason::Reason,
};

/// RFC 792.
const DESTINATION_UNREACHABLE: u8 = 3;
const TIME_EXCEEDED: u8 = 11;
const PARAMETER_PROBLEM: u8 = 12;

const ICMP_LEN: usize = 8;
/// Offsets in the frame.
const ICMP_CHECKSUM: usize = ETH_LEN + IPV4_LEN + 2;
const QUOTE: usize = ETH_LEN + IPV4_LEN + ICMP_LEN;
const QUOTED_CHECKSUM: usize = QUOTE + 10;
const QUOTED_ADDRESSES: usize = QUOTE + 12;
const QUOTED_L4: usize = QUOTE + IPV4_LEN;

/// An error, without IP options in either header.
#[derive(Clone, Copy)]
#[repr(C, align(2))]
struct Headers {
    frame: Frame,
    icmp: [u8; ICMP_LEN],
    quoted: Ipv4Header,
    /// All that must be quoted of the transport header.
    quoted_l4: L4Head,
}

/// What an error says.
struct Error {
    /// The error itself, without ports.
    outer: Parsed,
    /// Of the packet that it is about, as quoted.
    quoted: FlowKey,
    quoted_checksum: u16,
    /// Of UDP, 0 for none.
    quoted_udp_checksum: u16,
}

/// Comes in.
#[inline(always)]
pub(crate) fn coming(packet: &Packet<'_>, roles: Interface) -> Step<Outcome> {
    let Some(error) = read(packet) else { return pass(Reason::PassOtherProtocol) };
    let mut answered = error.quoted.reversed();
    if !roles.is(Interface::OVERLAY) && !roles.is(Interface::PODS) {
        // About a packet that this node seemed to have sent: see `masquerade::outer`.
        answered.destination = inside::overlay();
    }
    // An uplink may be the overlay too: a client's error about an answer comes in there as well.
    if let Some(found) = answer::find(&answered) {
        return from_backend(packet, &error, &found.entry.get(), roles);
    }
    from_client(packet, &error)
}

/// Goes out of an uplink: the stack has routed it, or has made it.
#[inline(always)]
pub(crate) fn leaving(packet: &Packet<'_>) -> Step<Outcome> {
    let Some(error) = read(packet) else { return pass(Reason::PassOtherProtocol) };
    match answer::find(&error.quoted.reversed()).map(|found| found.entry.get()) {
        Some(reply) if reply.kind() == ReplyKind::Translate => {
            let client = Client::new(error.quoted.source, error.quoted.source_port);
            to_client(packet, &error, &reply, client, Exit::stack(0))
        }
        _ => pass(Reason::PassOtherProtocol),
    }
}

/// From the client's side, about an answer: to the backend that had sent it.
#[inline(always)]
fn from_client(packet: &Packet<'_>, error: &Error) -> Step<Outcome> {
    let own = error.quoted.reversed();
    let sent = masquerade::tuple(&own).unwrap_or(own);
    let flow = flow::established_by_key(&sent).map(|entry| entry.get());
    let Some((flow, backend)) = flow.and_then(|flow| Some((flow, serving(&flow)?))) else {
        return pass(Reason::PassOtherProtocol);
    };
    let is_masqueraded = sent != own;
    let (mut client, mut source) = (own.source, error.outer.key.source);
    if is_masqueraded {
        client = masquerade::outer(&sent, backend.is_masqueraded());
        source = client;
    }
    let exit = match flow.path() {
        Path::Stack => Exit::stack(mark::FORWARDED),
        Path::Redirect => redirect(packet, error, source, backend.address, is_masqueraded)?,
    };
    let new = Ends { source, receiver: (backend.address, backend.port), other: (client, sent.source_port) };
    finish(packet, error, &new, exit, Reason::ForwardIcmpError)
}

/// From a backend, or from somebody on the way to it, about a client's packet: to the client, or to the holder that
/// forwarded it.
#[inline(always)]
fn from_backend(packet: &Packet<'_>, error: &Error, reply: &Reply, roles: Interface) -> Step<Outcome> {
    match reply.kind() {
        ReplyKind::Mark if roles.is(Interface::PODS) => {
            config::set_mark_byte(packet, reply.mark);
            ControlFlow::Break(End::Outcome(Outcome::Next(Reason::HolderReply)))
        }
        ReplyKind::Mark => pass(Reason::PassOtherProtocol),
        ReplyKind::Translate if reply.path() == Path::Stack => pass(Reason::PassReplyToStack),
        ReplyKind::Translate => {
            let mut client = Client::new(error.quoted.source, error.quoted.source_port);
            if reply.is_masqueraded() {
                let Some(itself) = masquerade::client(&error.quoted.reversed(), reply) else {
                    return drop(Reason::DropReplyUnknown);
                };
                client = itself;
            }
            let exit = redirect(packet, error, reply.address, client.address, reply.is_masqueraded())?;
            to_client(packet, error, reply, client, exit)
        }
    }
}

/// The client knows the address alone, so the error comes from there, whoever on the way has sent it.
#[inline(always)]
fn to_client(packet: &Packet<'_>, error: &Error, reply: &Reply, client: Client, exit: Exit) -> Step<Outcome> {
    let new = Ends {
        source: reply.address,
        receiver: (client.address, client.port),
        other: (reply.address, reply.port),
    };
    finish(packet, error, &new, exit, Reason::ReplyIcmpError)
}

#[inline(always)]
fn redirect(
    packet: &Packet<'_>,
    error: &Error,
    source: Ipv4,
    destination: Ipv4,
    is_masqueraded: bool,
) -> Step<Exit> {
    if error.outer.ip.ttl <= 1 {
        return drop(Reason::DropTtl);
    }
    match forward::route(packet, &error.outer, source, destination) {
        forward::Route::Via(way) => ControlFlow::Continue(Exit::redirect(way)),
        forward::Route::Local if is_masqueraded => ControlFlow::Continue(Exit::redirect(forward::TO_SELF)),
        _ => drop(Reason::DropNoRoute),
    }
}

/// The ends of an error and of what it quotes, as they are to be.
struct Ends {
    /// Of the error.
    source: Ipv4,
    /// The error's receiver, who had sent the quoted packet.
    receiver: (Ipv4, Port),
    /// The other end of that.
    other: (Ipv4, Port),
}

#[inline(always)]
fn finish(packet: &Packet<'_>, error: &Error, new: &Ends, exit: Exit, reason: Reason) -> Step<Outcome> {
    if !rewrite(packet, error, new, exit.counts_hop()) {
        return drop(Reason::DropRewrite);
    }
    ControlFlow::Continue(plan::leave(packet, exit, reason))
}

/// An ICMP error about a TCP or UDP packet that was addressed as the error's receiver sent it; `None` for all else.
#[inline(always)]
fn read(packet: &Packet<'_>) -> Option<Error> {
    let headers = read_headers(packet)?;
    let Headers { frame, icmp: [kind, _, c0, c1, ..], quoted, quoted_l4 } = headers;
    let ip = Ip::new(&frame.ip);
    let is_error = matches!(kind, DESTINATION_UNREACHABLE | TIME_EXCEEDED | PARAMETER_PROBLEM);
    let whole = u32::from(ip.total_length) >= (size_of::<Headers>() - ETH_LEN) as u32
        && u32::from(ip.total_length) <= packet.len() - ETH_LEN as u32;
    let has_options = ip.header_length != IPV4_LEN as u8 || quoted.length() != IPV4_LEN as u8;
    let protocol = Protocol::new(quoted.protocol);
    if frame.ip.protocol != Protocol::ICMP.number()
        || !is_error
        || !whole
        || has_options
        || ip.is_fragment()
        || quoted.version() != 4
        || Ip::new(&quoted).is_later_fragment()
        || (protocol != Protocol::TCP && protocol != Protocol::UDP)
        || quoted.source != frame.ip.destination
    {
        return None;
    }
    let none = Port::default();
    let outer = Parsed {
        key: FlowKey::new(
            Ipv4::new(frame.ip.source),
            none,
            Ipv4::new(frame.ip.destination),
            none,
            Protocol::ICMP,
        ),
        client: Client::default(),
        outer: Ipv4::UNSPECIFIED,
        source_mac: Mac::new(frame.source_mac),
        ip,
        checksum: u16::from_ne_bytes([c0, c1]),
        tcp: Tcp::default(),
    };
    let [_, _, udp @ ..] = quoted_l4.word;
    Some(Error {
        outer,
        quoted: FlowKey::new(
            Ipv4::new(quoted.source),
            Port::from_bytes(quoted_l4.source_port),
            Ipv4::new(quoted.destination),
            Port::from_bytes(quoted_l4.destination_port),
            protocol,
        ),
        quoted_checksum: u16::from_ne_bytes(quoted.checksum),
        quoted_udp_checksum: if protocol == Protocol::UDP { u16::from_ne_bytes(udp) } else { 0 },
    })
}

#[inline(always)]
fn read_headers(packet: &Packet<'_>) -> Option<Headers> {
    if let Some(headers) = packet.read(0) {
        return Some(headers);
    }
    let wanted = size_of::<Headers>();
    if packet.len() < wanted as u32 || !packet.pull(wanted) {
        return None;
    }
    packet.read(0)
}

/// Gives the error and the quoted packet other ends. The error's own checksum covers all that is quoted. False leaves a packet
/// that must be dropped.
#[inline(always)]
fn rewrite(packet: &Packet<'_>, error: &Error, new: &Ends, counts_hop: bool) -> bool {
    let (outer, quoted) = (&error.outer.key, &error.quoted);
    let (receiver, other) = (new.receiver, new.other);
    let address = carried(
        difference(quoted.source.to_ne(), receiver.0.to_ne()),
        difference(quoted.destination.to_ne(), other.0.to_ne()),
    );
    let port = carried(
        difference(quoted.source_port.to_ne().into(), receiver.1.to_ne().into()),
        difference(quoted.destination_port.to_ne().into(), other.1.to_ne().into()),
    );
    let mut sum = u32::from(!error.outer.checksum);
    add(&mut sum, address);
    add(&mut sum, port);
    let quoted_checksum = updated(error.quoted_checksum, address, 0);
    add(&mut sum, difference(error.quoted_checksum.into(), quoted_checksum.into()));
    // Both ends change where the connection is masqueraded.
    let is_masqueraded = quoted.source != receiver.0 && quoted.destination != other.0;
    (!is_masqueraded || rewrite::write_ethernet(packet))
        && write_quoted_sum(packet, error, address, port, &mut sum)
        && packet.write(QUOTED_ADDRESSES, [receiver.0, other.0])
        && packet.write(QUOTED_L4, [receiver.1, other.1])
        && packet.write(QUOTED_CHECKSUM, quoted_checksum)
        && packet.write(ICMP_CHECKSUM, !fold(sum))
        && rewrite::addresses(
            packet,
            &error.outer.ip,
            (outer.source, outer.destination),
            (new.source, receiver.0),
            counts_hop,
        )
}

/// The quoted transport checksum, if it is quoted: of TCP it is behind what must be.
#[inline(always)]
fn write_quoted_sum(packet: &Packet<'_>, error: &Error, address: u32, port: u32, sum: &mut u32) -> bool {
    const UDP: usize = QUOTED_L4 + 6;
    const TCP: usize = QUOTED_L4 + 16;
    if error.quoted.protocol == Protocol::UDP {
        let old = error.quoted_udp_checksum;
        if old == 0 {
            return true;
        }
        let new = updated_udp(old, address, port);
        add(sum, difference(old.into(), new.into()));
        return packet.write(UDP, new);
    }
    if usize::from(error.outer.ip.total_length) < TCP + 2 - ETH_LEN {
        return true;
    }
    let Some(old) = packet.load::<[u8; 2]>(TCP as u32).map(u16::from_ne_bytes) else { return true };
    let new = updated(old, address, port);
    add(sum, difference(old.into(), new.into()));
    packet.store(TCP as u32, &new)
}
