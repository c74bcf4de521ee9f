//! A network without tunnel: clients and other nodes are behind one device.

use super::holder::{answer, forward, node};
use super::{remote, request, response, syn_ack, third, translated};
use crate::case::{Case, FORWARDED, Place, egress, ingress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, HOLDER, LOCAL, Lab, REMOTE, SERVED, syn};
use etherparse::Icmpv4Type;
use etherparse::icmpv4::DestUnreachableHeader;
use lb_common::flow::State;
use lb_common::interface::Interface;
use lb_common::reason::Reason;

fn shared(prepare: impl Fn(&mut Lab) + 'static) -> Case {
    Case::new(move |lab| {
        prepare(lab);
        let both = Interface::UPLINK.and(Interface::OVERLAY);
        lab.maps.interfaces.insert(&Device::Uplink.index(), &both).unwrap();
    })
}

impl Case {
    /// The backend's packet comes in where the client's does.
    fn comes_back_by_the_uplink(self, packet: &Frame) -> Self {
        self.send(ingress(Device::Uplink, packet).redirected(Reason::ReplyRedirect, translated(packet)))
    }

    fn established_over_one_device(self) -> Self {
        self.goes_to(&syn(), REMOTE).comes_back_by_the_uplink(&syn_ack(REMOTE)).goes_to(&third(), REMOTE)
    }
}

pub(crate) fn connection() -> Case {
    shared(remote)
        .established_over_one_device()
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
        .goes_to(&request(), REMOTE)
        .comes_back_by_the_uplink(&response(REMOTE))
}

pub(crate) fn forward_of_a_holder() -> Case {
    shared(node)
        .send(ingress(Device::Uplink, forward().syn()).marks(Reason::HolderForward, FORWARDED))
        .marked(&forward(), Place::Handshakes(State::Opening), HOLDER.1)
        .send(
            ingress(Device::Pods, answer().syn().ack(1001))
                .marks(Reason::HolderReply, u32::from(HOLDER.1) << 24),
        )
}

/// It may route for others: what goes to a NodePort here may need the masquerade that our mark would keep off.
pub(crate) fn other_traffic_of_a_holder() -> Case {
    let unknown_port = forward().to((LOCAL.0, 9090)).syn();
    let node_port = forward().to(([192, 0, 2, 10], 30_080)).syn();
    shared(node)
        .send(ingress(Device::Uplink, &node_port).passes(Reason::PassForeign))
        .send(ingress(Device::Uplink, &unknown_port).passes(Reason::PassForeign))
}

/// A client's about an answer, and a hop's about a client's packet.
pub(crate) fn errors_of_both_sides() -> Case {
    let smaller = || {
        Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: 1400 })
    };
    let (router, hop) = ([192, 0, 2, 1], [10, 40, 0, 254]);
    let answered = response(REMOTE).from(SERVED).dont_fragment();
    let to_pod = answered.clone().from(REMOTE).error_from(router, smaller(), 20).ttl(63);
    let to_client = request().error_from(SERVED.0, smaller(), 20).ttl(63);
    shared(remote)
        .established_over_one_device()
        .send(
            ingress(Device::Uplink, answered.error_from(router, smaller(), 20))
                .redirected(Reason::ForwardIcmpError, to_pod),
        )
        .send(
            ingress(Device::Uplink, request().to(REMOTE).error_from(hop, smaller(), 20))
                .redirected(Reason::ReplyIcmpError, to_client),
        )
}

/// An answer to another holder leaves as it is, without the mark that led it here.
pub(crate) fn marks_end() -> Case {
    let holder = u32::from(HOLDER.1) << 24;
    let answer = Frame::tcp(LOCAL, CLIENT).ack(1);
    let mut case = shared(node);
    for ours in [holder, FORWARDED] {
        case = case.send(
            egress(Device::Uplink, &answer)
                .marked(ours | 0x0042_0001)
                .marks(Reason::PassForeign, 0x0042_0001),
        );
    }
    case
}
