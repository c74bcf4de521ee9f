//! A sieve for packets: bits in an array, by which most of those that are not for us are told with one load.
//!
//! A bit says "perhaps": the hash maps decide. It is set before an entry that it stands for is written, and stays set, since
//! one that is set in vain costs time alone, while one that is missing would hide an entry.

use crate::addr::Port;
use crate::service::ServiceKey;

/// Bits for the keys of `services`, by a hash. With 10,000 served ports one foreign packet in 26 is looked up in vain.
const SERVED_BITS: u32 = 1 << 18;
/// A bit for each port number of backends and endpoints. Their addresses come and go, and would fill it in the long run.
const BACKEND_BITS: u32 = 1 << 16;
const WORD: u32 = 64;

/// Words of the `sieve` map.
pub const SIEVE_WORDS: u32 = (SERVED_BITS + BACKEND_BITS) / WORD;

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
        let [a, b, c, d] = key.address.octets();
        let address = u32::from_ne_bytes([a, b, c, d]);
        let rest = (key.port.number() as u32) << 8 | key.protocol.number() as u32;
        // Multiplication by the golden ratio (Knuth, The Art of Computer Programming, volume 3, section 6.4).
        let hash = (address ^ rest.rotate_left(13)).wrapping_mul(0x9e37_79b9);
        Self::at(hash >> (u32::BITS - SERVED_BITS.trailing_zeros()))
    }

    /// For packets from a backend's port, and for another holder's to it, whichever the protocol.
    #[inline(always)]
    pub const fn of_backend(port: Port) -> Self {
        Self::at(SERVED_BITS + port.number() as u32)
    }

    #[inline(always)]
    const fn at(number: u32) -> Self {
        Self { word: number / WORD, mask: 1 << (number % WORD) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::{Ipv4, Protocol};
    use std::collections::BTreeSet;

    #[test]
    fn every_bit_is_in_the_map_and_those_of_backends_are_apart() {
        let backends: BTreeSet<Bit> = (0..=u16::MAX).map(|port| Bit::of_backend(Port::new(port))).collect();
        assert_eq!(backends.len(), 65_536);
        let services: BTreeSet<Bit> = services().collect();
        assert!(backends.is_disjoint(&services));
        assert!(
            backends.iter().chain(&services).all(|bit| bit.word < SIEVE_WORDS && bit.mask.is_power_of_two())
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
