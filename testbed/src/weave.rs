//! The topology: nodes as weave and kube-proxy leave them, an outside, pods.

use crate::cluster::{Cluster, Endpoint};
use crate::host::Host;
use crate::namespace;
use crate::process::Process;
use crate::run::Run;
use anyhow::{Context as _, Result, ensure};
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// The number of nodes.
const NODES: u8 = 3;
/// The router, on the nodes' network and on the client's.
const ROUTER: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(198, 51, 100, 1)];
/// The client.
const CLIENT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 10);
/// Of the overlay: 1500 less the 50 bytes of VXLAN over IPv4.
const OVERLAY_MTU: u16 = 1450;

/// As weave (nat) and kube-proxy (filter) install it. The third nat rule is the one that hides clients: whatever enters
/// the overlay from outside gets the node's own address.
const RULES: &str = "\
*nat
:WEAVE - [0:0]
-A POSTROUTING -j WEAVE
-A WEAVE -s 10.32.0.0/12 -d 224.0.0.0/4 -j RETURN
-A WEAVE -s 10.32.0.0/12 ! -d 10.32.0.0/12 -j MASQUERADE
-A WEAVE ! -s 10.32.0.0/12 -d 10.32.0.0/12 -j MASQUERADE
COMMIT
*filter
:KUBE-FORWARD - [0:0]
-A FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
COMMIT
";

/// What may differ between testbeds.
#[derive(Clone, Debug)]
pub struct Options {
    /// Addresses that nodes hold beside their own: (number of the node, address in 192.0.2.0/24).
    pub addresses: Vec<(u8, Ipv4Addr)>,
    /// Whether bridged packets pass iptables on the nodes (`net.bridge.bridge-nf-call-iptables`).
    pub br_netfilter: bool,
    /// Whether client and pods leave checksums to the (virtual) device. Off for captures whose checksums are judged.
    pub checksum_offload: bool,
    /// `net.ipv4.conf.*.rp_filter` of the nodes: 0 off, 1 strict, 2 loose.
    pub rp_filter: u8,
    /// The agent's binary, for [`Testbed::start_agent`].
    pub agent: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            addresses: vec![(1, Ipv4Addr::new(192, 0, 2, 101)), (2, Ipv4Addr::new(192, 0, 2, 102))],
            br_netfilter: true,
            checksum_offload: true,
            rp_filter: 0,
            agent: None,
        }
    }
}

/// The hosts, the cluster's state, and the run that they belong to. Everything goes when it is dropped.
#[derive(Debug)]
pub struct Testbed {
    nodes: Vec<Node>,
    client: Host,
    router: Host,
    wire: Host,
    cluster: Cluster,
    options: Options,
    next_pod: AtomicU32,
    // Last: dropping it takes the rest away.
    run: Run,
}

/// A node of the cluster.
#[derive(Debug)]
pub struct Node {
    host: Host,
    number: u8,
    last_pod: AtomicU8,
}

/// A pod: a host in the overlay.
#[derive(Clone, Debug)]
pub struct Pod {
    host: Host,
    ip: Ipv4Addr,
    node: u8,
    port: String,
}

impl Node {
    /// 1 for `n1`.
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Its own address, on its uplink `eth0`.
    pub fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(192, 0, 2, 10 + self.number)
    }

    /// The address of its bridge `weave`, which its pods have as their router.
    pub fn overlay(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 32, 0, self.number)
    }

    /// The Ethernet address of its bridge `weave`.
    pub fn overlay_mac(&self) -> [u8; 6] {
        [0x02, 0x0a, 0x20, 0, 0, self.number]
    }

    fn set_up(&self, options: &Options, others: &[&Self]) -> Result<()> {
        let (number, address, overlay) = (self.number, self.address(), self.overlay());
        let mut links = format!(
            "link set lo up
             addr add {address}/24 dev eth0
             link set eth0 up
             route add default via {}
             link add weave address 02:0a:20:00:00:{number:02x} type bridge
             link set weave mtu {OVERLAY_MTU}
             addr add {overlay}/12 brd + dev weave
             link set weave up
             link add vxlan-6784 mtu {OVERLAY_MTU} type vxlan id 6784 dstport 6784 local {address}
             link set vxlan-6784 master weave up\n",
            ROUTER[0]
        );
        // Writing to a String cannot fail.
        for (_, held) in options.addresses.iter().filter(|(holder, _)| *holder == number) {
            let _ = writeln!(links, "addr add {held}/32 dev eth0");
        }
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
        self.ip(&links)?;
        // Where a packet goes whose Ethernet address nobody has learned: to every other node.
        let flood: String = others
            .iter()
            .map(|other| format!("fdb append 00:00:00:00:00:00 dev vxlan-6784 dst {}\n", other.address()))
            .collect();
        self.bridge(&flood)?;
        self.feed(&["iptables-restore", "--wait"], RULES)
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
        self.ip
    }

    /// The number of its node.
    pub fn node(&self) -> u8 {
        self.node
    }

    /// As a ready endpoint of a Service.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::ready(self.ip, &node_name(self.node))
    }
}

