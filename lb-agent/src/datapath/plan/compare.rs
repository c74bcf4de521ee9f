//! Comparing everything that is noted with what the maps hold, in parts: each takes some milliseconds at most, so that a
//! change need not wait for all of it.

use super::{Observed, digest};
use crate::datapath::maps::{Maps, MapsError};

/// A comparison that is under way.
#[derive(Debug, Default)]
pub struct Comparison {
    next: Part,
}

/// What is compared at once. In this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    /// The small maps, and the services.
    #[default]
    Small,
    Backends,
    Endpoints,
    /// So many tables, from that of this service id on: each is a map of its own.
    Rings(u32),
}

/// Tables that are compared at once.
const RINGS: usize = 100;

/// What a part came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// It is as noted; other parts are left.
    Same,
    /// It was the last, and all of them are as noted.
    AllSame,
    /// It is not as noted.
    Differs,
}

impl Comparison {
    /// Compares the next part.
    ///
    /// # Errors
    /// A map that cannot be read.
    pub fn go_on(&mut self, observed: &Observed, maps: &Maps) -> Result<Compared, MapsError> {
        let (is_same, next) = match self.next {
            Part::Small => (observed.has_small(maps)?, Some(Part::Backends)),
            Part::Backends => (maps.backends()? == observed.slots, Some(Part::Endpoints)),
            Part::Endpoints => (observed.has_endpoints(maps)?, Some(Part::Rings(0))),
            Part::Rings(first) => {
                let mut rings = observed.rings.range(first..);
                let is_same = Observed::has_rings(rings.by_ref().take(RINGS), maps)?;
                (is_same, rings.next().map(|(id, _)| Part::Rings(*id)))
            }
        };
        if !is_same {
            return Ok(Compared::Differs);
        }
        let Some(next) = next else { return Ok(Compared::AllSame) };
        self.next = next;
        Ok(Compared::Same)
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
        mut rings: impl Iterator<Item = (&'a u32, &'a u64)>,
        maps: &Maps,
    ) -> Result<bool, MapsError> {
        rings.try_fold(true, |is_same, (id, noted)| {
            Ok(is_same && maps.ring(*id)?.is_some_and(|ring| digest(&ring) == *noted))
        })
    }
}
