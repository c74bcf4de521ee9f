//! The Maglev tables, as the agent writes them: see [`RingPlace`].

use super::maps::{MapsError, failed};
use super::sys;
use aya::maps::{Array, ArrayOfMaps, IterableMap as _, Map, MapData, MapError};
use lb_common::service::{RING_HEAD, RingPlace};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

const NAME: &str = "rings";

/// `BPF_F_INNER_MAP`: an inner map of its own size (Linux 5.10).
const BPF_F_INNER_MAP: u32 = 0x1000;

/// The kernel's own number for "not supported", which it lets out here: arrays of maps take batches since Linux 5.14.
const ENOTSUPP: i32 = 524;

type Ring = Array<MapData, RingPlace>;

/// The map `rings`.
#[derive(Debug)]
pub(super) struct Rings {
    map: Map,
}

impl Rings {
    pub(super) fn new(map: Map) -> Self {
        Self { map }
    }

    /// The number of places in the table of a served port; `None` where there is no table.
    pub(super) fn size(&self, service: u32) -> Result<Option<u32>, MapsError> {
        let Some(ring) = self.open(service)? else { return Ok(None) };
        Ok(Some(head(&ring)?.size_and_half().0))
    }

    /// The table of a served port; `None` where there is none.
    pub(super) fn table(&self, service: u32) -> Result<Option<Vec<u32>>, MapsError> {
        let Some(ring) = self.open(service)? else { return Ok(None) };
        let places = places(&ring)?;
        let Some((head, places)) = places.split_first() else { return Ok(None) };
        let (size, half) = head.size_and_half();
        Ok(Some(places.iter().take(size as usize).map(|place| place.id(half)).collect()))
    }

    /// Replaces tables, each in one store as packets see it.
    ///
    /// Where a ring has room for its new table, which is nearly always, that is all. New rings come in one call for all of
    /// them, since the kernel makes each such call wait until no packet can be using a former one: 10 to 20 ms, long after
    /// packets see the new ones.
    pub(super) fn set(&mut self, tables: &[(u32, Vec<u32>)]) -> Result<(), MapsError> {
        let mut new = Vec::new();
        for (service, table) in tables {
            match self.open(*service)? {
                Some(ring) if ring.len() as usize > table.len() => rewrite(ring, table)?,
                _ => new.push((*service, new_ring(table)?)),
            }
        }
        self.exchange(&new)
    }

    fn open(&self, service: u32) -> Result<Option<Ring>, MapsError> {
        let rings: ArrayOfMaps<&MapData, Ring> =
            ArrayOfMaps::try_from(&self.map).map_err(failed(NAME, "open"))?;
        loop {
            match rings.get(&service, 0) {
                Ok(ring) => return Ok(Some(ring)),
                Err(MapError::KeyNotFound) => return Ok(None),
                // Exchanged, and gone, between the look-up of its id and its opening.
                Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => {
                }
                Err(source) => return Err(failed(NAME, "look up")(source)),
            }
        }
    }

    fn exchange(&mut self, rings: &[(u32, Ring)]) -> Result<(), MapsError> {
        let Map::ArrayOfMaps(data) = &self.map else { return Err(MapsError::Missing { name: NAME }) };
        let (services, fds): (Vec<u32>, Vec<i32>) =
            rings.iter().map(|(service, ring)| (*service, fd(ring).as_raw_fd())).unzip();
        match sys::write_all(data.fd().as_fd(), &services, &fds) {
            Err(error) if error.raw_os_error() == Some(ENOTSUPP) => self.exchange_singly(rings),
            result => {
                result.map_err(|source| MapsError::Batch { name: NAME, action: "exchange tables", source })
            }
        }
    }

    fn exchange_singly(&mut self, rings: &[(u32, Ring)]) -> Result<(), MapsError> {
        let mut map: ArrayOfMaps<&mut MapData, Ring> =
            ArrayOfMaps::try_from(&mut self.map).map_err(failed(NAME, "open"))?;
        for (service, ring) in rings {
            map.set(*service, ring, 0).map_err(failed(NAME, "exchange a table"))?;
        }
        Ok(())
    }
}

fn head(ring: &Ring) -> Result<RingPlace, MapsError> {
    ring.get(&RING_HEAD, 0).map_err(failed(NAME, "read the head of a table"))
}

/// The head and all places.
fn places(ring: &Ring) -> Result<Vec<RingPlace>, MapsError> {
    let mut places: Vec<(u32, RingPlace)> = sys::read_all(fd(ring), ring.len())
        .map_err(|source| MapsError::Batch { name: NAME, action: "read a table", source })?;
    places.sort_unstable_by_key(|(index, _)| *index);
    Ok(places.into_iter().map(|(_, place)| place).collect())
}

/// Writes the table that is not in use, and then the head.
fn rewrite(mut ring: Ring, table: &[u32]) -> Result<(), MapsError> {
    let before = places(&ring)?;
    let half = before.first().map_or(0, |head| 1 - head.size_and_half().1.min(1));
    let after = before.iter().skip(1).zip(table).map(|(place, id)| place.with_id(half, *id));
    fill(&ring, after)?;
    let head = RingPlace::head(size_of_table(table), half);
    ring.set(RING_HEAD, head, 0).map_err(failed(NAME, "write the head of a table"))
}

fn new_ring(table: &[u32]) -> Result<Ring, MapsError> {
    let size = size_of_table(table);
    let mut ring = Array::create(size + 1, BPF_F_INNER_MAP).map_err(failed(NAME, "create a table"))?;
    fill(&ring, table.iter().map(|id| RingPlace::default().with_id(0, *id)))?;
    ring.set(RING_HEAD, RingPlace::head(size, 0), 0).map_err(failed(NAME, "write the head of a table"))?;
    Ok(ring)
}

/// Writes the places, without the head.
fn fill(ring: &Ring, places: impl Iterator<Item = RingPlace>) -> Result<(), MapsError> {
    let (indices, places): (Vec<u32>, Vec<RingPlace>) = (RING_HEAD + 1..).zip(places).unzip();
    sys::write_all(fd(ring), &indices, &places).map_err(|source| MapsError::Batch {
        name: NAME,
        action: "fill a table",
        source,
    })
}

fn size_of_table(table: &[u32]) -> u32 {
    u32::try_from(table.len()).unwrap_or(u32::MAX)
}

fn fd(ring: &Ring) -> BorrowedFd<'_> {
    ring.map().fd().as_fd()
}
