//! New address and port, with checksums brought up to date: the only writer of a forwarded packet's bytes.

use crate::{
    packet::{ETH_LEN, IPV4_LEN, Packet},
    parse::{Ip, Parsed},
    plan::Plan,
    scratch,
};
use aya_ebpf::helpers::{bpf_csum_update, bpf_l4_csum_replace};
use lb_common::{
    addr::{Ipv4, Port},
    flow::Side,
};

/// Offsets in an Ethernet frame with IPv4 (RFC 791, section 3.1).
const TTL: usize = ETH_LEN + 8;
const CHECKSUM: usize = ETH_LEN + 10;
const SOURCE: usize = ETH_LEN + 12;
const DESTINATION: usize = ETH_LEN + 16;
/// Offsets in the transport header.
const UDP_CHECKSUM: usize = 6;
const TCP_CHECKSUM: usize = 16;

/// Of `bpf_l4_csum_replace`: the change is one of the pseudo-header, so that partial checksums take it too.
const BPF_F_PSEUDO_HDR: u64 = 0x10;
/// Of `bpf_l4_csum_replace`: zero stays zero, and a computed zero becomes 0xffff (RFC 768).
const BPF_F_MARK_MANGLED_0: u64 = 0x20;

/// One end of a packet, and what becomes of it.
#[derive(Clone, Copy)]
struct End {
    old: (Ipv4, Port),
    new: (Ipv4, Port),
    /// Offset of the address in the frame, and of the port in the transport header.
    at: (usize, usize),
}

/// What the changes add to a checksum, as [`difference`] tells it.
#[derive(Clone, Copy)]
struct Change {
    address: u32,
    port: u32,
}

impl End {
    #[inline(always)]
    fn source(old: (Ipv4, Port), new: (Ipv4, Port)) -> Self {
        Self { old, new, at: (SOURCE, 0) }
    }

    #[inline(always)]
    fn destination(old: (Ipv4, Port), new: (Ipv4, Port)) -> Self {
        Self { old, new, at: (DESTINATION, 2) }
    }

    #[inline(always)]
    fn change(&self) -> Change {
        Change {
            address: difference(self.old.0.to_ne(), self.new.0.to_ne()),
            port: difference(self.old.1.to_ne().into(), self.new.1.to_ne().into()),
        }
    }

    #[inline(always)]
    fn write(&self, packet: &Packet<'_>, parsed: &Parsed) -> bool {
        (self.old.1 == self.new.1 || write_port(packet, parsed, self.new.1, self.at.1))
            && packet.write(self.at.0, self.new.0)
    }
}

/// Carries it out. False leaves a packet of which some bytes may have changed: it must be dropped.
#[inline(always)]
pub(crate) fn apply(packet: &Packet<'_>, parsed: &Parsed, plan: &Plan) -> bool {
    let (key, new) = (&parsed.key, (plan.address, plan.port));
    let end = match plan.end {
        Side::Backend => End::source((key.source, key.source_port), new),
        Side::Client => End::destination((key.destination, key.destination_port), new),
    };
    let other = clients_end(parsed, plan.end);
    let is_masqueraded = other.old != other.new;
    let mut change = end.change();
    if is_masqueraded {
        change = change.and(other.change());
        if !other.write(packet, parsed) || !write_ethernet(packet) {
            return false;
        }
    }
    write_sum(packet, parsed, change, is_masqueraded)
        && write_ip(packet, &parsed.ip, change.address, plan.exit.counts_hop())
        && end.write(packet, parsed)
}

/// The Ethernet addresses that the kernel is about to write. Where a device has summed up the packet, `bpf_redirect_neigh`
/// counts the header that is there before, and a pod's veth takes off the one that is there then (seen on Linux 6.18): the
/// pod drops what does not agree. Packets to clients outside leave the machine, and those to a local backend go through the
/// stack, which forgets that sum.
#[inline(always)]
pub(crate) fn write_ethernet(packet: &Packet<'_>) -> bool {
    scratch::ethernet().is_none_or(|ethernet| packet.write(0, ethernet))
}

/// The client's end: as it was, unless the connection is masqueraded.
#[inline(always)]
fn clients_end(parsed: &Parsed, sender: Side) -> End {
    let (key, client) = (&parsed.key, (parsed.client.address, parsed.client.port));
    match sender {
        Side::Client => End::source(client, (parsed.outer, key.source_port)),
        Side::Backend => End::destination((parsed.outer, key.destination_port), client),
    }
}

impl Change {
    /// Both.
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        Self { address: carried(self.address, other.address), port: carried(self.port, other.port) }
    }
}

/// Whether the transport checksum certainly covers all that it should, so that we may bring it up to date ourselves, which
/// costs a fifth of what the helper does. Where a device is to complete it, it is the sum of the pseudo-header alone. We
/// cannot see which it is; but one that is not that sum is whole. (One in 65,536 whole ones looks as if it were not.) The
/// tuple of a connection that is masqueraded is not what stands in the packet.
#[inline(always)]
fn has_whole_sum(packet: &Packet<'_>, parsed: &Parsed, is_masqueraded: bool) -> bool {
    let is_absent = parsed.is_udp() && parsed.checksum == 0;
    parsed.ip.header_length == IPV4_LEN as u8
        && packet.gso_size() == 0
        && !is_absent
        && !is_masqueraded
        && parsed.checksum != pseudo_header_sum(parsed)
}

