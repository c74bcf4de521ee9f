//! Replies by the backend's 5-tuple: what becomes of a packet that a backend sends.

use crate::{config, entry::Entry, flow, holder};
use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{HashMap, LruHashMap},
    macros::btf_map,
};
use lb_common::{
    addr::Protocol,
    flow::{FlowKey, Reply, ReplyKind},
    limits,
};

#[btf_map(name = "replies")]
static REPLIES: HashMap<FlowKey, Reply, { limits::FLOWS as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map(name = "handshake_replies")]
static HANDSHAKE_REPLIES: LruHashMap<FlowKey, Reply, { limits::HANDSHAKES as usize }> = LruHashMap::new();

#[inline(always)]
pub(crate) fn established(key: &FlowKey) -> Option<Entry<Reply>> {
    REPLIES.get_ptr_mut(key).map(Entry::new)
}

#[inline(always)]
pub(crate) fn handshake(key: &FlowKey) -> Option<Entry<Reply>> {
    HANDSHAKE_REPLIES.get_ptr_mut(key).map(Entry::new)
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
fn is_free(entry: &Entry<Reply>, key: &FlowKey, owner: &FlowKey, now: u32) -> bool {
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
