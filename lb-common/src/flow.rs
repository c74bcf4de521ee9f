//! Flows: what is remembered of a connection.
//!
//! A connection has two entries. The *flow* (5-tuple as the client sends it) owns the state; the *reply*
//! (5-tuple as the backend answers) says how an answer is treated. Both live in the LRU tables `handshakes` and
//! `handshake_replies` until the handshake is complete, then in `flows` and `replies`, which evict nothing.

use crate::addr::{Ipv4, Port, Protocol};
use crate::way::Way;
use bytemuck::{Pod, Zeroable};

/// A 5-tuple, as it stands in a packet going one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C)]
pub struct FlowKey {
    /// Source address.
    pub source: Ipv4,
    /// Destination address.
    pub destination: Ipv4,
    /// Source port.
    pub source_port: Port,
    /// Destination port.
    pub destination_port: Port,
    /// TCP or UDP.
    pub protocol: Protocol,
    zero: u8,
    zeros: u16,
}

impl FlowKey {
    /// A key; the spare bytes are zero.
    #[inline(always)]
    pub const fn new(
        source: Ipv4,
        source_port: Port,
        destination: Ipv4,
        destination_port: Port,
        protocol: Protocol,
    ) -> Self {
        Self { source, destination, source_port, destination_port, protocol, zero: 0, zeros: 0 }
    }

    /// The tuple of a packet going the other way.
    #[inline(always)]
    pub const fn reversed(&self) -> Self {
        Self::new(self.destination, self.destination_port, self.source, self.source_port, self.protocol)
    }

    /// The tuple after its destination was replaced.
    #[inline(always)]
    pub const fn with_destination(&self, address: Ipv4, port: Port) -> Self {
        Self::new(self.source, self.source_port, address, port, self.protocol)
    }
}

/// Where a connection is in its life. A plain number in the maps: see [`State::number`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// TCP: a SYN went to the backend. UDP: a datagram did.
    Opening = 1,
    /// TCP: the backend answered SYN-ACK, its acknowledgement is awaited.
    Answered = 2,
    /// TCP without a SYN: a connection that another holder began. Established at the backend's first answer.
    PickedUp = 3,
    /// Both sides have spoken.
    Established = 4,
    /// The client has sent FIN.
    ClientClosed = 5,
    /// The backend has sent FIN.
    BackendClosed = 6,
    /// Both have.
    Closed = 7,
    /// Either has sent RST.
    Reset = 8,
}

impl State {
    /// Every state, in the order of its numbers.
    pub const ALL: [Self; 8] = [
        Self::Opening,
        Self::Answered,
        Self::PickedUp,
        Self::Established,
        Self::ClientClosed,
        Self::BackendClosed,
        Self::Closed,
        Self::Reset,
    ];

    /// The number in the maps, from 1.
    #[inline(always)]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// From a map; a number that this version does not know counts as [`State::Reset`], which dies soonest.
    #[inline(always)]
    pub const fn from_number(number: u8) -> Self {
        match number {
            1 => Self::Opening,
            2 => Self::Answered,
            3 => Self::PickedUp,
            4 => Self::Established,
            5 => Self::ClientClosed,
            6 => Self::BackendClosed,
            7 => Self::Closed,
            _ => Self::Reset,
        }
    }

    /// The name in tables and metric labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Answered => "answered",
            Self::PickedUp => "picked_up",
            Self::Established => "established",
            Self::ClientClosed => "client_closed",
            Self::BackendClosed => "backend_closed",
            Self::Closed => "closed",
            Self::Reset => "reset",
        }
    }

    /// Whether the connection is over, so that a SYN begins another.
    #[inline(always)]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Closed | Self::Reset)
    }

    /// The state after a packet of one side, with these flags. Where more comes after an RST, that was none of the connection's:
    /// it was forged, or outside the window, which is not followed here. Had it been one, its sender would answer what still comes
    /// by another.
    #[inline(always)]
    #[must_use]
    pub const fn after(self, side: Side, fin: bool, rst: bool) -> Self {
        if rst {
            return Self::Reset;
        }
        match (self, side) {
            (Self::Reset, _) if !fin => Self::Established,
            _ if !fin => self,
            (Self::Closed, _) => self,
            (Self::BackendClosed, Side::Client) | (Self::ClientClosed, Side::Backend) => Self::Closed,
            (_, Side::Client) => Self::ClientClosed,
            (_, Side::Backend) => Self::BackendClosed,
        }
    }
}

