//! The walk of a packet, as a list of steps.

use crate::{
    account, answer, backend, config, forward, fragment, holder, icmp, interface, masquerade,
    open::{self, Connection},
    outcome::{End, Outcome, Step, drop, pass, too_big},
    packet::Packet,
    parse::{Parsed, is_icmp, is_icmp_redirect, parse},
    plan::{self, Exit, Plan},
    reject, scratch, sieve,
};
use core::ops::ControlFlow;
use lb_common::{
    backend::Backend,
    flow::{Path, Side},
    fragment::Hook,
    interface::Interface,
    mark,
    reason::Reason,
    way::Way,
};

/// What every overlay takes, bytes of an IP packet (RFC 8200's minimum): no need to ask.
const SMALL: u16 = 1280;

/// A packet that came in.
#[inline(always)]
pub(crate) fn ingress(packet: &Packet<'_>) -> Outcome {
    ended(walk_in(packet))
}

/// A packet that goes out.
#[inline(always)]
pub(crate) fn egress(packet: &Packet<'_>) -> Outcome {
    ended(walk_out(packet))
}

#[inline(always)]
fn ended(walk: Step<Outcome>) -> Outcome {
    match walk {
        ControlFlow::Continue(outcome) | ControlFlow::Break(End::Outcome(outcome)) => outcome,
        // Refusals end in `walk_in_whole`, which has the parsed packet.
        ControlFlow::Break(End::Refusal(refusal)) => Outcome::Dropped(refusal.reason),
    }
}

#[inline(always)]
fn walk_in(packet: &Packet<'_>) -> Step<Outcome> {
    let roles = interface::roles(packet)?;
    if comes_again(config::mark_byte(packet), roles) {
        return pass(Reason::PassFinished);
    }
    if is_icmp(packet) {
        return icmp::coming(packet, roles);
    }
    let parsed = scratch::keep(parse(packet)?)?;
    packet.keep(None);
    if parsed.ip.is_fragment() {
        fragment::begin(packet, Hook::ingress(roles))?;
    }
    let outcome = ended(walk_in_whole(packet, parsed, roles));
    if packet.keeps() {
        fragment::note(packet.skb(), outcome.reason());
    }
    ControlFlow::Continue(outcome)
}

/// Whether it is one of `Exit::stack_again`. A function of its own, since what the verifier would know of the roles behind a
/// branch here would make it walk all that follows once more.
#[inline(never)]
fn comes_again(mark: u8, roles: Interface) -> bool {
    mark == mark::FORWARDED && roles.is(Interface::BRIDGE)
}

/// A packet with all its headers.
#[inline(always)]
fn walk_in_whole(packet: &Packet<'_>, parsed: &mut Parsed, roles: Interface) -> Step<Outcome> {
    if roles.is(Interface::OVERLAY) {
        holder::recognise(packet, parsed, roles)?;
    }
    match plan(packet, parsed, roles) {
        ControlFlow::Continue(plan) => ControlFlow::Continue(plan::commit(packet, parsed, &plan)),
        ControlFlow::Break(End::Refusal(refusal)) => {
            parsed.key = parsed.client_key();
            ControlFlow::Continue(reject::answer(packet, parsed, refusal))
        }
        ControlFlow::Break(end) => ControlFlow::Break(end),
    }
}

#[inline(always)]
fn walk_out(packet: &Packet<'_>) -> Step<Outcome> {
    let byte = config::mark_byte(packet);
    if byte == mark::DONE {
        config::set_mark_byte(packet, 0);
        return pass(Reason::PassFinished);
    }
    let roles = interface::roles(packet)?;
    // A tunnel looks up its outer packet's route with the inner packet's mark: ours must not reach it. Nor what is
    // behind an uplink over which other nodes are reached.
    if byte != 0 {
        config::set_mark_byte(packet, 0);
    }
    if roles.is(Interface::UPLINK) {
        if is_icmp(packet) {
            return icmp::leaving(packet);
        }
        let mut parsed = parse(packet)?;
        packet.keep(None);
        if parsed.ip.is_fragment() {
            fragment::begin(packet, Hook::EGRESS)?;
        }
        let outcome = ended(leave_whole(packet, &mut parsed));
        if packet.keeps() {
            fragment::note(packet.skb(), outcome.reason());
        }
        return ControlFlow::Continue(outcome);
    }
    // A marked answer leaves by the bridge that it came in on, and so the stack tells the pod of a shorter way. The pod
    // would remember it for the client, whichever holder its next connection comes through.
    if packet.is_from_this_node() && is_icmp_redirect(packet) {
        return drop(Reason::DropIcmpRedirect);
    }
    pass(Reason::PassForeign)
}

