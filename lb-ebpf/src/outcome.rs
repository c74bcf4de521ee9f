//! How a packet's walk ends.

use core::ops::ControlFlow;
use lb_common::reason::Reason;

/// Continue with the next program on the hook, then as the stack would (`TCX_NEXT` has the same number).
pub(crate) const TC_ACT_UNSPEC: i32 = -1;
/// Drop.
pub(crate) const TC_ACT_SHOT: i32 = 2;
/// Carry out what a redirect helper noted.
pub(crate) const TC_ACT_REDIRECT: i32 = 7;

/// The end of a walk. The variant is what the hook is told, the reason is what is counted.
#[must_use]
#[derive(Clone, Copy)]
pub(crate) enum Outcome {
    /// A redirect helper has been called: a forward, or an answer to a refused packet.
    Redirected(Reason),
    /// To whoever is next: untouched, or translated and left to the stack.
    Next(Reason),
    /// Thrown away.
    Dropped(Reason),
}

impl Outcome {
    #[inline(always)]
    pub(crate) fn reason(self) -> Reason {
        match self {
            Self::Redirected(reason) | Self::Next(reason) | Self::Dropped(reason) => reason,
        }
    }
}

/// What ends a walk before its last step.
#[must_use]
#[derive(Clone, Copy)]
pub(crate) enum End {
    /// As it is.
    Outcome(Outcome),
    /// With an answer that is yet to be built.
    Refusal(Refusal),
}

/// A packet to a served port that is answered instead of forwarded.
#[derive(Clone, Copy)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    /// For [`Reason::RejectTooBig`], bytes of an IP packet.
    pub(crate) mtu: u16,
}

/// A step's product, or what ends the walk; `?` ends it.
pub(crate) type Step<T> = ControlFlow<End, T>;

/// Ends the walk with the packet untouched.
#[inline(always)]
pub(crate) fn pass<T>(reason: Reason) -> Step<T> {
    ControlFlow::Break(End::Outcome(Outcome::Next(reason)))
}

/// Ends the walk and the packet.
#[inline(always)]
pub(crate) fn drop<T>(reason: Reason) -> Step<T> {
    ControlFlow::Break(End::Outcome(Outcome::Dropped(reason)))
}

/// Ends the walk with an answer: a TCP reset, or ICMP port unreachable.
#[inline(always)]
pub(crate) fn refuse<T>(reason: Reason) -> Step<T> {
    ControlFlow::Break(End::Refusal(Refusal { reason, mtu: 0 }))
}

/// Ends the walk with "fragmentation needed".
#[inline(always)]
pub(crate) fn too_big<T>(mtu: u16) -> Step<T> {
    ControlFlow::Break(End::Refusal(Refusal { reason: Reason::RejectTooBig, mtu }))
}