impl Deref for Pod {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl Testbed {
    /// Builds it: nodes n1 to n3, router and client, no pods.
    ///
    /// # Errors
    /// When not root, or a program or a kernel feature is missing. Nothing is left behind.
    pub fn weave(options: Options) -> Result<Self> {
        let run = Run::begin()?;
        let host = |name: &str| Host::new(&run, name);
        let nodes: Vec<_> = (1..=NODES)
            .map(|number| Node { host: host(&node_name(number)), number, last_pod: AtomicU8::new(0) })
            .collect();
        let (client, router, wire) = (host("client"), host("router"), host("wire"));
        let cluster = Cluster::new(run.files().join("cluster"))?;

        let hosts = nodes.iter().map(Deref::deref).chain([&client, &router, &wire]);
        namespace::add(hosts.map(Host::namespace))?;
        set_up_wire(&wire)?;
        plug_in(&wire, nodes.iter().map(Deref::deref).chain([&router]))?;
        set_up_outside(&router, &client, &options)?;
        for node in &nodes {
            let others: Vec<_> = nodes.iter().filter(|other| other.number != node.number).collect();
            node.set_up(&options, &others).with_context(|| format!("setting up {}", node.name()))?;
            cluster.set_node(node.name(), node.address())?;
        }
        Ok(Self { nodes, client, router, wire, cluster, options, next_pod: AtomicU32::new(1), run })
    }

    /// Node `n1` has number 1.
    ///
    /// # Panics
    /// When there is no node of that number.
    pub fn node(&self, number: u8) -> &Node {
        &self.nodes[usize::from(number) - 1]
    }

    /// All nodes, in order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The host outside the cluster, 198.51.100.10.
    pub fn client(&self) -> &Host {
        &self.client
    }

    /// The client's address.
    pub fn client_address(&self) -> Ipv4Addr {
        CLIENT
    }

    /// The router between client and nodes.
    pub fn router(&self) -> &Host {
        &self.router
    }

    /// The cluster's state.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The run's directory: logs, configurations, captures.
    pub fn directory(&self) -> PathBuf {
        self.run.files()
    }

    /// Adds a pod, as the CNI would: a veth pair with one end in the node's bridge, an address of the overlay, the bridge
    /// as its router. `name` is unique in the testbed.
    ///
    /// # Errors
    /// When the name is taken or the node has 254 pods.
    pub fn add_pod(&self, node: u8, name: &str) -> Result<Pod> {
        let host = Host::new(&self.run, name);
        let node = self.node(node);
        let last = node.last_pod.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| {
            last.checked_add(1).filter(|last| *last < u8::MAX)
        });
        let last = last.map_err(|_| anyhow::anyhow!("{} is full of pods", node.name()))?;
        let ip = Ipv4Addr::new(10, 32, node.number, last + 1);
        let port = format!("vethwepl{}", self.next_pod.fetch_add(1, Ordering::Relaxed));
        namespace::add([host.namespace()])?;
        host.sysctls(&[("ipv6/conf/default/disable_ipv6", "1")])?;
        node.ip(&format!(
            "link add {port} mtu {OVERLAY_MTU} type veth peer name eth0 mtu {OVERLAY_MTU} netns {}
             link set {port} master weave up
             link set {port} type bridge_slave hairpin on",
            host.namespace()
        ))?;
        host.ip(&format!(
            "link set lo up
             addr add {ip}/12 brd + dev eth0
             link set eth0 up
             route add default via {}",
            node.overlay()
        ))?;
        if !self.options.checksum_offload {
            checksum_in_software(&host)?;
        }
        Ok(Pod { host, ip, node: node.number, port })
    }

    /// Removes a pod and ends its programs, without a word to anybody: also the way a pod crashes.
    ///
    /// # Errors
    /// When a program of it does not die.
    #[expect(clippy::needless_pass_by_value, reason = "there is no pod afterwards")]
    pub fn remove_pod(&self, pod: Pod) -> Result<()> {
        self.node(pod.node).ip(&format!("link del {}", pod.port))?;
        namespace::remove(pod.namespace())
    }

    /// Adds a host that is no node to the nodes' network, with an address in 192.0.2.0/24.
    ///
    /// # Errors
    /// When the name is taken.
    pub fn add_host(&self, name: &str, address: Ipv4Addr) -> Result<Host> {
        let host = Host::new(&self.run, name);
        namespace::add([host.namespace()])?;
        host.sysctls(&[("ipv6/conf/default/disable_ipv6", "1")])?;
        plug_in(&self.wire, [&host])?;
        host.ip(&format!(
            "link set lo up
             addr add {address}/24 dev eth0
             link set eth0 up
             route add default via {}",
            ROUTER[0]
        ))?;
        Ok(host)
    }

