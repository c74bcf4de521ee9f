//! ICMP errors about packets of clients inside the cluster: both ends of what they quote are others than the packet's.

use super::icmp::{EIGHT, HOP, ROUTER, WHOLE, port, smaller};
use super::inside::{
    ASIDE, OTHER_NODE, POD, POD_TO_REMOTE, PROCESS, Walk, forget_owner, node, node_with_aside,
    node_with_local,
};
use crate::case::{Case, ingress};
use crate::frame::Frame;
use crate::lab::{Device, SERVED};
use etherparse::Icmpv4Type;
use lb_common::addr::Protocol;
use lb_common::reason::Reason;

impl Case {
    /// What `teller` says about the client's `packet`, as that has left, is told to the client in its own terms.
    fn tells_client(
        self,
        walk: Walk,
        packet: &Frame,
        (teller, kind): ([u8; 4], &Icmpv4Type),
        quoted: usize,
    ) -> Self {
        let source = walk.source(packet.key().protocol);
        let about = packet.clone().from(source).to(walk.backend).error_from(teller, kind.clone(), quoted);
        let due = walk.back(packet.error_from(SERVED.0, kind.clone(), quoted).ttl(63));
        self.send(ingress(walk.ways_in.1, about).redirected(Reason::ReplyIcmpError, due))
    }

    /// What `teller` says about the backend's `answer`, as the client has got it, is told to the backend.
    fn tells_backend(
        self,
        walk: Walk,
        answer: &Frame,
        (teller, kind): ([u8; 4], &Icmpv4Type),
        quoted: usize,
    ) -> Self {
        let about = answer.clone().from(SERVED).to(walk.client).error_from(teller, kind.clone(), quoted);
        let due = walk.forth(answer.error_from(walk.outer, kind.clone(), quoted).ttl(63));
        self.send(ingress(walk.ways_in.0, about).redirected(Reason::ForwardIcmpError, due))
    }

    /// Both, in TCP and UDP.
    fn tells_both(self, walk: Walk) -> Self {
        let request = walk.tcp().seq(1001).ack(5001).payload(b"request").dont_fragment();
        let response = walk.answer().seq(5001).ack(1008).payload(b"response").dont_fragment();
        let query = Frame::udp(walk.client, SERVED).payload(b"query");
        let answer = Frame::udp(walk.backend, walk.source(Protocol::UDP)).payload(b"answer");
        self.shakes_hands(walk)
            .tells_client(walk, &request, (HOP, &smaller()), EIGHT)
            .tells_client(walk, &request, (HOP, &smaller()), WHOLE)
            .tells_backend(walk, &response, (walk.client.0, &smaller()), EIGHT)
            .tells_backend(walk, &response, (walk.client.0, &smaller()), WHOLE)
            .walks(walk, &query)
            // The backend has no socket.
            .tells_client(walk, &query, (walk.backend.0, &port()), EIGHT)
            .tells_client(walk, &query.clone().without_checksum(), (walk.backend.0, &port()), EIGHT + 5)
            .walks_back(walk, &answer)
            // The client has none any more.
            .tells_backend(walk, &answer, (walk.client.0, &port()), EIGHT)
            .tells_backend(walk, &answer.without_checksum(), (walk.client.0, &port()), EIGHT)
    }
}

pub(crate) fn pod() -> Case {
    Case::new(node).tells_both(POD_TO_REMOTE)
}

pub(crate) fn pod_to_local() -> Case {
    Case::new(node_with_local).tells_both(POD_TO_REMOTE.to_local())
}

/// By `lo`, as all that is for the node itself from an address of its own.
pub(crate) fn process() -> Case {
    Case::new(node).tells_both(POD_TO_REMOTE.of_process(PROCESS))
}

/// Who tells the backend is the holder, as the backend knows nobody else of the connection.
pub(crate) fn other_node() -> Case {
    let walk = POD_TO_REMOTE.of_other_node();
    let response = walk.answer().seq(5001).ack(1008).payload(b"response").dont_fragment();
    Case::new(node).tells_both(walk).tells_backend(walk, &response, (ROUTER, &smaller()), WHOLE)
}

/// About a backend that sees the Service's address, and tells that.
pub(crate) fn backend_aside() -> Case {
    Case::new(node_with_aside).tells_both(ASIDE)
}

/// The port has another owner by now: nobody is told of what was not theirs.
pub(crate) fn owner_has_changed() -> Case {
    let walk = POD_TO_REMOTE;
    let request = walk.tcp().seq(1001).ack(5001);
    let about = request.from(walk.source(Protocol::TCP)).to(walk.backend).error_from(HOP, smaller(), WHOLE);
    let answer = walk.answer().seq(5001).ack(1001).from(SERVED).to(POD).error_from(POD.0, smaller(), WHOLE);
    Case::new(node)
        .shakes_hands(walk)
        .then(move |lab| forget_owner(lab, walk))
        .send(ingress(Device::Overlay, about).dropped(Reason::DropReplyUnknown))
        .send(ingress(Device::Pods, answer).passes(Reason::PassOtherProtocol))
}

/// Nothing is made up about connections that are not known.
pub(crate) fn not_of_ours() -> Case {
    let about = |client| Frame::tcp(SERVED, client).ack(1).error_from(ROUTER, smaller(), WHOLE);
    Case::new(node)
        .shakes_hands(POD_TO_REMOTE)
        .send(ingress(Device::Pods, about((POD.0, 41_000))).passes(Reason::PassOtherProtocol))
        .send(ingress(Device::Node, about(PROCESS)).passes(Reason::PassOtherProtocol))
        .send(ingress(Device::Uplink, about(OTHER_NODE)).passes(Reason::PassOtherProtocol))
        .send(ingress(Device::Pods, about(POD).ttl(1)).dropped(Reason::DropTtl))
}
