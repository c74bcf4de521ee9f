//! Answers to packets that are refused. The packet becomes its own answer and goes back the way it came.

use crate::{
    forward,
    outcome::{Outcome, Refusal},
    packet::{ETH_LEN, IPV4_LEN, Packet, TCP_LEN, UDP_LEN},
    parse::{Parsed, Tcp},
    rewrite::fold,
};
use aya_ebpf::helpers::{bpf_l4_csum_replace, bpf_skb_adjust_room, bpf_skb_change_tail};
use lb_common::{
    addr::{Ipv4, Protocol},
    reason::Reason,
};

const DONT_FRAGMENT: [u8; 2] = [0x40, 0];
const TTL: u8 = 64;
const ICMP_LEN: usize = 8;
const BPF_ADJ_ROOM_MAC: u32 = 1;

/// RFC 792: destination unreachable.
const ICMP_UNREACHABLE: u8 = 3;
const CODE_PORT: u8 = 3;
const CODE_FRAGMENTATION_NEEDED: u8 = 4;

#[derive(Clone, Copy)]
#[repr(C)]
struct Ethernet {
    destination: [u8; 6],
    source: [u8; 6],
    ether_type: [u8; 2],
}

/// RFC 791, section 3.1, as 16-bit words in native order: a one's complement sum does not mind the byte order
/// (RFC 1071, section 2 B).
type Ipv4Words = [u16; IPV4_LEN / 2];

#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Reset {
    ethernet: Ethernet,
    ip: Ipv4Words,
    tcp: [u16; TCP_LEN / 2],
}

#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unreachable {
    ethernet: Ethernet,
    ip: Ipv4Words,
    icmp: [u16; ICMP_LEN / 2],
}

/// Turns the packet into the answer and sends it back.
#[inline(always)]
pub(crate) fn answer(packet: &Packet<'_>, parsed: &Parsed, refusal: Refusal) -> Outcome {
    // A reset is never answered (RFC 9293, section 3.5.2).
    if parsed.tcp.has(Tcp::RST) {
        return Outcome::Dropped(refusal.reason);
    }
    let answered = if refusal.reason == Reason::RejectTooBig {
        // RFC 1191.
        unreachable(packet, parsed, CODE_FRAGMENTATION_NEEDED, refusal.mtu)
    } else if parsed.is_udp() {
        unreachable(packet, parsed, CODE_PORT, 0)
    } else {
        reset(packet, parsed)
    };
    if answered && forward::send_back(packet) {
        Outcome::Redirected(refusal.reason)
    } else {
        Outcome::Dropped(Reason::DropRejectFailed)
    }
}

/// RFC 9293, section 3.5.2: with the acknowledged number where there is one, else acknowledging what was sent.
#[inline(always)]
fn reset(packet: &Packet<'_>, parsed: &Parsed) -> bool {
    let Some(partial) = prepare(packet, parsed, TCP_LEN) else { return false };
    let Some(ethernet) = packet.load::<Ethernet>(0) else { return false };
    let (sequence, acknowledgement, flags) = if parsed.tcp.has(Tcp::ACK) {
        (parsed.tcp.acknowledgement, 0, Tcp::RST)
    } else {
        (0, parsed.tcp.sequence.wrapping_add(segment_length(parsed)), Tcp::RST | Tcp::ACK)
    };
    let mut tcp = [
        parsed.key.destination_port.to_ne(),
        parsed.key.source_port.to_ne(),
        high(sequence),
        low(sequence),
        high(acknowledgement),
        low(acknowledgement),
        u16::from_ne_bytes([(TCP_LEN as u8 / 4) << 4, flags]),
        0,
        0,
        0,
    ];
    let pseudo = sum(&halves(parsed.key.source))
        + sum(&halves(parsed.key.destination))
        + u32::from(u16::from_ne_bytes([0, parsed.key.protocol.number()]))
        + u32::from((TCP_LEN as u16).to_be());
    // A partial checksum holds the sum of the pseudo-header; whoever sends the packet on adds the rest.
    tcp[8] = if partial { fold(pseudo) } else { !fold(pseudo + sum(&tcp)) };
    let frame =
        Reset { ethernet: ethernet.swapped(), ip: answer_header(parsed, Protocol::TCP, TCP_LEN), tcp };
    packet.store(0, &frame)
}

/// RFC 793: bytes of payload, and one each for SYN and FIN.
#[inline(always)]
fn segment_length(parsed: &Parsed) -> u32 {
    let headers = u32::from(parsed.ip.header_length) + u32::from(parsed.tcp.header_length);
    u32::from(parsed.ip.total_length).saturating_sub(headers)
        + u32::from(parsed.tcp.has(Tcp::SYN))
        + u32::from(parsed.tcp.has(Tcp::FIN))
}

/// The answer quotes the refused packet's IP header and the first bytes behind it: 8, as RFC 792 asks, or a whole
/// TCP header, because the kernel does not cut a packet before a checksum that is yet to be completed.
#[inline(always)]
fn unreachable(packet: &Packet<'_>, parsed: &Parsed, code: u8, mtu: u16) -> bool {
    if parsed.is_udp() {
        unreachable_quoting::<{ UDP_LEN / 2 }>(packet, parsed, code, mtu)
    } else {
        unreachable_quoting::<{ TCP_LEN / 2 }>(packet, parsed, code, mtu)
    }
}

