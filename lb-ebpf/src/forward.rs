//! Where a packet goes next: the kernel's routes and neighbours, or the stack.

use crate::{config, outcome::TC_ACT_REDIRECT, packet::Packet, parse::Parsed, scratch};
use aya_ebpf::{
    bindings::{BPF_F_INGRESS, bpf_fib_lookup as FibLookup, bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1},
    helpers::{bpf_fib_lookup, bpf_redirect, bpf_redirect_neigh},
};
use lb_common::{
    addr::{Ipv4, Protocol},
    mark,
    way::Way,
};

const AF_INET: u8 = 2;

/// Return values of `bpf_fib_lookup` (`enum` in the kernel's `include/uapi/linux/bpf.h`).
const BPF_FIB_LKUP_RET_SUCCESS: i64 = 0;
const BPF_FIB_LKUP_RET_NOT_FWDED: i64 = 4;
const BPF_FIB_LKUP_RET_NO_NEIGH: i64 = 7;
const BPF_FIB_LKUP_RET_FRAG_NEEDED: i64 = 8;

/// `struct bpf_fib_lookup` for IPv4.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct FibParams {
    family: u8,
    l4_protocol: u8,
    ports: u16,
    ports_too: u16,
    length_or_mtu: u16,
    interface: u32,
    tos: u8,
    zero: u8,
    zeros: u16,
    source: Ipv4,
    source_rest: u32,
    source_end: u64,
    destination_or_next_hop: Ipv4,
    destination_rest: u32,
    destination_end: u64,
    vlan: u32,
    source_mac: [u16; 3],
    destination_mac: [u16; 3],
}

const _: () = assert!(size_of::<FibParams>() == size_of::<FibLookup>());

/// What the kernel's routing says.
pub(crate) enum Route {
    /// Out of a device, to a neighbour of it.
    Via(Way),
    /// To this node itself.
    Local,
    /// The device's MTU, in bytes of an IP packet, is smaller than the packet; 0 where the kernel does not tell it.
    TooBig { mtu: u16 },
    /// Nowhere.
    None,
}

/// `lo`, which has this index in every network namespace: the way of a packet that comes in and is for this node itself,
/// from an address of its own. On every other interface the stack takes that for forged.
pub(crate) const TO_SELF: Way = Way { interface: 1, next_hop: Ipv4::UNSPECIFIED, passes: u16::MAX };

/// Asks the kernel for the way from `source` to `destination`, as if the packet had come in with these addresses.
#[inline(always)]
pub(crate) fn route(packet: &Packet<'_>, parsed: &Parsed, source: Ipv4, destination: Ipv4) -> Route {
    let question = Question {
        protocol: parsed.key.protocol,
        tos: parsed.ip.tos,
        length: wire_length(packet, parsed),
        source,
        destination,
    };
    ask(packet, &question)
}

/// The MTU of the device on the way from `source` to `destination`, in bytes of an IP packet, if it is less than the largest
/// packet. The question is about that one, since only "too big" is answered with the MTU whether there is a neighbour or not
/// (Linux 6.18). `None` from a kernel before 5.12, which does not say it.
#[inline(always)]
pub(crate) fn mtu(packet: &Packet<'_>, source: Ipv4, destination: Ipv4) -> Option<u16> {
    let question = Question { protocol: Protocol::TCP, tos: 0, length: u16::MAX, source, destination };
    match ask(packet, &question) {
        Route::TooBig { mtu } if mtu != 0 => Some(mtu),
        Route::TooBig { .. } | Route::Via(_) | Route::Local | Route::None => None,
    }
}

/// What the way may depend on.
struct Question {
    protocol: Protocol,
    tos: u8,
    /// Bytes of an IP packet.
    length: u16,
    source: Ipv4,
    destination: Ipv4,
}

