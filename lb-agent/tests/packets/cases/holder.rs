//! The other node: forwards from a holder to a pod here, and the answers' way back.

use crate::case::{Case, FORWARDED, Place, ingress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, HOLDER, HOLDER_2, LOCAL, Lab, SERVED, now};
use lb_common::addr::{Port, Protocol};
use lb_common::flow::{Flow, Path, Reply, State};
use lb_common::holder::EndpointHolders;
use lb_common::reason::Reason;

pub(super) fn node(lab: &mut Lab) {
    lab.holder(HOLDER);
    lab.holder(HOLDER_2);
    both(lab);
}

fn both(lab: &mut Lab) {
    lab.endpoint(LOCAL, Protocol::TCP, &[HOLDER.1, HOLDER_2.1]);
    lab.endpoint(LOCAL, Protocol::UDP, &[HOLDER.1, HOLDER_2.1]);
}

fn second_only(lab: &mut Lab) {
    lab.endpoint(LOCAL, Protocol::TCP, &[HOLDER_2.1]);
    lab.endpoint(LOCAL, Protocol::UDP, &[HOLDER_2.1]);
}

/// As the holder sends it.
pub(super) fn forward() -> Frame {
    Frame::tcp(CLIENT, LOCAL).source_mac(HOLDER.0).ttl(63)
}

pub(super) fn answer() -> Frame {
    Frame::tcp(LOCAL, CLIENT).seq(5000)
}

impl Case {
    fn recognised(self, packet: &Frame) -> Self {
        self.send(ingress(Device::Overlay, packet).marks(Reason::HolderForward, FORWARDED))
    }

    fn led_back(self, packet: &Frame, mark: u8) -> Self {
        self.send(ingress(Device::Pods, packet).marks(Reason::HolderReply, u32::from(mark) << 24))
    }

    fn established_here(self) -> Self {
        self.recognised(&forward().syn())
            .led_back(&answer().syn().ack(1001), HOLDER.1)
            .recognised(&forward().seq(1001).ack(5001))
            .marked(&forward(), Place::Flows(State::Established), HOLDER.1)
    }
}

pub(crate) fn handshake() -> Case {
    Case::new(node)
        .recognised(&forward().syn())
        .marked(&forward(), Place::Handshakes(State::Opening), HOLDER.1)
        .led_back(&answer().syn().ack(1001), HOLDER.1)
        .marked(&forward(), Place::Handshakes(State::Answered), HOLDER.1)
        .recognised(&forward().seq(1001).ack(5000))
        .marked(&forward(), Place::Handshakes(State::Answered), HOLDER.1)
        .recognised(&forward().seq(1001).ack(5001))
        .marked(&forward(), Place::Flows(State::Established), HOLDER.1)
        .recognised(&forward().seq(1001).ack(5001).payload(b"data"))
        .led_back(&answer().ack(1005).payload(b"data"), HOLDER.1)
}

/// Other programs' bits stay in both directions.
pub(crate) fn other_mark_bits_stay() -> Case {
    Case::new(node)
        .send(
            ingress(Device::Overlay, forward().syn())
                .marked(0x0042_0001)
                .marks(Reason::HolderForward, FORWARDED | 0x0042_0001),
        )
        .send(
            ingress(Device::Pods, answer().syn().ack(1001))
                .marked(0x0042_0001)
                .marks(Reason::HolderReply, u32::from(HOLDER.1) << 24 | 0x0042_0001),
        )
}

pub(crate) fn mark_shift() -> Case {
    Case::new(node)
        .config(|config| config.mark_shift = 8)
        .send(
            ingress(Device::Overlay, forward().syn())
                .marked(0xaa00_00bb)
                .marks(Reason::HolderForward, 0xaa00_fbbb),
        )
        .send(
            ingress(Device::Pods, answer().syn().ack(1001))
                .marks(Reason::HolderReply, u32::from(HOLDER.1) << 8),
        )
}

