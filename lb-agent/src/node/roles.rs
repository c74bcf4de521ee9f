//! Which kind of network the pods are on, and which device plays which role in it.
//!
//! | network | pods | overlay | known to others by |
//! | --- | --- | --- | --- |
//! | bridged: weave | one bridge | its ports to other nodes | the bridge |
//! | tunnelled: flannel, Calico with VXLAN | a bridge, or a veth each | the VXLAN device | the VXLAN device |
//! | routed: host-gw, kubenet, Calico without tunnel | a bridge, or a veth each | the uplink | the uplink |
//!
//! On the latter two, the pods' devices come and go with pods: a node without any holds addresses all the same.
//! What is not recognised is refused, and nothing is guessed: a wrong guess would send answers with pods' addresses to
//! clients.

use super::interfaces::{Interface, Kind, Selection, matches_any, usable_addresses};
use super::routes::{self, ListError, Route, contains};
use crate::datapath::attach::{Device, Direction};
use crate::policy::reach::Reach;
use glob::Pattern;
use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;

/// The flags of the command line that the messages of this module name.
pub const CNI_FLAG: &str = "--cni";
/// See [`CNI_FLAG`].
pub const UPLINK_FLAG: &str = "--uplink";
/// See [`CNI_FLAG`].
pub const PODS_FLAG: &str = "--pods-device";
/// See [`CNI_FLAG`].
pub const OVERLAY_FLAG: &str = "--overlay-device";

/// The bridge of weave.
const WEAVE: &str = "weave";
/// The pods' devices elsewhere: the CNI plugin `bridge`, kubenet and kube-router have a bridge, Calico a veth for each pod.
const ROUTED_PODS: [&str; 4] = ["cni0", "cbr0", "kube-bridge", "cali*"];
const FLANNEL: &str = "flannel.*";
const CALICO: &str = "vxlan.calico";
/// Tunnels of CNIs that have no Ethernet address to know a holder by, or a datapath of their own.
const STRANGERS: [&str; 7] =
    ["flannel-wg", "wireguard.cali", "cilium_host", "antrea-gw0", "ovn-k8s-mp0", "kube-tunnel-*", "tun-*"];

/// The CNI whose devices are looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Cni {
    /// What the node's devices and routes show
    #[default]
    Auto,
    /// A bridge that is joined with the other nodes' bridges: weave
    Weave,
    /// A VXLAN device that is routed to: flannel, k3s
    Flannel,
    /// Routes to other nodes as the routers to their pods: flannel's host-gw, kubenet, kube-router
    HostGw,
    /// A veth for each pod, by VXLAN or plain routes: Calico
    Calico,
}

/// How to find the devices of each role.
#[derive(Clone, Debug, Default)]
pub struct RoleOptions {
    /// Which network is looked for.
    pub cni: Cni,
    /// Where clients arrive. Empty: every device that carries a host address.
    pub uplinks: Vec<Pattern>,
    /// The devices of the pods. Empty: those that the CNIs make.
    pub pods: Vec<Pattern>,
    /// What leads to the other nodes. Empty: what the CNI makes.
    pub overlay: Vec<String>,
    /// Which addresses are the host's.
    pub selection: Selection,
}

/// How frames get from a holder to the node of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// The bridges of all nodes are one network.
    Bridged,
    /// Through a VXLAN device that is routed to.
    Tunnelled,
    /// Over the network that the nodes are on.
    Routed,
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bridged => "bridged",
            Self::Tunnelled => "tunnelled",
            Self::Routed => "routed",
        })
    }
}

/// The devices that the programs are attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roles {
    /// What the others are part of.
    pub network: Network,
    /// Clients and the other nodes are behind these.
    pub uplink: Vec<Interface>,
    /// Frames of this node's pods arrive on these. One where the network is bridged; elsewhere perhaps none yet.
    pub pods: Vec<Interface>,
    /// Frames of other nodes' pods and holders arrive on these: ports of a bridge, or one device, which may be an
    /// uplink as well.
    pub overlay: Vec<Interface>,
    /// Where other nodes send the replies to our forwards.
    pub overlay_address: Ipv4Addr,
    /// What other nodes know our forwards by.
    pub overlay_mac: [u8; 6],
}

/// `lo`, which every network namespace has, at this index. The node's own packets to its own addresses pass it.
pub const LOOPBACK: u32 = 1;

impl Roles {
    /// Every device once, with any role, and the programs that it runs.
    pub fn devices(&self) -> Vec<Device> {
        let both = self.uplink.iter().chain(&self.pods).map(|device| (device, &Direction::ALL[..]));
        let directions = match self.network {
            // What leaves by a port of the bridge has passed the bridge's own hook, or was never routed here.
            Network::Bridged => &[Direction::Ingress][..],
            Network::Tunnelled | Network::Routed => &Direction::ALL[..],
        };
        let overlay = self.overlay.iter().map(|device| (device, directions));
        // What leaves by it comes in again at once.
        let loopback = Device { index: LOOPBACK, name: "lo".to_owned(), directions: &[Direction::Ingress] };
        let mut devices: Vec<Device> = both
            .chain(overlay)
            .map(|(device, directions)| Device { index: device.index, name: device.name.clone(), directions })
            .chain([loopback])
            .collect();
        // A device that has another role beside that of a port comes first, with both programs.
        devices.sort_by_key(|device| device.index);
        devices.dedup_by_key(|device| device.index);
        devices
    }

