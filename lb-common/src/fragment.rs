//! What became of the first fragment of a datagram, for those that follow: they have no ports.

use crate::{
    addr::{Ipv4, Port, Protocol},
    interface::Interface,
    reason::Reason,
};
use bytemuck::{Pod, Zeroable};

/// How long fragments may follow their first one, in seconds as the clock shows them. A sender uses a number again after
/// 65,536 datagrams to one address at the earliest (RFC 6864, section 4.3 asks for more), which at full speed is soon.
const LIFETIME: u32 = 2;

/// Where a packet is seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(transparent)]
pub struct Hook {
    roles: u8,
}

impl Hook {
    /// Where it goes out.
    pub const EGRESS: Self = Self { roles: 0 };

    /// Where it comes in, by an interface with these roles.
    #[inline(always)]
    pub const fn ingress(roles: Interface) -> Self {
        Self { roles: roles.bits() }
    }
}

/// Key of the `fragments` map: what all fragments of one datagram have in common (RFC 791, section 3.2), where it is seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C)]
pub struct FragmentKey {
    /// As the packet has it here.
    pub source: Ipv4,
    /// Likewise.
    pub destination: Ipv4,
    /// Network order.
    id: [u8; 2],
    /// TCP or UDP.
    pub protocol: Protocol,
    hook: Hook,
}

impl FragmentKey {
    /// Of the datagram between `source` and `destination` with the identification `id`, network order.
    #[inline(always)]
    pub const fn new(
        (source, destination): (Ipv4, Ipv4),
        protocol: Protocol,
        id: [u8; 2],
        hook: Hook,
    ) -> Self {
        Self { source, destination, id, protocol, hook }
    }

    /// As three words of the machine.
    #[inline(always)]
    pub fn to_words(self) -> [u32; 3] {
        bytemuck::cast(self)
    }

    /// The opposite.
    #[inline(always)]
    pub fn from_words(words: [u32; 3]) -> Self {
        bytemuck::cast(words)
    }
}

/// What is done with a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Thrown away, like the first one.
    Drop,
    /// To the backend by redirect.
    ForwardRedirect,
    /// To the backend through the stack.
    ForwardStack,
    /// To the client by redirect.
    ReplyRedirect,
    /// To the client, from the stack.
    ReplyTranslated,
    /// Another holder's forward: marked.
    HolderForward,
    /// The answer to one: marked.
    HolderReply,
}

impl Fate {
    /// Of the fragments that follow a first one that ended for the reason with this number; `None` where they go on as they come.
    #[inline(always)]
    const fn after(number: u8) -> Option<Self> {
        const FORWARD_REDIRECT: u8 = Reason::ForwardRedirect as u8;
        const FORWARD_STACK: u8 = Reason::ForwardStack as u8;
        const REPLY_REDIRECT: u8 = Reason::ReplyRedirect as u8;
        const REPLY_TRANSLATED: u8 = Reason::ReplyTranslated as u8;
        const HOLDER_FORWARD: u8 = Reason::HolderForward as u8;
        const HOLDER_REPLY: u8 = Reason::HolderReply as u8;
        Some(match number {
            FORWARD_REDIRECT => Self::ForwardRedirect,
            FORWARD_STACK => Self::ForwardStack,
            REPLY_REDIRECT => Self::ReplyRedirect,
            REPLY_TRANSLATED => Self::ReplyTranslated,
            HOLDER_FORWARD => Self::HolderForward,
            HOLDER_REPLY => Self::HolderReply,
            reject_or_drop if reject_or_drop >= Reason::RejectNoEndpoint as u8 => Self::Drop,
            _ => return None,
        })
    }

    /// What a fragment that follows ends with.
    #[inline(always)]
    pub const fn reason(self) -> Reason {
        match self {
            Self::Drop => Reason::DropFragment,
            Self::ForwardRedirect => Reason::ForwardRedirect,
            Self::ForwardStack => Reason::ForwardStack,
            Self::ReplyRedirect => Reason::ReplyRedirect,
            Self::ReplyTranslated => Reason::ReplyTranslated,
            Self::HolderForward => Reason::HolderForward,
            Self::HolderReply => Reason::HolderReply,
        }
    }

    /// Whether it goes from the client to a backend, by this node.
    #[inline(always)]
    pub const fn is_forward(self) -> bool {
        matches!(self, Self::ForwardRedirect | Self::ForwardStack)
    }

    /// Whether it passes the stack by.
    #[inline(always)]
    pub const fn is_redirect(self) -> bool {
        matches!(self, Self::ForwardRedirect | Self::ReplyRedirect)
    }
}

