//! Why a packet ended as it did: the one list behind the counters, their metric labels and `docs/reasons.md`.
//!
//! Every packet that a program touches adds to exactly one of these. A number is never reused: a reason that
//! goes leaves a hole.

/// What became of the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Translated or recognised, and on its way.
    Forward,
    /// Left untouched to whoever comes next on the hook, then to the stack.
    Pass,
    /// Answered with a TCP reset or an ICMP error; the packet itself became the answer. A reset is refused in silence.
    Reject,
    /// Thrown away.
    Drop,
}

impl Kind {
    /// The name in tables and metric labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Pass => "pass",
            Self::Reject => "reject",
            Self::Drop => "drop",
        }
    }
}

macro_rules! reasons {
    ($($number:literal $variant:ident $kind:ident $label:literal $doc:literal)*) => {
        /// See the module.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Reason {
            $(#[doc = $doc] $variant = $number,)*
        }

        impl Reason {
            /// Every reason, by number.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// What becomes of a packet with this reason.
            pub const fn kind(self) -> Kind {
                match self { $(Self::$variant => Kind::$kind,)* }
            }

            /// The name in tables and metric labels.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label,)* }
            }

            /// One sentence for people.
            pub const fn describe(self) -> &'static str {
                match self { $(Self::$variant => $doc,)* }
            }
        }
    };
}

reasons! {
    1 ForwardRedirect Forward "forward_redirect" "Client to backend: destination rewritten, redirected to the backend's device."
    2 ForwardStack Forward "forward_stack" "Client to backend: destination rewritten, left to the stack (backend on this node, or --forwarding stack)."
    3 ReplyRedirect Forward "reply_redirect" "Backend to client: source rewritten to the address, redirected to the client's device."
    4 ReplyTranslated Forward "reply_translated" "Backend to client: source rewritten to the address on egress, after the stack has routed it."
    5 HolderForward Forward "holder_forward" "Recognised as another holder's forward to a pod of this node; remembered, bytes untouched."
    6 HolderReply Forward "holder_reply" "A pod's answer to another holder's forward: marked, so that the routing rule leads it back there."
    7 ForwardIcmpError Forward "forward_icmp_error" "An ICMP error about an answer that a backend had sent from the address: led to the backend, with the quoted packet as the backend knows it."
    8 ReplyIcmpError Forward "reply_icmp_error" "An ICMP error about a client's packet, from a backend or on the way to it: led to the client, with the quoted packet as the client knows it."

    16 PassNotIpv4 Pass "pass_not_ipv4" "Not an IPv4 packet."
    17 PassOtherProtocol Pass "pass_other_protocol" "IPv4, but neither TCP nor UDP, nor an ICMP error about a connection of ours."
    18 PassShort Pass "pass_short" "Too short for the headers it announces; the stack drops it."
    19 PassForeign Pass "pass_foreign" "No service, flow or endpoint of ours."
    20 PassOwnSocket Pass "pass_own_socket" "To a served port, but part of a connection that this node itself has open."
    21 PassSynAck Pass "pass_syn_ack" "A SYN-ACK to a served port without a flow: the answer to a connection that this node masqueraded; never one to a backend."
    22 PassFinished Pass "pass_finished" "A packet that the program has translated already: it goes out after a redirect, or comes in once more on a bridge."
    23 PassReplyToStack Pass "pass_reply_to_stack" "A backend's answer that the stack routes first (egress translates it), or tells the pod to be too big."
    24 PassFragment Pass "pass_fragment" "A later fragment whose first one was not ours, or has not come before it: the stack never gets the first one of what is ours, so nobody gets the rest."
    25 PassUnknownInterface Pass "pass_unknown_interface" "On an interface without a role: the agent has not written it yet, or it was replaced."
    26 PassLoopback Pass "pass_loopback" "From 127/8 to a served port: such a packet never leaves this node, so the node itself takes it."

    32 RejectNoEndpoint Reject "reject_no_endpoint" "No endpoint of the service is ready."
    33 RejectBackendGone Reject "reject_backend_gone" "TCP: the flow's backend is gone, so the connection is."
    34 RejectCollision Reject "reject_collision" "Every backend that could be tried already has a connection with this client's address and port."
    35 RejectTableFull Reject "reject_table_full" "The handshake was complete, but the flow table is full."
    36 RejectTooBig Reject "reject_too_big" "Larger than the way to the backend allows, and not to be fragmented: answered with the MTU."
    37 RejectUnknownSource Reject "reject_unknown_source" "From inside the cluster, in the middle of a connection that this node has not seen the beginning of: its source cannot be guessed."
    38 RejectNoPort Reject "reject_no_port" "From inside the cluster: every source port that was tried for it is taken, or there is no room for another."

    48 DropFragment Drop "drop_fragment" "A later fragment whose first one was refused or dropped, or whose connection has gone since."
    49 DropTtl Drop "drop_ttl" "The time to live would reach zero."
    50 DropNoRoute Drop "drop_no_route" "The kernel has no route to the backend or back to the client."
    51 DropRewrite Drop "drop_rewrite" "The kernel refused a change of the packet after the first byte was changed."
    52 DropHolderConflict Drop "drop_holder_conflict" "Another holder's forward with the 5-tuple of a connection that a different holder has here."
    53 DropReplyUnknown Drop "drop_reply_unknown" "An answer that was routed here for translation, but no flow is known: never sent with the pod's address."
    54 DropTableFull Drop "drop_table_full" "The tables cannot take another connection."
    55 DropNoRing Drop "drop_no_ring" "The service has no table yet: the agent is about to write it."
    56 DropRejectFailed Drop "drop_reject_failed" "The answer to a refused packet could not be built."
    57 DropTooBig Drop "drop_too_big" "Larger than the way to the backend allows, and no answer is due."
    58 DropIcmpRedirect Drop "drop_icmp_redirect" "An ICMP redirect of this node to a pod: it would lead the answers to one client past the node, all to one holder."
    59 DropNoOverlay Drop "drop_no_overlay" "From inside the cluster, but this node's own overlay address is not known yet: no answer would find its way back."
    60 DropPastHolder Drop "drop_past_holder" "A pod's answer to another holder's forward, about to leave past that holder, with the pod's address: rule, route or program was removed, and is on its way back."
}

/// Number of slots in the `outcomes` map: room for new reasons without a new layout.
pub const SLOTS: u32 = 64;

impl Reason {
    /// Index into the `outcomes` map.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::string::{String, ToString as _};

    #[test]
    fn numbers_and_labels_are_unique_and_in_range() {
        let numbers: BTreeSet<u32> = Reason::ALL.iter().map(|r| r.number()).collect();
        let labels: BTreeSet<&str> = Reason::ALL.iter().map(|r| r.label()).collect();
        assert_eq!(numbers.len(), Reason::ALL.len());
        assert_eq!(labels.len(), Reason::ALL.len());
        assert!(numbers.iter().all(|n| *n < SLOTS));
    }

    #[test]
    fn a_label_begins_with_its_kind() {
        for reason in Reason::ALL {
            let prefix: String = reason.label().split('_').next().unwrap_or_default().to_string();
            let expected = match reason.kind() {
                Kind::Forward => &["forward", "reply", "holder"][..],
                Kind::Pass => &["pass"],
                Kind::Reject => &["reject"],
                Kind::Drop => &["drop"],
            };
            assert!(expected.contains(&prefix.as_str()), "{}", reason.label());
        }
    }
}