pub(crate) fn closes() -> Case {
    Case::new(node)
        .established_here()
        .recognised(&forward().fin().seq(1001).ack(5001))
        .marked(&forward(), Place::Flows(State::ClientClosed), HOLDER.1)
        .led_back(&answer().fin().ack(1002), HOLDER.1)
        .marked(&forward(), Place::Flows(State::Closed), HOLDER.1)
        // The last acknowledgement still finds its way.
        .led_back(&answer().ack(1002), HOLDER.1)
        // And the client's next connection from the same port begins anew.
        .recognised(&forward().syn().seq(9000))
        .marked(&forward(), Place::Handshakes(State::Opening), HOLDER.1)
        .led_back(&answer().syn().seq(7000).ack(9001), HOLDER.1)
        .recognised(&forward().seq(9001).ack(7001))
        .marked(&forward(), Place::Flows(State::Established), HOLDER.1)
}

pub(crate) fn pod_refuses() -> Case {
    Case::new(node)
        .recognised(&forward().syn())
        .led_back(&answer().rst().ack(1001), HOLDER.1)
        .marked(&forward(), Place::Handshakes(State::Reset), HOLDER.1)
        .recognised(&forward().syn())
        .marked(&forward(), Place::Handshakes(State::Opening), HOLDER.1)
}

pub(crate) fn udp() -> Case {
    let forward = Frame::udp(CLIENT, LOCAL).source_mac(HOLDER.0);
    Case::new(node)
        .recognised(&forward)
        .marked(&forward, Place::Handshakes(State::Opening), HOLDER.1)
        .led_back(&Frame::udp(LOCAL, CLIENT), HOLDER.1)
        .marked(&forward, Place::Flows(State::Established), HOLDER.1)
        .recognised(&forward)
}

/// Recognition needs the link-layer address and the endpoint and the holder's forwarding to it.
pub(crate) fn not_a_forward() -> Case {
    let unknown_mac = forward().source_mac([2, 0, 0, 0, 0xbb, 9]).syn();
    let unknown_port = forward().to((LOCAL.0, 9090)).syn();
    let other_protocol = Frame::udp(CLIENT, LOCAL).source_mac(HOLDER.0);
    Case::new(|lab| {
        node(lab);
        lab.endpoint(LOCAL, Protocol::UDP, &[HOLDER_2.1]);
    })
    .send(ingress(Device::Overlay, &unknown_mac).passes(Reason::PassForeign))
    // Perhaps this node is about to hear of the endpoint: nothing is remembered, but nobody masquerades it.
    .send(ingress(Device::Overlay, &unknown_port).marks(Reason::PassForeign, FORWARDED))
    .send(ingress(Device::Overlay, &other_protocol).marks(Reason::PassForeign, FORWARDED))
    // The holder's own traffic.
    .send(
        ingress(Device::Overlay, unknown_port.from(([10, 40, 0, HOLDER.1], 50_000)))
            .passes(Reason::PassForeign),
    )
    // And the overlay: link-layer addresses of other networks mean nothing.
    .send(ingress(Device::Uplink, forward().syn()).passes(Reason::PassForeign))
    .send(ingress(Device::Pods, forward().syn()).passes(Reason::PassForeign))
    .marked(&forward(), Place::Nowhere, 0)
}

/// A2: the second holder's connection with the same tuple; the first keeps it.
pub(crate) fn live_tuple_is_not_taken_over() -> Case {
    let second = forward().source_mac(HOLDER_2.0);
    Case::new(node)
        .established_here()
        .send(ingress(Device::Overlay, second.clone().syn()).dropped(Reason::DropHolderConflict))
        .send(ingress(Device::Overlay, second.clone().ack(1)).dropped(Reason::DropHolderConflict))
        .led_back(&answer().ack(1001), HOLDER.1)
        // Not in a handshake either.
        .send(
            ingress(Device::Overlay, forward().from((CLIENT.0, 41_000)).syn())
                .marks(Reason::HolderForward, FORWARDED),
        )
        .send(
            ingress(Device::Overlay, second.from((CLIENT.0, 41_000)).syn())
                .dropped(Reason::DropHolderConflict),
        )
}

/// It may when the first is over.
pub(crate) fn closed_tuple_is_taken_over() -> Case {
    let second = forward().source_mac(HOLDER_2.0);
    Case::new(node)
        .established_here()
        .recognised(&forward().rst().seq(1001))
        .recognised(&second.clone().syn())
        .marked(&forward(), Place::Handshakes(State::Opening), HOLDER_2.1)
        .led_back(&answer().syn().ack(1001), HOLDER_2.1)
        .recognised(&second.seq(1001).ack(5001))
        .marked(&forward(), Place::Flows(State::Established), HOLDER_2.1)
}