/// Value of the `fragments` map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Fragment {
    /// The source that the first one left with.
    pub source: Ipv4,
    /// The destination that the first one left with.
    pub destination: Ipv4,
    /// Seconds since boot (`CLOCK_MONOTONIC`) when it came.
    pub second: u32,
    /// As the first one came.
    pub source_port: Port,
    /// As the first one came.
    pub destination_port: Port,
    /// The first one's, by number.
    reason: u8,
    /// Our byte of the packet mark, as the first one left.
    pub mark: u8,
    /// Bytes that have not come yet, modulo 2^16; before the last fragment, less than nothing by what has come.
    missing: u16,
}

/// Which part of a datagram a fragment has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where it begins in the datagram's payload, bytes.
    pub offset: u16,
    /// Of its own payload, bytes.
    pub length: u16,
    /// Whether nothing comes behind it.
    pub is_last: bool,
}

impl Fragment {
    /// What became of a first fragment with these ports and as many bytes of payload. It left with these addresses and this mark.
    #[inline(always)]
    pub const fn new(
        (source_port, destination_port): (Port, Port),
        (source, destination): (Ipv4, Ipv4),
        mark: u8,
        reason: Reason,
        now: u32,
        length: u16,
    ) -> Self {
        Self {
            source,
            destination,
            second: now,
            source_port,
            destination_port,
            reason: reason as u8,
            mark,
            missing: 0_u16.wrapping_sub(length),
        }
    }

    /// Notes one that follows. True where the datagram is complete: what else comes with its number is another one's. One that
    /// comes twice, or two CPUs at once, only keep it open: until its time is over, or at worst until as much has come.
    #[inline(always)]
    pub const fn completes(&mut self, part: Part) -> bool {
        if part.is_last {
            self.missing = self.missing.wrapping_add(part.offset).wrapping_add(part.length);
        }
        self.missing = self.missing.wrapping_sub(part.length);
        self.missing == 0
    }

    /// What is done with the others; `None` where they go on as they come.
    #[inline(always)]
    pub const fn fate(&self) -> Option<Fate> {
        Fate::after(self.reason)
    }

    /// Whether others may still follow. Another CPU may have noted a later second than ours.
    #[inline(always)]
    pub const fn holds(&self, now: u32) -> bool {
        now.saturating_sub(self.second) <= LIFETIME
    }
}

const _: () = assert!(size_of::<FragmentKey>() == 12 && size_of::<Fragment>() == 20);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reason::Kind;
    use std::vec::Vec;

    fn fragment(reason: Reason, now: u32) -> Fragment {
        let (ports, addresses) = ((Port::new(1), Port::new(2)), (Ipv4::default(), Ipv4::default()));
        Fragment::new(ports, addresses, 7, reason, now, 1_480)
    }

    /// Any order behind the first, up to the largest datagram. What comes twice keeps it open.
    #[test]
    fn a_datagram_ends_with_the_last_of_its_parts() {
        let part = |n: u16, count: u16| Part { offset: n * 1_480, length: 1_480, is_last: n + 1 == count };
        for count in [2, 3, 44] {
            let mut known = fragment(Reason::ForwardStack, 100);
            let forwards: Vec<bool> = (1..count).map(|n| known.completes(part(n, count))).collect();
            let mut known = fragment(Reason::ForwardStack, 100);
            let backwards: Vec<bool> = (1..count).rev().map(|n| known.completes(part(n, count))).collect();
            for ends in [forwards, backwards] {
                assert_eq!(ends.iter().position(|end| *end), Some(ends.len() - 1), "{count}");
            }
        }
        let mut known = fragment(Reason::ForwardStack, 100);
        assert!(![1, 1, 2].map(|n| known.completes(part(n, 3))).contains(&true));
    }

    /// ICMP errors have no tuple of their own, and no fragments.
    #[test]
    fn the_rest_of_a_datagram_goes_with_its_first_fragment() {
        for reason in Reason::ALL {
            let fate = fragment(*reason, 100).fate();
            match reason.kind() {
                Kind::Forward if matches!(reason, Reason::ForwardIcmpError | Reason::ReplyIcmpError) => {}
                Kind::Forward => assert_eq!(fate.map(Fate::reason), Some(*reason)),
                Kind::Pass => assert_eq!(fate, None),
                Kind::Reject | Kind::Drop => assert_eq!(fate, Some(Fate::Drop)),
            }
        }
    }

    #[test]
    fn a_number_is_soon_used_again() {
        let known = fragment(Reason::ForwardStack, 100);
        assert!([99, 100, 102].map(|now| known.holds(now)).iter().all(|holds| *holds));
        assert!(!known.holds(103));
    }

    #[test]
    fn a_key_is_the_same_after_a_walk() {
        let addresses = (Ipv4::new([1, 2, 3, 4]), Ipv4::new([6, 7, 8, 9]));
        let key = FragmentKey::new(addresses, Protocol::UDP, [10, 11], Hook::ingress(Interface::PODS));
        assert_eq!(FragmentKey::from_words(key.to_words()), key);
        assert_ne!(key, FragmentKey::new(addresses, Protocol::UDP, [10, 11], Hook::EGRESS));
    }
}
