//! Maglev tables, in a stable variant.
//!
//! As in Maglev (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer", NSDI 2016, 3.4)
//! each backend visits the table's places in an order of its own, a permutation made of an offset and a skip. In the
//! paper the backends take turns at the next free place, so a backend that leaves changes everybody's later turns:
//! at 100 backends and 16,381 places 1.4 % of the other entries move. Here a place goes to the backend in whose
//! order it comes first, and each backend has as many seats as its equal share; who is displaced goes on along its
//! order. That is a stable matching (Gale, Shapley 1962), which is the same whatever order the claims are made in;
//! shares still differ by at most one place, and only 0.7 % move.
//!
//! Every node must build the same table, so nothing here may change between releases that are to run side by side.

use lb_common::maglev::{index, size_for};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

/// Who a place in the table belongs to: an endpoint's address and port.
pub type Backend = (Ipv4Addr, u16);

/// The table for a set of backends: [`size_for`] entries, each a position in the set's order. Empty without backends.
pub fn table(backends: &BTreeSet<Backend>) -> Vec<u32> {
    if backends.is_empty() {
        return Vec::new();
    }
    let size = size_for(backends.len());
    let places = size as usize;
    let mut orders: Vec<Order> = backends.iter().map(|backend| Order::of(*backend, size)).collect();
    let mut claims = vec![Claim::NONE; places];
    for (position, backend) in (0..).zip(0..orders.len()) {
        let seats = places / backends.len() + usize::from(backend < places % backends.len());
        for _ in 0..seats {
            settle(position, &mut orders, &mut claims);
        }
    }
    claims.into_iter().map(|claim| claim.backend).collect()
}

/// Finds a place for one seat of a backend, and for whoever is displaced by that.
///
/// Ends because there are as many seats as places: nobody reaches the end of its order before a place is free.
fn settle(backend: u32, orders: &mut [Order], claims: &mut [Claim]) {
    let mut seeker = backend;
    loop {
        let order = &mut orders[seeker as usize];
        let claim = Claim { rank: order.rank, backend: seeker };
        let holding = &mut claims[order.advance() as usize];
        if claim < *holding {
            let displaced = std::mem::replace(holding, claim);
            if displaced == Claim::NONE {
                return;
            }
            seeker = displaced.backend;
        }
    }
}

/// A backend's claim to a place. The smaller one wins: the earlier in its backend's order, then the lower backend.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    rank: u32,
    backend: u32,
}

impl Claim {
    const NONE: Self = Self { rank: u32::MAX, backend: u32::MAX };
}

/// The order in which a backend visits the places, and how far it is.
struct Order {
    place: u32,
    skip: u32,
    size: u32,
    rank: u32,
}

impl Order {
    /// Offset below `size` and skip in 1..`size`; as the size is a prime, every place comes up once.
    fn of((address, port): Backend, size: u32) -> Self {
        let hash = mix(u64::from(u32::from(address)) << 16 | u64::from(port));
        let (high, low) = ((hash >> 32) as u32, (hash & 0xffff_ffff) as u32);
        Self { place: index(high, size), skip: index(low, size - 1) + 1, size, rank: 0 }
    }

    /// The place that is next.
    fn advance(&mut self) -> u32 {
        let place = self.place;
        let next = place + self.skip;
        self.place = if next < self.size { next } else { next - self.size };
        self.rank += 1;
        place
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
const fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Pods as a cluster has them: a few dense ranges of addresses, one port.
    fn backends(count: u32) -> BTreeSet<Backend> {
        (0..count).map(|i| (Ipv4Addr::from(0x0a20_0000 + (i % 4) * 0x1_0000 + i / 4 + 2), 8080)).collect()
    }

    /// The table with the backends themselves as entries.
    fn entries(backends: &BTreeSet<Backend>) -> Vec<Backend> {
        let sorted: Vec<Backend> = backends.iter().copied().collect();
        table(backends).into_iter().map(|position| sorted[position as usize]).collect()
    }

    #[test]
    fn shares_differ_by_at_most_one_place() {
        for count in [1, 2, 3, 10, 100, 1_000, 70_000] {
            let table = table(&backends(count));
            assert_eq!(table.len(), size_for(count as usize) as usize);
            let mut shares = BTreeMap::from_iter((0..count).map(|position| (position, 0)));
            for position in table {
                *shares.get_mut(&position).expect("a position in the set") += 1;
            }
            let (most, least) = (shares.values().max().copied(), shares.values().min().copied());
            assert!(most.unwrap() - least.unwrap() <= 1, "{count} backends: {most:?} to {least:?}");
        }
    }

    #[test]
    fn at_most_a_percent_of_the_rest_moves_when_one_of_a_hundred_leaves() {
        let all = backends(100);
        let before = entries(&all);
        let moved_without = |gone: &Backend| {
            let mut rest = all.clone();
            rest.remove(gone);
            // Still the same size, or every entry would move.
            assert_eq!(size_for(rest.len()), size_for(all.len()));
            let after = entries(&rest);
            let others: Vec<_> = before.iter().zip(&after).filter(|(before, _)| *before != gone).collect();
            let moved = others.iter().filter(|(before, after)| before != after).count();
            assert!(moved * 100 <= others.len(), "{gone:?}: {moved} of {}", others.len());
            moved
        };
        let moved: usize = all.iter().map(moved_without).sum();
        println!("on average {} of {} entries moved", moved / all.len(), before.len());
    }

    #[test]
    fn the_order_of_the_input_does_not_matter() {
        let forward = backends(50);
        let mut backward = BTreeSet::new();
        for backend in forward.iter().rev() {
            backward.insert(*backend);
        }
        assert_eq!(table(&forward), table(&backward));
    }

    #[test]
    fn no_backend_makes_no_table() {
        assert!(table(&BTreeSet::new()).is_empty());
    }

    /// Two releases side by side must agree: a change of this number breaks connections at every move of an address.
    #[test]
    fn the_table_never_changes() {
        let digest = |count| {
            let bytes = table(&backends(count)).into_iter().flat_map(u32::to_le_bytes);
            bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
            })
        };
        assert_eq!([2, 10, 100].map(digest), [6157488559252578820, 7000609037910156469, 2069465293702482581]);
    }
}