/// Who sent a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one who opened the connection.
    Client,
    /// The endpoint.
    Backend,
}

/// How packets of a connection leave the holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Redirected to the device; netfilter sees neither direction.
    Redirect,
    /// Through the stack; netfilter sees both directions.
    Stack,
}

/// Value of `flows` and `handshakes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Flow {
    /// Slot in `backends`.
    pub backend: u32,
    /// The slot's generation when it was chosen.
    pub generation: u32,
    /// [`crate::service::Service::id`].
    pub service: u32,
    /// Seconds since boot (`CLOCK_MONOTONIC`), at a granularity of one second.
    pub last_seen: u32,
    /// TCP in a handshake: the acknowledgement number that the client's third packet must carry, host order.
    pub expected_ack: u32,
    state: u8,
    path: u8,
    zero: u16,
}

impl Flow {
    /// A new flow.
    #[inline(always)]
    pub const fn new(
        service: u32,
        backend: u32,
        generation: u32,
        path: Path,
        state: State,
        now: u32,
    ) -> Self {
        Self {
            backend,
            generation,
            service,
            last_seen: now,
            expected_ack: 0,
            state: state.number(),
            path: path as u8,
            zero: 0,
        }
    }

    /// Notes the time; at most one write a second.
    #[inline(always)]
    pub const fn seen(&mut self, now: u32) {
        if self.last_seen != now {
            self.last_seen = now;
        }
    }

    /// Where the connection is.
    #[inline(always)]
    pub const fn state(&self) -> State {
        State::from_number(self.state)
    }

    /// Moves on.
    #[inline(always)]
    pub const fn set_state(&mut self, state: State) {
        self.state = state.number();
    }

    /// How its packets leave.
    #[inline(always)]
    pub const fn path(&self) -> Path {
        if self.path == Path::Redirect as u8 { Path::Redirect } else { Path::Stack }
    }
}

/// What both entries of a connection have: the time of its last packet, and where it is in its life.
pub trait Tracked: Copy {
    /// Notes the time.
    fn seen(&mut self, now: u32);
    /// Where the connection is.
    fn state(&self) -> State;
    /// Moves on.
    fn set_state(&mut self, state: State);
    /// The acknowledgement number that the client's third packet must carry, host order.
    fn expect(&mut self, acknowledgement: u32);
}

macro_rules! tracked {
    ($entry:ty) => {
        impl Tracked for $entry {
            #[inline(always)]
            fn seen(&mut self, now: u32) {
                Self::seen(self, now);
            }

            #[inline(always)]
            fn state(&self) -> State {
                Self::state(self)
            }

            #[inline(always)]
            fn set_state(&mut self, state: State) {
                Self::set_state(self, state);
            }

            #[inline(always)]
            fn expect(&mut self, acknowledgement: u32) {
                self.expected_ack = acknowledgement;
            }
        }
    };
}

tracked!(Flow);
tracked!(Reply);

/// What a reply entry asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyKind {
    /// This node holds the address: the source becomes address and port again.
    Translate,
    /// Another node does: the packet is marked, and the routing rule for the mark leads it there.
    Mark,
}

/// Value of `replies` and `handshake_replies`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Reply {
    /// Translate: the address that the client connected to.
    pub address: Ipv4,
    /// Translate: [`crate::service::Service::id`].
    pub service: u32,
    /// As in [`Flow`]; for Translate a cache that spares the flow a write, for Mark the truth.
    pub last_seen: u32,
    /// Mark, TCP in a handshake: as in [`Flow`].
    pub expected_ack: u32,
    /// Translate: 0 where the way is to be asked for.
    interface: u32,
    next_hop: Ipv4,
    passes: u16,
    /// Translate: the port that the client connected to.
    pub port: Port,
    kind: u8,
    /// Mark: 1..=250.
    pub mark: u8,
    state: u8,
    path: u8,
}

