//! Backends: the endpoints behind one served port, in numbered slots.

use crate::addr::{Ipv4, Port};
use bytemuck::{Pod, Zeroable};

/// Value of the `backends` map, index = backend id. Slot 0 is never used, so id 0 means "none".
///
/// A slot belongs to one served port. A flow remembers slot *and* generation: when the agent gives a slot to
/// another endpoint it counts the generation up, so every flow of the old one is dead at its next packet,
/// without a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Backend {
    /// Changes whenever the slot is given to another endpoint.
    pub generation: u32,
    /// [`crate::service::Service::id`] of the served port.
    pub service: u32,
    /// The endpoint's address.
    pub address: Ipv4,
    /// The endpoint's port.
    pub port: Port,
    state: u8,
    flags: u8,
}

/// What a backend may still get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendState {
    /// The slot is free; flows that name it are dead.
    Absent,
    /// Ready: new and existing flows.
    Active,
    /// Still in its EndpointSlice but not ready (terminating, say): existing flows only.
    Draining,
}

impl Backend {
    const ABSENT: u8 = 0;
    const ACTIVE: u8 = 1;
    const DRAINING: u8 = 2;
    const LOCAL: u8 = 1;
    const MASQUERADED: u8 = 2;

    /// A slot in use.
    pub fn new(
        service: u32,
        generation: u32,
        address: Ipv4,
        port: Port,
        state: BackendState,
        local: bool,
    ) -> Self {
        let mut backend = Self { generation, service, address, port, state: 0, flags: u8::from(local) };
        backend.set_state(state);
        backend
    }

    /// The same, but for whoever connects the source is replaced: see [`Backend::is_masqueraded`].
    #[must_use]
    pub fn masqueraded(mut self, is_masqueraded: bool) -> Self {
        self.flags = self.flags & !Self::MASQUERADED | if is_masqueraded { Self::MASQUERADED } else { 0 };
        self
    }

    /// The state; a number that this version does not know counts as absent.
    #[inline(always)]
    pub fn state(&self) -> BackendState {
        match self.state {
            Self::ACTIVE => BackendState::Active,
            Self::DRAINING => BackendState::Draining,
            _ => BackendState::Absent,
        }
    }

    /// Changes the state only.
    pub fn set_state(&mut self, state: BackendState) {
        self.state = match state {
            BackendState::Absent => Self::ABSENT,
            BackendState::Active => Self::ACTIVE,
            BackendState::Draining => Self::DRAINING,
        };
    }

    /// Whether new flows may choose it.
    #[inline(always)]
    pub fn takes_new_flows(&self) -> bool {
        self.state == Self::ACTIVE
    }

    /// Whether a flow that was given slot and `generation` may go on.
    #[inline(always)]
    pub fn serves(&self, generation: u32) -> bool {
        self.state != Self::ABSENT && self.generation == generation
    }

    /// Whether the endpoint runs on this node: its packets go through the stack, so that the CNI's network
    /// policy applies to them.
    #[inline(always)]
    pub fn is_local(&self) -> bool {
        self.flags & Self::LOCAL != 0
    }

    /// Whether its answers to a client would not come back to the holder by themselves, so that the connection needs the
    /// holder as its source: see [`crate::masquerade`].
    #[inline(always)]
    pub fn is_masqueraded(&self) -> bool {
        self.flags & Self::MASQUERADED != 0
    }
}

const _: () = assert!(size_of::<Backend>() == 16 && align_of::<Backend>() == 4);
