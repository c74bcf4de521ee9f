//! The largest TCP segment that the ends of a connection announce (RFC 9293, section 3.7.1). The client and the pod know their
//! own devices alone; the way between the nodes may take less. An announcement that suits it spares every connection the
//! "fragmentation needed" of its first large packet, which some networks swallow.

use crate::{
    forward,
    packet::{ETH_LEN, IPV4_LEN, Packet, TCP_LEN},
    parse::Ip,
    wire::Ipv4Header,
};
use aya_ebpf::{bindings::__sk_buff, helpers::bpf_l4_csum_replace, programs::TcContext};
use lb_common::addr::Ipv4;

/// Kinds of options (RFC 9293, section 3.2): the first two are one byte long.
const END: u8 = 0;
const NO_OPERATION: u8 = 1;
const MAXIMUM_SEGMENT_SIZE: u8 = 2;

/// How many options are looked at: this one nearly always comes first.
const OPTIONS: u32 = 4;
/// Offset in the TCP header.
const CHECKSUM: u32 = 16;

/// Brings the announcement in a SYN that has been rewritten down to what the way to the backend, whose address is given as
/// [`Ipv4::to_ne`], takes. False leaves a packet that must be dropped. A function of its own: few packets need it, and they
/// need much of the stack.
#[inline(never)]
pub(crate) fn clamp(skb: *mut __sk_buff, backend: u32) -> bool {
    let ctx = TcContext::new(skb);
    let packet = Packet::new(&ctx);
    let Some(header) = packet.read::<Ipv4Header>(ETH_LEN) else { return false };
    let (source, destination) = (Ipv4::new(header.source), Ipv4::new(header.destination));
    let client = if destination.to_ne() == backend { source } else { destination };
    let l4 = Ip::new(&header).l4_offset();
    let Some(at) = find(&packet, l4) else { return true };
    let Some(mtu) = forward::mtu(&packet, client, Ipv4::from_ne(backend)) else { return true };
    let largest = mtu.saturating_sub((IPV4_LEN + TCP_LEN) as u16);
    let Some(announced) = packet.load::<[u8; 2]>(at) else { return true };
    if u16::from_be_bytes(announced) <= largest {
        return true;
    }
    let word = |bytes: [u8; 2]| {
        let word = u16::from_ne_bytes(bytes);
        // At an odd place its bytes belong to two words of the sum, which is the same as one whose bytes are exchanged
        // (RFC 1071, section 2 B).
        u64::from(if (at - l4).is_multiple_of(2) { word } else { word.swap_bytes() })
    };
    let new = largest.to_be_bytes();
    // SAFETY: the helper checks the offset and makes the bytes writable.
    let is_summed = unsafe { bpf_l4_csum_replace(skb, l4 + CHECKSUM, word(announced), word(new), 2) == 0 };
    is_summed && packet.store(at, &new)
}

/// Where the announced size stands, from the Ethernet header on.
#[inline(always)]
fn find(packet: &Packet<'_>, l4: u32) -> Option<u32> {
    let [offset] = packet.load::<[u8; 1]>(l4 + 12)?;
    let end = l4 + u32::from(offset >> 4) * 4;
    let mut at = l4 + TCP_LEN as u32;
    for _ in 0..OPTIONS {
        if at + 4 > end {
            return None;
        }
        match packet.load::<[u8; 2]>(at)? {
            [END, _] => return None,
            [NO_OPERATION, _] => at += 1,
            [MAXIMUM_SEGMENT_SIZE, 4] => return Some(at + 2),
            [_, length] if length >= 2 => at += u32::from(length),
            _ => return None,
        }
    }
    None
}
