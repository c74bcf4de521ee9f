//! The maps, as typed tables: what the agent, the command line and the tests read and write.

use super::inside::Inside;
use super::pins::Pins;
use super::rings::Rings;
use super::roles::Interfaces;
use super::sieve::{Sieve, SievedTable};
use super::sys;
use aya::Ebpf;
use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray};
use lb_common::addr::Mac;
use lb_common::backend::Backend;
use lb_common::counters::Outcome;
use lb_common::flow::{Flow, FlowKey, Reply};
use lb_common::fragment::{Fragment, FragmentKey};
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::masquerade::{Client, Masquerade, MasqueradedKey};
use lb_common::reason::Reason;
use lb_common::service::{Service, ServiceKey, ServiceStats};
use lb_common::sieve::Bit;
use std::collections::BTreeMap;
use std::io;
use std::marker::PhantomData;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

/// Every map of the program.
pub const NAMES: [&str; 21] = [
    "interfaces",
    "sieve",
    "services",
    "rings",
    "backends",
    "ways",
    "flows",
    "handshakes",
    "replies",
    "handshake_replies",
    "fragments",
    "masquerades",
    "masqueraded",
    "inside",
    "own",
    "scratch",
    "holders",
    "endpoints",
    "outcomes",
    "service_stats",
    "clock",
];

/// What went wrong with a map.
#[derive(Debug, thiserror::Error)]
pub enum MapsError {
    /// No datapath is there.
    #[error("there is no datapath at {path}: is the agent running on this node, and --bpffs right?")]
    Absent {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// A map of the program is missing.
    #[error("the map {name} is missing")]
    Missing {
        /// The map.
        name: &'static str,
    },
    /// aya or the kernel refused.
    #[error("map {name}: {action}")]
    Map {
        /// The map.
        name: &'static str,
        /// What was tried.
        action: &'static str,
        /// Why not.
        #[source]
        source: MapError,
    },
    /// The kernel refused a batch.
    #[error("map {name}: {action}")]
    Batch {
        /// The map.
        name: &'static str,
        /// What was tried.
        action: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The map is full.
    #[error(
        "the map {name} is full: it has room for {entries} entries; what is in it stays, what is new is not served"
    )]
    Full {
        /// The map.
        name: &'static str,
        /// Its size.
        entries: u32,
    },
}

/// One hash map.
#[derive(Debug)]
pub struct Table<K, V> {
    name: &'static str,
    map: Map,
    types: PhantomData<(K, V)>,
}

impl<K: aya::Pod + Default + Ord, V: aya::Pod + Default> Table<K, V> {
    fn data(&self) -> Result<&MapData, MapsError> {
        match &self.map {
            Map::HashMap(data) | Map::LruHashMap(data) => Ok(data),
            _ => Err(MapsError::Missing { name: self.name }),
        }
    }

    fn typed(&self) -> Result<HashMap<&MapData, K, V>, MapsError> {
        HashMap::try_from(&self.map).map_err(self.failed("open"))
    }

    fn typed_mut(&mut self) -> Result<HashMap<&mut MapData, K, V>, MapsError> {
        let name = self.name;
        HashMap::try_from(&mut self.map).map_err(|source| MapsError::Map { name, action: "open", source })
    }

    fn failed(&self, action: &'static str) -> impl Fn(MapError) -> MapsError + use<K, V> {
        let name = self.name;
        move |source| MapsError::Map { name, action, source }
    }

    /// How many entries fit.
    pub fn max_entries(&self) -> Result<u32, MapsError> {
        Ok(self.data()?.info().map_err(self.failed("read its size"))?.max_entries())
    }

    /// One value.
    pub fn get(&self, key: &K) -> Result<Option<V>, MapsError> {
        match self.typed()?.get(key, 0) {
            Ok(value) => Ok(Some(value)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(source) => Err(self.failed("look up")(source)),
        }
    }

    /// Every entry, sorted.
    pub fn all(&self) -> Result<BTreeMap<K, V>, MapsError> {
        Ok(self.list()?.into_iter().collect())
    }

    /// Every entry, in no order: for the big tables.
    pub fn list(&self) -> Result<Vec<(K, V)>, MapsError> {
        let entries = self.max_entries()?;
        sys::read_all(self.data()?.fd().as_fd(), entries).map_err(|source| MapsError::Batch {
            name: self.name,
            action: "read",
            source,
        })
    }

    /// Adds or replaces.
    pub fn insert(&mut self, key: &K, value: &V) -> Result<(), MapsError> {
        let result = self.typed_mut()?.insert(key, value, 0);
        match result {
            Ok(()) => Ok(()),
            Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::E2BIG) => {
                Err(MapsError::Full { name: self.name, entries: self.max_entries()? })
            }
            Err(source) => Err(self.failed("insert")(source)),
        }
    }

