//! Constants that the agent sets when it loads the program; the verifier prunes what they rule out.

use crate::flow::State;
use bytemuck::{Pod, Zeroable};

/// Name of the program's global.
pub const GLOBAL: &str = "CONFIG";

/// Idle times, in seconds, after which a flow counts as gone. Indexed through [`Timeouts::of`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Timeouts {
    /// TCP until the handshake is complete.
    pub handshake: u32,
    /// TCP with both directions open. A little above the kernel's whole keep-alive cycle (7200 s + 9 × 75 s), so that
    /// a connection that uses keep-alive never expires here.
    pub established: u32,
    /// TCP after one FIN.
    pub half_closed: u32,
    /// TCP after both FINs.
    pub closed: u32,
    /// TCP after an RST.
    pub reset: u32,
    /// UDP without an answer.
    pub udp_opening: u32,
    /// UDP with an answer.
    pub udp_established: u32,
}

impl Timeouts {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        handshake: 60,
        established: 8_100,
        half_closed: 300,
        closed: 10,
        reset: 10,
        udp_opening: 30,
        udp_established: 180,
    };

    /// The idle time for a state.
    #[inline(always)]
    pub const fn of(&self, state: State, is_udp: bool) -> u32 {
        match (state, is_udp) {
            (State::Opening | State::Answered | State::PickedUp, true) => self.udp_opening,
            (_, true) => self.udp_established,
            (State::Opening | State::Answered | State::PickedUp, false) => self.handshake,
            (State::Established, false) => self.established,
            (State::ClientClosed | State::BackendClosed, false) => self.half_closed,
            (State::Closed, false) => self.closed,
            (State::Reset, false) => self.reset,
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The program's global `CONFIG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Config {
    /// See [`crate::mark`]: how far our byte is shifted left in the packet mark (0, 8, 16 or 24).
    pub mark_shift: u32,
    /// 1: everything goes through the stack (`--forwarding stack`); 0: remote backends by redirect.
    pub through_stack: u32,
    /// Idle times.
    pub timeouts: Timeouts,
}

impl Config {
    /// The defaults.
    pub const DEFAULT: Self = Self { mark_shift: 24, through_stack: 0, timeouts: Timeouts::DEFAULT };
}

impl Default for Config {
    fn default() -> Self {
        Self::DEFAULT
    }
}

const _: () = assert!(size_of::<Config>() == 36);
