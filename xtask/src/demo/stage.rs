//! The story: what plays in it, and its chapters, wherever the objects are.

use super::cluster::Cluster;
use super::heading;
use crate::sh;
use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use testbed::cluster::Service;
use testbed::load::{Counts, Load};
use testbed::server::{self, Server};
use testbed::{Options, Pod, Process, Testbed, Topology, dns, http, wait};

/// Held by n1 in the testbed.
pub(super) const WEB: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 101), 80);
/// Held by n2.
const DNS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 102), 53);
/// For one request, and for what an agent should do at once.
pub(super) const SOON: Duration = Duration::from_secs(30);

/// A pod with its server. The server goes first.
pub(super) struct Backend {
    server: Server,
    pub(super) pod: Pod,
}

/// Everything that plays. Fields go in this order: programs, then the hosts that they run on.
pub(super) struct Stage<C> {
    agents: BTreeMap<u8, Process>,
    pub(super) web: Vec<Backend>,
    dns: Vec<Backend>,
    pub(super) cluster: C,
    pub(super) testbed: Testbed,
}

impl<C: Cluster> Stage<C> {
    /// Puts everything up, with the cluster that `found` makes beside the nodes.
    pub(super) fn set(
        agent: PathBuf,
        topology: Topology,
        found: impl FnOnce(&Testbed) -> Result<C>,
    ) -> Result<Self> {
        sh::say(&format!("putting up three nodes with the network {topology}, pods and a client"));
        let testbed = Testbed::new(Options { topology, agent: Some(agent), ..Options::default() })?;
        if topology == Topology::Routed {
            println!(
                "Each node is behind a router of its own: there, holders serve the pods of their own node."
            );
        }
        let web = [(1, "web-a"), (2, "web-b"), (3, "web-c"), (3, "web-d")].map(|(node, name)| {
            backend(&testbed, home(&testbed, node, 1), name, |pod| server::http(pod, 8080))
        });
        let dns = [(1, "dns-a"), (3, "dns-b")]
            .map(|(node, name)| backend(&testbed, home(&testbed, node, 2), name, |pod| server::dns(pod)));
        let web = web.into_iter().collect::<Result<Vec<_>>>()?;
        let dns = dns.into_iter().collect::<Result<Vec<_>>>()?;

        let cluster = found(&testbed)?;
        let service = Service::new("web", *WEB.ip()).tcp(WEB.port(), 8080);
        cluster.add_service(&testbed, service, &pods(&web))?;
        let service = Service::new("dns", *DNS.ip()).udp(DNS.port(), 53);
        cluster.add_service(&testbed, service, &pods(&dns))?;

        sh::say("starting an agent on every node");
        let agents = (1..=3).map(|node| Ok((node, cluster.start_agent(&testbed, node)?)));
        let agents = agents.collect::<Result<_>>()?;
        let mut stage = Self { agents, web, dns, cluster, testbed };
        stage.await_agents()?;
        Ok(stage)
    }

    /// Until each Service has its status, and each pod has answered.
    fn await_agents(&mut self) -> Result<()> {
        let Self { agents, cluster, testbed, .. } = self;
        for (service, address) in [("web", WEB), ("dns", DNS)] {
            wait::until(&format!("the status of Service {service}"), SOON, || {
                for (node, agent) in agents.iter_mut() {
                    ensure!(agent.is_running()?, "the agent of n{node} has ended: {}", agent.log()?.trim());
                }
                let status = cluster.status(testbed, service)?;
                ensure!(status.contains(&address.ip().to_string()), "{status}");
                Ok(())
            })?;
        }
        // Each node's agent works at its own pace.
        wait::until("an answer from every pod", SOON, || {
            let counts = self.request(40)?;
            ensure!(counts.len() == self.web.len(), "{counts:?}");
            Ok(())
        })
    }

    /// From the addresses to the maps: what there is to see in any cluster.
    pub(super) fn story(self) -> Result<Self> {
        self.addresses()?;
        self.spread()?;
        self.clients_seen()?;
        self.datagrams()?;
        let stage = self.pod_leaves()?.agent_dies()?;
        stage.counters()?;
        stage.maps()?;
        Ok(stage)
    }

