//! The networks that are tried.

use std::fmt;
use testbed::{Masquerade, Options, Topology, Uplink};

/// One of them.
pub(crate) struct Kind {
    pub(crate) number: usize,
    pub(crate) options: Options,
    /// What agents have to be told.
    pub(crate) words: &'static [&'static str],
    note: &'static str,
}

/// Every topology with every `rp_filter`, where strict goes with a policy that forwards nothing by itself; and what is
/// worth a look on some of them.
pub(crate) fn all() -> Vec<Kind> {
    let usual = Topology::ALL.into_iter().flat_map(|topology| {
        (0..=2).map(move |rp_filter| {
            let forward_drop = rp_filter == 1;
            let note = if forward_drop { ", FORWARD DROP" } else { "" };
            (Options { topology, rp_filter, forward_drop, ..Options::default() }, note)
        })
    });
    let nftables = [Topology::Flannel, Topology::HostGw].map(|topology| {
        let flannel = Masquerade::Nftables;
        (Options { topology, flannel, ..Options::default() }, ", nftables")
    });
    // Loose: packets come in by one uplink and go out by the other.
    let second = [Topology::Weave, Topology::Flannel, Topology::Calico].map(|topology| {
        let uplink = Uplink::Second;
        (Options { topology, uplink, rp_filter: 2, ..Options::default() }, ", address on eth1")
    });
    let bridge = [Topology::Weave, Topology::HostGw, Topology::CalicoVxlan].map(|topology| {
        let uplink = Uplink::Bridge;
        (
            Options { topology, uplink, rp_filter: 1, br_netfilter: false, ..Options::default() },
            ", uplink br0, no br_netfilter",
        )
    });
    let filtered_bridge = [Topology::Weave, Topology::Flannel, Topology::Calico].map(|topology| {
        let uplink = Uplink::Bridge;
        (Options { topology, uplink, ..Options::default() }, ", uplink br0")
    });
    let unfiltered = [Topology::Weave, Topology::Flannel].map(|topology| {
        (Options { topology, br_netfilter: false, ..Options::default() }, ", no br_netfilter")
    });
    let all = usual.chain(nftables).chain(second).chain(bridge).chain(filtered_bridge).chain(unfiltered);
    let kind = |(number, (options, note)): (usize, (Options, _))| {
        // A bridge whose one port is a veth, as in the testbed, is taken for one of pods.
        let words: &[_] = if options.uplink == Uplink::Bridge { &["--address-include=br0"] } else { &[] };
        Kind { number, options, words, note }
    };
    all.enumerate().map(kind).collect()
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { topology, rp_filter, .. } = &self.options;
        write!(f, "{topology}, rp_filter {rp_filter}{}", self.note)
    }
}
