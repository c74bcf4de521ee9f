//! Replies by the backend's 5-tuple: what becomes of a packet that a backend sends.

use crate::{config, flow, holder, parse::Tcp};
use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{HashMap, LruHashMap},
    macros::btf_map,
};
use lb_common::{
    addr::Protocol,
    flow::{FlowKey, Reply, ReplyKind, Side, State},
    limits,
    way::Way,
};

#[btf_map(name = "replies")]
static REPLIES: HashMap<FlowKey, Reply, { limits::FLOWS as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map(name = "handshake_replies")]
static HANDSHAKE_REPLIES: LruHashMap<FlowKey, Reply, { limits::HANDSHAKES as usize }> = LruHashMap::new();

/// An entry of either table; see `flow::Entry`.
pub(crate) struct Entry {
    value: *mut Reply,
}

impl Entry {
    #[inline(always)]
    pub(crate) fn get(&self) -> Reply {
        // SAFETY: as in `flow::Entry::get`.
        unsafe { *self.value }
    }

    #[inline(always)]
    pub(crate) fn seen(&self, now: u32) {
        // SAFETY: as in `flow::Entry::get`.
        unsafe { (*self.value).seen(now) };
    }

    /// The way that the kernel's routing named in this second, if it holds for a packet of `length` bytes.
    #[inline(always)]
    pub(crate) fn way(&self, length: u16) -> Option<Way> {
        // SAFETY: as in `flow::Entry::get`.
        unsafe { (*self.value).way(length) }
    }

    /// Keeps the way until the next second.
    #[inline(always)]
    pub(crate) fn set_way(&self, way: Way) {
        // SAFETY: as in `flow::Entry::get`.
        unsafe { (*self.value).set_way(way) };
    }

    #[inline(always)]
    pub(crate) fn set_state(&self, state: State) {
        // SAFETY: as in `flow::Entry::get`.
        unsafe { (*self.value).set_state(state) };
    }

    #[inline(always)]
    pub(crate) fn answered(&self, sequence: u32) {
        // SAFETY: as in `flow::Entry::get`.
        unsafe { (*self.value).expected_ack = sequence.wrapping_add(1) };
        self.set_state(State::Answered);
    }

    #[inline(always)]
    pub(crate) fn sent(&self, side: Side, tcp: Tcp, now: u32) {
        self.seen(now);
        if tcp.is_turning() {
            self.set_state(self.get().state().after(side, tcp.has(Tcp::FIN), tcp.has(Tcp::RST)));
        }
    }
}

#[inline(always)]
pub(crate) fn established(key: &FlowKey) -> Option<Entry> {
    REPLIES.get_ptr_mut(key).map(|value| Entry { value })
}

#[inline(always)]
pub(crate) fn handshake(key: &FlowKey) -> Option<Entry> {
    HANDSHAKE_REPLIES.get_ptr_mut(key).map(|value| Entry { value })
}

/// Stores the reply side of a handshake.
#[inline(always)]
pub(crate) fn begin(key: &FlowKey, reply: &Reply) -> bool {
    HANDSHAKE_REPLIES.insert(key, reply, 0).is_ok()
}

/// Stores the reply side of an established connection. False where the table is full.
#[inline(always)]
pub(crate) fn establish(key: &FlowKey, reply: &Reply) -> bool {
    REPLIES.insert(key, reply, 0).is_ok()
}

#[inline(always)]
pub(crate) fn end_handshake(key: &FlowKey) {
    let _ = HANDSHAKE_REPLIES.remove(key);
}

#[inline(always)]
pub(crate) fn forget(key: &FlowKey) {
    let _ = REPLIES.remove(key);
}

/// Whether a connection that begins with the client tuple `owner` may use the reply tuple `key`: without SNAT, two
/// connections of one client port that lead to one backend would be the same 5-tuple there. The established entry of a
/// connection that is over goes, since answers are looked up there first.
#[inline(always)]
pub(crate) fn claim(key: &FlowKey, owner: &FlowKey, now: u32) -> bool {
    if let Some(entry) = established(key) {
        if !is_free(&entry, key, owner, now) {
            return false;
        }
        forget(key);
    }
    handshake(key).is_none_or(|entry| is_free(&entry, key, owner, now))
}

#[inline(always)]
fn is_free(entry: &Entry, key: &FlowKey, owner: &FlowKey, now: u32) -> bool {
    let reply = entry.get();
    match reply.kind() {
        // Or its holder has let go of it: the address may have moved here, and its connections with it.
        ReplyKind::Mark => !is_live(&reply, owner.protocol, now) || !holder::forwards(key, reply.mark),
        ReplyKind::Translate => {
            let other = owner.with_destination(reply.address, reply.port);
            other == *owner || !flow::is_live(&other, now)
        }
    }
}

/// Whether another holder's connection is alive.
#[inline(always)]
pub(crate) fn is_live(reply: &Reply, protocol: Protocol, now: u32) -> bool {
    let idle = now.saturating_sub(reply.last_seen);
    !reply.state().is_over() && idle <= config::timeouts().of(reply.state(), protocol == Protocol::UDP)
}
