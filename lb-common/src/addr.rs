//! Addresses and ports as they stand in a packet.
//!
//! Byte arrays, so that `bpftool map dump` prints them readably and nobody mistakes their order; aligned like the
//! integers of their size, so that the BPF backend copies and compares them in one instruction.

use bytemuck::{Pod, Zeroable};
use core::net::Ipv4Addr;

/// An IPv4 address, stored in network order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C, align(4))]
pub struct Ipv4 {
    octets: [u8; 4],
}

impl Ipv4 {
    /// 0.0.0.0.
    pub const UNSPECIFIED: Self = Self::new([0; 4]);
    /// Bits of an address.
    pub const BITS: u32 = 32;

    /// Whether it is in 127.0.0.0/8.
    #[inline(always)]
    pub const fn is_loopback(self) -> bool {
        self.octets[0] == 127
    }

    /// From the bytes of a packet, or from `Ipv4Addr::octets`.
    #[inline(always)]
    pub const fn new(octets: [u8; 4]) -> Self {
        Self { octets }
    }

    /// The bytes as they stand in a packet.
    #[inline(always)]
    pub const fn octets(self) -> [u8; 4] {
        self.octets
    }

    /// The opposite of [`Ipv4::to_ne`].
    #[inline(always)]
    pub const fn from_ne(word: u32) -> Self {
        Self { octets: word.to_ne_bytes() }
    }

    /// The four bytes read as one native integer, without conversion: for hashing and checksum differences.
    #[inline(always)]
    pub const fn to_ne(self) -> u32 {
        u32::from_ne_bytes(self.octets)
    }
}

impl From<Ipv4Addr> for Ipv4 {
    fn from(address: Ipv4Addr) -> Self {
        Self::new(address.octets())
    }
}

impl From<Ipv4> for Ipv4Addr {
    fn from(address: Ipv4) -> Self {
        Self::from(address.octets)
    }
}

/// A TCP or UDP port, stored in network order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C, align(2))]
pub struct Port {
    bytes: [u8; 2],
}

impl Port {
    /// From a host-order number.
    #[inline(always)]
    pub const fn new(number: u16) -> Self {
        Self { bytes: number.to_be_bytes() }
    }

    /// From the bytes of a packet.
    #[inline(always)]
    pub const fn from_bytes(bytes: [u8; 2]) -> Self {
        Self { bytes }
    }

    /// The host-order number.
    #[inline(always)]
    pub const fn number(self) -> u16 {
        u16::from_be_bytes(self.bytes)
    }

    /// The bytes as they stand in a packet.
    #[inline(always)]
    pub const fn bytes(self) -> [u8; 2] {
        self.bytes
    }

    /// The two bytes read as one native integer, without conversion: for hashing and checksum differences.
    #[inline(always)]
    pub const fn to_ne(self) -> u16 {
        u16::from_ne_bytes(self.bytes)
    }
}

/// An Ethernet address, with two zero bytes behind it so that it can be a map key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C, align(4))]
pub struct Mac {
    octets: [u8; 6],
    zero: u16,
}

impl Mac {
    /// From the bytes of a packet.
    #[inline(always)]
    pub const fn new(octets: [u8; 6]) -> Self {
        Self { octets, zero: 0 }
    }

    /// The bytes as they stand in a packet.
    #[inline(always)]
    pub const fn octets(self) -> [u8; 6] {
        self.octets
    }
}

/// An IP protocol number (IANA), as it stands in the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C)]
pub struct Protocol {
    number: u8,
}

impl Protocol {
    /// ICMP, 1.
    pub const ICMP: Self = Self { number: 1 };
    /// TCP, 6.
    pub const TCP: Self = Self { number: 6 };
    /// UDP, 17.
    pub const UDP: Self = Self { number: 17 };

    /// From the byte of a header.
    #[inline(always)]
    pub const fn new(number: u8) -> Self {
        Self { number }
    }

    /// The byte of a header.
    #[inline(always)]
    pub const fn number(self) -> u8 {
        self.number
    }

    /// The usual name in capitals, `?` for a protocol that this balancer does not carry.
    pub const fn name(self) -> &'static str {
        match self.number {
            1 => "ICMP",
            6 => "TCP",
            17 => "UDP",
            _ => "?",
        }
    }
}

const _: () = assert!(size_of::<Ipv4>() == 4 && size_of::<Port>() == 2 && size_of::<Mac>() == 8);
const _: () = assert!(align_of::<Ipv4>() == 4 && align_of::<Port>() == 2 && align_of::<Mac>() == 4);
