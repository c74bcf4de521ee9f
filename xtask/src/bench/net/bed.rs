//! One testbed per variant, so that variants differ in nothing but what carries the client's packets to the pod.
//!
//! The client is outside, n1 is where its packets enter, the pod runs on n2 behind the overlay. Answers go back through
//! n1 in every variant. There is no CNI netfilter and no br_netfilter, so that plain routing is plain.

use super::probe::{self, Server};
use crate::bench::moby;
use crate::sh;
use anyhow::{Context as _, Result, ensure};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use testbed::cluster::Service;
use testbed::{Host, Options, Pod, Process, Testbed, Topology, wait};

/// Held by n1.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 101);
/// Until agents have brought everything up to date.
const AGENTS: Duration = Duration::from_secs(60);
/// The first port of services that nobody asks.
const FILLERS: u32 = 20_000;
/// As with kube-proxy, but nothing is dropped: without br_netfilter n2 sees answers alone.
const TRACKING: &str = "table ip kube { chain forward { type filter hook forward priority filter; ct state invalid counter\n}\n}\n";
/// Of the service that is measured.
const PORTS: u32 = 3;

/// What carries packets from n1 to the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// Routes alone: the client knows the pod's address.
    Plain,
    /// Plain, with a packet filter on n1's uplink that lets everything pass.
    EmptyProgram,
    /// nftables in moby's shape.
    Nftables,
    /// Plain, on nodes that track connections, as every node with kube-proxy does.
    Tracked,
    /// This load balancer.
    Ours,
    /// The same without its nftables table, the only cause of connection tracking here. No CNI hides the client either.
    OursUntracked,
}

impl Variant {
    pub(super) const ALL: [Self; 6] =
        [Self::Plain, Self::EmptyProgram, Self::Tracked, Self::Nftables, Self::Ours, Self::OursUntracked];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain routing",
            Self::EmptyProgram => "empty TC program",
            Self::Nftables => "nftables",
            Self::Tracked => "plain with conntrack",
            Self::Ours => "ours",
            Self::OursUntracked => "ours without conntrack",
        }
    }
}

/// Fields go in this order: sockets, then the hosts that they are of.
pub(super) struct Bed {
    pub(super) variant: Variant,
    pub(super) server: Server,
    pod: Pod,
    services: u32,
    agent: PathBuf,
    testbed: Testbed,
}

impl Bed {
    /// With one service.
    pub(super) fn build(variant: Variant, agent: &Path, topology: Topology) -> Result<Self> {
        let agent = agent.to_owned();
        let options =
            Options { topology, br_netfilter: false, agent: Some(agent.clone()), ..Options::default() };
        let testbed = Testbed::new(options)?;
        for node in testbed.nodes() {
            node.run(&["nft", "flush", "ruleset"])?;
        }
        let pod = testbed.add_pod(2, "server")?;
        let server = Server::start(&pod)?;
        let bed = Self { variant, server, pod, services: 1, agent, testbed };
        match variant {
            Variant::Plain => bed.route()?,
            Variant::EmptyProgram => {
                bed.route()?;
                // A classic program that answers 0, "no match": it is compiled to BPF and goes on to the stack.
                let n1 = bed.testbed.node(1);
                n1.run(&["tc", "qdisc", "add", "dev", "eth0", "clsact"])?;
                n1.run(&["tc", "filter", "add", "dev", "eth0", "ingress", "bpf", "bytecode", "1,6 0 0 0"])?;
            }
            Variant::Tracked => {
                bed.route()?;
                for node in bed.testbed.nodes() {
                    node.feed(&["nft", "-f", "-"], TRACKING)?;
                }
            }
            Variant::Nftables => {
                bed.route()?;
                let rules = moby::table() + &moby::add(ADDRESS, &[bed.pod.ip()]);
                bed.testbed.node(1).feed(&["nft", "-f", "-"], &rules)?;
            }
            Variant::Ours | Variant::OursUntracked => {
                let service = Service::new("bench", ADDRESS)
                    .udp(probe::UDP, probe::UDP)
                    .tcp(probe::TCP, probe::TCP)
                    .tcp(probe::BULK, probe::BULK);
                let cluster = bed.testbed.cluster();
                cluster.set_service(service)?;
                cluster.set_endpoints("bench", &[bed.pod.endpoint()])?;
                bed.reconcile()?;
            }
        }
        bed.verify()?;
        Ok(bed)
    }

