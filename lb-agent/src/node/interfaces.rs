//! A node's interfaces: what the kernel lists, which addresses are the host's, which device plays which role.

use crate::datapath::attach::{Device, Direction};
use futures::TryStreamExt as _;
use glob::Pattern;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoBridge, InfoData, InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

/// The flags of the command line that the messages of this module name.
pub const UPLINK_FLAG: &str = "--uplink";
/// See [`UPLINK_FLAG`].
pub const PODS_FLAG: &str = "--pods-device";
/// See [`UPLINK_FLAG`].
pub const OVERLAY_FLAG: &str = "--overlay-device";
/// The bridge of weave.
pub const DEFAULT_PODS: &str = "weave";

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
    fn takes(&self, interface: &Interface, all: &[Interface]) -> bool {
        if matches_any(&self.exclude, &interface.name) {
            return false;
        }
        if !self.include.is_empty() {
            return matches_any(&self.include, &interface.name);
        }
        !is_made_by_others(&interface.name) && !is_bridge_of_pods(interface, all)
    }
}

fn matches_any(patterns: &[Pattern], name: &str) -> bool {
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

fn usable_addresses(interface: &Interface) -> impl Iterator<Item = Ipv4Addr> {
    let addresses = if interface.up { interface.addresses.as_slice() } else { &[] };
    addresses.iter().map(|(address, _)| *address).filter(|a| !a.is_loopback() && !a.is_link_local())
}

/// How to find the devices of each role.
#[derive(Clone, Debug, Default)]
pub struct RoleOptions {
    /// Where clients arrive. Empty: every device that carries a host address.
    pub uplinks: Vec<Pattern>,
    /// The bridge of the pods; [`DEFAULT_PODS`] when none is named.
    pub pods: Option<String>,
    /// The ports of that bridge that lead to the other nodes. Empty: those that are VXLAN tunnels, or named as
    /// weave names them.
    pub overlay: Vec<String>,
    /// Which addresses are the host's.
    pub selection: Selection,
}

/// The devices that the programs are attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roles {
    /// Clients and the other nodes are behind these.
    pub uplink: Vec<Interface>,
    /// Frames of this node's pods arrive on it.
    pub pods: Interface,
    /// Frames of other nodes' pods and holders arrive on these.
    pub overlay: Vec<Interface>,
    /// The first address of the pods' device: where other nodes send the replies to our forwards.
    pub overlay_address: Ipv4Addr,
    /// The Ethernet address of the pods' device: what other nodes know our forwards by.
    pub overlay_mac: [u8; 6],
}

impl Roles {
    /// Every device once, with any role, and the programs that it runs.
    pub fn devices(&self) -> Vec<Device> {
        let both = self.uplink.iter().chain([&self.pods]).map(|device| (device, &Direction::ALL[..]));
        // What leaves by a port of the bridge has passed the bridge's own hook, or was never routed here.
        let ports = self.overlay.iter().map(|device| (device, &[Direction::Ingress][..]));
        let mut devices: Vec<Device> = both
            .chain(ports)
            .map(|(device, directions)| Device { index: device.index, name: device.name.clone(), directions })
            .collect();
        // A device that has another role beside that of a port comes first, with both programs.
        devices.sort_by_key(|device| device.index);
        devices.dedup_by_key(|device| device.index);
        devices
    }
}

/// A role that no device plays.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoleError {
    /// The bridge is missing.
    #[error(
        "no interface named {wanted:?} for the pods' network; this node has: {existing}. Start the CNI, or name its \
         bridge with {PODS_FLAG}"
    )]
    NoPods {
        /// The name that was looked for.
        wanted: String,
        /// The names that exist.
        existing: String,
    },
    /// The device is something else.
    #[error(
        "{name:?} is not a bridge, so it cannot be the pods' network; this node's bridges: {bridges}. Name one with {PODS_FLAG}"
    )]
    PodsNotBridge {
        /// The device.
        name: String,
        /// The names of the bridges that exist.
        bridges: String,
    },
    /// The bridge has no address, so replies cannot be sent to it.
    #[error(
        "the pods' bridge {name:?} has no IPv4 address or is down, so other nodes cannot send replies there. Wait for the CNI (weave: `weave expose`), or name another bridge with {PODS_FLAG}"
    )]
    PodsWithoutAddress {
        /// The bridge.
        name: String,
    },
    /// No port leads to the other nodes.
    #[error(
        "the bridge {bridge:?} has no port that is a VXLAN tunnel or named vethwe-bridge or vxlan-*; its ports: \
         {ports}. Name the one that leads to the other nodes with {OVERLAY_FLAG}"
    )]
    NoOverlay {
        /// The pods' bridge.
        bridge: String,
        /// Its ports.
        ports: String,
    },
    /// A port that was named is not one.
    #[error("{wanted:?} (from {OVERLAY_FLAG}) is not a port of the bridge {bridge:?}; its ports: {ports}")]
    NotAPort {
        /// The name that was looked for.
        wanted: String,
        /// The pods' bridge.
        bridge: String,
        /// Its ports.
        ports: String,
    },
    /// Nothing carries a host address, or nothing matches.
    #[error(
        "no uplink: {looked_for}; this node has: {existing}. Name the interface that clients arrive on with {UPLINK_FLAG}"
    )]
    NoUplink {
        /// What was looked for.
        looked_for: String,
        /// The names that exist.
        existing: String,
    },
}