    /// The pods' bridge, where other nodes' frames pass it without being routed.
    pub fn bridge(&self) -> Option<&Interface> {
        match self.network {
            Network::Bridged => self.pods.first(),
            Network::Tunnelled | Network::Routed => None,
        }
    }

    /// The device that replies to a holder with this overlay address leave by, if it can be reached.
    pub fn way_back(&self, holder: Ipv4Addr) -> Option<&Interface> {
        match self.network {
            Network::Bridged => self.pods.first(),
            Network::Tunnelled => self.overlay.first(),
            Network::Routed => self.overlay.first().filter(|_| self.reach().takes_in(holder)),
        }
    }

    /// The devices on which packets with clients' sources come in, though clients are behind another: what a strict
    /// reverse-path filter would drop. On a bridged network these are answers.
    pub fn with_foreign_sources(&self) -> Vec<&str> {
        let devices = match self.network {
            Network::Bridged => &self.pods,
            Network::Tunnelled | Network::Routed => &self.overlay,
        };
        devices.iter().map(|device| device.name.as_str()).collect()
    }

    /// Which other nodes can be known by their link-layer addresses. Behind a router, everybody has the router's.
    pub fn reach(&self) -> Reach {
        match (self.network, self.overlay.first()) {
            (Network::Routed, Some(device)) => {
                let networks = device.addresses.iter().copied().filter(|(_, prefix)| *prefix < 32);
                Reach::Networks { device: device.name.clone(), networks: networks.collect() }
            }
            _ => Reach::Everybody,
        }
    }
}

/// No network is recognised, or a role is played by no device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoleError {
    /// Nothing that is known.
    #[error(
        "the network of the pods is not recognised: there is no bridge {WEAVE}, no {FLANNEL}, no {CALICO}, and no cni0 or \
         cali* together with routes to other nodes' pods over an uplink; this node has: {existing}. Start the CNI, or \
         name it with {CNI_FLAG}"
    )]
    Unknown {
        /// The names that exist.
        existing: String,
    },
    /// More than one that is known.
    #[error(
        "{found} are there, and a node has one network of pods. Remove what another CNI has left, or name the one in use \
         with {CNI_FLAG}"
    )]
    Ambiguous {
        /// The devices.
        found: String,
    },
    /// A tunnel that is not known.
    #[error(
        "other nodes' pods are reached over {device}, which gives a holder no Ethernet address that other nodes could know \
         it by. Let the CNI use VXLAN or plain routes; or name the network with {CNI_FLAG}, where {device} is not the CNI's"
    )]
    Stranger {
        /// The device.
        device: String,
    },
    /// Frames without an Ethernet header.
    #[error(
        "clients are to arrive on {device}, which is no Ethernet device (a tunnel such as WireGuard or tun): the packet program \
         reads and writes Ethernet headers. Name the interfaces that clients arrive on with {UPLINK_FLAG}"
    )]
    UplinkNotEthernet {
        /// The device.
        device: String,
    },
    /// Two ways to other nodes.
    #[error(
        "other nodes' pods are reached over {first} and over {second}, but a node is known to others by one device. Let \
         the CNI use one (flannel: DirectRouting false; Calico: vxlanMode Always, or Never), or name it with {OVERLAY_FLAG}"
    )]
    TwoWays {
        /// A device.
        first: String,
        /// Another.
        second: String,
    },
    /// The bridge is missing.
    #[error(
        "no interface named {wanted} for the pods' network; this node has: {existing}. Start the CNI, or name its bridge \
         with {PODS_FLAG}"
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
    /// The device has no address, so replies cannot be sent to it.
    #[error(
        "{name:?} has no IPv4 address, no Ethernet address, or is down, so other nodes cannot send replies there. Wait for the CNI \
         (weave: `weave expose`), or name another device with {flag}"
    )]
    WithoutAddress {
        /// The device.
        name: String,
        /// What names another.
        flag: &'static str,
    },
    /// No port leads to the other nodes.
    #[error(
        "the bridge {bridge:?} has no port that is a VXLAN tunnel or named vethwe-bridge or vxlan-*; its ports: \
         {ports}. Name the one that leads to the other nodes with {OVERLAY_FLAG}"
    )]
    NoOverlayPort {
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
    /// Nothing leads to the other nodes.
    #[error(
        "{looked_for}; this node has: {existing}. Start the CNI, or name the device that leads to the other nodes with {OVERLAY_FLAG}"
    )]
    NoOverlay {
        /// What was looked for.
        looked_for: String,
        /// The names that exist.
        existing: String,
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

/// Finds the devices of each role among `interfaces`, by the routes that the kernel has.
///
/// # Errors
/// The kernel refuses a dump. Inside: what [`find_roles`] says.
pub async fn find(
    netlink: &rtnetlink::Handle,
    interfaces: &[Interface],
    options: &RoleOptions,
) -> Result<Result<Roles, RoleError>, ListError> {
    let routes = if needs_routes(interfaces, options) { routes::list(netlink).await? } else { Vec::new() };
    Ok(find_roles(interfaces, &routes, options))
}

/// Whether the node's routes must be known to find its devices: those of a router of the internet take their time.
fn needs_routes(interfaces: &[Interface], options: &RoleOptions) -> bool {
    let has_weave = || interfaces.iter().any(|i| i.kind == Kind::Bridge && i.name == WEAVE);
    match options.cni {
        Cni::Weave => false,
        Cni::Auto => !has_weave(),
        Cni::Flannel | Cni::HostGw | Cni::Calico => true,
    }
}

/// Finds the devices of each role.
///
/// # Errors
/// No network is recognised, or a role is played by no device: what was looked for, what there is, and the flag that
/// names it.
pub fn find_roles(
    interfaces: &[Interface],
    routes: &[Route],
    options: &RoleOptions,
) -> Result<Roles, RoleError> {
    let search = Search { interfaces, routes, options };
    match search.network()? {
        Network::Bridged => search.bridged(),
        Network::Tunnelled => search.tunnelled(),
        Network::Routed => search.routed(),
    }
}

struct Search<'a> {
    interfaces: &'a [Interface],
    routes: &'a [Route],
    options: &'a RoleOptions,
}

