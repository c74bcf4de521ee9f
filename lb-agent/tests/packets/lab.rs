//! A node in a network namespace of its own, with the packet program loaded and fresh maps.

use crate::frame::{End, Frame};
use aya::Ebpf;
use aya::maps::Array;
use aya::programs::SchedClassifier;
use lb_agent::datapath::load::{self, Limits};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::testrun::{Meta, Runner};
use lb_common::addr::{Ipv4, Mac, Port, Protocol};
use lb_common::backend::{Backend, BackendState};
use lb_common::config::Config;
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::interface::Interface;
use lb_common::masquerade::{Network, Own};
use lb_common::service::{Service, ServiceKey};
use lb_common::way::BackendWay;
use std::fs;
use std::process::Command;

/// A client outside.
pub(crate) const CLIENT: End = ([198, 51, 100, 7], 40_000);
/// The address that this node holds, and its served port (TCP and UDP), which backends have as 8080.
pub(crate) const SERVED: End = ([192, 0, 2, 10], 80);
/// Another served port of it; its backends have the same.
pub(crate) const SERVED_SAME_PORT: End = ([192, 0, 2, 10], 443);
/// A pod on another node.
pub(crate) const REMOTE: End = ([10, 40, 0, 2], 8080);
/// Another one.
pub(crate) const REMOTE_2: End = ([10, 40, 0, 3], 8080);
/// A pod on this node.
pub(crate) const LOCAL: End = ([10, 32, 0, 2], 8080);

/// This node's address on the overlay, for whoever asks [`Lab::own`].
pub(crate) const OWN: [u8; 4] = [10, 32, 0, 1];

/// Two other nodes that hold addresses: link-layer address on the overlay, and mark.
pub(crate) const HOLDER: ([u8; 6], u8) = ([2, 0, 0, 0, 0xaa, 1], 17);
pub(crate) const HOLDER_2: ([u8; 6], u8) = ([2, 0, 0, 0, 0xaa, 2], 18);

/// Ids in the maps.
pub(crate) const TCP_80: u32 = 0;
pub(crate) const UDP_80: u32 = 1;
pub(crate) const TCP_443: u32 = 2;
pub(crate) const UDP_443: u32 = 3;

/// Where a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// `eth0`: clients and the router are behind it.
    Uplink,
    /// `vxlan`: the other nodes' frames.
    Overlay,
    /// `weave`: this node's pods.
    Pods,
    /// `lo`: this node's own processes.
    Node,
    /// `wire`: an interface without a role.
    Stranger,
}

/// Which program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    Ingress,
    Egress,
}

pub(crate) struct Lab {
    pub(crate) ebpf: Ebpf,
    pub(crate) maps: Maps,
    runner: Runner,
}

/// Small enough that a case loads at once.
pub(crate) const LIMITS: Limits =
    Limits { flows: 1024, handshakes: 1024, services: 16, backends: 64, endpoints: 64 };

/// Shell commands that make the node. All traffic stays inside: nothing leads out of the namespace.
const NODE: &str = "
    ip link set lo up
    ip link add eth0 address 02:00:00:00:00:10 type veth peer name wire
    ip link add weave address 02:00:00:00:00:20 type bridge
    ip link add vxlan type veth peer name tunnel
    ip link set vxlan master weave
    for device in eth0 wire weave vxlan tunnel; do ip link set $device up; done
    ip address add 192.0.2.10/24 dev eth0
    ip address add 10.32.0.1/12 dev weave
    ip route add default via 192.0.2.1
    ip neighbour add 192.0.2.1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent
";

