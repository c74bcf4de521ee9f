//! I4: what TCP's ends announce as the largest segment is brought down to what the overlay takes.

use super::route::local;
use super::{forwarded, remote, syn_ack, translated};
use crate::case::{Case, FORWARDED, egress, ingress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, LOCAL, Lab, REMOTE, SERVED, sh};
use lb_common::reason::Reason;

const NO_OPERATION: u8 = 1;

fn narrow(lab: &mut Lab) {
    remote(lab);
    sh("ip link set weave mtu 1376");
}

/// The option.
fn announces(size: u16) -> [u8; 4] {
    let [high, low] = size.to_be_bytes();
    [2, 4, high, low]
}

fn syn(options: &[u8]) -> Frame {
    Frame::tcp(CLIENT, SERVED).syn().tcp_options(options)
}

/// The client's SYN and the backend's answer, with these options, and as they leave.
fn both(case: Case, before: &[u8], after: &[u8]) -> Case {
    let (request, answer) = (syn(before), syn_ack(REMOTE).tcp_options(before));
    let (forward, reply) = (forwarded(&syn(after), REMOTE), translated(&syn_ack(REMOTE).tcp_options(after)));
    case.send(ingress(Device::Uplink, request).redirected(Reason::ForwardRedirect, forward))
        .send(ingress(Device::Overlay, answer).redirected(Reason::ReplyRedirect, reply))
}

pub(crate) fn clamped() -> Case {
    let case = both(Case::new(narrow), &announces(1460), &announces(1336));
    let case = both(case, &announces(1337), &announces(1336));
    both(case, &announces(8960), &announces(1336))
}

/// One that fits stays, and so does a packet without one.
pub(crate) fn small_enough() -> Case {
    let mut case = Case::new(narrow);
    for options in [&announces(1336)[..], &announces(536), &announces(0), &[]] {
        case = both(case, options, options);
    }
    case
}

/// Behind other options, at odd places too; bounded, and never past the options' end.
pub(crate) fn among_other_options() -> Case {
    let window = [3, 3, 7];
    let timestamps = [8, 10, 1, 2, 3, 4, 5, 6, 7, 8];
    let with = |size: u16, before: &[u8], rest: &[u8]| [before, &announces(size), rest].concat();
    let mut case = Case::new(narrow);
    for (before, rest) in [
        (&[NO_OPERATION][..], &[NO_OPERATION; 3][..]),
        (&window, &[NO_OPERATION]),
        (&timestamps, &[NO_OPERATION; 2]),
        (&[&window[..], &[NO_OPERATION]].concat(), &[]),
    ] {
        case = both(case, &with(1460, before, rest), &with(1336, before, rest));
    }
    for odd in [
        with(1460, &[NO_OPERATION; 4], &[]),
        with(1460, &[0, 0, 0, 0], &[]),
        // Lengths that are none, and one that leads out.
        with(1460, &[8, 0, 0, 0], &[]),
        with(1460, &[8, 1, 0, 0], &[]),
        vec![8, 40, 2, 4],
        vec![2, 3, 5, 180],
    ] {
        case = both(case, &odd, &odd);
    }
    case
}

pub(crate) fn behind_ip_options() -> Case {
    let (before, after) = (syn(&announces(1460)), syn(&announces(1336)));
    let options = [NO_OPERATION; 8];
    Case::new(narrow).send(
        ingress(Device::Uplink, before.ip_options(&options))
            .redirected(Reason::ForwardRedirect, forwarded(&after.ip_options(&options), REMOTE)),
    )
}

/// Through the stack likewise, and what is not a SYN is not looked at.
pub(crate) fn through_the_stack() -> Case {
    let answer = |options: &[u8]| syn_ack(LOCAL).tcp_options(options);
    let data = Frame::tcp(CLIENT, SERVED).seq(1001).ack(5001).tcp_options(&announces(1460));
    Case::new(|lab| {
        local(lab);
        sh("ip link set weave mtu 1376");
    })
    .send(ingress(Device::Uplink, syn(&announces(1460))).stack(
        Reason::ForwardStack,
        syn(&announces(1336)).to(LOCAL),
        FORWARDED,
    ))
    .send(ingress(Device::Pods, answer(&announces(1460))).passes(Reason::PassReplyToStack))
    .send(egress(Device::Uplink, answer(&announces(1460))).stack(
        Reason::ReplyTranslated,
        answer(&announces(1336)).from(SERVED),
        0,
    ))
    .send(ingress(Device::Uplink, &data).stack(Reason::ForwardStack, data.clone().to(LOCAL), FORWARDED))
}
