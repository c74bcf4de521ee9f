//! A node's interfaces: what the kernel lists, and which addresses are the host's.

use futures::TryStreamExt as _;
use glob::Pattern;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoBridge, InfoData, InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

/// An interface of this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number for it.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its Ethernet address; none on tunnels and the like.
    pub mac: Option<[u8; 6]>,
    /// What it is.
    pub kind: Kind,
    /// Index of the bridge, bond or team that it is a port of.
    pub master: Option<u32>,
    /// Largest IP packet, in bytes.
    pub mtu: u32,
    /// Set up by the administrator (`ip link set up`). A missing carrier does not count as down: addresses stay.
    pub up: bool,
    /// For a bridge: hands its IPv4 frames to netfilter by an option of its own, whatever the sysctl says.
    pub calls_iptables: bool,
    /// IPv4 addresses with the length of their prefix, in the kernel's order.
    pub addresses: Vec<(Ipv4Addr, u8)>,
}

/// What an interface is, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No kind of its own: a physical or paravirtual device, or the loopback.
    Device,
    /// A Linux bridge.
    Bridge,
    /// One end of a pair.
    Veth,
    /// A VXLAN tunnel.
    Vxlan,
    /// Anything else, by the kernel's name for it.
    Other(String),
}

/// Reading the interfaces failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot list the node's interfaces: {source}")]
pub struct ListError {
    #[from]
    source: rtnetlink::Error,
}

/// Lists the interfaces, by index.
///
/// # Errors
/// The kernel refuses a dump.
pub async fn list(handle: &rtnetlink::Handle) -> Result<Vec<Interface>, ListError> {
    let mut interfaces: Vec<Interface> =
        handle.link().get().execute().map_ok(from_link).try_collect().await?;
    let addresses: Vec<AddressMessage> = handle.address().get().execute().try_collect().await?;
    for (index, address, prefix) in addresses.iter().filter_map(from_address) {
        // An interface that appeared between the two dumps is found at the next pass.
        if let Some(interface) = interfaces.iter_mut().find(|i| i.index == index) {
            interface.addresses.push((address, prefix));
        }
    }
    interfaces.sort_by_key(|i| i.index);
    Ok(interfaces)
}

fn from_link(link: LinkMessage) -> Interface {
    let mut interface = Interface {
        index: link.header.index,
        name: String::new(),
        mac: None,
        kind: Kind::Device,
        master: None,
        mtu: 0,
        up: link.header.flags.contains(LinkFlags::Up),
        calls_iptables: false,
        addresses: Vec::new(),
    };
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name = name,
            LinkAttribute::Address(bytes) => interface.mac = bytes.try_into().ok(),
            LinkAttribute::Controller(index) => interface.master = Some(index),
            LinkAttribute::Mtu(mtu) => interface.mtu = mtu,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => interface.kind = from_kind(&kind),
                        LinkInfo::Data(InfoData::Bridge(options)) => {
                            interface.calls_iptables = options.contains(&InfoBridge::NfCallIpTables(true));
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    interface
}

fn from_kind(kind: &InfoKind) -> Kind {
    match kind {
        InfoKind::Bridge => Kind::Bridge,
        InfoKind::Veth => Kind::Veth,
        InfoKind::Vxlan => Kind::Vxlan,
        other => Kind::Other(other.to_string()),
    }
}

fn from_address(message: &AddressMessage) -> Option<(u32, Ipv4Addr, u8)> {
    let ipv4 = |ip: &IpAddr| match ip {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    };
    // On a point-to-point link IFA_ADDRESS is the peer and IFA_LOCAL our own end.
    let local = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Local(ip) => ipv4(ip),
        _ => None,
    });
    let any = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Address(ip) => ipv4(ip),
        _ => None,
    });
    local.or(any).map(|address| (message.header.index, address, message.header.prefix_len))
}

/// Names of interfaces that a CNI, a container runtime, kube-proxy or a virtual machine monitor makes for itself.
/// Kinds alone do not do: a host's uplink may be a bridge, or (in a container or a test) a veth.
const NOT_THE_HOSTS: &[&str] = &[
    "lo",
    "docker*",
    "cni*",
    "cbr*",
    "weave*",
    "vethwe*",
    "vxlan*",
    "flannel*",
    "cali*",
    "cilium*",
    "lxc*",
    "tunl*",
    "veth*",
    "br-*",
    "virbr*",
    "kube-*",
    "nodelocaldns*",
    "datapath",
];