    pub(super) fn client(&self) -> &Host {
        self.testbed.client()
    }

    /// What the client asks.
    pub(super) fn address(&self) -> Ipv4Addr {
        match self.variant {
            Variant::Plain | Variant::EmptyProgram | Variant::Tracked => self.pod.ip(),
            Variant::Nftables | Variant::Ours | Variant::OursUntracked => ADDRESS,
        }
    }

    /// Makes it that many services of one port each; the one that is measured counts for its three ports. Those that
    /// nobody asks are written by a program, since an agent takes a while to read 10,000 manifests. Routes do not know of
    /// services.
    pub(super) fn fill(&mut self, services: u32) -> Result<()> {
        let first = std::mem::replace(&mut self.services, services).max(PORTS);
        if services <= first {
            return Ok(());
        }
        match self.variant {
            Variant::Plain | Variant::EmptyProgram | Variant::Tracked => {}
            Variant::Nftables => {
                self.testbed.node(1).feed(&["nft", "-f", "-"], &moby::fill(first, services))?;
            }
            Variant::Ours | Variant::OursUntracked => {
                let program = self.agent.with_file_name("examples").join("fill_services");
                let ports = [FILLERS + first, FILLERS + services].map(|port| port.to_string());
                let mut command = Command::new(program);
                command.arg(self.testbed.pins(1)).arg(ADDRESS.to_string()).args(ports);
                sh::output(&mut command)?;
                let served = self.testbed.ask_agent(1, &["services", "-o", "json"])?;
                let served: serde_json::Value = serde_json::from_str(&served)?;
                let count = served.as_array().map_or(0, Vec::len);
                ensure!(count == services as usize, "{count} ports are served, not {services}");
            }
        }
        Ok(())
    }

    /// Starts agents, waits until all is in the maps, and ends them: packets do not need them, and what they do meanwhile
    /// would be measured with the rest.
    fn reconcile(&self) -> Result<()> {
        let mut agents: Vec<Process> =
            [1, 2].into_iter().map(|node| self.testbed.start_agent(node, &[])).collect::<Result<_>>()?;
        wait::until("an answer through the agents' work", AGENTS, || {
            for agent in &mut agents {
                ensure!(agent.is_running()?, "an agent has ended: {}", agent.log()?.trim());
            }
            probe::echo(self.client(), self.address(), &self.server, Duration::from_millis(200)).map(drop)
        })?;
        for agent in agents {
            agent.terminate()?;
        }
        if self.variant == Variant::OursUntracked {
            for node in self.testbed.nodes() {
                node.run(&["nft", "flush", "ruleset"])?;
            }
        }
        Ok(())
    }

    /// For variants whose answers only routes lead back through n1.
    fn route(&self) -> Result<()> {
        let (n1, n2) = (self.testbed.node(1), self.testbed.node(2));
        // Else nodes would tell each other, or the pod, of the shorter way.
        for node in [n1, n2] {
            let devices = [Some("all"), Some(node.overlay_device()), node.pods_bridge()];
            for device in devices.into_iter().flatten() {
                node.sysctls(&[(&format!("ipv4/conf/{device}/send_redirects"), "0")])?;
            }
        }
        let (pods, client) = (self.testbed.pod_network(), self.testbed.client_address());
        self.testbed.router().ip(&format!("route add {pods} via {}", n1.address()))?;
        n2.ip(&format!("route add {client}/32 via {} dev {} onlink", n1.overlay(), n2.overlay_device()))
    }

    /// That it does what its name says, with the client's address intact.
    fn verify(&self) -> Result<()> {
        let what = || format!("the testbed with {}", self.variant.name());
        probe::echo(self.client(), self.address(), &self.server, AGENTS).with_context(what)?;
        let (seen, port) =
            probe::seen_client(self.client(), self.address(), &self.server).with_context(what)?;
        ensure!(seen == (self.testbed.client_address(), port).into(), "{}: the pod has seen {seen}", what());
        if matches!(self.variant, Variant::Ours | Variant::OursUntracked) {
            let reasons = self.testbed.ask_agent(1, &["reasons"])?;
            for reason in ["forward_redirect", "reply_redirect"] {
                ensure!(reasons.contains(reason), "no packet was a {reason}: {reasons}");
            }
        }
        Ok(())
    }
}
