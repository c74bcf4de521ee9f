//! What may differ between testbeds.

use crate::topology::Topology;
use std::net::Ipv4Addr;
use std::path::PathBuf;

/// What may differ between testbeds.
#[derive(Clone, Debug)]
pub struct Options {
    /// The network between the pods.
    pub topology: Topology,
    /// Addresses that nodes hold beside their own: (number of the node, address in 192.0.2.0/24).
    pub addresses: Vec<(u8, Ipv4Addr)>,
    /// What the nodes' addresses are on.
    pub uplink: Uplink,
    /// Whether bridged packets pass iptables on the nodes (`net.bridge.bridge-nf-call-iptables`).
    pub br_netfilter: bool,
    /// Whether nodes forward nothing but what kube-proxy and the CNI accept: policy DROP of FORWARD, as Docker sets it.
    pub forward_drop: bool,
    /// Where flannel has its masquerade.
    pub flannel: Masquerade,
    /// Whether client and pods leave checksums to the (virtual) device. Off for captures whose checksums are judged.
    pub checksum_offload: bool,
    /// `net.ipv4.conf.*.rp_filter` of the nodes: 0 off, 1 strict, 2 loose.
    pub rp_filter: u8,
    /// The agent's binary, for [`Testbed::start_agent`](crate::Testbed::start_agent).
    pub agent: Option<PathBuf>,
}

/// What a node's addresses are on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Uplink {
    /// All on `eth0`.
    #[default]
    Single,
    /// Its own on `eth0`, which its default route leads to; [`Options::addresses`] on `eth1`, a network of its own that the
    /// router sends them to.
    Second,
    /// All on the bridge `br0`, whose one port is `eth0`.
    Bridge,
}

/// What flannel writes its masquerade with: its `EnableNFTables`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Masquerade {
    /// The chain `FLANNEL-POSTRTG`.
    #[default]
    Iptables,
    /// The table `flannel-ipv4`.
    Nftables,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            topology: Topology::Weave,
            addresses: vec![(1, Ipv4Addr::new(192, 0, 2, 101)), (2, Ipv4Addr::new(192, 0, 2, 102))],
            uplink: Uplink::Single,
            br_netfilter: true,
            forward_drop: false,
            flannel: Masquerade::Iptables,
            checksum_offload: true,
            rp_filter: 0,
            agent: None,
        }
    }
}
