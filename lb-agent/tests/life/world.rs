//! A testbed with a web server in a pod of each node, a Service in front of them, and agents that come and go.

use crate::node;
use anyhow::{Context as _, Result, ensure};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::pins::Pins;
use nix::sys::signal::Signal;
use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use testbed::cluster::Service;
use testbed::server::Server;
use testbed::{Host, Options, Pod, Process, Testbed, http, server, wait};

/// How long what must come about may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// How long one request may take.
pub(crate) const REQUEST: Duration = Duration::from_secs(3);
/// "Within about a second", on a machine that is busy with other tests.
pub(crate) const SOON: Duration = Duration::from_millis(2_500);

/// The address that n1 holds, and the port of the Service `web` there.
pub(crate) const WEB: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 101), 80);

/// The binary that is tested.
pub(crate) const AGENT: &str = env!("CARGO_BIN_EXE_lb-agent");

/// How an agent ends: [`World::terminate`] or [`World::kill`].
pub(crate) type End = fn(&mut World, u8);

/// A flood fills the CPUs' queues, which all namespaces share, and the kernel drops what others send meanwhile: it runs alone.
static MACHINE: RwLock<()> = RwLock::new(());

#[expect(dead_code, reason = "held for as long as the world lives")]
enum Share {
    WithOthers(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

/// See the module. Everything goes when it is dropped, in this order.
pub(crate) struct World {
    agents: [Option<Agent>; 3],
    _servers: Vec<Server>,
    pub(crate) pods: Vec<Pod>,
    pub(crate) testbed: Testbed,
    _share: Share,
}

/// A running agent and what it has said since its start.
pub(crate) struct Agent {
    pub(crate) process: Process,
    /// Where its part of the node's log begins, in bytes.
    begin: usize,
}

impl Agent {
    pub(crate) fn said(&self) -> String {
        self.process.log().unwrap().split_off(self.begin)
    }

    pub(crate) fn await_said(&self, text: &str) {
        wait::until(&format!("the agent says {text:?}"), PATIENCE, || {
            let said = self.said();
            ensure!(said.contains(text), "{said}");
            Ok(())
        })
        .unwrap();
    }
}

impl World {
    /// Without agents.
    pub(crate) fn new() -> Self {
        Self::with(Options::default())
    }

    /// Without agents.
    pub(crate) fn with(options: Options) -> Self {
        Self::build(options, Share::WithOthers(MACHINE.read().unwrap_or_else(PoisonError::into_inner)))
    }

    fn build(options: Options, share: Share) -> Self {
        let testbed = Testbed::new(Options { agent: Some(AGENT.into()), ..options }).unwrap();
        let pods: Vec<Pod> =
            (1..=3).map(|node| testbed.add_pod(node, &format!("web-{node}")).unwrap()).collect();
        let servers = pods.iter().map(|pod| server::http(pod, 8080).unwrap()).collect();
        let world = Self { agents: [None, None, None], _servers: servers, pods, testbed, _share: share };
        world.cluster().set_service(Service::new("web", *WEB.ip()).tcp(WEB.port(), 8080)).unwrap();
        let endpoints: Vec<_> = world.pods.iter().map(Pod::endpoint).collect();
        world.cluster().set_endpoints("web", &endpoints).unwrap();
        world
    }

    /// With agents that serve.
    pub(crate) fn serving(args: &[&str]) -> Self {
        Self::new().serve(args)
    }

    /// The same, while no other test runs.
    pub(crate) fn serving_alone(args: &[&str]) -> Self {
        let share = Share::Alone(MACHINE.write().unwrap_or_else(PoisonError::into_inner));
        Self::build(Options::default(), share).serve(args)
    }

    fn serve(mut self, args: &[&str]) -> Self {
        let world = &mut self;
        world.start_all(args);
        // A request before the other nodes recognise the holder leaves a masqueraded entry in their conntrack, which a
        // later connection from the same port would fall into.
        world.await_nodes(if args.contains(&"--attach=clsact") { "clsact" } else { "tcx" });
        world.await_ready();
        world.await_served();
        self
    }

    pub(crate) fn start_all(&mut self, args: &[&str]) {
        for node in 1..=3 {
            self.start(node, args);
        }
    }

    pub(crate) fn start(&mut self, node: u8, args: &[&str]) {
        self.start_binary(Path::new(AGENT), node, args);
    }

    /// Another copy of the agent, as an upgrade brings it.
    pub(crate) fn start_binary(&mut self, binary: &Path, node: u8, args: &[&str]) {
        let words = self.words(binary, "run", node);
        let words: Vec<&str> = words.iter().map(String::as_str).chain(args.iter().copied()).collect();
        let log = self.testbed.directory().join(format!("logs/n{node}-agent.log"));
        let begin = fs::read(log).map_or(0, |log| log.len());
        let process = self.node(node).spawn("agent", &words).unwrap();
        self.agents[usize::from(node) - 1] = Some(Agent { process, begin });
    }

    fn words(&self, binary: &Path, command: &str, node: u8) -> Vec<String> {
        let show = |path: &Path| path.to_str().unwrap().to_owned();
        let mut words = vec![show(binary), command.to_owned()];
        if command == "run" {
            words.extend(["--node".to_owned(), format!("n{node}")]);
            words.extend(["--manifests".to_owned(), show(self.cluster().directory())]);
        }
        words.extend(["--bpffs".to_owned(), show(&self.testbed.pins(node))]);
        words.extend(["--state-dir".to_owned(), show(&self.state(node))]);
        words
    }

    /// Runs `lb-agent cleanup` on a node; what it prints, or what it complains.
    pub(crate) fn clean_up(&self, node: u8) -> Result<String> {
        self.node(node).run(&self.words(Path::new(AGENT), "cleanup", node))
    }

    /// The agent's state directory.
    pub(crate) fn state(&self, node: u8) -> PathBuf {
        self.testbed.directory().join(format!("state/n{node}"))
    }

    pub(crate) fn agent(&self, node: u8) -> &Agent {
        self.agents[usize::from(node) - 1].as_ref().unwrap()
    }

    pub(crate) fn process(&mut self, node: u8) -> &mut Process {
        &mut self.agents[usize::from(node) - 1].as_mut().unwrap().process
    }

    pub(crate) fn terminate(&mut self, node: u8) {
        let agent = self.agents[usize::from(node) - 1].take().unwrap();
        let status = agent.process.terminate().unwrap();
        assert!(status.success(), "n{node}: {status}");
    }

    pub(crate) fn kill(&mut self, node: u8) {
        let agent = self.agents[usize::from(node) - 1].take().unwrap();
        let status = agent.process.kill().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(Signal::SIGKILL as i32),
            "it had ended before: {status}"
        );
    }

    /// The host that is a node.
    pub(crate) fn node(&self, node: u8) -> &Host {
        self.testbed.node(node).deref()
    }

    pub(crate) fn cluster(&self) -> &testbed::cluster::Cluster {
        self.testbed.cluster()
    }

    /// The pinned maps of a node.
    pub(crate) fn maps(&self, node: u8) -> Maps {
        Maps::open(&Pins::new(&self.testbed.pins(node))).unwrap()
    }

    /// The pod that answers a request of the client over a new connection.
    pub(crate) fn get(&self) -> Result<String> {
        http::get(self.testbed.client(), WEB, "/", REQUEST)
    }

    /// Waits until every pod has answered the client.
    pub(crate) fn await_served(&self) {
        let mut seen = BTreeSet::new();
        wait::until("answers of all pods", PATIENCE, || {
            seen.insert(http::get(self.testbed.client(), WEB, "/", Duration::from_millis(500))?);
            ensure!(seen.len() == self.pods.len(), "only {seen:?}");
            Ok(())
        })
        .unwrap();
    }

    /// Waits until all agents have reconciled, since their last start.
    pub(crate) fn await_ready(&self) {
        for agent in self.agents.iter().flatten() {
            agent.await_said(" ready");
        }
    }

    /// One program per hook, one rule and route for the one holder where it is another node, one table of nftables.
    pub(crate) fn check_nodes(&self, kind: &str) -> Result<()> {
        for node in 1..=3 {
            let host = self.node(node);
            let held_elsewhere = usize::from(node != 1);
            (|| {
                node::check_hooks(host, kind)?;
                let (rules, routes) = (node::rules(host)?, node::routes(host)?);
                ensure!(rules.len() == held_elsewhere, "rules: {rules:?}");
                ensure!(routes.len() == held_elsewhere, "routes: {routes:?}");
                let tables = node::nft_tables(host)?;
                let ours = tables.iter().filter(|table| table.contains("reweave")).count();
                ensure!(ours == 1, "tables: {tables:?}");
                anyhow::Ok(())
            })()
            .with_context(|| format!("n{node}"))?;
        }
        Ok(())
    }

    pub(crate) fn await_nodes(&self, kind: &str) {
        wait::until("one of each on every node", PATIENCE, || self.check_nodes(kind)).unwrap();
    }
}

impl Drop for World {
    /// For the person who reads why a test failed: what became of packets.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for node in 1..=3 {
            let outcomes = Maps::open(&Pins::new(&self.testbed.pins(node))).and_then(|maps| maps.outcomes());
            let packets: Vec<_> =
                outcomes.iter().flatten().map(|(reason, o)| (reason.label(), o.packets)).collect();
            eprintln!("n{node}: {packets:?}");
        }
    }
}
