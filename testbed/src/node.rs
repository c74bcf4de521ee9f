//! A node of the cluster: its own network, which is the same under every CNI, and its pods.

use crate::cluster::Endpoint;
use crate::host::Host;
use crate::options::{Options, Uplink};
use crate::outside;
use crate::topology::{self, Network, Overlay, Plug, Topology};
use anyhow::{Context as _, Result};
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::ops::Deref;
use std::sync::atomic::{AtomicU8, Ordering};

/// As kube-proxy installs it.
const KUBE_PROXY: &str = "\
:KUBE-FORWARD - [0:0]
-A FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
";

/// A node of the cluster.
#[derive(Debug)]
pub struct Node {
    host: Host,
    number: u8,
    topology: Topology,
    uplink: Uplink,
    last_pod: AtomicU8,
}

/// A pod: a host in the overlay.
#[derive(Clone, Debug)]
pub struct Pod {
    host: Host,
    node: u8,
    plug: Plug,
}

pub(crate) fn name(number: u8) -> String {
    format!("n{number}")
}

impl Node {
    pub(crate) fn new(host: Host, number: u8, options: &Options) -> Self {
        let Options { topology, uplink, .. } = *options;
        Self { host, number, topology, uplink, last_pod: AtomicU8::new(0) }
    }

    pub(crate) fn network(&self) -> &'static dyn Network {
        self.topology.network()
    }

    /// 1 for `n1`.
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Its own address, on its uplink.
    pub fn address(&self) -> Ipv4Addr {
        self.network().address(self.number).0
    }

    /// The device that has its own address: `eth0` or `br0`.
    pub fn uplink(&self) -> &'static str {
        match self.uplink {
            Uplink::Single | Uplink::Second => "eth0",
            Uplink::Bridge => "br0",
        }
    }

    /// The device that has the addresses which it holds beside its own.
    pub fn held_on(&self) -> &'static str {
        match self.uplink {
            Uplink::Single | Uplink::Bridge => self.uplink(),
            Uplink::Second => outside::SECOND,
        }
    }

    /// The Ethernet address of its uplink.
    pub fn mac(&self) -> [u8; 6] {
        [0x02, 0xc0, 0, 0x02, 0, self.number]
    }

    fn overlay_end(&self) -> Overlay {
        self.network().overlay(self)
    }

    /// The address where other nodes send what is for it rather than for its pods, such as replies to its forwards: of
    /// the bridge `weave`, of the VXLAN device, or the node's own.
    pub fn overlay(&self) -> Ipv4Addr {
        self.overlay_end().address
    }

    /// The device with that address.
    pub fn overlay_device(&self) -> &'static str {
        self.overlay_end().device
    }

    /// The Ethernet address of that device: the source of what the node sends to other nodes' pods.
    pub fn overlay_mac(&self) -> [u8; 6] {
        self.overlay_end().mac
    }

    /// The bridge that its pods are on; nothing where each has a device of its own.
    pub fn pods_bridge(&self) -> Option<&'static str> {
        self.network().bridge()
    }

    /// Where the router sends packets for addresses that it holds; nothing where the router asks for them by ARP.
    pub(crate) fn next_hop(&self) -> Option<Ipv4Addr> {
        if self.uplink == Uplink::Second {
            return Some(outside::second(self.number));
        }
        self.network().own_link(self.number).map(|_| self.address())
    }

    pub(crate) fn set_up(&self, options: &Options, others: &[&Self]) -> Result<()> {
        let bridged = if options.br_netfilter { "1" } else { "0" };
        let rp_filter = options.rp_filter.to_string();
        // Before the links: a new device takes its values from `default`.
        self.sysctls(&[
            ("ipv6/conf/default/disable_ipv6", "1"),
            ("ipv4/conf/all/rp_filter", &rp_filter),
            ("ipv4/conf/default/rp_filter", &rp_filter),
            ("ipv4/conf/eth0/rp_filter", &rp_filter),
            ("ipv4/ip_forward", "1"),
        ])?;
        self.sysctls(&[("bridge/bridge-nf-call-iptables", bridged)])
            .context("br_netfilter is missing: modprobe br_netfilter")?;
        if options.uplink == Uplink::Second {
            self.sysctls(&[(&format!("ipv4/conf/{}/rp_filter", outside::SECOND), &rp_filter)])?;
        }
        self.ip(&self.links(options))?;
        self.network().set_up(self, others, options)?;
        let policy = if options.forward_drop { "DROP" } else { "ACCEPT" };
        let rules = self.network().iptables(self, options);
        let rules = format!("*filter\n:FORWARD {policy} [0:0]\n{KUBE_PROXY}{rules}");
        self.feed(&["iptables-restore", "--noflush", "--wait"], &rules)
    }

    /// Its own network: addresses and the way out.
    fn links(&self, options: &Options) -> String {
        let (address, prefix) = self.network().address(self.number);
        let (uplink, mac) = (self.uplink(), topology::mac(self.mac()));
        let router = self.network().own_link(self.number).unwrap_or(outside::ROUTER);
        let mut links = format!("link set lo up\nlink set eth0 address {mac}\nlink set eth0 up\n");
        // Writing to a String cannot fail.
        if options.uplink == Uplink::Bridge {
            let _ = writeln!(
                links,
                "link add {uplink} address {mac} type bridge
                 link set eth0 master {uplink}
                 link set {uplink} up"
            );
        }
        if options.uplink == Uplink::Second {
            let second = outside::second(self.number);
            let _ = writeln!(links, "addr add {second}/24 dev {0}\nlink set {0} up", outside::SECOND);
        }
        let _ = writeln!(
            links,
            "addr add {address}/{prefix} dev {uplink}
             route add default via {router}"
        );
        for (_, held) in options.addresses.iter().filter(|(holder, _)| *holder == self.number) {
            let _ = writeln!(links, "addr add {held}/32 dev {}", self.held_on());
        }
        links
    }

    pub(crate) fn add_pod(&self, host: Host) -> Result<Pod> {
        let last = self.last_pod.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| {
            last.checked_add(1).filter(|last| *last < u8::MAX)
        });
        let last = last.map_err(|_| anyhow::anyhow!("{} is full of pods", self.name()))?;
        let plug = self.network().add_pod(self, &host, last + 1)?;
        Ok(Pod { host, node: self.number, plug })
    }

    pub(crate) fn remove_pod(&self, pod: &Pod) -> Result<()> {
        self.network().remove_pod(self, &pod.host, &pod.plug)
    }
}

impl Deref for Node {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl Pod {
    /// Its address in the overlay.
    pub fn ip(&self) -> Ipv4Addr {
        self.plug.ip
    }

    /// The number of its node.
    pub fn node(&self) -> u8 {
        self.node
    }

    /// The node's end of its link.
    pub fn port(&self) -> &str {
        &self.plug.port
    }

    /// As a ready endpoint of a Service.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::ready(self.ip(), &name(self.node))
    }
}

impl Deref for Pod {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}
