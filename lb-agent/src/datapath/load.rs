//! Loads the packet program, with the maps that are pinned already or new ones.

use super::pins::Pins;
use aya::maps::MapData;
use aya::programs::{ProgramError, SchedClassifier};
use aya::{Ebpf, EbpfError, EbpfLoader};
use lb_common::config::{Config, GLOBAL};
use lb_common::limits;
use std::fs;
use std::io;
use std::path::PathBuf;

/// The names of the two programs, as the kernel shows them.
pub const PROGRAMS: [&str; 2] = ["reweave_ingress", "reweave_egress"];

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/lb-ebpf"));

/// How much fits; see [`limits`] for what it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Established connections.
    pub flows: u32,
    /// Connections in the middle of a handshake.
    pub handshakes: u32,
    /// Served ports.
    pub services: u32,
    /// Backend slots.
    pub backends: u32,
    /// Endpoints, own and others'.
    pub endpoints: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            flows: limits::FLOWS,
            handshakes: limits::HANDSHAKES,
            services: limits::SERVICES,
            backends: limits::BACKENDS,
            endpoints: limits::ENDPOINTS,
        }
    }
}

impl Limits {
    /// Each map with a limit of its own, by name.
    fn of_maps(&self) -> [(&'static str, u32); 10] {
        [
            ("flows", self.flows),
            ("replies", self.flows),
            ("handshakes", self.handshakes),
            ("handshake_replies", self.handshakes),
            ("services", self.services),
            ("service_stats", self.services),
            ("rings", self.services),
            ("backends", self.backends),
            ("ways", self.backends),
            ("endpoints", self.endpoints),
        ]
    }
}

/// Why the program could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// bpffs is not there, or not writable.
    #[error("{path}: {source}; is bpffs mounted there? (mount -t bpf bpf /sys/fs/bpf)")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A map of an earlier start has another size.
    #[error(
        "the pinned map {name} has room for {found} entries, but {wanted} are asked for: either keep the former \
         limit, or remove the datapath with `lb-agent cleanup`, which ends the connections in it"
    )]
    Limit {
        /// The map.
        name: &'static str,
        /// What is there.
        found: u32,
        /// What the limits say.
        wanted: u32,
    },
    /// A map cannot be opened.
    #[error("the pinned map {name} cannot be opened")]
    Map {
        /// The map.
        name: &'static str,
        /// What aya said.
        #[source]
        source: aya::maps::MapError,
    },
    /// The kernel refused maps or program.
    #[error("the packet program cannot be loaded")]
    Load(#[from] EbpfError),
    /// The verifier refused the program.
    #[error("the kernel's verifier refuses the packet program {name}")]
    Verify {
        /// The program.
        name: &'static str,
        /// With the verifier's log.
        #[source]
        source: ProgramError,
    },
    /// The object and this code do not belong together.
    #[error("the embedded object has no program {name}")]
    Missing {
        /// The program.
        name: &'static str,
    },
}

/// Loads both programs. Maps are pinned below `pins`; those of an earlier start are adopted with their content.
pub fn load(pins: &Pins, limits: &Limits, config: &Config) -> Result<Ebpf, LoadError> {
    let directory = pins.maps();
    fs::create_dir_all(&directory)
        .map_err(|source| LoadError::Directory { path: directory.clone(), source })?;
    check_limits(pins, limits)?;
    let mut loader = EbpfLoader::new();
    loader.override_global(GLOBAL, config, true);
    for (name, entries) in limits.of_maps() {
        loader.map_max_entries(name, entries);
    }
    for name in super::maps::NAMES {
        loader.map_pin_path(name, directory.join(name));
    }
    verify(loader.load(OBJECT)?)
}

/// Loads both programs with fresh maps that live as long as the result.
pub fn load_unpinned(limits: &Limits, config: &Config) -> Result<Ebpf, LoadError> {
    let mut loader = EbpfLoader::new();
    loader.override_global(GLOBAL, config, true);
    for (name, entries) in limits.of_maps() {
        loader.map_max_entries(name, entries);
    }
    verify(loader.load(OBJECT)?)
}

fn verify(mut ebpf: Ebpf) -> Result<Ebpf, LoadError> {
    for name in PROGRAMS {
        let program = classifier(&mut ebpf, name)?;
        let mut attempts = 1..ATTEMPTS;
        while let Err(source) = program.load() {
            if !was_interrupted(&source) || attempts.next().is_none() {
                return Err(LoadError::Verify { name, source });
            }
        }
    }
    Ok(ebpf)
}

/// The verifier gives up with EAGAIN when a signal is pending for the process; libbpf tries five times as well.
const ATTEMPTS: u32 = 5;

fn was_interrupted(error: &ProgramError) -> bool {
    matches!(error, ProgramError::LoadError { io_error, .. } if io_error.raw_os_error() == Some(libc::EAGAIN))
}

/// One of [`PROGRAMS`].
pub fn classifier<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut SchedClassifier, LoadError> {
    ebpf.program_mut(name)
        .and_then(|program| <&mut SchedClassifier>::try_from(program).ok())
        .ok_or(LoadError::Missing { name })
}

/// A pinned map keeps the size that it was made with. Its content is worth more than the new limit, so the operator
/// decides.
fn check_limits(pins: &Pins, limits: &Limits) -> Result<(), LoadError> {
    for (name, wanted) in limits.of_maps() {
        let path = pins.maps().join(name);
        if !path.exists() {
            continue;
        }
        let map = MapData::from_pin(&path).map_err(|source| LoadError::Map { name, source })?;
        let found = map.info().map_err(|source| LoadError::Map { name, source })?.max_entries();
        if found != wanted {
            return Err(LoadError::Limit { name, found, wanted });
        }
    }
    Ok(())
}
