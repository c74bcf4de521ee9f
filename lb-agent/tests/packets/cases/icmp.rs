//! ICMP errors about packets of forwarded connections: each end hears of its own packets.

use super::{remote, request, response, syn_ack, third};
use crate::case::{Case, FORWARDED, Place, egress, ingress};
use crate::frame::{End, Frame};
use crate::lab::{CLIENT, Device, HOLDER, LOCAL, Lab, REMOTE, SERVED, Slot, TCP_80, UDP_80, sh, syn};
use etherparse::Icmpv4Type;
use etherparse::icmpv4::{DestUnreachableHeader, ParameterProblemHeader, TimeExceededCode};
use lb_common::addr::Protocol;
use lb_common::flow::State;
use lb_common::reason::Reason;

/// On the client's side.
pub(super) const ROUTER: [u8; 4] = [192, 0, 2, 1];
/// On the pods' side, and on the side of other nodes.
pub(super) const HOP: [u8; 4] = [10, 40, 0, 254];
/// All that must be quoted of a transport header; the whole of it.
pub(super) const EIGHT: usize = 8;
pub(super) const WHOLE: usize = 20;

pub(super) fn smaller() -> Icmpv4Type {
    Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: 1400 })
}

pub(super) fn port() -> Icmpv4Type {
    Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port)
}

/// The backend's answer as it left towards the client.
fn answered() -> Frame {
    response(REMOTE).from(SERVED).dont_fragment()
}

impl Case {
    /// What a router tells the address about `answer` is led to `backend`, about the packet that that one sent.
    fn leads(self, answer: &Frame, backend: End, kind: &Icmpv4Type, quoted: usize) -> Self {
        let due = answer.clone().from(backend).error_from(ROUTER, kind.clone(), quoted).ttl(63);
        self.send(
            ingress(Device::Uplink, answer.error_from(ROUTER, kind.clone(), quoted))
                .redirected(Reason::ForwardIcmpError, due),
        )
    }
}

pub(crate) fn path_takes_less() -> Case {
    let all = answered().bytes().len() - 34;
    Case::new(remote)
        .established(REMOTE)
        .leads(&answered(), REMOTE, &smaller(), EIGHT)
        .leads(&answered(), REMOTE, &smaller(), 16)
        .leads(&answered(), REMOTE, &smaller(), 18)
        .leads(&answered(), REMOTE, &smaller(), WHOLE)
        .leads(&answered(), REMOTE, &smaller(), all)
        .flow(&syn(), REMOTE, Place::Flows(State::Established))
}

/// RFC 792: destination unreachable, time exceeded, parameter problem.
pub(crate) fn every_error() -> Case {
    use DestUnreachableHeader as Unreachable;
    [
        Icmpv4Type::DestinationUnreachable(Unreachable::Network),
        Icmpv4Type::DestinationUnreachable(Unreachable::Host),
        Icmpv4Type::DestinationUnreachable(Unreachable::FilterProhibited),
        Icmpv4Type::TimeExceeded(TimeExceededCode::TtlExceededInTransit),
        Icmpv4Type::ParameterProblem(ParameterProblemHeader::PointerIndicatesError(8)),
    ]
    .iter()
    .fold(Case::new(remote).established(REMOTE), |case, kind| case.leads(&answered(), REMOTE, kind, WHOLE))
}

pub(crate) fn quote_of_a_datagram() -> Case {
    let (query, answer) =
        (Frame::udp(CLIENT, SERVED).payload(b"q"), Frame::udp(REMOTE, CLIENT).payload(b"a"));
    let sent = answer.clone().from(SERVED);
    Case::new(remote)
        .goes_to(&query, REMOTE)
        .comes_back(&answer)
        .leads(&sent, REMOTE, &smaller(), EIGHT)
        .leads(&sent, REMOTE, &smaller(), EIGHT + 1)
        // RFC 768: none stays none.
        .leads(&sent.clone().without_checksum(), REMOTE, &smaller(), EIGHT)
}