#[inline(always)]
fn ask(packet: &Packet<'_>, question: &Question) -> Route {
    let mut fib = FibParams {
        family: AF_INET,
        l4_protocol: question.protocol.number(),
        ports: 0,
        ports_too: 0,
        length_or_mtu: question.length,
        interface: packet.interface(),
        tos: question.tos,
        zero: 0,
        zeros: 0,
        source: question.source,
        source_rest: 0,
        source_end: 0,
        destination_or_next_hop: question.destination,
        destination_rest: 0,
        destination_end: 0,
        vlan: 0,
        source_mac: [0; 3],
        destination_mac: [0; 3],
    };
    // LLVM makes one call of `memset` of the zeros at the end, a loop over bytes; a volatile store in their middle
    // keeps them single stores.
    // SAFETY: a field of a local.
    unsafe { (&raw mut fib.vlan).write_volatile(0) };
    // SAFETY: the struct has the size and layout that the helper expects.
    let found =
        unsafe { bpf_fib_lookup(packet.ctx(), (&raw mut fib).cast(), size_of::<FibParams>() as i32, 0) };
    if found == BPF_FIB_LKUP_RET_SUCCESS {
        scratch::keep_ethernet(fib.destination_mac, fib.source_mac);
    } else {
        scratch::keep_ethernet([0; 3], [0; 3]);
    }
    match found {
        // Without a neighbour entry the rest of the answer is complete; `bpf_redirect_neigh` resolves it.
        BPF_FIB_LKUP_RET_SUCCESS | BPF_FIB_LKUP_RET_NO_NEIGH => {
            Route::Via(Way {
                interface: fib.interface,
                next_hop: fib.destination_or_next_hop,
                // The MTU; without a neighbour, the length that was asked about.
                passes: fib.length_or_mtu,
            })
        }
        BPF_FIB_LKUP_RET_NOT_FWDED => Route::Local,
        // The MTU stands here since Linux 5.12, commit e1850ea9bd9e. Before, it is what was asked (seen on 5.10), which as an MTU
        // would change nothing; 0 is the answer of a router that does not tell (RFC 1191, section 5): Linux goes on with 552 bytes.
        BPF_FIB_LKUP_RET_FRAG_NEEDED => {
            Route::TooBig { mtu: if fib.length_or_mtu == question.length { 0 } else { fib.length_or_mtu } }
        }
        _ => Route::None,
    }
}

/// The size that must pass the MTU: a GSO packet is cut into segments later.
#[inline(always)]
pub(crate) fn wire_length(packet: &Packet<'_>, parsed: &Parsed) -> u16 {
    let segment = packet.gso_size();
    if segment == 0 {
        return parsed.ip.total_length;
    }
    let l4 = if parsed.is_udp() { 8 } else { u32::from(parsed.tcp.header_length) };
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a segment is at most 65,535 bytes, as is what it was cut from"
    )]
    let length = (u32::from(parsed.ip.header_length) + l4 + segment) as u16;
    length
}

/// Sends it out of `interface` to `next_hop`, whose link-layer address the kernel finds or asks for.
#[inline(always)]
pub(crate) fn redirect(interface: u32, next_hop: Ipv4) -> bool {
    let mut params = bpf_redir_neigh {
        nh_family: u32::from(AF_INET),
        __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh: [next_hop.to_ne(), 0, 0, 0] },
    };
    // SAFETY: parameters and their size agree.
    let action =
        unsafe { bpf_redirect_neigh(interface, &raw mut params, size_of::<bpf_redir_neigh>() as i32, 0) };
    action == i64::from(TC_ACT_REDIRECT)
}

/// Hands it to the stack, as if it came in on `lo`. The Ethernet address must be that of `lo`, or the stack takes the packet
/// for another host's.
#[inline(always)]
pub(crate) fn to_self(packet: &Packet<'_>) -> bool {
    packet.write(0, [0_u8; 6]) && enter(TO_SELF.interface)
}

/// Lets it come in on an interface.
#[inline(always)]
pub(crate) fn enter(interface: u32) -> bool {
    // SAFETY: any interface index is allowed.
    unsafe { bpf_redirect(interface, BPF_F_INGRESS.into()) == i64::from(TC_ACT_REDIRECT) }
}

/// Sends it back out of the interface that it came in on, with the link-layer addresses that it carries.
#[inline(always)]
pub(crate) fn send_back(packet: &Packet<'_>) -> bool {
    config::set_mark_byte(packet, mark::DONE);
    // SAFETY: any interface index is allowed.
    unsafe { bpf_redirect(packet.interface(), 0) == i64::from(TC_ACT_REDIRECT) }
}
