//! The programs in the kernel that use the pinned maps, and the constants that they were loaded with.

use super::maps::MapsError;
use super::pins::Pins;
use aya::maps::{Array, Map, MapData, MapError};
use aya::programs::{ProgramError, ProgramInfo, loaded_programs};
use lb_common::config::Config;

/// Where a program's constants are.
const CONSTANTS: &str = ".rodata";

/// The ingress program that was loaded last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The kernel's number for it.
    pub id: u32,
    /// The kernel's hash of its instructions: equal where they are.
    pub tag: u64,
    /// Its constants; `None` where another version of the agent laid them out differently.
    pub config: Option<Config>,
}

/// Why it could not be found.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The pinned maps.
    #[error(transparent)]
    Maps(#[from] MapsError),
    /// The kernel refused.
    #[error("cannot list the programs that the kernel has loaded")]
    Programs(#[from] ProgramError),
}

/// The ingress program on the maps below `pins`; `None` where the kernel has none, so that no packet is looked at.
///
/// # Errors
/// The kernel refuses, or there are no maps.
pub fn find(pins: &Pins, name: &str) -> Result<Option<Loaded>, FindError> {
    let services = MapData::from_pin(pins.maps().join("services"))
        .and_then(|map| map.info())
        .map_err(super::maps::failed("services", "open"))?
        .id();
    let mut newest: Option<ProgramInfo> = None;
    for program in loaded_programs() {
        // One that ended meanwhile is none of those that are looked for.
        let Ok(program) = program else { continue };
        if program.name_as_str() == Some(name)
            && program.map_ids()?.is_some_and(|ids| ids.contains(&services))
            && newest.as_ref().is_none_or(|newest| newest.id() < program.id())
        {
            newest = Some(program);
        }
    }
    let Some(program) = newest else { return Ok(None) };
    let config = constants(&program.map_ids()?.unwrap_or_default())?;
    Ok(Some(Loaded { id: program.id(), tag: program.tag(), config }))
}

/// Reads the constants among a program's maps.
fn constants(ids: &[u32]) -> Result<Option<Config>, MapsError> {
    let failed = super::maps::failed(CONSTANTS, "read");
    for id in ids {
        let map = MapData::from_id(*id).map_err(&failed)?;
        if map.info().map_err(&failed)?.name_as_str() != Some(CONSTANTS) {
            continue;
        }
        let map = Map::Array(map);
        return match Array::<&MapData, Config>::try_from(&map) {
            Ok(array) => array.get(&0, 0).map(Some).map_err(&failed),
            Err(MapError::InvalidValueSize { .. }) => Ok(None),
            Err(error) => Err(failed(error)),
        };
    }
    Ok(None)
}
