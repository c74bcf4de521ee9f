//! The sieve, and the tables whose keys must be in it: see [`lb_common::sieve`].

use super::maps::{MapsError, Table, failed};
use super::sys;
use aya::maps::{Array, Map, MapData};
use lb_common::addr::Mac;
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::service::{Service, ServiceKey};
use lb_common::sieve::{Bit, SIEVE_WORDS};
use std::ops::Deref;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

const NAME: &str = "sieve";

/// The map `sieve`.
#[derive(Clone, Debug)]
pub(super) struct Sieve {
    map: Arc<Mutex<Map>>,
}

impl Sieve {
    pub(super) fn new(map: Map) -> Self {
        Self { map: Arc::new(Mutex::new(map)) }
    }

    /// Sets a bit. None is ever taken back.
    pub(super) fn set(&self, bit: Bit) -> Result<(), MapsError> {
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let mut words: Array<&mut MapData, u64> = Array::try_from(&mut *map).map_err(failed(NAME, "open"))?;
        let word = words.get(&bit.word, 0).map_err(failed(NAME, "look up"))?;
        if word & bit.mask == 0 {
            words.set(bit.word, word | bit.mask, 0).map_err(failed(NAME, "write"))?;
        }
        Ok(())
    }

    pub(super) fn words(&self) -> Result<Vec<u64>, MapsError> {
        let map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let mut words: Vec<(u32, u64)> = sys::read_all(fd(&map)?, SIEVE_WORDS)
            .map_err(|source| MapsError::Batch { name: NAME, action: "read", source })?;
        words.sort_unstable_by_key(|(index, _)| *index);
        Ok(words.into_iter().map(|(_, word)| word).collect())
    }

    pub(super) fn set_words(&self, words: &[u64]) -> Result<(), MapsError> {
        let map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let indices: Vec<u32> = (0..SIEVE_WORDS).take(words.len()).collect();
        sys::write_all(fd(&map)?, &indices, words).map_err(|source| MapsError::Batch {
            name: NAME,
            action: "write",
            source,
        })
    }
}

fn fd(map: &Map) -> Result<BorrowedFd<'_>, MapsError> {
    match map {
        Map::Array(data) => Ok(data.fd().as_fd()),
        _ => Err(MapsError::Missing { name: NAME }),
    }
}

/// An entry that packets are sieved for.
pub trait Sieved<V> {
    /// Its bits.
    fn bits(&self, value: &V) -> impl Iterator<Item = Bit>;
}

impl Sieved<Service> for ServiceKey {
    fn bits(&self, service: &Service) -> impl Iterator<Item = Bit> {
        let masqueraded = service.masquerades().then(|| Bit::of_masqueraded(self));
        std::iter::once(Bit::of_service(self)).chain(masqueraded)
    }
}

impl Sieved<Holder> for Mac {
    fn bits(&self, _: &Holder) -> impl Iterator<Item = Bit> {
        std::iter::once(Bit::of_holder(*self))
    }
}

impl Sieved<EndpointHolders> for EndpointKey {
    fn bits(&self, _: &EndpointHolders) -> impl Iterator<Item = Bit> {
        std::iter::once(Bit::of_backend(self.port))
    }
}

/// A table whose new keys are in the sieve before they are written.
#[derive(Debug)]
pub struct SievedTable<K, V> {
    table: Table<K, V>,
    sieve: Sieve,
}

impl<K, V> SievedTable<K, V> {
    pub(super) fn new(table: Table<K, V>, sieve: Sieve) -> Self {
        Self { table, sieve }
    }
}

impl<K: aya::Pod + Default + Ord + Sieved<V>, V: aya::Pod + Default> SievedTable<K, V> {
    /// Adds or replaces.
    ///
    /// # Errors
    /// The table is full, or a map cannot be written.
    pub fn insert(&mut self, key: &K, value: &V) -> Result<(), MapsError> {
        for bit in key.bits(value) {
            self.sieve.set(bit)?;
        }
        self.table.insert(key, value)
    }

    /// Removes; what is not there is removed already.
    ///
    /// # Errors
    /// The table cannot be written.
    pub fn remove(&mut self, key: &K) -> Result<(), MapsError> {
        self.table.remove(key)
    }
}

impl<K, V> Deref for SievedTable<K, V> {
    type Target = Table<K, V>;

    fn deref(&self) -> &Self::Target {
        &self.table
    }
}
