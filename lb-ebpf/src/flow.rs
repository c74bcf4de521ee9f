//! Flows by the client's 5-tuple: the established ones, and handshakes in a table of their own.

use crate::{config, parse::Parsed, parse::Tcp};
use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{HashMap, LruHashMap},
    macros::btf_map,
};
use lb_common::{
    addr::Protocol,
    flow::{Flow, FlowKey, Side, State},
    limits,
};

/// Allocated on use: at the default limit a preallocated table would cost every node its full size.
#[btf_map(name = "flows")]
static FLOWS: HashMap<FlowKey, Flow, { limits::FLOWS as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// A flood of SYNs evicts at most other handshakes, and those find their backend again by the hash.
#[btf_map(name = "handshakes")]
static HANDSHAKES: LruHashMap<FlowKey, Flow, { limits::HANDSHAKES as usize }> = LruHashMap::new();

/// An entry of either table. Writes go to the map at once; two CPUs that write one entry at the same time lose at
/// worst a second of `last_seen` or repeat a change of state.
pub(crate) struct Entry {
    value: *mut Flow,
}

impl Entry {
    /// A copy, since the entry may be recycled under its reader.
    #[inline(always)]
    pub(crate) fn get(&self) -> Flow {
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
        unsafe { (*self.value).expected_ack = sequence.wrapping_add(1) };
        self.set_state(State::Answered);
    }

    /// Notes a packet of an established connection.
    #[inline(always)]
    pub(crate) fn sent(&self, side: Side, tcp: Tcp, now: u32) {
        self.seen(now);
        if tcp.is_turning() {
            self.set_state(self.get().state().after(side, tcp.has(Tcp::FIN), tcp.has(Tcp::RST)));
        }
    }
}

/// The established flow that the client's packet belongs to; none where it has expired, or where a SYN begins
/// another on the same tuple.
#[inline(always)]
pub(crate) fn established(parsed: &Parsed, now: u32) -> Option<Entry> {
    let entry = established_by_key(&parsed.key)?;
    let flow = entry.get();
    if is_expired(&flow, parsed.key.protocol, now) || (parsed.tcp.is_opening() && flow.state().is_over()) {
        forget(&parsed.key);
        return None;
    }
    Some(entry)
}

/// The established flow, expired or not.
#[inline(always)]
pub(crate) fn established_by_key(key: &FlowKey) -> Option<Entry> {
    FLOWS.get_ptr_mut(key).map(|value| Entry { value })
}

/// The handshake, expired or not: its backend is as good as any.
#[inline(always)]
pub(crate) fn handshake(key: &FlowKey) -> Option<Entry> {
    HANDSHAKES.get_ptr_mut(key).map(|value| Entry { value })
}

/// Stores a handshake. False where the kernel has no memory for it.
#[inline(always)]
pub(crate) fn begin(key: &FlowKey, flow: &Flow) -> bool {
    HANDSHAKES.insert(key, flow, 0).is_ok()
}

/// Stores an established flow. False where the table is full: what is in it stays.
#[inline(always)]
pub(crate) fn establish(key: &FlowKey, flow: &Flow) -> bool {
    FLOWS.insert(key, flow, 0).is_ok()
}

/// Removes the handshake of a flow that is established now.
#[inline(always)]
pub(crate) fn end_handshake(key: &FlowKey) {
    // An entry that was evicted meanwhile is gone as well.
    let _ = HANDSHAKES.remove(key);
}

/// Removes an established flow. Its reply entry is an index without an owner now: the next connection that wants
/// the tuple takes it over, and the agent's sweep finds the rest.
#[inline(always)]
pub(crate) fn forget(key: &FlowKey) {
    let _ = FLOWS.remove(key);
}

/// Whether a connection is alive, in whichever table.
#[inline(always)]
pub(crate) fn is_live(key: &FlowKey, now: u32) -> bool {
    match established_by_key(key).or_else(|| handshake(key)) {
        Some(entry) => {
            let flow = entry.get();
            !flow.state().is_over() && !is_expired(&flow, key.protocol, now)
        }
        None => false,
    }
}

#[inline(always)]
fn is_expired(flow: &Flow, protocol: Protocol, now: u32) -> bool {
    // Another CPU may have noted a later second than ours.
    now.saturating_sub(flow.last_seen) > config::timeouts().of(flow.state(), protocol == Protocol::UDP)
}