fn local(lab: &mut Lab) {
    lab.serve(SERVED, Protocol::TCP, TCP_80, &[Slot::local(1, LOCAL)]);
    lab.serve(SERVED, Protocol::UDP, UDP_80, &[Slot::local(2, LOCAL)]);
}

/// A connection with [`LOCAL`], through the stack.
fn with_local() -> Case {
    let stacked = |packet: &Frame| packet.clone().to(LOCAL);
    let back = syn_ack(LOCAL).from(SERVED);
    Case::new(local)
        .send(ingress(Device::Uplink, syn()).stack(Reason::ForwardStack, stacked(&syn()), FORWARDED))
        .send(egress(Device::Uplink, syn_ack(LOCAL)).stack(Reason::ReplyTranslated, back, 0))
        .send(ingress(Device::Uplink, third()).stack(Reason::ForwardStack, stacked(&third()), FORWARDED))
}

pub(crate) fn local_backend() -> Case {
    let sent = response(LOCAL).from(SERVED);
    let due = response(LOCAL).error_from(ROUTER, smaller(), WHOLE);
    with_local().send(ingress(Device::Uplink, sent.error_from(ROUTER, smaller(), WHOLE)).stack(
        Reason::ForwardIcmpError,
        due,
        FORWARDED,
    ))
}

/// A pod without a socket: the client hears it from the address, about what it sent there.
pub(crate) fn from_the_backend() -> Case {
    let query = Frame::udp(CLIENT, SERVED).payload(b"query");
    let back = query.error_from(SERVED.0, port(), EIGHT).ttl(63);
    Case::new(remote)
        .goes_to(&query, REMOTE)
        .send(
            ingress(Device::Overlay, query.clone().to(REMOTE).error_from(REMOTE.0, port(), EIGHT))
                .redirected(Reason::ReplyIcmpError, back),
        )
        .flow(&query, REMOTE, Place::Handshakes(State::Opening))
}

/// The client does not know the hop, nor may its address leave.
pub(crate) fn from_a_hop() -> Case {
    let back = request().error_from(SERVED.0, smaller(), WHOLE).ttl(63);
    Case::new(remote).established(REMOTE).send(
        ingress(Device::Overlay, request().to(REMOTE).error_from(HOP, smaller(), WHOLE))
            .redirected(Reason::ReplyIcmpError, back),
    )
}

pub(crate) fn through_the_stack() -> Case {
    let query = Frame::udp(CLIENT, SERVED).payload(b"query");
    let error = query.clone().to(LOCAL).error_from(LOCAL.0, port(), EIGHT);
    let back = query.error_from(SERVED.0, port(), EIGHT);
    let stacked = query.clone().to(LOCAL);
    Case::new(local)
        .send(ingress(Device::Uplink, &query).stack(Reason::ForwardStack, stacked, FORWARDED))
        .send(ingress(Device::Pods, &error).passes(Reason::PassReplyToStack))
        .send(egress(Device::Uplink, &error).stack(Reason::ReplyIcmpError, back, 0))
}

/// To the holder that forwarded the packet; bytes untouched.
pub(crate) fn on_the_other_node() -> Case {
    let forward = Frame::udp(CLIENT, LOCAL).source_mac(HOLDER.0).ttl(63).payload(b"query");
    let error = forward.error_from(LOCAL.0, port(), EIGHT);
    Case::new(|lab| {
        lab.holder(HOLDER);
        lab.endpoint(LOCAL, Protocol::UDP, &[HOLDER.1]);
    })
    .send(ingress(Device::Overlay, &forward).marks(Reason::HolderForward, FORWARDED))
    .send(ingress(Device::Pods, &error).marks(Reason::HolderReply, u32::from(HOLDER.1) << 24))
    .send(ingress(Device::Overlay, &error).passes(Reason::PassOtherProtocol))
    .send(egress(Device::Uplink, &error).passes(Reason::PassOtherProtocol))
}

