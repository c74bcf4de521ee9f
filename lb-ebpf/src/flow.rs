//! Flows by the client's 5-tuple: the established ones, and handshakes in a table of their own.

use crate::{config, entry::Entry, parse::Parsed};
use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{HashMap, LruHashMap},
    macros::btf_map,
};
use lb_common::{
    addr::Protocol,
    flow::{Flow, FlowKey},
    limits,
};

/// Allocated on use: at the default limit a preallocated table would cost every node its full size.
#[btf_map(name = "flows")]
static FLOWS: HashMap<FlowKey, Flow, { limits::FLOWS as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// A flood of SYNs evicts at most other handshakes, and those find their backend again by the hash.
#[btf_map(name = "handshakes")]
static HANDSHAKES: LruHashMap<FlowKey, Flow, { limits::HANDSHAKES as usize }> = LruHashMap::new();

/// The established flow that the client's packet belongs to; none where it has expired, or where a SYN begins
/// another on the same tuple.
#[inline(always)]
pub(crate) fn established(parsed: &Parsed, now: u32) -> Option<Entry<Flow>> {
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
pub(crate) fn established_by_key(key: &FlowKey) -> Option<Entry<Flow>> {
    FLOWS.get_ptr_mut(key).map(Entry::new)
}

/// The handshake, expired or not: its backend is as good as any.
#[inline(always)]
pub(crate) fn handshake(key: &FlowKey) -> Option<Entry<Flow>> {
    HANDSHAKES.get_ptr_mut(key).map(Entry::new)
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

/// The same, roughly and cheaper for the verifier: one that is not over counts as alive until the longest of its table's
/// timeouts.
#[inline(always)]
pub(crate) fn may_be_live(key: &FlowKey, now: u32) -> bool {
    let is_live = |entry: Entry<Flow>, timeout: u32| {
        let flow = entry.get();
        !flow.state().is_over() && now.saturating_sub(flow.last_seen) <= timeout
    };
    let timeouts = config::timeouts();
    match established_by_key(key) {
        Some(entry) => is_live(entry, timeouts.established),
        None => handshake(key).is_some_and(|entry| is_live(entry, timeouts.handshake)),
    }
}

#[inline(always)]
fn is_expired(flow: &Flow, protocol: Protocol, now: u32) -> bool {
    // Another CPU may have noted a later second than ours.
    now.saturating_sub(flow.last_seen) > config::timeouts().of(flow.state(), protocol == Protocol::UDP)
}
