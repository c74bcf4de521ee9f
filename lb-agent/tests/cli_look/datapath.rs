//! A datapath with known content, pinned in a directory of its own.

use aya::Ebpf;
use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use lb_agent::datapath::load::{self, Limits};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::pins::Pins;
use lb_common::addr::{Ipv4, Mac, Port, Protocol};
use lb_common::backend::{Backend, BackendState};
use lb_common::config::Config;
use lb_common::flow::{Flow, FlowKey, Path, Reply, State};
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::interface::Interface;
use lb_common::service::{Service, ServiceKey};
use nix::time::{ClockId, clock_gettime};
use std::fs;
use std::path::{Path as FilePath, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The interface whose hook a test run is on: the loopback.
const HOOK: u32 = 1;
/// In the future of every test: such an entry has been idle for no time at all.
pub(crate) const NEVER_IDLE: u32 = u32::MAX;

pub(crate) struct Datapath {
    pub(crate) maps: Maps,
    ebpf: Ebpf,
    removal: Removal,
}

/// Takes the pins away, however the test ends.
struct Removal {
    directory: PathBuf,
}

impl Drop for Removal {
    fn drop(&mut self) {
        // Also on the way out of a panic, where another one would hide the first.
        let _ = fs::remove_dir_all(&self.directory);
    }
}

pub(crate) fn key(source: [u8; 4], port: u16, destination: [u8; 4], destination_port: u16) -> FlowKey {
    FlowKey::new(
        Ipv4::new(source),
        Port::new(port),
        Ipv4::new(destination),
        Port::new(destination_port),
        Protocol::TCP,
    )
}

fn service_key(last: u8, port: u16, protocol: Protocol) -> ServiceKey {
    ServiceKey::new(Ipv4::new([192, 0, 2, last]), Port::new(port), protocol)
}

fn endpoint(address: [u8; 4], port: u16, protocol: Protocol, marks: &[u8]) -> (EndpointKey, EndpointHolders) {
    let mut holders = EndpointHolders::default();
    for mark in marks {
        holders.insert(*mark);
    }
    (EndpointKey::new(Ipv4::new(address), Port::new(port), protocol), holders)
}

impl Datapath {
    /// Empty maps.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        assert!(nix::unistd::geteuid().is_root(), "this test loads BPF programs: run it as root");
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory = PathBuf::from(format!("/sys/fs/bpf/reweave-lb-test-{}-{number}", std::process::id()));
        let pins = Pins::new(&directory);
        let limits = Limits { flows: 64, handshakes: 64, services: 16, backends: 8, endpoints: 16 };
        let removal = Removal { directory };
        let ebpf = load::load(&pins, &limits, &Config::DEFAULT).unwrap();
        Self { maps: Maps::open(&pins).unwrap(), ebpf, removal }
    }

    /// Three served ports (one with two backends, one without, one that has no table yet), another holder, and
    /// connections of every sort.
    pub(crate) fn filled() -> Self {
        let mut datapath = Self::new();
        let maps = &mut datapath.maps;
        maps.interfaces.insert(&HOOK, &Interface::UPLINK.and(Interface::PODS)).unwrap();
        for (id, key) in [
            (1, service_key(101, 80, Protocol::TCP)),
            (2, service_key(101, 53, Protocol::UDP)),
            (3, service_key(102, 443, Protocol::TCP)),
        ] {
            maps.services.insert(&key, &Service::new(id, false)).unwrap();
        }
        for (id, service, generation, address, state, local) in [
            (1, 1, 1, [10, 32, 1, 1], BackendState::Active, true),
            (2, 1, 4, [10, 32, 2, 1], BackendState::Draining, false),
            (5, 9, 2, [10, 32, 3, 1], BackendState::Active, false),
        ] {
            let (address, port) = (Ipv4::new(address), Port::new(8080));
            let backend = Backend::new(service, generation, address, port, state, local);
            maps.set_backend(id, &backend).unwrap();
        }
        maps.set_ring(1, &[1; 251]).unwrap();
        maps.set_ring(2, &[]).unwrap();
        maps.holders
            .insert(&Mac::new([2, 10, 32, 0, 0, 2]), &Holder::new(Ipv4::new([10, 32, 0, 2]), 7))
            .unwrap();
        for (key, holders) in [
            endpoint([10, 32, 1, 1], 8080, Protocol::TCP, &[EndpointHolders::SELF, 7]),
            endpoint([10, 32, 1, 1], 53, Protocol::UDP, &[7]),
            endpoint([10, 32, 2, 1], 8080, Protocol::TCP, &[EndpointHolders::SELF]),
        ] {
            maps.endpoints.insert(&key, &holders).unwrap();
        }
        datapath.connect();
        datapath
    }

    fn connect(&mut self) {
        let maps = &mut self.maps;
        let client = [198, 51, 100, 10];
        let address = [192, 0, 2, 101];
        let idle = Flow::new(1, 2, 4, Path::Redirect, State::Established, now() - 100);
        maps.flows.insert(&key(client, 40_001, address, 80), &idle).unwrap();
        let dead = Flow::new(1, 2, 3, Path::Stack, State::ClientClosed, NEVER_IDLE);
        maps.flows.insert(&key(client, 40_002, address, 80), &dead).unwrap();
        let opening = Flow::new(1, 1, 1, Path::Stack, State::Opening, NEVER_IDLE);
        maps.handshakes.insert(&key([198, 51, 100, 11], 40_003, address, 80), &opening).unwrap();
        let own = Reply::translate(Ipv4::new(address), Port::new(80), 1, Path::Redirect, NEVER_IDLE);
        maps.replies.insert(&key([10, 32, 2, 1], 8080, client, 40_001), &own).unwrap();
        let known = Reply::mark(7, State::Established, NEVER_IDLE);
        maps.replies.insert(&key([10, 32, 1, 1], 8080, [198, 51, 100, 12], 40_004), &known).unwrap();
        let unknown = Reply::mark(9, State::Answered, now() - 5);
        maps.handshake_replies.insert(&key([10, 32, 1, 1], 8080, client, 40_005), &unknown).unwrap();
    }

    /// Lets the ingress program see a frame, on a hook that sends nothing.
    pub(crate) fn receive(&mut self, frame: &[u8]) {
        let program: &mut SchedClassifier = load::classifier(&mut self.ebpf, load::PROGRAMS[0]).unwrap();
        let mut after = vec![0; frame.len() + 64];
        program
            .test_run(TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut after),
                ..TestRunOptions::default()
            })
            .unwrap();
    }

    pub(crate) fn directory(&self) -> &FilePath {
        &self.removal.directory
    }

    /// The pin of a map.
    pub(crate) fn pin(&self, map: &str) -> PathBuf {
        Pins::new(&self.removal.directory).maps().join(map)
    }
}

/// By the clock of the packet program.
pub(crate) fn now() -> u32 {
    u32::try_from(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap().tv_sec()).unwrap()
}

/// A SYN or a datagram from 198.51.100.20:50000 to an address in 192.0.2.0/24. Nobody here asks for its checksums.
pub(crate) fn frame(last: u8, port: u16, protocol: Protocol) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    let l4: &[u8] = if protocol == Protocol::TCP {
        &[0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0]
    } else {
        &[0, 8, 0, 0]
    };
    let length = u8::try_from(24 + l4.len()).unwrap();
    frame.extend([0x45, 0, 0, length, 0, 0, 0, 0, 64, protocol.number(), 0, 0]);
    frame.extend([198, 51, 100, 20, 192, 0, 2, last]);
    frame.extend(50_000_u16.to_be_bytes());
    frame.extend(port.to_be_bytes());
    frame.extend(l4);
    frame
}