impl Reply {
    const TRANSLATE: u8 = 1;
    const MARK: u8 = 2;
    const TRANSLATE_BOTH: u8 = 3;

    /// For a connection to an address of this node.
    #[inline(always)]
    pub const fn translate(address: Ipv4, port: Port, service: u32, path: Path, now: u32) -> Self {
        Self {
            address,
            service,
            last_seen: now,
            expected_ack: 0,
            interface: 0,
            next_hop: Ipv4::new([0; 4]),
            passes: 0,
            port,
            kind: Self::TRANSLATE,
            mark: 0,
            state: 0,
            path: path as u8,
        }
    }

    /// For a connection that the holder with `mark` forwarded to a pod of this node.
    #[inline(always)]
    pub const fn mark(mark: u8, state: State, now: u32) -> Self {
        Self {
            address: Ipv4::new([0; 4]),
            service: 0,
            last_seen: now,
            expected_ack: 0,
            interface: 0,
            next_hop: Ipv4::new([0; 4]),
            passes: 0,
            port: Port::new(0),
            kind: Self::MARK,
            mark,
            state: state.number(),
            path: Path::Stack as u8,
        }
    }

    /// The same for a connection whose source is masqueraded: its answers get their destination back too.
    #[must_use]
    #[inline(always)]
    pub const fn masqueraded(mut self, is_masqueraded: bool) -> Self {
        if is_masqueraded {
            self.kind = Self::TRANSLATE_BOTH;
        }
        self
    }

    /// Translate: whether the destination is to be replaced as well, see [`crate::masquerade`].
    #[inline(always)]
    pub const fn is_masqueraded(&self) -> bool {
        self.kind == Self::TRANSLATE_BOTH
    }

    /// Notes the time. The way is asked for anew once in every second, so that a changed route is followed.
    #[inline(always)]
    pub const fn seen(&mut self, now: u32) {
        if self.last_seen != now {
            self.last_seen = now;
            self.interface = 0;
        }
    }

    /// The way to the client, if it is known for a packet of `length` bytes.
    #[inline(always)]
    pub const fn way(&self, length: u16) -> Option<Way> {
        if self.interface == 0 || length > self.passes {
            return None;
        }
        Some(Way { interface: self.interface, next_hop: self.next_hop, passes: self.passes })
    }

    /// The way that was kept last, whether it still holds or not.
    #[inline(always)]
    pub const fn last_way(&self) -> Way {
        Way { interface: self.interface, next_hop: self.next_hop, passes: self.passes }
    }

    /// Keeps the way until the next second.
    #[inline(always)]
    pub const fn set_way(&mut self, way: Way) {
        self.interface = way.interface;
        self.next_hop = way.next_hop;
        self.passes = way.passes;
    }

    /// What it asks for.
    #[inline(always)]
    pub const fn kind(&self) -> ReplyKind {
        if self.kind == Self::MARK { ReplyKind::Mark } else { ReplyKind::Translate }
    }

    /// Mark: where the connection is.
    #[inline(always)]
    pub const fn state(&self) -> State {
        State::from_number(self.state)
    }

    /// Mark: moves on.
    #[inline(always)]
    pub const fn set_state(&mut self, state: State) {
        self.state = state.number();
    }

    /// How the connection's packets leave the holder.
    #[inline(always)]
    pub const fn path(&self) -> Path {
        if self.path == Path::Redirect as u8 { Path::Redirect } else { Path::Stack }
    }
}

const _: () = assert!(size_of::<FlowKey>() == 16 && align_of::<FlowKey>() == 4);
const _: () = assert!(size_of::<Flow>() == 24 && size_of::<Reply>() == 32);
