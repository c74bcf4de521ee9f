//! Comparing what is noted with what the maps hold, in parts: each takes some milliseconds, so that a change need not wait
//! for all of it.

use super::{Digest, Observed, digest};
use crate::datapath::maps::{Maps, MapsError};

/// A comparison, and where the next one goes on.
#[derive(Debug, Default)]
pub struct Comparison {
    next: Option<Part>,
    /// The service id whose table is next. Each comparison takes some, in turn.
    ring: u32,
}

/// What is compared at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The small maps, and the services.
    Small,
    /// Slots from this one on.
    Backends(u32),
    Endpoints,
    /// Tables, of which so many are left for this comparison.
    Rings(usize),
}

/// Slots that are compared at once.
const SLOTS: u32 = 16_384;
/// Tables that are compared at once. To read one takes a quarter of a millisecond, since each is a map of its own.
const RINGS: usize = 10;
/// Tables of one comparison. All of 5,000 would take a second of CPU time each period.
const RINGS_A_COMPARISON: usize = 250;

impl Comparison {
    /// Begins one, unless one is under way.
    pub fn begin(&mut self) {
        self.next.get_or_insert(Part::Small);
    }

    /// Whether one is under way.
    pub fn is_under_way(&self) -> bool {
        self.next.is_some()
    }

    /// Compares the next part. False if the maps do not hold what is noted.
    ///
    /// # Errors
    /// A map that cannot be read.
    pub fn go_on(&mut self, observed: &Observed, maps: &Maps) -> Result<bool, MapsError> {
        let Some(part) = self.next else { return Ok(true) };
        let (is_same, next) = match part {
            Part::Small => (observed.has_small(maps)?, Some(Part::Backends(0))),
            Part::Backends(first) => {
                let end =
                    first.saturating_add(SLOTS).min(u32::try_from(observed.slots.len()).unwrap_or(u32::MAX));
                let noted = observed.slots.get(first as usize..end as usize).unwrap_or_default();
                let is_last = end as usize == observed.slots.len();
                let next = if is_last { Part::Endpoints } else { Part::Backends(end) };
                (maps.backends_from(first, SLOTS)? == noted, Some(next))
            }
            Part::Endpoints => (observed.has_endpoints(maps)?, Some(Part::Rings(RINGS_A_COMPARISON))),
            Part::Rings(left) => {
                let mut rings = observed.rings.range(self.ring..);
                let is_same = Observed::has_rings(rings.by_ref().take(RINGS.min(left)), maps)?;
                let next = rings.next().map(|(id, _)| *id);
                self.ring = next.unwrap_or(0);
                (
                    is_same,
                    next.and_then(|_| left.checked_sub(RINGS).filter(|left| *left > 0)).map(Part::Rings),
                )
            }
        };
        self.next = next;
        Ok(is_same)
    }
}

impl Observed {
    fn has_small(&self, maps: &Maps) -> Result<bool, MapsError> {
        // A stray is to go, so it is never as it should be.
        Ok(self.strays.is_empty()
            && maps.interfaces.all()? == self.interfaces
            && maps.holders.all()? == self.holders
            && maps.services.all()? == self.services)
    }

    fn has_endpoints(&self, maps: &Maps) -> Result<bool, MapsError> {
        let held = maps.endpoints.list()?;
        let is_noted = |(key, holders)| self.endpoints.get(key) == Some(holders);
        Ok(held.len() == self.endpoints.len()
            && held.iter().map(|(key, holders)| (key, holders)).all(is_noted))
    }

    fn has_rings<'a>(
        mut rings: impl Iterator<Item = (&'a u32, &'a Digest)>,
        maps: &Maps,
    ) -> Result<bool, MapsError> {
        rings.try_fold(true, |is_same, (id, noted)| {
            Ok(is_same && maps.ring(*id)?.is_some_and(|ring| digest(&ring) == *noted))
        })
    }
}
