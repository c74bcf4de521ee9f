//! The cases, by subject.

pub(crate) mod backends;
pub(crate) mod collision;
pub(crate) mod egress;
pub(crate) mod foreign;
pub(crate) mod fragment;
pub(crate) mod full;
pub(crate) mod holder;
pub(crate) mod icmp;
pub(crate) mod inside;
pub(crate) mod inside_icmp;
pub(crate) mod mss;
pub(crate) mod refuse;
pub(crate) mod route;
pub(crate) mod shared_uplink;
pub(crate) mod tcp;
pub(crate) mod udp;

use crate::case::{Case, Place, ingress};
use crate::frame::{End, Frame};
use crate::lab::{
    CLIENT, Device, Lab, REMOTE, SERVED, SERVED_SAME_PORT, Slot, TCP_80, TCP_443, UDP_80, UDP_443, syn,
};
use lb_common::addr::Protocol;
use lb_common::flow::State;
use lb_common::holder::EndpointHolders;
use lb_common::reason::Reason;

/// The backend whose port is the served one's.
pub(crate) const REMOTE_SAME_PORT: End = (REMOTE.0, 443);

/// One remote backend behind each served port.
pub(crate) fn remote(lab: &mut Lab) {
    lab.serve(SERVED, Protocol::TCP, TCP_80, &[Slot::remote(1, REMOTE)]);
    lab.serve(SERVED, Protocol::UDP, UDP_80, &[Slot::remote(2, REMOTE)]);
    lab.serve(SERVED_SAME_PORT, Protocol::TCP, TCP_443, &[Slot::remote(3, REMOTE_SAME_PORT)]);
    lab.serve(SERVED_SAME_PORT, Protocol::UDP, UDP_443, &[Slot::remote(4, REMOTE_SAME_PORT)]);
    for (at, protocol) in
        [(REMOTE, Protocol::TCP), (REMOTE, Protocol::UDP), (REMOTE_SAME_PORT, Protocol::TCP)]
    {
        lab.endpoint(at, protocol, &[EndpointHolders::SELF]);
    }
}

/// The client's packet as it goes to a backend by redirect.
pub(crate) fn forwarded(packet: &Frame, backend: End) -> Frame {
    packet.clone().to(backend).ttl(63)
}

/// The backend's packet as it goes to the client by redirect.
pub(crate) fn translated(packet: &Frame) -> Frame {
    packet.clone().from(SERVED).ttl(63)
}

/// What `backend` answers the client's SYN with.
pub(crate) fn syn_ack(backend: End) -> Frame {
    Frame::tcp(backend, CLIENT).syn().seq(5000).ack(1001)
}

/// The third packet.
pub(crate) fn third() -> Frame {
    Frame::tcp(CLIENT, SERVED).seq(1001).ack(5001)
}

/// Data of the client and of the backend.
pub(crate) fn request() -> Frame {
    Frame::tcp(CLIENT, SERVED).seq(1001).ack(5001).payload(b"GET / HTTP/1.0\r\n\r\n")
}

pub(crate) fn response(backend: End) -> Frame {
    Frame::tcp(backend, CLIENT).seq(5001).ack(1019).payload(b"HTTP/1.0 200 OK\r\n\r\n")
}

impl Case {
    /// A packet of the client that goes to a backend by redirect.
    pub(crate) fn goes_to(self, packet: &Frame, backend: End) -> Self {
        let forward = forwarded(packet, backend);
        self.send(ingress(Device::Uplink, packet).redirected(Reason::ForwardRedirect, forward))
    }

    /// A packet of the backend that comes back over the overlay.
    pub(crate) fn comes_back(self, packet: &Frame) -> Self {
        let reply = translated(packet);
        self.send(ingress(Device::Overlay, packet).redirected(Reason::ReplyRedirect, reply))
    }

    /// A whole handshake of the client with a remote backend.
    pub(crate) fn established(self, backend: End) -> Self {
        self.goes_to(&syn(), backend).comes_back(&syn_ack(backend)).goes_to(&third(), backend).flow(
            &syn(),
            backend,
            Place::Flows(State::Established),
        )
    }
}