/// Which interfaces' addresses are the host's own.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Only these. Empty: every interface that is neither named like one of a CNI nor a bridge of pods.
    pub include: Vec<Pattern>,
    /// Never these.
    pub exclude: Vec<Pattern>,
}

impl Selection {
    pub(super) fn takes(&self, interface: &Interface, all: &[Interface]) -> bool {
        if matches_any(&self.exclude, &interface.name) {
            return false;
        }
        if !self.include.is_empty() {
            return matches_any(&self.include, &interface.name);
        }
        !is_made_by_others(&interface.name) && !is_bridge_of_pods(interface, all)
    }
}

pub(super) fn matches_any(patterns: &[Pattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

fn is_made_by_others(name: &str) -> bool {
    // The patterns are either a whole name or a beginning.
    NOT_THE_HOSTS.iter().any(|known| match known.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == *known,
    })
}

/// A bridge with veths and nothing real among its ports leads to pods; one with a network card leads outside.
fn is_bridge_of_pods(interface: &Interface, all: &[Interface]) -> bool {
    let mut ports = all.iter().filter(|port| port.master == Some(interface.index)).peekable();
    interface.kind == Kind::Bridge
        && ports.peek().is_some()
        && ports.all(|port| match &port.kind {
            Kind::Veth | Kind::Vxlan => true,
            Kind::Device | Kind::Bridge => false,
            Kind::Other(kind) => !matches!(kind.as_str(), "bond" | "team" | "vlan" | "macvlan"),
        })
}

/// The addresses that the host itself has, sorted by number, each once. Not loopback's, not link-local ones, none
/// of an interface that is down.
pub fn host_addresses(interfaces: &[Interface], selection: &Selection) -> Vec<Ipv4Addr> {
    let addresses: BTreeSet<Ipv4Addr> =
        interfaces.iter().filter(|i| selection.takes(i, interfaces)).flat_map(usable_addresses).collect();
    addresses.into_iter().collect()
}

pub(super) fn usable_addresses(interface: &Interface) -> impl Iterator<Item = Ipv4Addr> {
    let addresses = if interface.up { interface.addresses.as_slice() } else { &[] };
    addresses.iter().map(|(address, _)| *address).filter(|a| !a.is_loopback() && !a.is_link_local())
}

#[cfg(test)]
mod tests {
    use super::super::sample::{mk, node, port};
    use super::*;

    fn patterns(patterns: &[&str]) -> Vec<Pattern> {
        patterns.iter().map(|p| Pattern::new(p).unwrap()).collect()
    }

    fn addresses(interfaces: &[Interface], include: &[&str], exclude: &[&str]) -> Vec<String> {
        let selection = Selection { include: patterns(include), exclude: patterns(exclude) };
        host_addresses(interfaces, &selection).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn host_addresses_are_those_of_the_uplink_alone_sorted() {
        assert_eq!(addresses(&node(), &[], &[]), ["192.0.2.10", "192.0.2.11"]);
    }

    #[test]
    fn include_replaces_the_built_in_choice_and_exclude_wins() {
        assert_eq!(addresses(&node(), &["docker*"], &[]), ["172.17.0.1"]);
        assert_eq!(addresses(&node(), &["lo"], &[]), ["192.0.2.99"], "127/8 never counts");
        assert_eq!(addresses(&node(), &["eth?", "docker0"], &["eth0"]), ["172.17.0.1"], "eth1 is down");
    }

    #[test]
    fn a_bridge_with_a_network_card_is_the_hosts_and_one_with_veths_alone_is_not() {
        let bridge = |port_kind| {
            vec![
                mk(1, "br0", Kind::Bridge, &["192.0.2.1"]),
                port(1, mk(2, "veth1", Kind::Veth, &[])),
                port(1, mk(3, "port", port_kind, &[])),
            ]
        };
        assert_eq!(addresses(&bridge(Kind::Device), &[], &[]), ["192.0.2.1"]);
        assert_eq!(addresses(&bridge(Kind::Other("bond".to_owned())), &[], &[]), ["192.0.2.1"]);
        assert_eq!(addresses(&bridge(Kind::Vxlan), &[], &[]), [""; 0]);
    }
}