    /// Adds or replaces many.
    pub fn insert_all(&mut self, keys: &[K], values: &[V]) -> Result<(), MapsError> {
        sys::write_all(self.data()?.fd().as_fd(), keys, values).map_err(|source| MapsError::Batch {
            name: self.name,
            action: "write",
            source,
        })
    }

    /// Removes; what is not there is removed already.
    pub fn remove(&mut self, key: &K) -> Result<(), MapsError> {
        match self.typed_mut()?.remove(key) {
            Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
            Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => {
                Ok(())
            }
            Err(source) => Err(self.failed("remove")(source)),
        }
    }
}

/// The maps of one datapath.
#[derive(Debug)]
pub struct Maps {
    /// Roles by interface index.
    pub interfaces: Interfaces,
    /// Served ports.
    pub services: SievedTable<ServiceKey, Service>,
    /// Established flows by the client's tuple.
    pub flows: Table<FlowKey, Flow>,
    /// Handshakes by the client's tuple.
    pub handshakes: Table<FlowKey, Flow>,
    /// Established connections by the backend's tuple.
    pub replies: Table<FlowKey, Reply>,
    /// Handshakes by the backend's tuple.
    pub handshake_replies: Table<FlowKey, Reply>,
    /// Datagrams in fragments.
    pub fragments: Table<FragmentKey, Fragment>,
    /// Source ports of clients inside the cluster, by the client's tuple.
    pub masquerades: Table<FlowKey, Masquerade>,
    /// Whose those ports are.
    pub masqueraded: Table<MasqueradedKey, Client>,
    /// Who is inside the cluster.
    pub inside: Inside,
    /// Other nodes that forward to pods here, by link-layer address.
    pub holders: SievedTable<Mac, Holder>,
    /// Endpoints and who forwards to them.
    pub endpoints: SievedTable<EndpointKey, EndpointHolders>,
    backends: Map,
    sieve: Sieve,
    rings: Rings,
    outcomes: Map,
    service_stats: Map,
}

impl Maps {
    /// Opens the pinned maps, with or without an agent running.
    pub fn open(pins: &Pins) -> Result<Self, MapsError> {
        let directory = pins.maps();
        if !directory.is_dir() {
            return Err(MapsError::Absent { path: pins.root().to_owned() });
        }
        Self::collect(|name| {
            let path = directory.join(name);
            MapData::from_pin(path).and_then(Map::from_map_data).map_err(|source| MapsError::Map {
                name,
                action: "open",
                source,
            })
        })
    }

    /// Takes the maps of a program that was loaded without pins.
    pub fn take(ebpf: &mut Ebpf) -> Result<Self, MapsError> {
        Self::collect(|name| ebpf.take_map(name).ok_or(MapsError::Missing { name }))
    }