    fn addresses(&self) -> Result<()> {
        heading("Where the addresses are");
        println!("{:6} {:14} {:26} overlay", "node", "address", "pods");
        for node in self.testbed.nodes() {
            let pods: Vec<_> =
                self.backends().filter(|b| b.pod.node() == node.number()).map(|b| b.pod.name()).collect();
            println!("{:6} {:14} {:26} {}", node.name(), node.address(), pods.join(" "), node.overlay());
        }
        println!("{:6} {:14} outside, behind a router", "client", self.testbed.client_address());
        for (service, server) in [("web", WEB), ("dns", DNS)] {
            let holders = self.testbed.nodes().iter().map(|node| {
                let held = node.run(&["ip", "-4", "-o", "addr", "show", "to", &server.ip().to_string()])?;
                Ok((!held.is_empty()).then(|| node.name()))
            });
            let holders = holders.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect::<Vec<_>>();
            println!(
                "Service {service} asks for {}, held by {}: it forwards port {}",
                server.ip(),
                holders.join(", "),
                server.port()
            );
        }
        Ok(())
    }

    fn spread(&self) -> Result<()> {
        const REQUESTS: usize = 400;
        heading(&format!("{REQUESTS} requests to http://{WEB}, spread over pods on every node"));
        let counts = self.request(REQUESTS)?;
        self.table(&self.web, &counts);
        ensure!(counts.len() == self.web.len(), "not every pod has answered");
        Ok(())
    }

    fn clients_seen(&self) -> Result<()> {
        heading("Whom the pods saw: their own access logs");
        let client = self.testbed.client_address().to_string();
        for Backend { server, pod } in &self.web {
            let mut seen: BTreeMap<String, usize> = BTreeMap::new();
            for address in server.clients()? {
                *seen.entry(address).or_default() += 1;
            }
            let shown: Vec<_> =
                seen.iter().map(|(address, count)| format!("{address} ({count} requests)")).collect();
            println!("{:6} {}", pod.name(), shown.join(", "));
            ensure!(
                seen.len() == 1 && seen.contains_key(&client),
                "{} should have seen {client} alone",
                pod.name()
            );
        }
        println!("That is the client's own address, on every node.");
        Ok(())
    }

    fn datagrams(&self) -> Result<()> {
        const QUESTIONS: usize = 40;
        heading(&format!("{QUESTIONS} DNS questions over UDP to {DNS}"));
        let mut counts = BTreeMap::new();
        for _ in 0..QUESTIONS {
            *counts.entry(dns::ask(self.testbed.client(), DNS, server::WHO, SOON)?).or_default() += 1;
        }
        self.table(&self.dns, &counts);
        let client = self.testbed.client_address().to_string();
        for Backend { server, pod } in &self.dns {
            // Beside the question that found out whether the server was up.
            let others: Vec<_> =
                server.clients()?.into_iter().filter(|seen| *seen != client && seen != "127.0.0.1").collect();
            ensure!(others.is_empty(), "{} has seen {others:?}", pod.name());
        }
        println!("The servers' query logs name {client} here too.");
        Ok(())
    }

    /// As Kubernetes does it: the endpoint is terminating, then gone, then the pod ends.
    fn pod_leaves(mut self) -> Result<Self> {
        let leaving = self.web.pop().context("no pod left")?;
        heading(&format!("Under load, {} leaves", leaving.pod.name()));
        let load = Load::start(self.testbed.client(), WEB, 2);
        load.await_answers(500, SOON)?;
        let told = Instant::now();
        self.cluster.terminate(&self.testbed, "web", &leaving.pod, &pods(&self.web))?;
        let last = wait::until("the last new connection of the pod", SOON, || {
            let before = leaving.server.clients()?.len();
            let at = told.elapsed();
            load.await_answers(100, SOON)?;
            let new = leaving.server.clients()?.len() - before;
            ensure!(new == 0, "{new} requests among 100");
            Ok(at)
        })?;
        println!("terminating: no new connection to it after {} ms", last.as_millis());
        self.cluster.forget(&self.testbed, "web", &leaving.pod, &pods(&self.web))?;
        let Backend { server, pod } = leaving;
        drop(server);
        self.testbed.remove_pod(pod)?;
        load.await_answers(500, SOON)?;
        report(&load.finish()?)?;
        Ok(self)
    }

    fn agent_dies(mut self) -> Result<Self> {
        heading("Under load, the holder's agent is killed (kill -9) and started again");
        let load = Load::start(self.testbed.client(), WEB, 2);
        load.await_answers(500, SOON)?;
        let agent = self.agents.remove(&1).context("n1 has no agent")?;
        println!("agent of n1, process {}: {}", agent.pid(), agent.kill()?);
        load.await_answers(1000, SOON)?;
        println!("without it: {} requests answered so far", load.counts().answered);
        self.agents.insert(1, self.cluster.start_agent(&self.testbed, 1)?);
        load.await_answers(1000, SOON)?;
        report(&load.finish()?)?;
        let agent = self.agents.get_mut(&1).context("n1 has no agent")?;
        ensure!(agent.is_running()?, "the second agent has ended: {}", agent.log()?.trim());
        Ok(self)
    }