/// RFC 9293, section 3.1; RFC 768.
#[inline(always)]
fn pseudo_header_sum(parsed: &Parsed) -> u16 {
    let (source, destination) = (parsed.key.source.to_ne(), parsed.key.destination.to_ne());
    let length = parsed.ip.total_length - IPV4_LEN as u16;
    fold(
        (source & 0xffff)
            + (source >> 16)
            + (destination & 0xffff)
            + (destination >> 16)
            + u32::from(u16::from(parsed.key.protocol.number()).to_be())
            + u32::from(length.to_be()),
    )
}

/// Writes the transport checksum.
#[inline(always)]
fn write_sum(packet: &Packet<'_>, parsed: &Parsed, change: Change, is_masqueraded: bool) -> bool {
    if !has_whole_sum(packet, parsed, is_masqueraded) {
        return replace_l4(packet, parsed, change.address, BPF_F_PSEUDO_HDR)
            && replace_l4(packet, parsed, change.port, 0);
    }
    let (checksum, at) = if parsed.is_udp() {
        (updated_udp(parsed.checksum, change.address, change.port), UDP_CHECKSUM)
    } else {
        (updated(parsed.checksum, change.address, change.port), TCP_CHECKSUM)
    };
    // Where the device has summed up the whole packet: the transport checksum has taken up the address, which is not part of
    // what it covers beside the IP header, whose own checksum makes up for it.
    // SAFETY: the context is valid; where there is no such sum the helper refuses, and nothing is to be done.
    unsafe { bpf_csum_update(packet.skb(), !change.address) };
    packet.write(ETH_LEN + IPV4_LEN + at, checksum)
}

#[inline(always)]
fn write_port(packet: &Packet<'_>, parsed: &Parsed, port: Port, port_at: usize) -> bool {
    // As in `parse`: nearly always the offset is a constant, and the write needs no helper.
    if parsed.ip.header_length == IPV4_LEN as u8 {
        packet.write(ETH_LEN + IPV4_LEN + port_at, port)
    } else {
        packet.store(parsed.ip.l4_offset() + port_at as u32, &port)
    }
}

/// Gives a packet without a transport header other addresses: `old` and `new` source and destination. False as in [`apply`].
#[inline(always)]
pub(crate) fn addresses(
    packet: &Packet<'_>,
    ip: &Ip,
    old: (Ipv4, Ipv4),
    new: (Ipv4, Ipv4),
    counts_hop: bool,
) -> bool {
    let source = difference(old.0.to_ne(), new.0.to_ne());
    let destination = difference(old.1.to_ne(), new.1.to_ne());
    write_ip(packet, ip, carried(source, destination), counts_hop)
        && packet.write(SOURCE, new.0)
        && packet.write(DESTINATION, new.1)
}

/// The IP checksum after a change of an address, whose `difference` is given, and, where the packet does not meet the stack,
/// the time to live.
#[inline(always)]
fn write_ip(packet: &Packet<'_>, ip: &Ip, difference: u32, counts_hop: bool) -> bool {
    let mut hop = 0;
    if counts_hop {
        // The time to live is the first byte of its 16-bit word.
        let word = |ttl| u32::from(u16::from_ne_bytes([ttl, 0]));
        hop = self::difference(word(ip.ttl), word(ip.ttl - 1));
        if !packet.write(TTL, ip.ttl - 1) {
            return false;
        }
    }
    packet.write(CHECKSUM, updated(ip.checksum, difference, hop))
}

/// By the helper, which takes a difference where the size of what is replaced is 0, and passes the checksum by that is to be
/// completed, unless it is told that the change is one of the pseudo-header.
#[inline(always)]
fn replace_l4(packet: &Packet<'_>, parsed: &Parsed, difference: u32, flags: u64) -> bool {
    let (offset, zero) =
        if parsed.is_udp() { (UDP_CHECKSUM, BPF_F_MARK_MANGLED_0) } else { (TCP_CHECKSUM, 0) };
    let at = parsed.ip.l4_offset() + offset as u32;
    // SAFETY: the helper checks the offset and makes the bytes writable.
    unsafe { bpf_l4_csum_replace(packet.skb(), at, 0, difference.into(), flags | zero) == 0 }
}

/// What replacing `old` by `new` adds to a one's complement sum (RFC 1624, equation 3), as 32 bits.
#[inline(always)]
pub(crate) fn difference(old: u32, new: u32) -> u32 {
    carried(!old, new)
}

/// A one's complement sum of 32 bits.
#[inline(always)]
pub(crate) fn carried(one: u32, two: u32) -> u32 {
    let sum = u64::from(one) + u64::from(two);
    #[expect(clippy::cast_possible_truncation, reason = "the carry has been added")]
    let folded = (sum + (sum >> 32)) as u32;
    folded
}

/// A checksum after two changes, each as [`difference`] tells it.
#[inline(always)]
pub(crate) fn updated(checksum: u16, one: u32, two: u32) -> u16 {
    let mut sum = u32::from(!checksum);
    add(&mut sum, one);
    add(&mut sum, two);
    !fold(sum)
}

/// The same for UDP, where zero stands for none (RFC 768).
#[inline(always)]
pub(crate) fn updated_udp(checksum: u16, one: u32, two: u32) -> u16 {
    match updated(checksum, one, two) {
        0 => 0xffff,
        new => new,
    }
}

/// Adds a change, as [`difference`] tells it, to a one's complement sum.
#[inline(always)]
pub(crate) fn add(sum: &mut u32, difference: u32) {
    *sum += (difference & 0xffff) + (difference >> 16);
}

/// A one's complement sum as 16 bits.
#[inline(always)]
pub(crate) fn fold(mut sum: u32) -> u16 {
    sum = (sum & 0xffff) + (sum >> 16);
    sum += sum >> 16;
    #[expect(clippy::cast_possible_truncation, reason = "both carries have been added")]
    let folded = sum as u16;
    folded
}