    fn collect(mut map: impl FnMut(&'static str) -> Result<Map, MapsError>) -> Result<Self, MapsError> {
        let sieve = Sieve::new(map("sieve")?);
        Ok(Self {
            interfaces: Interfaces::new(map("interfaces")?),
            services: SievedTable::new(table("services", &mut map)?, sieve.clone()),
            flows: table("flows", &mut map)?,
            handshakes: table("handshakes", &mut map)?,
            replies: table("replies", &mut map)?,
            handshake_replies: table("handshake_replies", &mut map)?,
            fragments: table("fragments", &mut map)?,
            masquerades: table("masquerades", &mut map)?,
            masqueraded: table("masqueraded", &mut map)?,
            inside: Inside::new(map("inside")?, map("own")?, sieve.clone()),
            holders: SievedTable::new(table("holders", &mut map)?, sieve.clone()),
            endpoints: SievedTable::new(table("endpoints", &mut map)?, sieve.clone()),
            backends: map("backends")?,
            sieve,
            rings: Rings::new(map("rings")?),
            outcomes: map("outcomes")?,
            service_stats: map("service_stats")?,
        })
    }

    /// Number of backend slots, slot 0 included.
    pub fn backend_slots(&self) -> Result<u32, MapsError> {
        Ok(self.typed_backends()?.len())
    }

    /// Every slot, by id; slot 0 is never used.
    pub fn backends(&self) -> Result<Vec<Backend>, MapsError> {
        let Map::Array(data) = &self.backends else { return Err(MapsError::Missing { name: "backends" }) };
        let mut slots: Vec<(u32, Backend)> = sys::read_all(data.fd().as_fd(), self.backend_slots()?)
            .map_err(|source| MapsError::Batch { name: "backends", action: "read", source })?;
        slots.sort_unstable_by_key(|(id, _)| *id);
        Ok(slots.into_iter().map(|(_, backend)| backend).collect())
    }

    /// Up to `count` slots from this one on, by id.
    pub fn backends_from(&self, first: u32, count: u32) -> Result<Vec<Backend>, MapsError> {
        let Map::Array(data) = &self.backends else { return Err(MapsError::Missing { name: "backends" }) };
        sys::read_array(data.fd().as_fd(), first, count).map_err(|source| MapsError::Batch {
            name: "backends",
            action: "read",
            source,
        })
    }

    /// Writes a slot.
    pub fn set_backend(&mut self, id: u32, backend: &Backend) -> Result<(), MapsError> {
        self.sieve.set(Bit::of_backend(backend.port))?;
        let mut array: Array<&mut MapData, Backend> =
            Array::try_from(&mut self.backends).map_err(failed("backends", "open"))?;
        array.set(id, backend, 0).map_err(failed("backends", "write"))
    }

    fn typed_backends(&self) -> Result<Array<&MapData, Backend>, MapsError> {
        Array::try_from(&self.backends).map_err(failed("backends", "open"))
    }

    /// The number of places in the table of a served port; `None` where there is no table.
    pub fn ring_size(&self, service: u32) -> Result<Option<u32>, MapsError> {
        self.rings.size(service)
    }

    /// The table of a served port; `None` where there is none.
    pub fn ring(&self, service: u32) -> Result<Option<Vec<u32>>, MapsError> {
        self.rings.table(service)
    }

    /// Replaces the table of one served port: see [`Maps::set_rings`].
    pub fn set_ring(&mut self, service: u32, table: &[u32]) -> Result<(), MapsError> {
        self.set_rings(&[(service, table.to_vec())])
    }

    /// Replaces tables of served ports, each in one store as packets see it. An empty table refuses every new connection.
    pub fn set_rings(&mut self, tables: &[(u32, Vec<u32>)]) -> Result<(), MapsError> {
        self.rings.set(tables)
    }

    /// The sieve's words, by index.
    pub fn sieve_words(&self) -> Result<Vec<u64>, MapsError> {
        self.sieve.words()
    }

    /// Replaces the sieve's words. Only for maps that no packet of the node comes to: a bit that is taken back hides entries.
    pub fn set_sieve_words(&mut self, words: &[u64]) -> Result<(), MapsError> {
        self.sieve.set_words(words)
    }

    /// Packets and bytes by reason, all CPUs together; reasons without a packet are left out.
    pub fn outcomes(&self) -> Result<BTreeMap<Reason, Outcome>, MapsError> {
        let array: PerCpuArray<&MapData, Outcome> =
            PerCpuArray::try_from(&self.outcomes).map_err(failed("outcomes", "open"))?;
        let mut all = BTreeMap::new();
        for reason in Reason::ALL {
            let values = array.get(&reason.number(), 0).map_err(failed("outcomes", "look up"))?;
            let sum = values.iter().fold(Outcome::default(), |a, b| Outcome {
                packets: a.packets + b.packets,
                bytes: a.bytes + b.bytes,
            });
            if sum.packets != 0 {
                all.insert(*reason, sum);
            }
        }
        Ok(all)
    }

    /// Packets and bytes of a served port, all CPUs together.
    pub fn service_stats(&self, service: u32) -> Result<ServiceStats, MapsError> {
        let array: PerCpuArray<&MapData, ServiceStats> =
            PerCpuArray::try_from(&self.service_stats).map_err(failed("service_stats", "open"))?;
        let values = array.get(&service, 0).map_err(failed("service_stats", "look up"))?;
        Ok(values.iter().fold(ServiceStats::default(), |a, b| ServiceStats {
            packets_in: a.packets_in + b.packets_in,
            bytes_in: a.bytes_in + b.bytes_in,
            packets_out: a.packets_out + b.packets_out,
            bytes_out: a.bytes_out + b.bytes_out,
            connections: a.connections + b.connections,
            refused: a.refused + b.refused,
        }))
    }

    /// Sets the counters of a served port to zero, before its id is given to another.
    pub fn clear_service_stats(&mut self, service: u32) -> Result<(), MapsError> {
        let mut array: PerCpuArray<&mut MapData, ServiceStats> =
            PerCpuArray::try_from(&mut self.service_stats).map_err(failed("service_stats", "open"))?;
        let cpus = array.get(&service, 0).map_err(failed("service_stats", "look up"))?.len();
        let zero = aya::maps::PerCpuValues::try_from(vec![ServiceStats::default(); cpus])
            .map_err(|source| MapsError::Batch { name: "service_stats", action: "clear", source })?;
        array.set(service, zero, 0).map_err(failed("service_stats", "clear"))
    }
}

pub(super) fn failed(name: &'static str, action: &'static str) -> impl Fn(MapError) -> MapsError {
    move |source| MapsError::Map { name, action, source }
}

fn table<K, V>(
    name: &'static str,
    map: &mut impl FnMut(&'static str) -> Result<Map, MapsError>,
) -> Result<Table<K, V>, MapsError> {
    Ok(Table { name, map: map(name)?, types: PhantomData })
}
