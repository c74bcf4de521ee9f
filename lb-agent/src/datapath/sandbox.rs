//! The packet program on copies of map entries: what it would do with a packet, without any effect on the node.
//!
//! Nothing of the program's decisions is written a second time for that. A copy of the program runs on a packet
//! (`BPF_PROG_TEST_RUN`, which sends nothing) and asks the node's own routes, neighbours and sockets.

use super::attach::Direction;
use super::copies::Copies;
use super::load::{self, Limits, LoadError};
use super::maps::{Maps, MapsError};
use super::testrun::{Meta, Runner};
use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::ProgramError;
use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::backend::Backend;
use lb_common::config::Config;
use lb_common::flow::{Flow, FlowKey, Reply};
use lb_common::reason::Reason;
use lb_common::way::{BackendWay, Way};

/// Room for what a few packets add.
const SPARE: u32 = 16;

/// A datapath of its own, that no packet of the node comes to.
#[derive(Debug)]
pub struct Sandbox {
    ebpf: Ebpf,
    maps: Maps,
    runner: Runner,
    limits: Limits,
    config: Config,
}

/// What the program did with a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// What the hook was told, `TC_ACT_*`.
    pub action: i32,
    /// What was counted.
    pub reason: Reason,
    /// The frame afterwards.
    pub frame: Vec<u8>,
    /// The packet mark afterwards.
    pub mark: u32,
}

/// Why it could not be seen.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The copy of the program.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Its maps.
    #[error(transparent)]
    Maps(#[from] MapsError),
    /// The run.
    #[error(
        "the program cannot be tried on interface {interface}: is this the agent's network namespace? A frame of \
         {length} bytes"
    )]
    Run {
        /// Index of the interface.
        interface: u32,
        /// Of the frame.
        length: usize,
        /// What the kernel said.
        #[source]
        source: ProgramError,
    },
    /// The program counted nothing, or more than once.
    #[error("the program counted {0} outcomes for one packet")]
    Outcomes(usize),
}