    /// Gives an address from one node to another, and makes the router forget where it was, as the new holder's
    /// gratuitous ARP would.
    ///
    /// # Errors
    /// When `from` does not hold it.
    pub fn move_address(&self, address: Ipv4Addr, from: u8, to: u8) -> Result<()> {
        self.node(from).ip(&format!("addr del {address}/32 dev eth0"))?;
        self.node(to).ip(&format!("addr add {address}/32 dev eth0"))?;
        self.router.ip(&format!("neigh flush to {address}"))
    }

    /// Where the agent of a node pins its maps and programs: `--bpffs`.
    pub fn pins(&self, node: u8) -> PathBuf {
        self.run.pins().join(node_name(node))
    }

    /// Starts the agent of a node, with `more` arguments after its usual ones. It reports in the cluster's state when it
    /// serves: await that.
    ///
    /// # Errors
    /// When [`Options::agent`] is not set or cannot be run.
    pub fn start_agent(&self, node: u8, more: &[&str]) -> Result<Process> {
        self.start_agent_on("--manifests", self.cluster.directory(), node, more)
    }

    /// The same on a Kubernetes API, as the user of a kubeconfig.
    ///
    /// # Errors
    /// When [`Options::agent`] is not set or cannot be run.
    pub fn start_agent_as(&self, kubeconfig: &Path, node: u8, more: &[&str]) -> Result<Process> {
        self.start_agent_on("--kubeconfig", kubeconfig, node, more)
    }

    fn start_agent_on(&self, source: &str, file: &Path, node: u8, more: &[&str]) -> Result<Process> {
        let host = self.node(node);
        let state = self.run.files().join("state").join(host.name());
        std::fs::create_dir_all(&state)?;
        let mut words = vec![path(self.agent()?)?, "run", "--node", host.name(), source, path(file)?];
        let pins = self.pins(node);
        words.extend(["--bpffs", path(&pins)?, "--state-dir", path(&state)?]);
        words.extend(more);
        host.spawn("agent", &words)
    }

    /// Asks the agent's binary about a node's maps: `ask_agent(1, &["reasons", "-o", "json"])`.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn ask_agent(&self, node: u8, words: &[&str]) -> Result<String> {
        let pins = self.pins(node);
        self.node(node).run(&[&[path(self.agent()?)?], words, &["--bpffs", path(&pins)?]].concat())
    }

    fn agent(&self) -> Result<&Path> {
        let agent = self.options.agent.as_deref().context("Options::agent names no binary")?;
        ensure!(agent.is_file(), "the agent is not built: {}", agent.display());
        Ok(agent)
    }
}

fn node_name(number: u8) -> String {
    format!("n{number}")
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// The switch that nodes and router are plugged into.
fn set_up_wire(wire: &Host) -> Result<()> {
    wire.sysctls(&[("ipv6/conf/default/disable_ipv6", "1")])?;
    wire.ip("link add switch type bridge\nlink set switch up\n")
}

/// Their ends are called `eth0`.
fn plug_in<'a>(wire: &Host, hosts: impl IntoIterator<Item = &'a Host>) -> Result<()> {
    let mut links = String::new();
    for host in hosts {
        let _ = writeln!(
            links,
            "link add {name} type veth peer name eth0 netns {namespace}\nlink set {name} master switch up",
            name = host.name(),
            namespace = host.namespace(),
        );
    }
    wire.ip(&links)
}

fn set_up_outside(router: &Host, client: &Host, options: &Options) -> Result<()> {
    for host in [router, client] {
        host.sysctls(&[("ipv6/conf/default/disable_ipv6", "1")])?;
    }
    router.sysctls(&[("ipv4/ip_forward", "1")])?;
    router.ip(&format!(
        "link set lo up
         link add eth1 type veth peer name eth0 netns {}
         addr add {}/24 dev eth0
         addr add {}/24 dev eth1
         link set eth0 up
         link set eth1 up",
        client.namespace(),
        ROUTER[0],
        ROUTER[1],
    ))?;
    client.ip(&format!(
        "link set lo up
         addr add {CLIENT}/24 dev eth0
         link set eth0 up
         route add default via {}",
        ROUTER[1]
    ))?;
    if options.checksum_offload { Ok(()) } else { checksum_in_software(client) }
}

fn checksum_in_software(host: &Host) -> Result<()> {
    host.run(&["ethtool", "-K", "eth0", "tx", "off"]).map(drop)
}