    fn counters(&self) -> Result<()> {
        heading("What n1 has counted: lb-agent services, lb-agent reasons");
        println!("{}", self.testbed.ask_agent(1, &["services"])?.trim_end());
        println!();
        println!("{}", self.testbed.ask_agent(1, &["reasons"])?.trim_end());
        Ok(())
    }

    fn maps(&self) -> Result<()> {
        const LINES: usize = 24;
        let map = find_pin(&self.testbed.pins(1), "services")?;
        heading(&format!("The same state by any tool: bpftool map dump pinned {}", map.display()));
        let dump = sh::output(Command::new("bpftool").args(["map", "dump", "pinned"]).arg(&map))?;
        let lines: Vec<_> = dump.lines().collect();
        println!("{}", lines[..lines.len().min(LINES)].join("\n"));
        if lines.len() > LINES {
            println!("… {} lines more", lines.len() - LINES);
        }
        Ok(())
    }

    /// Leaves it to the person who watches.
    pub(super) fn keep(&self) -> Result<()> {
        let client = self.testbed.client().namespace();
        println!("It goes on running. In another terminal, as root, try:");
        println!("  nsenter --net=/run/netns/{client} curl http://{WEB}/client");
        println!("  nsenter --net=/run/netns/{client} curl http://{WEB}/");
        println!("  nsenter --net=/run/netns/{} ip rule", self.testbed.node(2).namespace());
        println!("  bpftool map dump pinned {}", find_pin(&self.testbed.pins(1), "services")?.display());
        for line in self.cluster.to_try(&self.testbed) {
            println!("  {line}");
        }
        println!("  tail -f {}/logs/n1-agent.log", self.testbed.directory().display());
        println!("Ctrl-C here removes everything.");
        // The signal's own thread removes everything and ends the process.
        loop {
            thread::park();
        }
    }

    /// Requests one after the other; how many each pod has answered.
    fn request(&self, count: usize) -> Result<BTreeMap<String, usize>> {
        let mut counts = BTreeMap::new();
        for _ in 0..count {
            *counts.entry(http::get(self.testbed.client(), WEB, "/", SOON)?).or_default() += 1;
        }
        Ok(counts)
    }

    fn table(&self, backends: &[Backend], counts: &BTreeMap<String, usize>) {
        for Backend { pod, .. } in backends {
            let count = counts.get(pod.name()).copied().unwrap_or(0);
            let node = self.testbed.node(pod.node()).name();
            println!("{:6} on {node} {:12} {count:4} {}", pod.name(), pod.ip(), "▪".repeat(count / 4));
        }
    }

    fn backends(&self) -> impl Iterator<Item = &Backend> {
        self.web.iter().chain(&self.dns)
    }
}

/// Where something of this node is put that a holder is to reach.
pub(super) fn home(testbed: &Testbed, node: u8, holder: u8) -> u8 {
    if testbed.topology() == Topology::Routed { holder } else { node }
}

pub(super) fn backend(
    testbed: &Testbed,
    node: u8,
    name: &str,
    serve: impl FnOnce(&Pod) -> Result<Server>,
) -> Result<Backend> {
    let pod = testbed.add_pod(node, name)?;
    Ok(Backend { server: serve(&pod)?, pod })
}

fn pods(backends: &[Backend]) -> Vec<&Pod> {
    backends.iter().map(|backend| &backend.pod).collect()
}

/// Says what a load has met; any failure fails the demo.
pub(super) fn report(counts: &Counts) -> Result<()> {
    println!("{} requests answered, {} failed", counts.answered, counts.failures.len());
    ensure!(counts.failures.is_empty(), "requests failed: {}", counts.failures.join("; "));
    Ok(())
}

/// The pin of a map, wherever below its directory the agent keeps it.
fn find_pin(directory: &Path, map: &str) -> Result<PathBuf> {
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in
            fs::read_dir(&directory).with_context(|| format!("cannot read {}", directory.display()))?
        {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                directories.push(entry.path());
            } else if entry.file_name().eq_ignore_ascii_case(map) {
                return Ok(entry.path());
            }
        }
    }
    anyhow::bail!("no map {map} is pinned below {}", directory.display())
}