/// Finds the devices of each role.
///
/// # Errors
/// A role that no device plays: what was looked for, what there is, and the flag that names it.
pub fn find_roles(interfaces: &[Interface], options: &RoleOptions) -> Result<Roles, RoleError> {
    let pods = find_pods(interfaces, options)?;
    let overlay = find_overlay(interfaces, options, &pods)?;
    let uplink = find_uplinks(interfaces, options, &pods, &overlay)?;
    let without_address = || RoleError::PodsWithoutAddress { name: pods.name.clone() };
    let overlay_address = usable_addresses(&pods).next().ok_or_else(without_address)?;
    let overlay_mac = pods.mac.ok_or_else(without_address)?;
    Ok(Roles { uplink, pods, overlay, overlay_address, overlay_mac })
}

fn find_pods(interfaces: &[Interface], options: &RoleOptions) -> Result<Interface, RoleError> {
    let wanted = options.pods.as_deref().unwrap_or(DEFAULT_PODS);
    let found = interfaces
        .iter()
        .find(|i| i.name == wanted)
        .ok_or_else(|| RoleError::NoPods { wanted: wanted.to_owned(), existing: names(interfaces) })?;
    if found.kind != Kind::Bridge {
        let bridges = names(interfaces.iter().filter(|i| i.kind == Kind::Bridge));
        return Err(RoleError::PodsNotBridge { name: found.name.clone(), bridges });
    }
    Ok(found.clone())
}

fn find_overlay(
    interfaces: &[Interface],
    options: &RoleOptions,
    pods: &Interface,
) -> Result<Vec<Interface>, RoleError> {
    let ports: Vec<&Interface> = interfaces.iter().filter(|i| i.master == Some(pods.index)).collect();
    let bridge = || pods.name.clone();
    let found: Vec<Interface> = if options.overlay.is_empty() {
        ports.iter().filter(|port| leads_to_other_nodes(port)).map(|&port| port.clone()).collect()
    } else {
        let find = |wanted: &String| {
            ports.iter().find(|port| port.name == *wanted).map(|&port| port.clone()).ok_or_else(|| {
                RoleError::NotAPort {
                    wanted: wanted.clone(),
                    bridge: bridge(),
                    ports: names(ports.iter().copied()),
                }
            })
        };
        options.overlay.iter().map(find).collect::<Result<_, _>>()?
    };
    if found.is_empty() {
        return Err(RoleError::NoOverlay { bridge: bridge(), ports: names(ports) });
    }
    Ok(found)
}

/// `vethwe-bridge` is where weave's Open vSwitch datapath ("fast datapath") meets its bridge.
fn leads_to_other_nodes(port: &Interface) -> bool {
    port.kind == Kind::Vxlan || port.name == "vethwe-bridge" || port.name.starts_with("vxlan-")
}

fn find_uplinks(
    interfaces: &[Interface],
    options: &RoleOptions,
    pods: &Interface,
    overlay: &[Interface],
) -> Result<Vec<Interface>, RoleError> {
    let has_other_role = |i: &Interface| i.index == pods.index || overlay.iter().any(|o| o.index == i.index);
    let is_uplink = |i: &Interface| {
        if options.uplinks.is_empty() {
            options.selection.takes(i, interfaces) && usable_addresses(i).next().is_some()
        } else {
            i.up && matches_any(&options.uplinks, &i.name)
        }
    };
    let found: Vec<Interface> =
        interfaces.iter().filter(|i| !has_other_role(i) && is_uplink(i)).cloned().collect();
    if found.is_empty() {
        let looked_for = if options.uplinks.is_empty() {
            "no interface that is up carries an IPv4 address of the host".to_owned()
        } else {
            let patterns: Vec<&str> = options.uplinks.iter().map(Pattern::as_str).collect();
            format!("no interface that is up matches {}", patterns.join(", "))
        };
        return Err(RoleError::NoUplink { looked_for, existing: names(interfaces) });
    }
    Ok(found)
}

