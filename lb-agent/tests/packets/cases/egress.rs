//! What goes out.

use super::holder::node;
use super::remote;
use crate::case::{Case, DONE, FORWARDED, egress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, HOLDER, LOCAL, REMOTE, now, syn};
use lb_common::flow::{Reply, State};
use lb_common::reason::Reason;

/// Redirected packets come by once more; only the mark is taken off.
pub(crate) fn finished() -> Case {
    let mut case = Case::new(remote);
    for device in [Device::Uplink, Device::Overlay, Device::Pods] {
        case = case
            .send(egress(device, syn()).marked(DONE | 0x0042_0001).marks(Reason::PassFinished, 0x0042_0001));
    }
    case
}

/// A tunnel would route its outer packets by our mark.
pub(crate) fn marks_end_at_overlay_and_pods() -> Case {
    let holder = u32::from(HOLDER.1) << 24;
    let mut case = Case::new(remote);
    for device in [Device::Overlay, Device::Pods] {
        for ours in [FORWARDED, holder] {
            case = case.send(
                egress(device, syn()).marked(ours | 0x0042_0001).marks(Reason::PassForeign, 0x0042_0001),
            );
        }
        case = case.send(egress(device, syn()).marked(0x0042_0001).passes(Reason::PassForeign));
    }
    case
}

/// The node's own packets, forwarded ones, and those of connections that are not translated.
pub(crate) fn foreign_on_the_uplink() -> Case {
    let own = Frame::tcp(([192, 0, 2, 10], 22), CLIENT).ack(1);
    Case::new(remote)
        .send(egress(Device::Uplink, own).marked(0x0042_0001).passes(Reason::PassForeign))
        .send(egress(Device::Uplink, Frame::tcp(REMOTE, CLIENT).ack(1)).passes(Reason::PassForeign))
        .send(
            egress(Device::Uplink, Frame::udp(LOCAL, CLIENT).payload(&[0; 64]).fragment(0, true))
                .passes(Reason::PassForeign),
        )
        .send(
            egress(
                Device::Uplink,
                Frame::protocol(17, LOCAL.0, CLIENT.0).payload(&[0; 64]).fragment(9, false),
            )
            .passes(Reason::PassFragment),
        )
        .send(egress(Device::Uplink, Frame::protocol(1, LOCAL.0, CLIENT.0)).passes(Reason::PassOtherProtocol))
}

/// The rule that leads an answer to its holder is gone: with the pod's address it must not reach the client. Where nodes
/// are reached over the uplink, it is the frame's address that tells.
pub(crate) fn past_the_holder() -> Case {
    let answer = Frame::tcp(LOCAL, CLIENT).ack(1);
    let key = answer.key();
    let to_holder = answer.clone().destination_mac(HOLDER.0);
    let to_router = || egress(Device::Uplink, &answer).dropped(Reason::DropPastHolder);
    Case::new(move |lab| {
        node(lab);
        lab.maps.replies.insert(&key, &Reply::mark(HOLDER.1, State::Established, now())).unwrap();
    })
    .send(to_router().marked(u32::from(HOLDER.1) << 24))
    .send(to_router())
    .send(egress(Device::Uplink, to_holder).passes(Reason::PassForeign))
}

/// A redirect of this node would lead a pod's answers past it; other ICMP of the node goes to its pods as ever, and what
/// leaves by the uplink is not looked at.
pub(crate) fn icmp_redirects() -> Case {
    let icmp = |kind: u8| Frame::protocol(1, [10, 32, 0, 1], LOCAL.0).payload(&[kind, 1, 0, 0, 10, 32, 0, 2]);
    Case::new(remote)
        .send(egress(Device::Pods, icmp(5)).dropped(Reason::DropIcmpRedirect))
        .send(egress(Device::Overlay, icmp(5)).dropped(Reason::DropIcmpRedirect))
        .send(egress(Device::Pods, icmp(3)).passes(Reason::PassForeign))
        .send(egress(Device::Pods, icmp(8)).passes(Reason::PassForeign))
        .send(egress(Device::Uplink, icmp(5)).passes(Reason::PassOtherProtocol))
}