/// A packet with all its headers, out of the uplink.
#[inline(always)]
fn leave_whole(packet: &Packet<'_>, parsed: &mut Parsed) -> Step<Outcome> {
    let plan = answer::leaving(packet, parsed)?;
    ControlFlow::Continue(plan::commit(packet, parsed, &plan))
}

/// A packet to a served port goes to a backend, or is refused; never to a socket of this node. Another may be an answer.
#[inline(always)]
fn plan(packet: &Packet<'_>, parsed: &mut Parsed, roles: Interface) -> Step<Plan> {
    if sieve::may_be_served(&parsed.key) {
        masquerade::request(packet, parsed, roles)?;
        if let Some(connection) = open::connection(packet, parsed)? {
            return counted(&connection, to_backend(packet, parsed, &connection, roles));
        }
    }
    if roles.is(Interface::OVERLAY) || roles.is(Interface::PODS) || masquerade::may_be_answer(&parsed.key) {
        return answer::from_backend(packet, parsed, roles);
    }
    pass(Reason::PassForeign)
}

/// Notes for the Service what does not go to its backend.
#[inline(always)]
fn counted(connection: &Connection, plan: Step<Plan>) -> Step<Plan> {
    if matches!(plan, ControlFlow::Break(End::Refusal(_) | End::Outcome(Outcome::Dropped(_)))) {
        account::refused(connection.backend.service);
    }
    plan
}

/// The way to the backend.
#[inline(always)]
fn to_backend(
    packet: &Packet<'_>,
    parsed: &mut Parsed,
    connection: &Connection,
    roles: Interface,
) -> Step<Plan> {
    let backend = &connection.backend;
    if parsed.is_masqueraded() {
        parsed.outer = masquerade::outer(&parsed.key, backend.is_masqueraded());
    }
    if connection.path == Path::Stack {
        // The stack's own "fragmentation needed" would quote the backend's address, which no socket of the client knows.
        if parsed.ip.dont_fragment()
            && parsed.ip.total_length > SMALL
            && let forward::Route::TooBig { mtu } =
                forward::route(packet, parsed, parsed.key.source, backend.address)
        {
            return too_big(mtu);
        }
        return through_stack(packet, backend, roles);
    }
    let length = forward::wire_length(packet, parsed);
    // A masqueraded packet needs the Ethernet addresses too.
    if !parsed.is_masqueraded()
        && let Some(way) = backend::way(connection.id, backend.generation, connection.now, length)
    {
        return redirect(parsed, backend, way);
    }
    match forward::route(packet, parsed, parsed.key.source, backend.address) {
        forward::Route::Via(way) => {
            backend::set_way(connection.id, backend.generation, connection.now, way);
            redirect(parsed, backend, way)
        }
        forward::Route::TooBig { mtu } if parsed.ip.dont_fragment() => too_big(mtu),
        forward::Route::TooBig { .. } if parsed.is_masqueraded() => {
            ControlFlow::Continue(to(backend, Exit::stack_by_lo(), Reason::ForwardRedirect))
        }
        forward::Route::Local if parsed.is_masqueraded() => {
            // A datagram is answered from the address that it came from, where that is this node's own.
            parsed.outer = backend.address;
            redirect(parsed, backend, forward::TO_SELF)
        }
        // The stack can fragment, we cannot. And an endpoint that is this node itself, a pod on the host's network,
        // is reached by the stack alone.
        forward::Route::TooBig { .. } | forward::Route::Local => through_stack(packet, backend, roles),
        forward::Route::None => drop(Reason::DropNoRoute),
    }
}

#[inline(always)]
fn redirect(parsed: &Parsed, backend: &Backend, way: Way) -> Step<Plan> {
    if parsed.ip.ttl <= 1 {
        return drop(Reason::DropTtl);
    }
    ControlFlow::Continue(to(backend, Exit::redirect(way), Reason::ForwardRedirect))
}

/// With the mark that keeps the CNI's masquerade off it.
#[inline(always)]
fn through_stack(packet: &Packet<'_>, backend: &Backend, roles: Interface) -> Step<Plan> {
    let exit = if roles.is(Interface::BRIDGE) {
        Exit::stack_again(packet.interface(), mark::FORWARDED)
    } else {
        Exit::stack(mark::FORWARDED)
    };
    ControlFlow::Continue(to(backend, exit, Reason::ForwardStack))
}

#[inline(always)]
fn to(backend: &Backend, exit: Exit, reason: Reason) -> Plan {
    Plan {
        end: Side::Client,
        address: backend.address,
        port: backend.port,
        service: backend.service,
        exit,
        reason,
    }
}