impl Sandbox {
    /// Loads a program with these constants, on maps that hold the copies and no more than they need.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(copies: &Copies, config: &Config) -> Result<Self, SandboxError> {
        Self::with_limits(&limits(copies), copies, config)
    }

    /// The same on maps with these limits.
    ///
    /// # Errors
    /// The kernel refuses, or the copies do not fit.
    pub fn with_limits(limits: &Limits, copies: &Copies, config: &Config) -> Result<Self, SandboxError> {
        let mut ebpf = load::load_unpinned(limits, config)?;
        let mut sandbox = Self {
            maps: Maps::take(&mut ebpf)?,
            ebpf,
            runner: Runner::default(),
            limits: *limits,
            config: *config,
        };
        sandbox.fill(copies)?;
        Ok(sandbox)
    }

    /// Runs the program of a hook on a frame. What it writes into the maps stays for the next frame.
    ///
    /// # Errors
    /// There is no such interface in this network namespace, or the kernel refuses the frame.
    pub fn run(&mut self, hook: Direction, frame: &[u8], meta: Meta) -> Result<Verdict, SandboxError> {
        let before = self.maps.outcomes()?;
        let program = load::classifier(&mut self.ebpf, hook.program())?;
        let action = self.runner.run(program, frame, meta).map_err(|source| SandboxError::Run {
            interface: meta.interface,
            length: frame.len(),
            source,
        })?;
        let after = self.maps.outcomes()?;
        let counted = after.into_iter().filter(|(reason, outcome)| before.get(reason) != Some(outcome));
        let reasons: Vec<Reason> = counted.map(|(reason, _)| reason).collect();
        let [reason] = reasons[..] else { return Err(SandboxError::Outcomes(reasons.len())) };
        Ok(Verdict { action, reason, frame: self.runner.packet().to_vec(), mark: self.runner.mark() })
    }

    /// The hash of the ingress program's instructions, see [`super::loaded::Loaded::tag`].
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn tag(&mut self) -> Result<u64, SandboxError> {
        let program = load::classifier(&mut self.ebpf, Direction::Ingress.program())?;
        let info = program.info();
        Ok(info.map_err(|source| LoadError::Verify { name: Direction::Ingress.program(), source })?.tag())
    }

    /// The constants that its program has.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the maps hold of a connection by now.
    pub fn maps(&self) -> &Maps {
        &self.maps
    }

    /// The way to a backend that the kernel has named to the program.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn way(&self, slot: u32) -> Result<Option<Way>, MapsError> {
        let failed = super::maps::failed("ways", "read");
        let map = self.ebpf.map("ways").ok_or(MapsError::Missing { name: "ways" })?;
        let ways: Array<&MapData, BackendWay> = Array::try_from(map).map_err(&failed)?;
        Ok(ways.get(&slot, 0).map_err(&failed)?.last())
    }

    /// Forgets the packets that it has seen: the maps hold these copies alone, but that a served port keeps its table
    /// where they have none.
    ///
    /// # Errors
    /// The kernel refuses, or the copies do not fit.
    pub fn reset(&mut self, copies: &Copies) -> Result<(), MapsError> {
        let maps = &mut self.maps;
        for index in maps.interfaces.all()?.keys() {
            maps.interfaces.remove(index)?;
        }
        for (slot, backend) in (0_u32..).zip(maps.backends()?) {
            if backend != Backend::default() {
                maps.set_backend(slot, &Backend::default())?;
            }
        }
        for (key, _) in maps.services.list()? {
            maps.services.remove(&key)?;
        }
        for (mac, _) in maps.holders.list()? {
            maps.holders.remove(&mac)?;
        }
        for (key, _) in maps.endpoints.list()? {
            maps.endpoints.remove(&key)?;
        }
        for table in [&mut maps.flows, &mut maps.handshakes] {
            for (key, _) in table.list()? {
                table.remove(&key)?;
            }
        }
        for table in [&mut maps.replies, &mut maps.handshake_replies] {
            for (key, _) in table.list()? {
                table.remove(&key)?;
            }
        }
        for (key, _) in maps.masquerades.list()? {
            maps.masquerades.remove(&key)?;
        }
        for (key, _) in maps.masqueraded.list()? {
            maps.masqueraded.remove(&key)?;
        }
        for network in maps.inside.networks()? {
            maps.inside.remove(network)?;
        }
        self.forget_ways()?;
        self.fill(copies)
    }

    fn forget_ways(&mut self) -> Result<(), MapsError> {
        let failed = super::maps::failed("ways", "write");
        let map = self.ebpf.map_mut("ways").ok_or(MapsError::Missing { name: "ways" })?;
        let mut ways: Array<&mut MapData, BackendWay> = Array::try_from(map).map_err(&failed)?;
        for slot in 0..self.limits.backends {
            ways.set(slot, BackendWay::default(), 0).map_err(&failed)?;
        }
        Ok(())
    }

    fn fill(&mut self, copies: &Copies) -> Result<(), MapsError> {
        let Copies {
            interfaces,
            sieve,
            service,
            ring,
            backends,
            flows,
            handshakes,
            replies,
            handshake_replies,
            masquerades,
            masqueraded,
            inside,
            own,
            holders,
            endpoints,
            flows_full,
            replies_full,
        } = copies;
        let maps = &mut self.maps;
        for (index, roles) in interfaces {
            maps.interfaces.insert(index, roles)?;
        }
        for (slot, backend) in backends {
            maps.set_backend(*slot, backend)?;
        }
        if let Some((key, service)) = service {
            maps.services.insert(key, service)?;
            if let Some(ring) = ring {
                maps.set_ring(service.id, ring)?;
            }
        }
        for (key, value) in flows {
            maps.flows.insert(key, value)?;
        }
        for (key, value) in handshakes {
            maps.handshakes.insert(key, value)?;
        }
        for (key, value) in replies {
            maps.replies.insert(key, value)?;
        }
        for (key, value) in handshake_replies {
            maps.handshake_replies.insert(key, value)?;
        }
        for (key, value) in masquerades {
            maps.masquerades.insert(key, value)?;
        }
        for (key, value) in masqueraded {
            maps.masqueraded.insert(key, value)?;
        }
        for network in inside {
            maps.inside.insert(*network)?;
        }
        maps.inside.set_own(*own)?;
        for (mac, holder) in holders {
            maps.holders.insert(mac, holder)?;
        }
        for (key, value) in endpoints {
            maps.endpoints.insert(key, value)?;
        }
        let room = self.limits.flows;
        if *flows_full {
            for key in nobodys(room, flows.len()) {
                maps.flows.insert(&key, &Flow::default())?;
            }
        }
        if *replies_full {
            for key in nobodys(room, replies.len()) {
                maps.replies.insert(&key, &Reply::default())?;
            }
        }
        // Last: a bit that is missing on the node is missing here.
        maps.set_sieve_words(sieve)
    }
}

/// As much as the copies need. Slots and ids keep their numbers.
fn limits(copies: &Copies) -> Limits {
    let count = |entries: usize| u32::try_from(entries).unwrap_or(u32::MAX);
    let entries = copies.flows.len().max(copies.replies.len());
    Limits {
        flows: count(entries) + SPARE,
        handshakes: count(copies.handshakes.len().max(copies.handshake_replies.len())).max(4_096),
        services: copies.service.map_or(0, |(_, service)| service.id) + 1,
        backends: copies.backends.keys().max().copied().unwrap_or(0) + 1,
        endpoints: count(copies.endpoints.len()) + 1,
    }
}

/// Keys that no packet has, to fill a table with `used` entries up to its limit.
fn nobodys(limit: u32, used: usize) -> impl Iterator<Item = FlowKey> {
    let used = u32::try_from(used).unwrap_or(u32::MAX);
    (used..limit).map(|number| {
        let zero = Port::new(0);
        FlowKey::new(Ipv4::new(number.to_be_bytes()), zero, Ipv4::default(), zero, Protocol::new(0))
    })
}
