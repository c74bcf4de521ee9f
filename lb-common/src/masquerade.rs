//! Clients inside the cluster: their connections leave the holder with its overlay address and a port of ours as their
//! source, because an answer to the client's own would not pass the holder.
//!
//! Everything behind the change of the source (flows, handshakes, replies, the choice of the backend's tuple) is the same as
//! for other clients: a connection of *this node's overlay address and the port*.

use crate::addr::{Ipv4, Port, Protocol};
use bytemuck::{Pod, Zeroable};

/// The first port that is given out. Below the range from which Linux takes ports for sockets (`ip_local_port_range`,
/// 32,768 to 60,999 by default), and above those that servers commonly have.
pub const FIRST_PORT: u16 = 16_384;
/// The number of ports, a power of two: as many connections from inside at once to one served port.
pub const PORTS: u16 = 16_384;
/// How many ports are tried for a connection. With half of them taken, 1 in 65,536 connections finds none free.
pub const TRIES: u32 = 16;
/// How many of these are looked at again, whether their connection is over: with half of them alive, 1 in 16 finds none.
pub const OUSTED: u32 = 4;

/// The port to try first, by a hash of the client's tuple.
#[inline(always)]
pub const fn first_port(hash: u32) -> u16 {
    FIRST_PORT + (hash >> 16) as u16 % PORTS
}

/// The port to try next: an odd step, so that all of them come.
#[inline(always)]
pub const fn next_port(port: u16) -> u16 {
    FIRST_PORT + (port - FIRST_PORT + 0x1e35) % PORTS
}

/// Whether it is a port that may have been given out.
#[inline(always)]
pub const fn is_port(port: Port) -> bool {
    port.number().wrapping_sub(FIRST_PORT) < PORTS
}

const _: () = assert!(PORTS.is_power_of_two() && FIRST_PORT.is_multiple_of(PORTS));

/// Value of `masquerades`, key [`crate::flow::FlowKey`] as the client sends it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Masquerade {
    /// The source port that backends see.
    pub port: Port,
    zero: u16,
}

impl Masquerade {
    /// A value; the spare bytes are zero.
    #[inline(always)]
    pub const fn new(port: Port) -> Self {
        Self { port, zero: 0 }
    }
}

/// Key of `masqueraded`: what a port was given out for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C)]
pub struct MasqueradedKey {
    /// The address that the client connected to.
    pub address: Ipv4,
    /// Its port.
    pub address_port: Port,
    /// The source port that backends see.
    pub port: Port,
    /// TCP or UDP.
    pub protocol: Protocol,
    zero: u8,
    zeros: u16,
}

impl MasqueradedKey {
    /// A key; the spare bytes are zero.
    #[inline(always)]
    pub const fn new(address: Ipv4, address_port: Port, port: Port, protocol: Protocol) -> Self {
        Self { address, address_port, port, protocol, zero: 0, zeros: 0 }
    }
}

/// Value of `masqueraded`: the client itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Client {
    /// Its address.
    pub address: Ipv4,
    /// Its port.
    pub port: Port,
    zero: u16,
}

impl Client {
    /// A value; the spare bytes are zero.
    #[inline(always)]
    pub const fn new(address: Ipv4, port: Port) -> Self {
        Self { address, port, zero: 0 }
    }
}

/// Key of the trie `inside`: a network whose hosts are inside the cluster. The fields of the kernel's
/// `struct bpf_lpm_trie_key_u8` (`include/uapi/linux/bpf.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C)]
pub struct Network {
    /// Leading bits that count, 0 to 32.
    pub prefix: u32,
    /// The others are zero.
    pub address: Ipv4,
}

/// Value of the array `own`, which has one: what packets need to know of this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Own {
    /// The overlay address; zero where it is not known yet.
    pub overlay: Ipv4,
    /// 1 where that is on the network that the nodes are on, else 0.
    pub is_outside: u32,
}

const _: () = assert!(size_of::<Masquerade>() == 4 && size_of::<MasqueradedKey>() == 12);
const _: () = assert!(size_of::<Client>() == 8 && size_of::<Network>() == 8 && size_of::<Own>() == 8);

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_port_comes_and_none_beside_them() {
        let ports: BTreeSet<u16> =
            core::iter::successors(Some(first_port(u32::MAX)), |port| Some(next_port(*port)))
                .take(PORTS.into())
                .collect();
        assert_eq!(ports.len(), usize::from(PORTS));
        assert!(ports.iter().all(|port| is_port(Port::new(*port))));
        let others = (0..=u16::MAX).filter(|port| is_port(Port::new(*port))).count();
        assert_eq!(others, usize::from(PORTS));
    }
}
