//! From a packet to a place in a Maglev table. The table itself is built by the agent (`policy::maglev`).
//!
//! Every node computes the same index for the same packet and the same endpoints: that is what lets a connection
//! survive its address moving to another holder. So neither the hash nor the sizes may change between releases
//! that are to run side by side.

use crate::addr::Port;
use crate::flow::FlowKey;

/// Table sizes, primes. The agent takes the first that is at least 100 times the number of backends, else the last.
pub const SIZES: [u32; 9] = [251, 509, 1_021, 2_039, 4_093, 8_191, 16_381, 32_749, 65_537];

/// The largest table, plus one for the size that stands at index 0 of a ring.
pub const MAX_RING: u32 = SIZES[SIZES.len() - 1] + 1;

/// The table size for a number of backends; at least one backend is assumed.
pub const fn size_for(backends: usize) -> u32 {
    let mut i = 0;
    while i < SIZES.len() - 1 {
        if SIZES[i] as usize >= backends * 100 {
            return SIZES[i];
        }
        i += 1;
    }
    SIZES[SIZES.len() - 1]
}

/// Hash of a connection, from the tuple as the client sends it. With affinity the client's port does not count.
#[inline(always)]
pub const fn hash_of(flow: &FlowKey, affinity: bool) -> u32 {
    let mut flow = *flow;
    if affinity {
        flow.source_port = Port::new(0);
    }
    hash(&flow)
}

/// Hash of a connection, from the tuple as the client sends it.
#[inline(always)]
pub const fn hash(flow: &FlowKey) -> u32 {
    let source = u32::from_le_bytes(flow.source.octets()) as u64;
    let destination = u32::from_le_bytes(flow.destination.octets()) as u64;
    let source_port = flow.source_port.number() as u64;
    let destination_port = flow.destination_port.number() as u64;
    let low = source | source_port << 32 | destination_port << 48;
    let high = destination | (flow.protocol.number() as u64) << 32;
    (mix(low ^ mix(high)) >> 32) as u32
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
#[inline(always)]
const fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The hash of the next place to try, when the backend at this one cannot be used. The golden ratio spreads the places
/// evenly over the table (Knuth, The Art of Computer Programming, volume 3, section 6.4).
#[inline(always)]
pub const fn next(hash: u32) -> u32 {
    hash.wrapping_add(0x9e37_79b9)
}

/// The index below `size` for a hash: a multiplication and a shift, no division.
#[inline(always)]
pub const fn index(hash: u32, size: u32) -> u32 {
    ((hash as u64 * size as u64) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_primes_with_room_for_a_percent() {
        for size in SIZES {
            assert!((2..size).take_while(|d| d * d <= size).all(|d| size % d != 0), "{size}");
        }
        assert_eq!(size_for(1), 251);
        assert_eq!(size_for(10), 1_021);
        assert_eq!(size_for(100), 16_381);
        assert_eq!(size_for(10_000), 65_537);
    }

    #[test]
    fn every_index_is_below_its_size() {
        for size in SIZES {
            assert_eq!(index(0, size), 0);
            assert_eq!(index(u32::MAX, size), size - 1);
        }
    }
}
