//! Roles by interface index, as the agent writes them: see [`InterfaceSlot`].

use super::maps::{MapsError, failed};
use super::sys;
use aya::maps::{Array, Map, MapData};
use lb_common::interface::{Interface, InterfaceSlot};
use lb_common::limits;
use std::collections::BTreeMap;
use std::os::fd::AsFd as _;

const NAME: &str = "interfaces";

/// The map `interfaces`.
#[derive(Debug)]
pub struct Interfaces {
    map: Map,
}

impl Interfaces {
    pub(super) fn new(map: Map) -> Self {
        Self { map }
    }

    /// How many interfaces fit.
    pub fn max_entries(&self) -> u32 {
        limits::INTERFACES
    }

    /// Roles by interface index.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn all(&self) -> Result<BTreeMap<u32, Interface>, MapsError> {
        let slots = self.slots()?;
        Ok(slots.values().filter(|slot| slot.index != 0).map(|slot| (slot.index, slot.interface)).collect())
    }

    /// Gives an interface its roles.
    ///
    /// # Errors
    /// All the slots that it may stand in are taken, or the map cannot be written.
    pub fn insert(&mut self, index: &u32, interface: &Interface) -> Result<(), MapsError> {
        let slots = self.slots()?;
        let holds = |place: &u32, index: u32| slots.get(place).is_some_and(|slot| slot.index == index);
        let own = InterfaceSlot::places(*index).find(|place| holds(place, *index));
        let place = own.or_else(|| InterfaceSlot::places(*index).find(|place| holds(place, 0)));
        let Some(place) = place else {
            return Err(MapsError::Full { name: NAME, entries: InterfaceSlot::PLACES });
        };
        self.write(place, InterfaceSlot { index: *index, interface: *interface })
    }

    /// Takes the roles of an interface.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn remove(&mut self, index: &u32) -> Result<(), MapsError> {
        let slots = self.slots()?;
        for place in slots.iter().filter(|(_, slot)| slot.index == *index).map(|(place, _)| *place) {
            self.write(place, InterfaceSlot::default())?;
        }
        Ok(())
    }

    fn slots(&self) -> Result<BTreeMap<u32, InterfaceSlot>, MapsError> {
        let Map::Array(data) = &self.map else { return Err(MapsError::Missing { name: NAME }) };
        let slots = sys::read_all(data.fd().as_fd(), limits::INTERFACES)
            .map_err(|source| MapsError::Batch { name: NAME, action: "read", source })?;
        Ok(slots.into_iter().collect())
    }

    fn write(&mut self, place: u32, slot: InterfaceSlot) -> Result<(), MapsError> {
        let mut array: Array<&mut MapData, InterfaceSlot> =
            Array::try_from(&mut self.map).map_err(failed(NAME, "open"))?;
        array.set(place, slot, 0).map_err(failed(NAME, "write"))
    }
}
