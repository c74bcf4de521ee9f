//! A sieve for packets: bits in an array, by which most of those that are not for us are told with one load.
//!
//! A bit says "perhaps": the hash maps decide. It is set before an entry that it stands for is written, and stays set, since
//! one that is set in vain costs time alone, while one that is missing would hide an entry.

use crate::addr::{Ipv4, Mac, Port};
use crate::service::ServiceKey;

/// Bits for the keys of `services`, by a hash. With 10,000 served ports one foreign packet in 26 is looked up in vain.
const SERVED_BITS: u32 = 1 << 18;
/// A bit for each port number of backends and endpoints. Their addresses come and go, and would fill it in the long run.
const BACKEND_BITS: u32 = 1 << 16;
/// Bits for the link-layer addresses of other holders, by a hash.
const HOLDER_BITS: u32 = 1 << 16;
/// Bits for the keys of those services whose backends are masqueraded, by a hash.
const MASQUERADED_BITS: u32 = 1 << 16;
/// Bits for the networks of clients inside the cluster, by a hash of the first 24 bits.
const INSIDE_BITS: u32 = 1 << 16;
const WORD: u32 = 64;

/// Words of the `sieve` map.
pub const SIEVE_WORDS: u32 =
    (SERVED_BITS + BACKEND_BITS + HOLDER_BITS + INSIDE_BITS + MASQUERADED_BITS) / WORD;

/// A bit of the sieve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bit {
    /// Index of its word in the `sieve` map.
    pub word: u32,
    /// The word with this bit alone.
    pub mask: u64,
}

impl Bit {
    /// For packets to a served port.
    #[inline(always)]
    pub const fn of_service(key: &ServiceKey) -> Self {
        Self::at(hash(word(key), SERVED_BITS))
    }

    /// For packets to a served port with backends that are masqueraded.
    #[inline(always)]
    pub const fn of_masqueraded(key: &ServiceKey) -> Self {
        let before = SERVED_BITS + BACKEND_BITS + HOLDER_BITS + INSIDE_BITS;
        Self::at(before + hash(word(key), MASQUERADED_BITS))
    }

    /// For packets from a backend's port, whichever the protocol.
    #[inline(always)]
    pub const fn of_backend(port: Port) -> Self {
        Self::at(SERVED_BITS + port.number() as u32)
    }

    /// For frames that a holder sends.
    #[inline(always)]
    pub const fn of_holder(mac: Mac) -> Self {
        let [a, b, c, d, e, f] = mac.octets();
        let word = u64::from_ne_bytes([a, b, c, d, e, f, 0, 0]);
        Self::at(SERVED_BITS + BACKEND_BITS + hash(word, HOLDER_BITS))
    }

    /// For packets from an address inside the cluster, or from its neighbours: one bit for each 256 addresses.
    #[inline(always)]
    pub const fn of_inside(address: Ipv4) -> Self {
        let [a, b, c, _] = address.octets();
        let word = u32::from_ne_bytes([a, b, c, 0]) as u64;
        Self::at(SERVED_BITS + BACKEND_BITS + HOLDER_BITS + hash(word, INSIDE_BITS))
    }

    #[inline(always)]
    const fn at(number: u32) -> Self {
        Self { word: number / WORD, mask: 1 << (number % WORD) }
    }
}

#[inline(always)]
const fn word(key: &ServiceKey) -> u64 {
    let address = key.address.to_ne() as u64;
    let port = (key.port.number() as u64) << 32;
    let protocol = (key.protocol.number() as u64) << 48;
    address | port | protocol
}

/// Multiplication by the golden ratio (Knuth, The Art of Computer Programming, volume 3, section 6.4): a number below
/// `bits`, a power of two.
#[inline(always)]
const fn hash(word: u64, bits: u32) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "a power of two of 32 bits has fewer")]
    let hash = (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - bits.trailing_zeros())) as u32;
    hash
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::{Ipv4, Protocol};
    use std::collections::BTreeSet;

    #[test]
    fn every_bit_is_in_the_map_and_each_kind_is_apart() {
        let backends: BTreeSet<Bit> = (0..=u16::MAX).map(|port| Bit::of_backend(Port::new(port))).collect();
        assert_eq!(backends.len(), 65_536);
        let services: BTreeSet<Bit> = services().collect();
        let holders: BTreeSet<Bit> = (0..=u8::MAX)
            .flat_map(|last| [2, 0xfe].map(|first| Bit::of_holder(Mac::new([first, 10, 32, 0, 7, last]))))
            .collect();
        assert!(holders.len() > 500, "{} bits", holders.len());
        assert!(backends.is_disjoint(&services) && backends.is_disjoint(&holders));
        assert!(holders.is_disjoint(&services));
        assert!(
            backends
                .iter()
                .chain(&services)
                .chain(&holders)
                .all(|bit| bit.word < SIEVE_WORDS && bit.mask.is_power_of_two())
        );
    }

    /// Ten thousand services on a few addresses: as many bits as a random function would give, or more.
    #[test]
    fn services_spread() {
        let bits: BTreeSet<Bit> = services().collect();
        assert!(bits.len() > 9_700, "{} bits", bits.len());
    }

    fn services() -> impl Iterator<Item = Bit> {
        (0..10_000_u16).map(|n| {
            let [address, _] = (n / 1_000).to_le_bytes();
            let protocol = if n % 2 == 0 { Protocol::TCP } else { Protocol::UDP };
            let port = Port::new(80 + n % 1_000 / 2);
            Bit::of_service(&ServiceKey::new(Ipv4::new([192, 0, 2, 10 + address]), port, protocol))
        })
    }
}