impl<'a> Search<'a> {
    fn network(&self) -> Result<Network, RoleError> {
        match self.options.cni {
            Cni::Weave => Ok(Network::Bridged),
            Cni::Flannel => Ok(Network::Tunnelled),
            Cni::HostGw => Ok(Network::Routed),
            Cni::Calico if !self.options.overlay.is_empty() => self.network_of_named(),
            Cni::Calico if self.interfaces.iter().any(is_calicos_tunnel) => Ok(Network::Tunnelled),
            Cni::Calico if !self.routes_to_pods().is_empty() => Ok(Network::Routed),
            Cni::Calico => Err(RoleError::NoOverlay {
                looked_for: format!("no {CALICO}, and no route to other nodes' pods over an uplink"),
                existing: names(self.interfaces),
            }),
            Cni::Auto if !self.options.overlay.is_empty() => self.network_of_named(),
            Cni::Auto => self.recognise(),
        }
    }

    fn network_of_named(&self) -> Result<Network, RoleError> {
        let named = self.named_overlay()?;
        let is_port = |device: &Interface| {
            let master = |i: &&Interface| Some(i.index) == device.master && i.kind == Kind::Bridge;
            self.interfaces.iter().any(|i| master(&i))
        };
        Ok(match named.first() {
            Some(device) if is_port(device) => Network::Bridged,
            Some(Interface { kind: Kind::Vxlan, .. }) => Network::Tunnelled,
            _ => Network::Routed,
        })
    }

    /// By what the CNIs make.
    fn recognise(&self) -> Result<Network, RoleError> {
        let bridges = self.interfaces.iter().filter(|i| self.is_joined_bridge(i));
        let bridges = bridges.map(|i| (WEAVE, i, Network::Bridged));
        let of = |is: fn(&Interface) -> bool, cni| {
            let found = self.interfaces.iter().filter(move |i| is(i));
            found.map(move |i| (cni, i, Network::Tunnelled))
        };
        let found: Vec<_> =
            bridges.chain(of(is_flannels_tunnel, FLANNEL)).chain(of(is_calicos_tunnel, CALICO)).collect();
        let Some((first, _, network)) = found.first() else { return self.recognise_routed() };
        if found.iter().any(|(cni, ..)| cni != first) {
            return Err(RoleError::Ambiguous { found: names(found.iter().map(|(_, device, _)| *device)) });
        }
        Ok(*network)
    }

    /// A bridge of pods with a port to other nodes; weave's also while it has none yet.
    fn is_joined_bridge(&self, interface: &Interface) -> bool {
        let leads_out =
            || self.interfaces.iter().any(|i| i.master == Some(interface.index) && leads_to_other_nodes(i));
        interface.kind == Kind::Bridge
            && if self.options.pods.is_empty() {
                interface.name == WEAVE
            } else {
                matches_any(&self.options.pods, &interface.name) && leads_out()
            }
    }

    fn recognise_routed(&self) -> Result<Network, RoleError> {
        let is_tunnel = |i: &Interface| match &i.kind {
            Kind::Vxlan => true,
            Kind::Other(kind) => {
                matches!(kind.as_str(), "ipip" | "geneve" | "gre" | "gretap" | "wireguard" | "sit")
            }
            Kind::Device | Kind::Bridge | Kind::Veth => false,
        };
        let is_stranger = |i: &&Interface| {
            matches_any(&patterns(&STRANGERS), &i.name)
                || is_tunnel(i) && self.routes.iter().any(|route| route.device == i.index)
        };
        if let Some(stranger) = self.interfaces.iter().find(is_stranger) {
            return Err(RoleError::Stranger { device: stranger.name.clone() });
        }
        let routes = self.routes_to_pods();
        // Routes alone may lead to anything, but for those of a CNI that says so.
        if !routes.is_empty() && (!self.pods().is_empty() || routes.iter().any(|route| route.is_calicos())) {
            return Ok(Network::Routed);
        }
        Err(RoleError::Unknown { existing: names(self.interfaces) })
    }

