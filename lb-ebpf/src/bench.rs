//! What the bench compares with: how little a program can cost. Not in the object that is shipped.

use crate::{
    outcome::TC_ACT_UNSPEC,
    packet::{ETH_LEN, IPV4_LEN, Packet},
    service,
};
use aya_ebpf::{macros::classifier, programs::TcContext};
use lb_common::{
    addr::{Ipv4, Port, Protocol},
    flow::FlowKey,
};

/// Nothing: what the hook and the measurement themselves cost.
#[classifier]
pub(crate) fn bench_empty(_ctx: TcContext) -> i32 {
    TC_ACT_UNSPEC
}

/// The 5-tuple at fixed offsets, and one look-up in a hash map.
#[classifier]
pub(crate) fn bench_lookup(ctx: TcContext) -> i32 {
    let packet = Packet::new(&ctx);
    let Some(addresses) = packet.read::<[[u8; 2]; 4]>(ETH_LEN + 12) else { return TC_ACT_UNSPEC };
    let Some(ports) = packet.read::<[[u8; 2]; 2]>(ETH_LEN + IPV4_LEN) else { return TC_ACT_UNSPEC };
    let [s0, s1, d0, d1] = addresses;
    let key = FlowKey::new(
        Ipv4::new([s0[0], s0[1], s1[0], s1[1]]),
        Port::from_bytes(ports[0]),
        Ipv4::new([d0[0], d0[1], d1[0], d1[1]]),
        Port::from_bytes(ports[1]),
        Protocol::TCP,
    );
    match service::find(&key) {
        Some(_) => TC_ACT_UNSPEC,
        // Another value, or the compiler would leave the look-up out.
        None => 0,
    }
}