pub(crate) fn not_about_a_connection_of_ours() -> Case {
    let ssh = Frame::tcp((SERVED.0, 22), CLIENT).ack(1);
    let pods_own = Frame::tcp((REMOTE.0, 50_000), CLIENT).ack(1);
    let about = |frame: &Frame| frame.error_from(ROUTER, smaller(), WHOLE);
    Case::new(remote)
        .established(REMOTE)
        .send(ingress(Device::Uplink, about(&ssh)).passes(Reason::PassOtherProtocol))
        .send(ingress(Device::Overlay, about(&pods_own)).passes(Reason::PassOtherProtocol))
        .send(egress(Device::Uplink, about(&pods_own)).passes(Reason::PassOtherProtocol))
        // Of the connection, but not sent to who had sent the packet.
        .send(ingress(Device::Uplink, about(&answered()).to((ROUTER, 0))).passes(Reason::PassOtherProtocol))
        // The backend is gone.
        .then(|lab| lab.set_backend(TCP_80, &Slot { generation: 2, ..Slot::remote(1, REMOTE) }))
        .send(ingress(Device::Uplink, about(&answered())).passes(Reason::PassOtherProtocol))
}

pub(crate) fn not_an_error() -> Case {
    let kinds = [0, 5, 8, 13];
    kinds.into_iter().fold(Case::new(remote).established(REMOTE), |case, code| {
        let kind = Icmpv4Type::Unknown { type_u8: code, code_u8: 0, bytes5to8: [0; 4] };
        case.send(
            ingress(Device::Uplink, answered().error_from(ROUTER, kind, WHOLE))
                .passes(Reason::PassOtherProtocol),
        )
    })
}

pub(crate) fn cut_short() -> Case {
    let error = answered().error_from(ROUTER, smaller(), EIGHT).bytes();
    (34..error.len())
        .step_by(5)
        .chain([error.len() - 1])
        .fold(Case::new(remote).established(REMOTE), |case, length| {
            case.send(ingress(Device::Uplink, &error[..length]).passes(Reason::PassOtherProtocol))
        })
}

/// IP options in either header are more than is handled; fragments have no whole quote.
pub(crate) fn unusual_headers() -> Case {
    let options = [1; 4];
    let error = |frame: &Frame| frame.error_from(ROUTER, smaller(), WHOLE);
    Case::new(remote)
        .established(REMOTE)
        .send(
            ingress(Device::Uplink, error(&answered()).ip_options(&options))
                .passes(Reason::PassOtherProtocol),
        )
        .send(
            ingress(Device::Uplink, error(&answered().ip_options(&options)))
                .passes(Reason::PassOtherProtocol),
        )
        .send(ingress(Device::Uplink, error(&answered()).fragment(0, true)).passes(Reason::PassOtherProtocol))
        .send(
            ingress(Device::Uplink, error(&answered().fragment(1, false))).passes(Reason::PassOtherProtocol),
        )
}

pub(crate) fn time_to_live() -> Case {
    let error = |ttl| answered().error_from(ROUTER, smaller(), WHOLE).ttl(ttl);
    let back = response(REMOTE).dont_fragment().error_from(ROUTER, smaller(), WHOLE).ttl(1);
    Case::new(remote)
        .established(REMOTE)
        .send(ingress(Device::Uplink, error(2)).redirected(Reason::ForwardIcmpError, back))
        .send(ingress(Device::Uplink, error(1)).dropped(Reason::DropTtl))
}

pub(crate) fn no_route() -> Case {
    Case::new(remote).established(REMOTE).then(|_| sh("ip route add unreachable 10.40.0.0/24")).send(
        ingress(Device::Uplink, answered().error_from(ROUTER, smaller(), WHOLE)).dropped(Reason::DropNoRoute),
    )
}
