//! The node's own connections: the address is usually the node's own, and its connections may have a served
//! port as their source port.

use crate::{packet::Packet, parse::Parsed};
use aya_ebpf::{
    bindings::{
        BPF_F_CURRENT_NETNS, bpf_sock, bpf_sock_tuple, bpf_sock_tuple__bindgen_ty_1,
        bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1,
    },
    helpers::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
};

/// `TCP_LISTEN` of the kernel's `include/net/tcp_states.h`.
const TCP_LISTEN: u32 = 10;

/// Whether this node has a socket that is connected to the packet's sender. One that merely listens does not
/// count: the port is served, so it gets nothing.
#[inline(always)]
pub(crate) fn is_connected(packet: &Packet<'_>, parsed: &Parsed) -> bool {
    let mut tuple = bpf_sock_tuple {
        __bindgen_anon_1: bpf_sock_tuple__bindgen_ty_1 {
            ipv4: bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1 {
                saddr: parsed.key.source.to_ne(),
                daddr: parsed.key.destination.to_ne(),
                sport: parsed.key.source_port.to_ne(),
                dport: parsed.key.destination_port.to_ne(),
            },
        },
    };
    let size = size_of::<bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1>() as u32;
    // All ones: the helper takes it as a signed number.
    let netns = i64::from(BPF_F_CURRENT_NETNS).cast_unsigned();
    if parsed.is_udp() {
        // SAFETY: tuple and its size agree; the reference is released in `looks`.
        looks(unsafe { bpf_sk_lookup_udp(packet.ctx(), &raw mut tuple, size, netns, 0) }, is_connected_udp)
    } else {
        // SAFETY: as above.
        looks(unsafe { bpf_skc_lookup_tcp(packet.ctx(), &raw mut tuple, size, netns, 0) }, is_connected_tcp)
    }
}

/// Asks and releases the reference.
#[inline(always)]
fn looks(socket: *mut bpf_sock, ask: impl FnOnce(&bpf_sock) -> bool) -> bool {
    if socket.is_null() {
        return false;
    }
    // SAFETY: not null, and referenced until the release below.
    let answer = ask(unsafe { &*socket });
    // SAFETY: the one release of the one reference.
    unsafe { bpf_sk_release(socket.cast()) };
    answer
}

#[inline(always)]
fn is_connected_tcp(socket: &bpf_sock) -> bool {
    socket.state != TCP_LISTEN
}

#[inline(always)]
fn is_connected_udp(socket: &bpf_sock) -> bool {
    socket.dst_port != 0
}
