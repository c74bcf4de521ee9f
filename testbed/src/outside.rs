//! What is between the nodes and around them: the wire, the router, the client. The same for every topology, but for the
//! links to nodes that have a subnet of their own.

use crate::host::Host;
use crate::node::Node;
use crate::options::{Options, Uplink};
use crate::topology::PREFIX_OF_OWN_LINK;
use anyhow::Result;
use std::fmt::Write as _;
use std::net::Ipv4Addr;

/// The router on the network of nodes and other hosts.
pub(crate) const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The client.
pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 10);
/// A node's second uplink.
pub(crate) const SECOND: &str = "eth1";

/// The router on the client's network.
const ROUTER_OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// The switches that hosts are plugged into: the nodes' network, and that of second uplinks.
const SWITCHES: [&str; 2] = ["switch", "switch2"];

/// The address of a node's second uplink; the router has the first of the network.
pub(crate) fn second(node: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, 10 + node)
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) router: Host,
    pub(crate) client: Host,
    pub(crate) wire: Host,
}

impl Outside {
    pub(crate) fn hosts(&self) -> [&Host; 3] {
        let Self { router, client, wire } = self;
        [router, client, wire]
    }

    /// Puts it up, with the nodes' ends of their links.
    pub(crate) fn set_up(&self, nodes: &[Node], options: &Options) -> Result<()> {
        let Self { router, client, wire } = self;
        for host in self.hosts() {
            host.sysctls(&[("ipv6/conf/default/disable_ipv6", "1")])?;
        }
        let switches = SWITCHES.map(|name| format!("link add {name} type bridge\nlink set {name} up\n"));
        wire.ip(&switches.concat())?;
        self.plug_in(router)?;
        router.sysctls(&[("ipv4/ip_forward", "1")])?;
        router.ip(&format!(
            "link set lo up
             link add eth1 type veth peer name eth0 netns {}
             addr add {ROUTER}/24 dev eth0
             addr add {ROUTER_OUTSIDE}/24 dev eth1
             link set eth0 up
             link set eth1 up",
            client.namespace(),
        ))?;
        client.ip(&format!(
            "link set lo up
             addr add {CLIENT}/24 dev eth0
             link set eth0 up
             route add default via {ROUTER_OUTSIDE}",
        ))?;
        self.connect(nodes)?;
        if options.uplink == Uplink::Second {
            self.connect_twice(nodes)?;
        }
        self.route(nodes, options)?;
        if options.checksum_offload { Ok(()) } else { checksum_in_software(client) }
    }

    /// Plugs a host into the nodes' network. Its end is called `eth0`.
    pub(crate) fn plug_in(&self, host: &Host) -> Result<()> {
        self.wire.ip(&cable(host, host.name(), SWITCHES[0], "eth0"))
    }

    /// Nodes to the wire, or each to the router by a link of its own.
    fn connect(&self, nodes: &[Node]) -> Result<()> {
        let (mut cables, mut links) = (String::new(), String::new());
        for node in nodes {
            let Some(router) = node.network().own_link(node.number()) else {
                cables += &cable(node, node.name(), SWITCHES[0], "eth0");
                continue;
            };
            // Writing to a String cannot fail.
            let _ = writeln!(
                links,
                "link add {name} type veth peer name eth0 netns {}
                 addr add {router}/{PREFIX_OF_OWN_LINK} dev {name}
                 link set {name} up",
                node.namespace(),
                name = node.name(),
            );
        }
        if !links.is_empty() {
            // Hosts on the nodes' usual network think that addresses held by nodes are on it too.
            self.router
                .sysctls(&[("ipv4/conf/eth0/proxy_arp", "1"), ("ipv4/neigh/eth0/proxy_delay", "0")])?;
        }
        self.wire.ip(&cables)?;
        self.router.ip(&links)
    }

    /// Nodes and router to a second network.
    fn connect_twice(&self, nodes: &[Node]) -> Result<()> {
        let mut cables = cable(&self.router, "router-2", SWITCHES[1], "eth2");
        for node in nodes {
            cables += &cable(node, &format!("{}-2", node.name()), SWITCHES[1], SECOND);
        }
        self.wire.ip(&cables)?;
        self.router.ip(&format!("addr add {}/24 dev eth2\nlink set eth2 up", Ipv4Addr::new(198, 18, 0, 1)))
    }

    /// What the router cannot find by ARP.
    fn route(&self, nodes: &[Node], options: &Options) -> Result<()> {
        let mut routes = String::new();
        for node in nodes {
            if let Some(pods) = node.network().announced(node.number()) {
                let _ =
                    writeln!(routes, "route add {pods} via {} onlink dev {}", node.address(), node.name());
            }
            let held = options.addresses.iter().filter(|(holder, _)| *holder == node.number());
            for (_, address) in held {
                routes += &route(*address, node);
            }
        }
        self.router.ip(&routes)
    }

    /// Makes the router send an address to another node from now on, as that node's gratuitous ARP or its announcement
    /// would.
    pub(crate) fn redirect(&self, address: Ipv4Addr, node: &Node) -> Result<()> {
        self.router.ip(&format!("{}neigh flush to {address}", route(address, node)))
    }
}

/// How the router finds an address that the node holds: by nothing, where it asks for it by ARP.
fn route(address: Ipv4Addr, node: &Node) -> String {
    node.next_hop().map(|hop| format!("route replace {address}/32 via {hop}\n")).unwrap_or_default()
}

/// From a switch to a host, whose end is called `device`.
fn cable(host: &Host, port: &str, switch: &str, device: &str) -> String {
    format!(
        "link add {port} type veth peer name {device} netns {}\nlink set {port} master {switch} up\n",
        host.namespace()
    )
}

pub(crate) fn checksum_in_software(host: &Host) -> Result<()> {
    host.run(&["ethtool", "-K", "eth0", "tx", "off"]).map(drop)
}