/// It may when the first is idle beyond its time.
pub(crate) fn expired_tuple_is_taken_over() -> Case {
    Case::new(node)
        .config(|config| config.timeouts.established = 20)
        .established_here()
        .then(|lab| {
            let key = forward().key().reversed();
            let mut reply = lab.maps.replies.get(&key).unwrap().unwrap();
            reply.last_seen = now() - 21;
            lab.maps.replies.insert(&key, &reply).unwrap();
        })
        .recognised(&forward().source_mac(HOLDER_2.0).syn())
}

/// The address has moved: the first holder does not forward to the endpoint any more, so the second may go on with the
/// connection. The pod's next packet goes to the new holder and establishes it.
pub(crate) fn moved_holder_goes_on() -> Case {
    let moved = forward().source_mac(HOLDER_2.0).seq(1001).ack(5001);
    Case::new(node)
        .established_here()
        .then(second_only)
        .recognised(&moved)
        .marked(&forward(), Place::Handshakes(State::PickedUp), HOLDER_2.1)
        .led_back(&answer().ack(1001).payload(b"more"), HOLDER_2.1)
        .marked(&forward(), Place::Flows(State::Established), HOLDER_2.1)
}

/// The tuple of a connection to an address of this node itself.
pub(crate) fn own_connection_keeps_its_tuple() -> Case {
    let own = Frame::tcp(CLIENT, SERVED).key();
    Case::new(move |lab| {
        own_connection(lab);
        lab.endpoint(LOCAL, Protocol::TCP, &[HOLDER.1, EndpointHolders::SELF]);
    })
    .send(ingress(Device::Overlay, forward().syn()).dropped(Reason::DropHolderConflict))
    .then(move |lab| lab.maps.flows.remove(&own).unwrap())
    .recognised(&forward().syn())
    .marked(&forward(), Place::Handshakes(State::Opening), HOLDER.1)
}

/// A connection to an address of this node that uses the tuple of `forward()`.
fn own_connection(lab: &mut Lab) {
    let own = Frame::tcp(CLIENT, SERVED).key();
    node(lab);
    let flow = Flow::new(0, 1, 1, Path::Stack, State::Established, now());
    lab.maps.flows.insert(&own, &flow).unwrap();
    let reply = Reply::translate(own.destination, Port::new(SERVED.1), 0, Path::Stack, now());
    lab.maps.replies.insert(&forward().key().reversed(), &reply).unwrap();
}

/// The address of this node's connection has moved to the holder, and the connection with it: this node forwards to the
/// endpoint no more.
pub(crate) fn moved_connection_leaves_its_tuple() -> Case {
    Case::new(own_connection).recognised(&forward().ack(1)).marked(
        &forward(),
        Place::Handshakes(State::PickedUp),
        HOLDER.1,
    )
}

/// A reset without a connection is passed to the pod, and nothing is remembered.
pub(crate) fn stray_reset() -> Case {
    Case::new(node).recognised(&forward().rst()).marked(&forward(), Place::Nowhere, 0)
}

/// C7 on the other node.
pub(crate) fn table_full() -> Case {
    let other = |frame: Frame| frame.from((CLIENT.0, 40_001));
    Case::new(node)
        .limits(|limits| limits.flows = 1)
        .established_here()
        .recognised(&other(forward()).syn())
        .led_back(&answer().to((CLIENT.0, 40_001)).syn().ack(1001), HOLDER.1)
        .send(ingress(Device::Overlay, other(forward()).seq(1001).ack(5001)).dropped(Reason::DropTableFull))
        .recognised(&forward().seq(1001).ack(5001))
        .led_back(&answer().ack(1001), HOLDER.1)
        .recognised(&Frame::udp(CLIENT, LOCAL).source_mac(HOLDER.0))
        .send(ingress(Device::Pods, Frame::udp(LOCAL, CLIENT)).dropped(Reason::DropTableFull))
}

/// An answer to a marked connection on the overlay is not the pod's.
pub(crate) fn answer_on_the_overlay_is_foreign() -> Case {
    Case::new(node)
        .established_here()
        .send(ingress(Device::Overlay, answer().ack(1001)).passes(Reason::PassForeign))
}
