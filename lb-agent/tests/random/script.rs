//! What happens in a sequence, as data that a seed gives.

use fastrand::Rng;
use testbed::Topology;

/// The networks that are tried; a seed names one of them.
const TOPOLOGIES: [Topology; 5] =
    [Topology::Weave, Topology::Flannel, Topology::HostGw, Topology::CalicoVxlan, Topology::Calico];
/// Pods of the Services, by number. Each sequence begins with one on each node.
pub(crate) const SLOTS: u8 = 3;
const NODES: u8 = 3;

/// One sequence.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) seed: u64,
    pub(crate) topology: Topology,
    pub(crate) steps: Vec<Step>,
}

/// Something that happens, and how many questions clients ask before the next thing does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) event: Event,
    pub(crate) questions: u64,
}

/// See the names. What is already as an event would have it stays so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    PodAdded {
        slot: u8,
        node: u8,
    },
    PodRemoved {
        slot: u8,
    },
    PodMoved {
        slot: u8,
        node: u8,
    },
    /// These pods are ready, of those that there are; the others are not.
    EndpointsChanged {
        ready: [bool; SLOTS as usize],
    },
    AgentKilled {
        node: u8,
    },
    AgentRestarted {
        node: u8,
    },
    /// Carrier is lost, and comes back.
    CablePulled {
        node: u8,
    },
    /// Down and up by somebody who then puts back the routes that this has removed, but ours.
    LinkFlapped {
        node: u8,
        link: Link,
    },
    Lost {
        node: u8,
        what: Thing,
    },
    AddressMoved {
        to: u8,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    Uplink,
    Overlay,
}

/// What somebody else removes of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thing {
    Rules,
    Routes,
    Table,
    Programs,
}

impl Thing {
    /// Whether nothing can hold its place until it is back: without programs or the identity NAT, the node does to packets
    /// what it would do without us.
    pub(crate) fn is_missed(self) -> bool {
        matches!(self, Self::Table | Self::Programs)
    }
}

impl Script {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let topology = TOPOLOGIES[usize::try_from(seed % 5).unwrap_or_default()];
        let steps = (0..rng.usize(3..7))
            .map(|_| Step { event: event(&mut rng), questions: rng.u64(0..30) })
            .collect();
        Self { seed, topology, steps }
    }
}

fn event(rng: &mut Rng) -> Event {
    let (slot, node) = (rng.u8(0..SLOTS), rng.u8(1..=NODES));
    match rng.u8(0..15) {
        0 => Event::PodAdded { slot, node },
        1 | 2 => Event::PodRemoved { slot },
        3 => Event::PodMoved { slot, node },
        4 => Event::EndpointsChanged { ready: [rng.bool(), rng.bool(), rng.bool()] },
        5 => Event::AgentKilled { node },
        6 => Event::AgentRestarted { node },
        7 => Event::CablePulled { node },
        8 => Event::LinkFlapped { node, link: Link::Uplink },
        9 => Event::LinkFlapped { node, link: Link::Overlay },
        10 => Event::Lost { node, what: Thing::Rules },
        11 => Event::Lost { node, what: Thing::Routes },
        12 => Event::Lost { node, what: if rng.bool() { Thing::Table } else { Thing::Programs } },
        _ => Event::AddressMoved { to: node },
    }
}
