//! What is tried on each network: who connects, to which backends, by which protocol, and whom the pod should see.

use crate::bed::{ADDRESS, Backend, Bed};
use std::net::Ipv4Addr;
use testbed::{Host, Topology};

/// Where the backends of a Service are. Its ports are by place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Holder,
    Other,
    Both,
    /// On the network of the holder itself.
    HostOfHolder,
    HostOfOther,
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
    pub(crate) source: fn(&Bed, &Backend) -> Source,
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
    Client { name: "outside", host: |bed, _| bed.testbed.client(), source: outside },
    inside("pod of holder", |bed, _| &bed.clients[&1]),
    inside("pod of other", |bed, _| &bed.clients[&2]),
    inside("pod of third", |bed, _| &bed.clients[&3]),
    inside("the backend", |bed, place| bed.backends[&place.backends()[0]].host(bed)),
    inside("holder", |bed, _| bed.testbed.node(1)),
    inside("other node", |bed, _| bed.testbed.node(2)),
    inside("third node", |bed, _| bed.testbed.node(3)),
];

/// Answers to clients inside the cluster would not always pass the holder, so pods see its overlay address.
const fn inside(name: &'static str, host: fn(&Bed, Place) -> &Host) -> Client {
    Client { name, host, source: inside_source }
}

/// Where an answer to a client would leave by other ways than the holder, the source is rewritten too.
fn outside(bed: &Bed, backend: &Backend) -> Source {
    if backend.node == 1 {
        return Source::Itself;
    }
    match (bed.testbed.topology(), backend.is_host) {
        (Topology::Routed, _) | (_, true) => inside_source(bed, backend),
        (_, false) => Source::Itself,
    }
}

/// The holder's overlay address; but a node sees one on its own network: itself, or the Service's.
fn inside_source(bed: &Bed, backend: &Backend) -> Source {
    let holder = bed.testbed.node(1);
    Source::Address(match (backend.is_host, backend.node) {
        (true, 1) => holder.address(),
        (true, _) if holder.overlay() != holder.address() => ADDRESS,
        _ => holder.overlay(),
    })
}

impl Place {
    pub(crate) const ALL: [Self; 5] =
        [Self::Holder, Self::Other, Self::Both, Self::HostOfHolder, Self::HostOfOther];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Holder => "on the holder",
            Self::Other => "on another node",
            Self::Both => "on both",
            Self::HostOfHolder => "holder itself",
            Self::HostOfOther => "other node",
        }
    }

    /// The Service's name, and its port for both protocols.
    pub(crate) fn service(self) -> (&'static str, u16) {
        match self {
            Self::Holder => ("holder", 8001),
            Self::Other => ("other", 8002),
            Self::Both => ("both", 8003),
            Self::HostOfHolder => ("host-holder", 8004),
            Self::HostOfOther => ("host-other", 8005),
        }
    }

    /// The names of its backends.
    pub(crate) fn backends(self) -> &'static [&'static str] {
        match self {
            Self::Holder => &["pod-1"],
            Self::Other => &["pod-2"],
            Self::Both => &["pod-1", "pod-2"],
            Self::HostOfHolder => &["n1"],
            Self::HostOfOther => &["n2"],
        }
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
