//! An entry of a table of connections, in place.

use crate::parse::Tcp;
use lb_common::{
    flow::{Reply, Side, State, Tracked},
    way::Way,
};

/// A flow or a reply, established or in a handshake. Writes go to the map at once; two CPUs that write one entry at the
/// same time lose at worst a second of `last_seen` or repeat a change of state.
pub(crate) struct Entry<T> {
    value: *mut T,
}

impl<T: Tracked> Entry<T> {
    /// Of a value that a lookup in this run of the program has found.
    #[inline(always)]
    pub(crate) fn new(value: *mut T) -> Self {
        Self { value }
    }

    /// A copy, since the entry may be recycled under its reader.
    #[inline(always)]
    pub(crate) fn get(&self) -> T {
        // SAFETY: the pointer came from a lookup in this run of the program, during which the kernel keeps the
        // memory (RCU), if perhaps with another entry's content.
        unsafe { *self.value }
    }

    /// Notes the time; at most one write a second.
    #[inline(always)]
    pub(crate) fn seen(&self, now: u32) {
        // SAFETY: as in `get`.
        unsafe { (*self.value).seen(now) };
    }

    #[inline(always)]
    pub(crate) fn set_state(&self, state: State) {
        // SAFETY: as in `get`.
        unsafe { (*self.value).set_state(state) };
    }

    /// The backend answered a SYN; the client's third packet must acknowledge `sequence` + 1.
    #[inline(always)]
    pub(crate) fn answered(&self, sequence: u32) {
        // SAFETY: as in `get`.
        unsafe { (*self.value).expect(sequence.wrapping_add(1)) };
        self.set_state(State::Answered);
    }

    /// Notes a packet of an established connection.
    #[inline(always)]
    pub(crate) fn sent(&self, side: Side, tcp: Tcp, now: u32) {
        self.seen(now);
        let state = self.get().state();
        if tcp.is_turning() || state == State::Reset {
            self.set_state(state.after(side, tcp.has(Tcp::FIN), tcp.has(Tcp::RST)));
        }
    }
}

impl Entry<Reply> {
    /// The way that the kernel's routing named in this second, if it holds for a packet of `length` bytes.
    #[inline(always)]
    pub(crate) fn way(&self, length: u16) -> Option<Way> {
        // SAFETY: as in `get`.
        unsafe { (*self.value).way(length) }
    }

    /// Keeps the way until the next second.
    #[inline(always)]
    pub(crate) fn set_way(&self, way: Way) {
        // SAFETY: as in `get`.
        unsafe { (*self.value).set_way(way) };
    }
}
