//! What is tried on each network: who connects, to which backends, by which protocol, and whom the pod should see.

use crate::bed::Bed;
use std::net::Ipv4Addr;
use testbed::{Host, Pod, Topology};

/// Where the backends of a Service are. Its ports are by place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Holder,
    Other,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

/// Somebody who connects.
pub(crate) struct Client {
    pub(crate) name: &'static str,
    /// Where its sockets are, for Services with their backends there.
    pub(crate) host: fn(&Bed, Place) -> &Host,
    /// Whom this backend should see.
    pub(crate) source: fn(&Bed, &Pod) -> Source,
}

/// Whom a backend sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The client itself: its address and its port.
    Itself,
    /// This address, with a port that somebody has allocated.
    Address(Ipv4Addr),
}

/// All who connect. Each is a row per network.
pub(crate) const CLIENTS: [Client; 8] = [
    Client { name: "outside", host: |bed, _| bed.testbed.client(), source: |_, _| Source::Itself },
    inside("pod of holder", |bed, _| &bed.clients[&1]),
    inside("pod of other", |bed, _| &bed.clients[&2]),
    inside("pod of third", |bed, _| &bed.clients[&3]),
    inside("the backend", |bed, place| &bed.pods[&place.nodes()[0]]),
    inside("holder", |bed, _| bed.testbed.node(1)),
    inside("other node", |bed, _| bed.testbed.node(2)),
    inside("third node", |bed, _| bed.testbed.node(3)),
];

/// Answers to clients inside the cluster would not always pass the holder, so pods see its overlay address.
const fn inside(name: &'static str, host: fn(&Bed, Place) -> &Host) -> Client {
    Client { name, host, source: |bed, _| Source::Address(bed.testbed.node(1).overlay()) }
}

impl Place {
    pub(crate) const ALL: [Self; 3] = [Self::Holder, Self::Other, Self::Both];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Holder => "on the holder",
            Self::Other => "on another node",
            Self::Both => "on both",
        }
    }

    /// The Service's name, and its port for both protocols.
    pub(crate) fn service(self) -> (&'static str, u16) {
        match self {
            Self::Holder => ("holder", 8001),
            Self::Other => ("other", 8002),
            Self::Both => ("both", 8003),
        }
    }

    /// The nodes with a backend.
    pub(crate) fn nodes(self) -> &'static [u8] {
        match self {
            Self::Holder => &[1],
            Self::Other => &[2],
            Self::Both => &[1, 2],
        }
    }

    /// Those of them whose backend the holder forwards to. Where every node is behind a router of its own, it serves pods
    /// of its own only, and says so: a forward would reach the other node with the router's Ethernet address, so nobody
    /// there would know which node the answer has to go back to.
    pub(crate) fn served(self, topology: Topology) -> impl Iterator<Item = u8> {
        let is_served = move |node: &u8| topology != Topology::Routed || *node == 1;
        self.nodes().iter().copied().filter(is_served)
    }
}

impl Protocol {
    pub(crate) const ALL: [Self; 2] = [Self::Tcp, Self::Udp];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        }
    }
}

/// The columns of the table.
pub(crate) fn columns() -> impl Iterator<Item = (Place, Protocol)> {
    Place::ALL.into_iter().flat_map(|place| Protocol::ALL.map(|protocol| (place, protocol)))
}