    /// The routes over uplinks that may lead to other nodes' pods: of a CNI that says so; of the size that this node's
    /// own network of pods has; of any size where it has none.
    fn routes_to_pods(&self) -> Vec<&'a Route> {
        let sizes: BTreeSet<u8> =
            self.pods().iter().flat_map(|i| &i.addresses).map(|(_, prefix)| *prefix).collect();
        let leads_out =
            |route: &&Route| self.interfaces.iter().any(|i| i.index == route.device && self.may_be_uplink(i));
        let has_size = |route: &&Route| sizes.is_empty() || sizes.contains(&route.destination.1);
        let is_wanted = |route: &&Route| leads_out(route) && (route.is_calicos() || has_size(route));
        self.routes.iter().filter(is_wanted).collect()
    }

    fn bridged(&self) -> Result<Roles, RoleError> {
        let pods = self.joined_bridge()?;
        let overlay = self.ports_to_other_nodes(pods)?;
        let uplink = self.uplinks(|i| i.index == pods.index || overlay.iter().any(|o| o.index == i.index))?;
        let (overlay_address, overlay_mac) =
            address_of(pods, |_| true).ok_or_else(|| without_address(pods, PODS_FLAG))?;
        let pods = vec![pods.clone()];
        Ok(Roles { network: Network::Bridged, uplink, pods, overlay, overlay_address, overlay_mac })
    }

    fn tunnelled(&self) -> Result<Roles, RoleError> {
        let is_wanted = match self.options.cni {
            Cni::Flannel => is_flannels_tunnel,
            Cni::Calico => is_calicos_tunnel,
            _ => |i: &Interface| is_flannels_tunnel(i) || is_calicos_tunnel(i),
        };
        let found: Vec<&Interface> = if self.options.overlay.is_empty() {
            self.interfaces.iter().filter(|i| is_wanted(i)).collect()
        } else {
            self.named_overlay()?
        };
        let overlay = self.only_one(&found, || {
            let name = if self.options.cni == Cni::Calico { CALICO } else { FLANNEL };
            format!("no VXLAN device {name}")
        })?;
        if self.options.overlay.is_empty() {
            self.refuse_direct_routes(overlay)?;
        }
        let (overlay_address, overlay_mac) =
            address_of(overlay, |_| true).ok_or_else(|| without_address(overlay, OVERLAY_FLAG))?;
        let pods: Vec<Interface> =
            self.pods().into_iter().filter(|i| i.index != overlay.index).cloned().collect();
        let uplink = self.uplinks(|i| i.index == overlay.index || pods.iter().any(|p| p.index == i.index))?;
        let overlay = vec![overlay.clone()];
        Ok(Roles { network: Network::Tunnelled, uplink, pods, overlay, overlay_address, overlay_mac })
    }

    /// Some CNIs reach the nodes of their own network without the tunnel, if they are told to. Such routes are of the
    /// tunnel's pool: between those that lead through it.
    fn refuse_direct_routes(&self, tunnel: &Interface) -> Result<(), RoleError> {
        let through: Vec<&Route> = self.routes.iter().filter(|r| r.device == tunnel.index).collect();
        let networks = through.iter().map(|route| route.destination.0);
        let pool: Vec<Ipv4Addr> = networks.chain(usable_addresses(tunnel)).collect();
        let (Some(first), Some(last)) = (pool.iter().min(), pool.iter().max()) else { return Ok(()) };
        let is_direct = |route: &&&Route| {
            let is_of_pool = (first..=last).contains(&&route.destination.0);
            route.is_calicos() || is_of_pool && through.iter().any(|t| t.destination.1 == route.destination.1)
        };
        let Some(direct) = self.routes_to_pods().iter().find(is_direct).copied() else { return Ok(()) };
        let second = self.interfaces.iter().filter(|i| i.index == direct.device);
        Err(RoleError::TwoWays { first: tunnel.name.clone(), second: names(second) })
    }

    fn routed(&self) -> Result<Roles, RoleError> {
        let pods: Vec<Interface> = self.pods().into_iter().cloned().collect();
        let uplink = self.uplinks(|i| pods.iter().any(|p| p.index == i.index))?;
        let routes = self.routes_to_pods();
        let leads_out = |i: &&Interface| routes.iter().any(|route| route.device == i.index);
        let found: Vec<&Interface> = if !self.options.overlay.is_empty() {
            self.named_overlay()?
        } else if routes.is_empty() {
            // The only node, or the first.
            let [only] = uplink.as_slice() else {
                return Err(RoleError::NoOverlay {
                    looked_for: "no route to other nodes' pods tells which uplink leads to them".to_owned(),
                    existing: names(&uplink),
                });
            };
            vec![only]
        } else {
            uplink.iter().filter(leads_out).collect()
        };
        let overlay = self.only_one(&found, || "no uplink with routes to other nodes' pods".to_owned())?;
        let hops = routes.iter().filter(|route| route.device == overlay.index).map(|route| route.via);
        let hops: Vec<Ipv4Addr> = hops.collect();
        let is_among_nodes = |network| hops.iter().any(|hop| contains(network, *hop));
        let found = address_of(overlay, is_among_nodes).or_else(|| address_of(overlay, |(_, p)| p < 32));
        let (overlay_address, overlay_mac) = found.ok_or_else(|| without_address(overlay, OVERLAY_FLAG))?;
        let overlay = vec![overlay.clone()];
        Ok(Roles { network: Network::Routed, uplink, pods, overlay, overlay_address, overlay_mac })
    }

    fn joined_bridge(&self) -> Result<&'a Interface, RoleError> {
        let wanted = &self.options.pods;
        let is_wanted =
            |i: &&Interface| if wanted.is_empty() { i.name == WEAVE } else { matches_any(wanted, &i.name) };
        let found: Vec<&Interface> = self.interfaces.iter().filter(is_wanted).collect();
        if let Some(bridge) = found.iter().find(|i| i.kind == Kind::Bridge) {
            return Ok(bridge);
        }
        let Some(other) = found.first() else {
            let wanted = wanted.iter().map(Pattern::as_str).collect::<Vec<_>>().join(", ");
            let wanted = if wanted.is_empty() { WEAVE.to_owned() } else { wanted };
            return Err(RoleError::NoPods { wanted, existing: names(self.interfaces) });
        };
        let bridges = names(self.interfaces.iter().filter(|i| i.kind == Kind::Bridge));
        Err(RoleError::PodsNotBridge { name: other.name.clone(), bridges })
    }

    fn ports_to_other_nodes(&self, bridge: &Interface) -> Result<Vec<Interface>, RoleError> {
        let ports: Vec<&Interface> =
            self.interfaces.iter().filter(|i| i.master == Some(bridge.index)).collect();
        let found: Vec<Interface> = if self.options.overlay.is_empty() {
            ports.iter().filter(|port| leads_to_other_nodes(port)).map(|&port| port.clone()).collect()
        } else {
            let find = |wanted: &String| {
                ports.iter().find(|port| port.name == *wanted).map(|&port| port.clone()).ok_or_else(|| {
                    RoleError::NotAPort {
                        wanted: wanted.clone(),
                        bridge: bridge.name.clone(),
                        ports: names(ports.iter().copied()),
                    }
                })
            };
            self.options.overlay.iter().map(find).collect::<Result<_, _>>()?
        };
        if found.is_empty() {
            return Err(RoleError::NoOverlayPort { bridge: bridge.name.clone(), ports: names(ports) });
        }
        Ok(found)
    }

    /// Where pods are not on a bridge that is joined with others.
    fn pods(&self) -> Vec<&'a Interface> {
        let usual = patterns(&ROUTED_PODS);
        let wanted = if self.options.pods.is_empty() { &usual } else { &self.options.pods };
        self.interfaces.iter().filter(|i| matches_any(wanted, &i.name)).collect()
    }

    fn named_overlay(&self) -> Result<Vec<&'a Interface>, RoleError> {
        let find = |wanted: &String| {
            self.interfaces.iter().find(|i| i.name == *wanted).ok_or_else(|| RoleError::NoOverlay {
                looked_for: format!("no interface named {wanted:?}"),
                existing: names(self.interfaces),
            })
        };
        self.options.overlay.iter().map(find).collect()
    }

    fn only_one(
        &self,
        found: &[&'a Interface],
        looked_for: impl FnOnce() -> String,
    ) -> Result<&'a Interface, RoleError>
    where
        Self: 'a,
    {
        match found {
            [] => Err(RoleError::NoOverlay { looked_for: looked_for(), existing: names(self.interfaces) }),
            [only] => Ok(only),
            [first, second, ..] => {
                Err(RoleError::TwoWays { first: first.name.clone(), second: second.name.clone() })
            }
        }
    }

    fn may_be_uplink(&self, interface: &Interface) -> bool {
        if self.options.uplinks.is_empty() {
            self.options.selection.takes(interface, self.interfaces)
                && usable_addresses(interface).next().is_some()
        } else {
            interface.up && matches_any(&self.options.uplinks, &interface.name)
        }
    }

    fn uplinks(&self, has_other_role: impl Fn(&Interface) -> bool) -> Result<Vec<Interface>, RoleError> {
        let candidates = self.interfaces.iter().filter(|i| !has_other_role(i) && self.may_be_uplink(i));
        let (found, bare): (Vec<Interface>, Vec<Interface>) =
            candidates.cloned().partition(|interface| interface.mac.is_some());
        // One that nobody has named may be somebody's VPN, beside the node's network.
        if let Some(device) = bare.first()
            && (found.is_empty() || !self.options.uplinks.is_empty())
        {
            return Err(RoleError::UplinkNotEthernet { device: device.name.clone() });
        }
        if found.is_empty() {
            let looked_for = if self.options.uplinks.is_empty() {
                "no interface that is up carries an IPv4 address of the host".to_owned()
            } else {
                let patterns: Vec<&str> = self.options.uplinks.iter().map(Pattern::as_str).collect();
                format!("no interface that is up matches {}", patterns.join(", "))
            };
            return Err(RoleError::NoUplink { looked_for, existing: names(self.interfaces) });
        }
        Ok(found)
    }
}

