//! What is to become of a packet that is forwarded, decided before its first byte changes, and the commit.

use crate::{
    account, config, forward, mss,
    outcome::Outcome,
    packet::Packet,
    parse::{Parsed, Tcp},
    rewrite,
};
use lb_common::{
    addr::{Ipv4, Port},
    flow::Side,
    mark,
    reason::Reason,
    way::Way,
};

/// Everything is checked; only the commit is left.
pub(crate) struct Plan {
    /// Who sent it: a client's packet gets a new destination, a backend's a new source.
    pub(crate) end: Side,
    pub(crate) address: Ipv4,
    pub(crate) port: Port,
    /// Whose counters it adds to.
    pub(crate) service: u32,
    pub(crate) exit: Exit,
    pub(crate) reason: Reason,
}

impl Plan {
    /// The backend's address.
    #[inline(always)]
    fn backend(&self, parsed: &Parsed) -> Ipv4 {
        match self.end {
            Side::Client => self.address,
            Side::Backend => parsed.key.source,
        }
    }
}

/// How it leaves. Every field always has a value: an enum with data would leave some of a register's bits undefined
/// where the compiler stores it on the stack, which the verifier refuses.
#[derive(Clone, Copy)]
pub(crate) struct Exit {
    /// 0, which no interface has, for the stack.
    interface: u32,
    next_hop: Ipv4,
    /// Our byte of the packet mark.
    mark: u8,
}

impl Exit {
    /// Past the stack, out of a device, to a neighbour of it.
    #[inline(always)]
    pub(crate) fn redirect(way: Way) -> Self {
        Self { interface: way.interface, next_hop: way.next_hop, mark: mark::DONE }
    }

    /// To the stack.
    #[inline(always)]
    pub(crate) fn stack(mark: u8) -> Self {
        Self { interface: 0, next_hop: Ipv4::new([0; 4]), mark }
    }

    /// To the stack, as if it came in once more: a bridge's netfilter hooks have noted a connection to the address already,
    /// and forget it so (`skb_scrub_packet`).
    #[inline(always)]
    pub(crate) fn stack_again(interface: u32, mark: u8) -> Self {
        Self { interface, next_hop: Ipv4::UNSPECIFIED, mark }
    }

    /// To the stack by `lo`, for a datagram from an address of this node that is larger than its way takes. It came in
    /// fragments, which a bridge's netfilter hooks have put together; the stack cuts it again, but takes it for forged on any other
    /// interface (Linux 6.18: on `lo` it does not, `accept_local` being set, whatever `rp_filter` is).
    #[inline(always)]
    pub(crate) fn stack_by_lo() -> Self {
        Self::stack_again(forward::TO_SELF.interface, mark::FORWARDED)
    }

    #[inline(always)]
    fn is_redirect(&self) -> bool {
        self.mark == mark::DONE
    }

    /// Where we forward in the stack's place we count the hop, as a router must (RFC 1812, section 5.3.1).
    #[inline(always)]
    pub(crate) fn counts_hop(&self) -> bool {
        self.is_redirect()
    }
}

/// Rewrites the packet and sends it on its way. From the first changed byte on there is only forward or drop.
#[inline(always)]
pub(crate) fn commit(packet: &Packet<'_>, parsed: &Parsed, plan: &Plan) -> Outcome {
    match plan.end {
        Side::Client => account::packet_in(plan.service, parsed),
        Side::Backend => account::packet_out(plan.service, parsed),
    }
    if !rewrite::apply(packet, parsed, plan) {
        return Outcome::Dropped(Reason::DropRewrite);
    }
    if parsed.tcp.has(Tcp::SYN) && !mss::clamp(packet.skb(), plan.backend(parsed).to_ne()) {
        return Outcome::Dropped(Reason::DropRewrite);
    }
    leave(packet, plan.exit, plan.reason)
}

/// Sends a packet that is rewritten on its way.
#[inline(always)]
pub(crate) fn leave(packet: &Packet<'_>, exit: Exit, reason: Reason) -> Outcome {
    config::set_mark_byte(packet, exit.mark);
    if exit.interface == 0 {
        Outcome::Next(reason)
    } else if is_sent(packet, exit) {
        Outcome::Redirected(reason)
    } else {
        Outcome::Dropped(Reason::DropRewrite)
    }
}

#[inline(always)]
fn is_sent(packet: &Packet<'_>, exit: Exit) -> bool {
    if exit.interface == forward::TO_SELF.interface {
        forward::to_self(packet)
    } else if !exit.is_redirect() {
        forward::enter(exit.interface)
    } else {
        forward::redirect(exit.interface, exit.next_hop)
    }
}