fn names<'a>(interfaces: impl IntoIterator<Item = &'a Interface>) -> String {
    let names: Vec<&str> = interfaces.into_iter().map(|i| i.name.as_str()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mk(index: u32, name: &str, kind: Kind, addresses: &[&str]) -> Interface {
        Interface {
            index,
            name: name.to_owned(),
            mac: Some([2, 0, 0, 0, 0, u8::try_from(index).unwrap()]),
            kind,
            master: None,
            mtu: 1500,
            up: true,
            calls_iptables: false,
            addresses: addresses.iter().map(|a| (a.parse().unwrap(), 24)).collect(),
        }
    }

    fn port(of: u32, interface: Interface) -> Interface {
        Interface { master: Some(of), ..interface }
    }

    fn down(interface: Interface) -> Interface {
        Interface { up: false, ..interface }
    }

    /// A node as weave leaves it, with docker beside it; the uplink is a veth, as in a container.
    fn node() -> Vec<Interface> {
        vec![
            mk(1, "lo", Kind::Device, &["127.0.0.1", "192.0.2.99"]),
            mk(2, "eth0", Kind::Veth, &["192.0.2.11", "192.0.2.10"]),
            down(mk(3, "eth1", Kind::Device, &["198.51.100.1"])),
            mk(4, "weave", Kind::Bridge, &["10.32.0.1"]),
            port(4, mk(5, "vethwe-bridge", Kind::Veth, &[])),
            port(4, mk(6, "vethwepl1", Kind::Veth, &[])),
            mk(7, "docker0", Kind::Bridge, &["172.17.0.1"]),
            mk(8, "eth2", Kind::Device, &["169.254.7.7"]),
            mk(9, "kube-ipvs0", Kind::Other("dummy".to_owned()), &["10.96.0.1"]),
        ]
    }

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

    #[test]
    fn roles_of_a_weave_node() {
        let roles = find_roles(&node(), &RoleOptions::default()).unwrap();
        assert_eq!(names(&roles.uplink), "eth0");
        assert_eq!(roles.pods.name, "weave");
        assert_eq!(names(&roles.overlay), "vethwe-bridge");
        assert_eq!(roles.overlay_address, Ipv4Addr::new(10, 32, 0, 1));
        let devices = roles.devices();
        let devices: Vec<_> =
            devices.iter().map(|device| (device.name.as_str(), device.directions.len())).collect();
        assert_eq!(devices, [("eth0", 2), ("weave", 2), ("vethwe-bridge", 1)]);
    }

    #[test]
    fn a_vxlan_port_is_the_overlay_whatever_its_name() {
        let mut interfaces = node();
        interfaces[4] = port(4, mk(5, "tunnel7", Kind::Vxlan, &[]));
        assert_eq!(names(&find_roles(&interfaces, &RoleOptions::default()).unwrap().overlay), "tunnel7");
    }

    #[test]
    fn a_role_without_a_device_says_what_exists_and_which_flag_helps() {
        let fails = |change: &dyn Fn(&mut Vec<Interface>, &mut RoleOptions)| {
            let (mut interfaces, mut options) = (node(), RoleOptions::default());
            change(&mut interfaces, &mut options);
            find_roles(&interfaces, &options).unwrap_err().to_string()
        };
        let says = |message: String, parts: &[&str]| {
            for part in parts {
                assert!(message.contains(part), "{message:?} lacks {part:?}");
            }
        };
        says(fails(&|i, _| i.retain(|i| i.name != "weave")), &["\"weave\"", "docker0", PODS_FLAG]);
        says(fails(&|_, o| o.pods = Some("eth0".to_owned())), &["not a bridge", "weave, docker0", PODS_FLAG]);
        says(fails(&|i, _| i.retain(|i| i.name != "vethwe-bridge")), &["vethwepl1", OVERLAY_FLAG]);
        says(
            fails(&|_, o| o.overlay = vec!["eth1".to_owned()]),
            &["\"eth1\"", "vethwe-bridge", OVERLAY_FLAG],
        );
        says(fails(&|i, _| i.retain(|i| i.name != "eth0")), &["host", UPLINK_FLAG]);
        says(fails(&|_, o| o.uplinks = patterns(&["bond*"])), &["bond*", "eth0", UPLINK_FLAG]);
        says(fails(&|i, _| i[3].addresses.clear()), &["no IPv4 address", "weave"]);
        says(fails(&|i, _| i[3].up = false), &["down", "weave"]);
    }
}