/// `vethwe-bridge` is where weave's Open vSwitch datapath ("fast datapath") meets its bridge.
fn leads_to_other_nodes(port: &Interface) -> bool {
    port.kind == Kind::Vxlan || port.name == "vethwe-bridge" || port.name.starts_with("vxlan-")
}

/// The number is the VXLAN's, by default 1.
fn is_flannels_tunnel(interface: &Interface) -> bool {
    interface.kind == Kind::Vxlan && interface.master.is_none() && interface.name.starts_with("flannel.")
}

fn is_calicos_tunnel(interface: &Interface) -> bool {
    interface.kind == Kind::Vxlan && interface.master.is_none() && interface.name == CALICO
}

/// The first usable address with a network that is wanted, and the link-layer address beside it.
fn address_of(
    interface: &Interface,
    is_wanted: impl Fn((Ipv4Addr, u8)) -> bool,
) -> Option<(Ipv4Addr, [u8; 6])> {
    let usable: Vec<Ipv4Addr> = usable_addresses(interface).collect();
    let mut wanted = interface.addresses.iter().filter(|network| is_wanted(**network));
    let (address, _) = wanted.find(|(address, _)| usable.contains(address))?;
    Some((*address, interface.mac?))
}

fn without_address(interface: &Interface, flag: &'static str) -> RoleError {
    RoleError::WithoutAddress { name: interface.name.clone(), flag }
}

