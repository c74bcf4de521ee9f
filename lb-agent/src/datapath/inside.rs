//! Who is inside the cluster, as the packets ask for it, and this node's own address among them.

use super::maps::{MapsError, failed};
use super::sieve::Sieve;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, Map, MapData};
use lb_common::addr::Ipv4;
use lb_common::masquerade::{Network, Own};
use lb_common::sieve::Bit;
use std::collections::BTreeSet;

const INSIDE: &str = "inside";
const OWN: &str = "own";

/// The maps `inside` and `own`.
#[derive(Debug)]
pub struct Inside {
    networks: Map,
    own: Map,
    sieve: Sieve,
}

impl Inside {
    pub(super) fn new(networks: Map, own: Map, sieve: Sieve) -> Self {
        Self { networks, own, sieve }
    }

    /// Every network.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn networks(&self) -> Result<BTreeSet<Network>, MapsError> {
        let trie: LpmTrie<&MapData, Ipv4, u32> =
            LpmTrie::try_from(&self.networks).map_err(failed(INSIDE, "open"))?;
        trie.keys()
            .map(|key| {
                let key = key.map_err(failed(INSIDE, "read"))?;
                Ok(Network { prefix: key.prefix_len(), address: key.data() })
            })
            .collect()
    }

    /// Adds a network. A large one costs a bit of the sieve for each 256 addresses of it.
    ///
    /// # Errors
    /// The map is full, or cannot be written.
    pub fn insert(&mut self, network: Network) -> Result<(), MapsError> {
        for part in parts(network) {
            self.sieve.set(Bit::of_inside(part))?;
        }
        let mut trie: LpmTrie<&mut MapData, Ipv4, u32> =
            LpmTrie::try_from(&mut self.networks).map_err(failed(INSIDE, "open"))?;
        trie.insert(&Key::new(network.prefix, network.address), 0, 0).map_err(failed(INSIDE, "insert"))
    }

    /// Removes a network.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn remove(&mut self, network: Network) -> Result<(), MapsError> {
        let mut trie: LpmTrie<&mut MapData, Ipv4, u32> =
            LpmTrie::try_from(&mut self.networks).map_err(failed(INSIDE, "open"))?;
        trie.remove(&Key::new(network.prefix, network.address)).map_err(failed(INSIDE, "remove"))
    }

    /// What packets know of this node.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn own(&self) -> Result<Own, MapsError> {
        let array: Array<&MapData, Own> = Array::try_from(&self.own).map_err(failed(OWN, "open"))?;
        array.get(&0, 0).map_err(failed(OWN, "look up"))
    }

    /// Replaces it.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_own(&mut self, own: Own) -> Result<(), MapsError> {
        let mut array: Array<&mut MapData, Own> =
            Array::try_from(&mut self.own).map_err(failed(OWN, "open"))?;
        array.set(0, own, 0).map_err(failed(OWN, "write"))
    }
}

/// One address of each 256 of a network.
fn parts(network: Network) -> impl Iterator<Item = Ipv4> {
    let first = u32::from_be_bytes(network.address.octets());
    let count = 1_u32 << 24_u32.saturating_sub(network.prefix).min(24);
    (0..count).map(move |part| Ipv4::new(first.wrapping_add(part << 8).to_be_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_a_part_for_each_256_addresses() {
        let count = |prefix, address| {
            parts(Network { prefix, address: Ipv4::new(address) }).collect::<BTreeSet<_>>().len()
        };
        assert_eq!(count(32, [192, 0, 2, 7]), 1);
        assert_eq!(count(24, [192, 0, 2, 0]), 1);
        assert_eq!(count(20, [10, 32, 0, 0]), 16);
        assert_eq!(count(12, [10, 32, 0, 0]), 4_096);
        let all: Vec<Ipv4> = parts(Network { prefix: 22, address: Ipv4::new([10, 0, 252, 0]) }).collect();
        assert_eq!(all, [252, 253, 254, 255].map(|third| Ipv4::new([10, 0, third, 0])));
    }
}