impl Lab {
    /// Moves the calling thread into a new network namespace, which ends with the thread.
    pub(crate) fn new(config: &Config, limits: &Limits) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test loads BPF programs: run it as root");
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        sh(NODE);
        // The file belongs to the namespace of the thread that opens it.
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        let mut ebpf = load::load_unpinned(limits, config).unwrap();
        let maps = Maps::take(&mut ebpf).unwrap();
        let mut lab = Self { ebpf, maps, runner: Runner::default() };
        let roles = [
            (Device::Uplink, Interface::UPLINK),
            (Device::Overlay, Interface::OVERLAY),
            (Device::Pods, Interface::PODS),
            (Device::Node, Interface::NODE),
        ];
        for (device, role) in roles {
            lab.maps.interfaces.insert(&device.index(), &role).unwrap();
        }
        lab
    }

    /// A served port with its backends, the first in slot `first`; each is in the ring.
    pub(crate) fn serve(&mut self, at: End, protocol: Protocol, service: u32, backends: &[Slot]) {
        for slot in backends {
            self.set_backend(service, slot);
        }
        let ring: Vec<u32> = match backends {
            [] => Vec::new(),
            some => some.iter().map(|slot| slot.id).cycle().take(251).collect(),
        };
        self.maps.set_ring(service, &ring).unwrap();
        self.announce(at, protocol, service);
    }

    /// The served port alone.
    pub(crate) fn announce(&mut self, at: End, protocol: Protocol, service: u32) {
        let key = ServiceKey::new(Ipv4::new(at.0), Port::new(at.1), protocol);
        self.maps.services.insert(&key, &Service::new(service, false)).unwrap();
    }

    pub(crate) fn set_backend(&mut self, service: u32, slot: &Slot) {
        let Slot { id, generation, at, state, local } = *slot;
        let backend = Backend::new(service, generation, Ipv4::new(at.0), Port::new(at.1), state, local);
        self.maps.set_backend(id, &backend).unwrap();
    }

    /// The ways to backends, so that the kernel is asked again.
    pub(crate) fn forget_ways(&mut self) {
        let map = self.ebpf.map_mut("ways").unwrap();
        let mut ways: Array<_, BackendWay> = Array::try_from(map).unwrap();
        for id in 0..ways.len() {
            ways.set(id, BackendWay::default(), 0).unwrap();
        }
    }

    /// An endpoint, and which holders forward to it.
    pub(crate) fn endpoint(&mut self, at: End, protocol: Protocol, marks: &[u8]) {
        let key = EndpointKey::new(Ipv4::new(at.0), Port::new(at.1), protocol);
        let mut holders = EndpointHolders::default();
        for mark in marks {
            holders.insert(*mark);
        }
        self.maps.endpoints.insert(&key, &holders).unwrap();
    }

    pub(crate) fn holder(&mut self, (mac, mark): ([u8; 6], u8)) {
        let holder = Holder::new(Ipv4::new([10, 40, 0, mark]), mark);
        self.maps.holders.insert(&Mac::new(mac), &holder).unwrap();
    }

    /// What packets know of this node: [`OWN`].
    pub(crate) fn own(&mut self) {
        self.maps.inside.set_own(Own { overlay: Ipv4::new(OWN), ..Own::default() }).unwrap();
    }

    /// A network whose hosts are inside the cluster.
    pub(crate) fn inside(&mut self, address: [u8; 4], prefix: u32) {
        self.maps.inside.insert(Network { prefix, address: Ipv4::new(address) }).unwrap();
    }

    /// Runs one of the programs on a packet: verdict, bytes and mark.
    pub(crate) fn run(&mut self, hook: Hook, bytes: &[u8], meta: Meta) -> (i32, &[u8], u32) {
        let name = match hook {
            Hook::Ingress => "reweave_ingress",
            Hook::Egress => "reweave_egress",
        };
        let verdict = self.run_program(name, bytes, meta);
        (verdict, self.runner.packet(), self.runner.mark())
    }

    /// The same by name, and the verdict only.
    pub(crate) fn run_program(&mut self, name: &str, bytes: &[u8], meta: Meta) -> i32 {
        let program: &SchedClassifier = self.ebpf.program(name).unwrap().try_into().unwrap();
        self.runner.run(program, bytes, meta).unwrap()
    }
}

/// One backend slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) id: u32,
    pub(crate) generation: u32,
    pub(crate) at: End,
    pub(crate) state: BackendState,
    pub(crate) local: bool,
}

impl Slot {
    pub(crate) const fn remote(id: u32, at: End) -> Self {
        Self { id, generation: 1, at, state: BackendState::Active, local: false }
    }

    pub(crate) const fn local(id: u32, at: End) -> Self {
        Self { local: true, ..Self::remote(id, at) }
    }

    pub(crate) const fn state(self, state: BackendState) -> Self {
        Self { state, ..self }
    }

    pub(crate) const fn generation(self, generation: u32) -> Self {
        Self { generation, ..self }
    }
}

impl Device {
    /// In the calling thread's namespace.
    pub(crate) fn index(self) -> u32 {
        let name = match self {
            Self::Uplink => "eth0",
            Self::Overlay => "vxlan",
            Self::Pods => "weave",
            Self::Node => "lo",
            Self::Stranger => "wire",
        };
        nix::net::if_::if_nametoindex(name).unwrap()
    }
}

/// Seconds of the clock that flow entries use.
pub(crate) fn now() -> u32 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
    u32::try_from(now.tv_sec()).unwrap()
}

/// In the calling thread's namespace.
pub(crate) fn sh(script: &str) {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Bytes for people, sixteen to a line, lines that differ between the two marked.
pub(crate) fn diff(expected: &[u8], found: &[u8]) -> String {
    let line = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x} ")).collect::<String>();
    let rows = expected.len().max(found.len()).div_ceil(16);
    let row = |bytes: &[u8], n: usize| -> Vec<u8> { bytes.iter().copied().skip(n * 16).take(16).collect() };
    (0..rows)
        .map(|n| {
            let (wanted, got) = (row(expected, n), row(found, n));
            if wanted == got {
                format!("  {:4x}   {}\n", n * 16, line(&wanted))
            } else {
                format!("  {:4x} - {}\n       + {}\n", n * 16, line(&wanted), line(&got))
            }
        })
        .collect()
}

/// What the client sends to begin a connection.
pub(crate) fn syn() -> Frame {
    Frame::tcp(CLIENT, SERVED).syn().tcp_options(&[2, 4, 5, 0xb4])
}