#[inline(always)]
fn unreachable_quoting<const WORDS: usize>(packet: &Packet<'_>, parsed: &Parsed, code: u8, mtu: u16) -> bool {
    let quoted = WORDS * 2;
    let Some(partial) = prepare(packet, parsed, quoted) else { return false };
    let Some(ethernet) = packet.load::<Ethernet>(0) else { return false };
    let Some(quoted_ip) = packet.load::<Ipv4Words>(ETH_LEN as u32) else { return false };
    let Some(quoted_l4) = packet.load::<[u16; WORDS]>((ETH_LEN + IPV4_LEN) as u32) else { return false };
    let mut icmp = [u16::from_ne_bytes([ICMP_UNREACHABLE, code]), 0, 0, mtu.to_be()];
    // A partial checksum in the quote is completed by whoever sends the packet on; from then on the quoted
    // transport bytes sum up to the complement of what stands in its place now.
    let checksum_at = const { if WORDS == UDP_LEN / 2 { 3 } else { 8 } };
    let l4_sum = if partial { u32::from(!quoted_l4[checksum_at]) } else { sum(&quoted_l4) };
    icmp[1] = !fold(sum(&icmp) + sum(&quoted_ip) + l4_sum);
    let added = IPV4_LEN + ICMP_LEN;
    // SAFETY: the helper checks the lengths.
    if unsafe { bpf_skb_adjust_room(packet.skb(), added as i32, BPF_ADJ_ROOM_MAC, 0) } != 0 {
        return false;
    }
    let length = ICMP_LEN + IPV4_LEN + quoted;
    let frame =
        Unreachable { ethernet: ethernet.swapped(), ip: answer_header(parsed, Protocol::ICMP, length), icmp };
    packet.store(0, &frame)
}

/// Cuts the packet behind `l4_length` bytes of its transport header, and says whether its transport checksum is
/// partial, that is, to be completed by whoever sends it on. IP options are more than an answer needs to handle.
#[inline(always)]
fn prepare(packet: &Packet<'_>, parsed: &Parsed, l4_length: usize) -> Option<bool> {
    if parsed.ip.header_length != IPV4_LEN as u8 {
        return None;
    }
    let partial = is_partial(packet, parsed)?;
    let length = (ETH_LEN + IPV4_LEN + l4_length) as u32;
    // SAFETY: the helper checks the length.
    (unsafe { bpf_skb_change_tail(packet.skb(), length, 0) } == 0).then_some(partial)
}

/// The kernel does not show `ip_summed` to programs. But its checksum helper leaves a partial checksum alone when
/// a change is not one of the pseudo-header, so a trial shows it; the field is restored.
#[inline(always)]
fn is_partial(packet: &Packet<'_>, parsed: &Parsed) -> Option<bool> {
    let offset = parsed.ip.l4_offset() + if parsed.is_udp() { 6 } else { 16 };
    let before: u16 = packet.load(offset)?;
    // 1 and 2 rather than 0 and 1: replacing 0 by 0xffff would be no change in one's complement.
    // SAFETY: the helper checks the offset.
    if unsafe { bpf_l4_csum_replace(packet.skb(), offset, 1, 2, 2) } != 0 {
        return None;
    }
    let after: u16 = packet.load(offset)?;
    (before == after || packet.store(offset, &before)).then_some(before == after)
}

impl Ethernet {
    #[inline(always)]
    fn swapped(self) -> Self {
        Self { destination: self.source, source: self.destination, ether_type: self.ether_type }
    }
}

/// The header of an answer from the address to the client, with `length` bytes behind it.
#[inline(always)]
fn answer_header(parsed: &Parsed, protocol: Protocol, length: usize) -> Ipv4Words {
    let total_length = (IPV4_LEN + length) as u16;
    let [source_high, source_low] = halves(parsed.key.destination);
    let [destination_high, destination_low] = halves(parsed.key.source);
    let mut words = [
        u16::from_ne_bytes([0x45, 0]),
        total_length.to_be(),
        0,
        u16::from_ne_bytes(DONT_FRAGMENT),
        u16::from_ne_bytes([TTL, protocol.number()]),
        0,
        source_high,
        source_low,
        destination_high,
        destination_low,
    ];
    words[5] = !fold(sum(&words));
    words
}

/// An address as two words.
#[inline(always)]
fn halves(address: Ipv4) -> [u16; 2] {
    let [a, b, c, d] = address.octets();
    [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]
}

/// The first two bytes, in network order, of a host-order number.
#[inline(always)]
fn high(number: u32) -> u16 {
    ((number >> 16) as u16).to_be()
}

/// The last two bytes, in network order, of a host-order number.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
fn low(number: u32) -> u16 {
    (number as u16).to_be()
}

#[inline(always)]
fn sum(words: &[u16]) -> u32 {
    let mut sum = 0;
    for word in words {
        sum += u32::from(*word);
    }
    sum
}
