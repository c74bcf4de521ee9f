//! The testbed as a whole: hosts, the cluster's state, agents.

use crate::cluster::Cluster;
use crate::host::Host;
use crate::namespace;
use crate::node::{self, Node, Pod};
use crate::options::Options;
use crate::outside::{self, Outside, checksum_in_software};
use crate::process::Process;
use crate::run::Run;
use crate::topology::Topology;
use anyhow::{Context as _, Result, ensure};
use std::net::Ipv4Addr;
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// The number of nodes.
const NODES: u8 = 3;

/// The hosts, the cluster's state, and the run that they belong to. Everything goes when it is dropped.
#[derive(Debug)]
pub struct Testbed {
    nodes: Vec<Node>,
    outside: Outside,
    cluster: Cluster,
    options: Options,
    // Last: dropping it takes the rest away.
    run: Run,
}

impl Testbed {
    /// Builds it: nodes n1 to n3, router and client, no pods.
    ///
    /// # Errors
    /// When not root, or a program or a kernel feature is missing. Nothing is left behind.
    pub fn new(options: Options) -> Result<Self> {
        let run = Run::begin()?;
        let host = |name: &str| Host::new(&run, name);
        let nodes: Vec<_> =
            (1..=NODES).map(|number| Node::new(host(&node::name(number)), number, &options)).collect();
        let outside = Outside { router: host("router"), client: host("client"), wire: host("wire") };
        let cluster = Cluster::new(run.files().join("cluster"))?;

        let hosts = nodes.iter().map(Deref::deref).chain(outside.hosts());
        namespace::add(hosts.map(Host::namespace))?;
        outside.set_up(&nodes, &options)?;
        for node in &nodes {
            let others: Vec<_> = nodes.iter().filter(|other| other.number() != node.number()).collect();
            node.set_up(&options, &others).with_context(|| format!("setting up {}", node.name()))?;
            cluster.set_node(node.name(), node.address())?;
        }
        Ok(Self { nodes, outside, cluster, options, run })
    }

    /// The same with weave's network.
    ///
    /// # Errors
    /// As [`Testbed::new`].
    pub fn weave(options: Options) -> Result<Self> {
        Self::new(Options { topology: Topology::Weave, ..options })
    }

    /// The network between the pods.
    pub fn topology(&self) -> Topology {
        self.options.topology
    }

    /// All pods of the cluster, as `ADDRESS/LENGTH`.
    pub fn pod_network(&self) -> &'static str {
        self.options.topology.network().pods()
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
        &self.outside.client
    }

    /// The client's address.
    pub fn client_address(&self) -> Ipv4Addr {
        outside::CLIENT
    }

    /// The router between client and nodes.
    pub fn router(&self) -> &Host {
        &self.outside.router
    }

    /// The switches between nodes and router. The port of a node's cable has the node's name, where nodes are not routed.
    pub fn wire(&self) -> &Host {
        &self.outside.wire
    }

    /// The cluster's state.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The run's directory: logs, configurations, captures.
    pub fn directory(&self) -> PathBuf {
        self.run.files()
    }

    /// Adds a pod, as the CNI would: a veth pair, an address of the node's pods, the node as its router. `name` is unique
    /// in the testbed.
    ///
    /// # Errors
    /// When the name is taken or the node is full of pods: weave and flannel have room for 253, Calico for 63.
    pub fn add_pod(&self, node: u8, name: &str) -> Result<Pod> {
        let host = self.add_namespace(name)?;
        let pod = self.node(node).add_pod(host)?;
        if !self.options.checksum_offload {
            checksum_in_software(&pod)?;
        }
        Ok(pod)
    }

    /// Removes a pod and ends its programs, without a word to anybody: also the way a pod crashes.
    ///
    /// # Errors
    /// When a program of it does not die.
    #[expect(clippy::needless_pass_by_value, reason = "there is no pod afterwards")]
    pub fn remove_pod(&self, pod: Pod) -> Result<()> {
        self.node(pod.node()).remove_pod(&pod)?;
        namespace::remove(pod.namespace())
    }

    /// Adds a host that is no node to the network 192.0.2.0/24, where nodes are too unless they are routed.
    ///
    /// # Errors
    /// When the name is taken.
    pub fn add_host(&self, name: &str, address: Ipv4Addr) -> Result<Host> {
        let host = self.add_namespace(name)?;
        self.outside.plug_in(&host)?;
        host.ip(&format!(
            "link set lo up
             addr add {address}/24 dev eth0
             link set eth0 up
             route add default via {}",
            outside::ROUTER
        ))?;
        Ok(host)
    }

    fn add_namespace(&self, name: &str) -> Result<Host> {
        let host = Host::new(&self.run, name);
        namespace::add([host.namespace()])?;
        host.sysctls(&[("ipv6/conf/default/disable_ipv6", "1")])?;
        Ok(host)
    }

    /// Gives a node an address, and makes the router send it there.
    ///
    /// # Errors
    /// When the node holds it already.
    pub fn add_address(&self, address: Ipv4Addr, node: u8) -> Result<()> {
        let node = self.node(node);
        node.ip(&format!("addr add {address}/32 dev {}", node.held_on()))?;
        self.outside.redirect(address, node)
    }

    /// Gives an address from one node to another.
    ///
    /// # Errors
    /// When `from` does not hold it.
    pub fn move_address(&self, address: Ipv4Addr, from: u8, to: u8) -> Result<()> {
        let from = self.node(from);
        from.ip(&format!("addr del {address}/32 dev {}", from.held_on()))?;
        self.add_address(address, to)
    }

    /// Where the agent of a node pins its maps and programs: `--bpffs`.
    pub fn pins(&self, node: u8) -> PathBuf {
        self.run.pins().join(node::name(node))
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

fn path(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}