fn patterns(texts: &[&str]) -> Vec<Pattern> {
    texts.iter().filter_map(|text| Pattern::new(text).ok()).collect()
}

/// For messages.
pub(super) fn names<'a>(interfaces: impl IntoIterator<Item = &'a Interface>) -> String {
    let names: Vec<&str> = interfaces.into_iter().map(|i| i.name.as_str()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{mk, node, port};
    use super::*;

    fn find(interfaces: &[Interface], routes: &[Route], cni: Cni) -> Result<Roles, RoleError> {
        find_roles(interfaces, routes, &RoleOptions { cni, ..RoleOptions::default() })
    }

    fn route(destination: &str, via: &str, device: u32, protocol: u8) -> Route {
        let (network, prefix) = destination.split_once('/').unwrap();
        let destination = (network.parse().unwrap(), prefix.parse().unwrap());
        Route { destination, via: via.parse().unwrap(), device, protocol }
    }

    /// Name, devices, routes, and what is found: kind, pods, overlay.
    type Found<'a> = (&'a str, Vec<Interface>, &'a [Route], Network, &'a str, &'a str);

    const BOOT: u8 = 3;
    const BIRD: u8 = 12;

    #[test]
    fn roles_of_a_weave_node() {
        let roles = find_roles(&node(), &[], &RoleOptions::default()).unwrap();
        assert_eq!(names(&roles.uplink), "eth0");
        assert_eq!(names(&roles.pods), "weave");
        assert_eq!(names(&roles.overlay), "vethwe-bridge");
        assert_eq!(roles.overlay_address, Ipv4Addr::new(10, 32, 0, 1));
        let devices = roles.devices();
        let devices: Vec<_> =
            devices.iter().map(|device| (device.name.as_str(), device.directions.len())).collect();
        assert_eq!(devices, [("lo", 1), ("eth0", 2), ("weave", 2), ("vethwe-bridge", 1)]);
    }

    #[test]
    fn a_vxlan_port_is_the_overlay_whatever_its_name() {
        let mut interfaces = node();
        interfaces[4] = port(4, mk(5, "tunnel7", Kind::Vxlan, &[]));
        assert_eq!(names(&find_roles(&interfaces, &[], &RoleOptions::default()).unwrap().overlay), "tunnel7");
    }

    #[test]
    fn a_role_without_a_device_says_what_exists_and_which_flag_helps() {
        let fails = |change: &dyn Fn(&mut Vec<Interface>, &mut RoleOptions)| {
            let (mut interfaces, mut options) = (node(), RoleOptions::default());
            change(&mut interfaces, &mut options);
            find_roles(&interfaces, &[], &options).unwrap_err().to_string()
        };
        let says = |message: String, parts: &[&str]| {
            for part in parts {
                assert!(message.contains(part), "{message:?} lacks {part:?}");
            }
        };
        says(
            fails(&|i, o| {
                o.cni = Cni::Weave;
                i.retain(|i| i.name != "weave");
            }),
            &["named weave", "docker0", PODS_FLAG],
        );
        says(
            fails(&|_, o| {
                o.cni = Cni::Weave;
                o.pods = patterns(&["eth0"]);
            }),
            &["not a bridge", "weave, docker0", PODS_FLAG],
        );
        says(fails(&|i, _| i.retain(|i| i.name != "vethwe-bridge")), &["vethwepl1", OVERLAY_FLAG]);
        says(
            fails(&|_, o| (o.cni, o.overlay) = (Cni::Weave, vec!["eth1".to_owned()])),
            &["\"eth1\"", "vethwe-bridge", OVERLAY_FLAG],
        );
        says(fails(&|i, _| i.retain(|i| i.name != "eth0")), &["host", UPLINK_FLAG]);
        says(fails(&|_, o| o.uplinks = patterns(&["bond*"])), &["bond*", "eth0", UPLINK_FLAG]);
        says(fails(&|i, _| i[3].addresses.clear()), &["no IPv4 address", "weave"]);
        says(fails(&|i, _| i[3].up = false), &["down", "weave"]);
    }

    /// I8: the packet program expects an Ethernet header.
    #[test]
    fn a_tunnel_without_ethernet_is_no_uplink() {
        let tunnel =
            Interface { mac: None, ..mk(10, "wg0", Kind::Other("wireguard".to_owned()), &["203.0.113.1"]) };
        let mut interfaces = node();
        interfaces.push(tunnel);
        let mut options = RoleOptions::default();
        assert_eq!(names(&find_roles(&interfaces, &[], &options).unwrap().uplink), "eth0");
        options.uplinks = patterns(&["eth0", "wg0"]);
        let refused = find_roles(&interfaces, &[], &options).unwrap_err();
        assert_eq!(refused, RoleError::UplinkNotEthernet { device: "wg0".to_owned() });
        interfaces.retain(|interface| interface.name != "eth0");
        let message = find_roles(&interfaces, &[], &RoleOptions::default()).unwrap_err().to_string();
        assert!(message.contains("wg0") && message.contains(UPLINK_FLAG), "{message}");
    }

    /// A node without pods of its own, and no CNI.
    fn bare() -> Vec<Interface> {
        vec![mk(1, "lo", Kind::Device, &["127.0.0.1"]), mk(2, "eth0", Kind::Device, &["192.0.2.1"])]
    }

    fn with(more: impl IntoIterator<Item = Interface>) -> Vec<Interface> {
        bare().into_iter().chain(more).collect()
    }

    fn flannel() -> Interface {
        mk(3, "flannel.1", Kind::Vxlan, &["10.244.1.0"])
    }

    fn cni0() -> Interface {
        mk(4, "cni0", Kind::Bridge, &["10.244.1.1"])
    }

    fn cali(n: u32) -> Interface {
        mk(n, &format!("cali{n:011x}"), Kind::Veth, &[])
    }

    fn in_short(roles: &Roles) -> (Network, String, String, String) {
        (roles.network, names(&roles.uplink), names(&roles.pods), names(&roles.overlay))
    }

    #[test]
    fn each_network_is_found_by_its_devices_and_routes() {
        let to_n2 = [route("10.244.2.0/24", "192.0.2.2", 2, BOOT)];
        let by_bird = [route("10.1.2.0/26", "192.0.2.2", 2, BIRD)];
        let calico = || mk(3, "vxlan.calico", Kind::Vxlan, &["10.1.1.0"]);
        let rows: [Found<'_>; 7] = [
            ("flannel", with([flannel(), cni0()]), &[], Network::Tunnelled, "cni0", "flannel.1"),
            ("no pod yet", with([flannel()]), &[], Network::Tunnelled, "none", "flannel.1"),
            ("host-gw", with([cni0()]), &to_n2, Network::Routed, "cni0", "eth0"),
            ("canal", with([flannel(), cali(9)]), &[], Network::Tunnelled, "cali00000000009", "flannel.1"),
            (
                "Calico, VXLAN",
                with([calico(), cali(9)]),
                &[],
                Network::Tunnelled,
                "cali00000000009",
                "vxlan.calico",
            ),
            ("Calico, routed", with([cali(9)]), &by_bird, Network::Routed, "cali00000000009", "eth0"),
            ("the same without a pod", bare(), &by_bird, Network::Routed, "none", "eth0"),
        ];
        for (name, interfaces, routes, network, pods, overlay) in rows {
            let roles = find(&interfaces, routes, Cni::Auto).unwrap_or_else(|e| panic!("{name}: {e}"));
            let expected = (network, "eth0".to_owned(), pods.to_owned(), overlay.to_owned());
            assert_eq!(in_short(&roles), expected, "{name}");
            let devices = roles.devices();
            let mut devices = devices.iter().filter(|device| device.name != "lo");
            let both_ways = devices.all(|device| device.directions.len() == 2);
            assert!(both_ways, "{name}: a mark must not reach the wire");
        }
    }

    #[test]
    fn a_routed_node_is_known_by_its_address_among_the_others() {
        let mut interfaces = with([cni0(), mk(5, "eth1", Kind::Device, &["203.0.113.1"])]);
        interfaces[1].addresses = vec![
            ("192.0.2.99".parse().unwrap(), 32),
            ("198.51.100.1".parse().unwrap(), 24),
            ("192.0.2.1".parse().unwrap(), 24),
        ];
        let routes = [route("10.244.2.0/24", "192.0.2.2", 2, BOOT)];
        let roles = find(&interfaces, &routes, Cni::Auto).unwrap();
        assert_eq!(roles.overlay_address, Ipv4Addr::new(192, 0, 2, 1));
        assert_eq!(roles.overlay_mac, interfaces[1].mac.unwrap());
        let way = |address: [u8; 4]| roles.way_back(address.into()).map(|device| device.index);
        assert_eq!(way([192, 0, 2, 7]), Some(2));
        assert_eq!(way([203, 0, 113, 7]), None, "behind another device, with another link-layer address");

        // Alone, two uplinks leave it open.
        let alone = find(&interfaces, &[], Cni::HostGw).unwrap_err().to_string();
        assert!(alone.contains("eth0, eth1") && alone.contains(OVERLAY_FLAG), "{alone}");
        assert_eq!(names(&find(&with([cni0()]), &[], Cni::HostGw).unwrap().overlay), "eth0");
    }

    #[test]
    fn what_is_not_clear_is_refused() {
        let tunnel = |kind: &str| mk(7, "tunl0", Kind::Other(kind.to_owned()), &["10.1.1.0"]);
        let through = [route("10.1.2.0/26", "192.0.2.2", 7, BIRD)];
        let static_one = [route("10.99.0.0/16", "192.0.2.254", 2, BOOT)];
        let direct =
            [route("10.244.3.0/24", "10.244.3.0", 3, BOOT), route("10.244.2.0/24", "192.0.2.2", 2, BOOT)];
        let two =
            [route("10.244.2.0/24", "192.0.2.2", 2, BOOT), route("10.244.3.0/24", "203.0.113.2", 5, BOOT)];
        let eth1 = || mk(5, "eth1", Kind::Device, &["203.0.113.1"]);
        let rows: [(&str, Vec<Interface>, &[Route], &str); 8] = [
            ("nothing", bare(), &[], "not recognised"),
            ("routes, and nothing of a CNI", bare(), &static_one, "not recognised"),
            ("a bridge, and routes to elsewhere", with([cni0()]), &static_one, "not recognised"),
            (
                "two CNIs",
                with([flannel(), mk(8, "weave", Kind::Bridge, &["10.32.0.1"])]),
                &[],
                "weave, flannel.1",
            ),
            ("IP in IP", with([tunnel("ipip"), cali(9)]), &through, "tunl0"),
            ("WireGuard", with([mk(7, "flannel-wg", Kind::Device, &[]), cni0()]), &direct[1..], "flannel-wg"),
            ("some without the tunnel", with([flannel(), cni0()]), &direct, "DirectRouting"),
            ("two uplinks", with([cni0(), eth1()]), &two, "eth0 and over eth1"),
        ];
        for (name, interfaces, routes, says) in rows {
            let error = find(&interfaces, routes, Cni::Auto).map(|roles| in_short(&roles)).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(says) && error.contains("--"), "{name}: {error}");
        }
        // The tunnel is there, and nothing uses it.
        let idle =
            find(&with([tunnel("ipip"), cali(9)]), &[route("10.1.2.0/26", "192.0.2.2", 2, BIRD)], Cni::Auto);
        assert_eq!(names(&idle.unwrap().overlay), "eth0");
    }

    #[test]
    fn a_named_network_or_device_wins() {
        let mut interfaces = with([flannel(), cni0(), mk(8, "weave", Kind::Bridge, &["10.32.0.1"])]);
        assert_eq!(find(&interfaces, &[], Cni::Flannel).unwrap().network, Network::Tunnelled);
        assert!(matches!(find(&interfaces, &[], Cni::Weave), Err(RoleError::NoOverlayPort { .. })));
        interfaces.push(mk(9, "vx9", Kind::Vxlan, &["10.9.0.0"]));
        let options = RoleOptions {
            overlay: vec!["vx9".to_owned()],
            pods: patterns(&["br-pods", "weave"]),
            ..RoleOptions::default()
        };
        let roles = find_roles(&interfaces, &[], &options).unwrap();
        assert_eq!((roles.network, names(&roles.pods).as_str()), (Network::Tunnelled, "weave"));
        let missing = RoleOptions { overlay: vec!["vx7".to_owned()], ..RoleOptions::default() };
        let error = find_roles(&interfaces, &[], &missing).unwrap_err().to_string();
        assert!(
            error.contains("\"vx7\"") && error.contains("vx9") && error.contains(OVERLAY_FLAG),
            "{error}"
        );
        for cni in [Cni::Flannel, Cni::Calico] {
            let error = find(&bare(), &[], cni).unwrap_err().to_string();
            assert!(error.contains("eth0") && error.contains(OVERLAY_FLAG), "{error}");
        }
    }
}
