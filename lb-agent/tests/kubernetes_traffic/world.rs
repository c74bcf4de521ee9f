//! Three nodes with agents as the manifests install them: each a ServiceAccount's token of its own, bound to its Pod, with
//! the rights and under the policies of `deploy/manifests/install.yaml`.

use crate::client::Talk;
use crate::echo::Echo;
use anyhow::{Context as _, Result, bail, ensure};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::pins::Pins;
use lb_common::addr::{Mac, Port, Protocol};
use lb_common::holder::EndpointKey;
use lb_common::service::ServiceKey;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::Deref as _;
use std::path::PathBuf;
use std::time::Duration;
use testbed::kubernetes::{Binaries, Bound, ControlPlane, KubeProxy, Mode, Options as PlaneOptions};
use testbed::server::{self, Server};
use testbed::{Host, Options, Pod, Process, Testbed, http, skip, wait};

/// How long what must come about may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// How long anything may take that takes milliseconds on an idle machine.
pub(crate) const SOON: Duration = Duration::from_secs(10);
/// One request.
const ANSWER: Duration = Duration::from_secs(1);

/// Ports of the Services that [`service`] writes: nginx, [`Echo`] over TCP, and over UDP.
pub(crate) const WEB: u16 = 80;
pub(crate) const TALK: u16 = 81;
pub(crate) const ASK: u16 = 53;

const AGENT: &str = env!("CARGO_BIN_EXE_lb-agent");
const INSTALL: &str = include_str!("../../../deploy/manifests/install.yaml");
const PROBES: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9213);
/// What [`World::tidy`] removes.
const LABEL: &str = "test.reweave.levk.dev/scenario";

/// See the module. Everything goes when it is dropped, in this order.
pub(crate) struct World {
    agents: [Option<Agent>; 3],
    _proxies: Vec<KubeProxy>,
    mode: Option<Mode>,
    echoes: Vec<Echo>,
    servers: Vec<(String, Server)>,
    /// Of the app `web`, one on each node.
    pub(crate) pods: Vec<Pod>,
    last_address: u8,
    pub(crate) plane: ControlPlane,
    pub(crate) testbed: Testbed,
}

/// A running agent and what it has said since its start.
struct Agent {
    process: Process,
    /// Where its part of the node's log begins, in bytes.
    begin: usize,
}

impl World {
    /// With agents that are ready; none if this machine cannot have Kubernetes.
    pub(crate) fn start(mode: Option<Mode>) -> Option<Self> {
        let binaries = skip::unless(Binaries::find())?;
        let testbed = Testbed::weave(Options::default()).unwrap();
        let plane = ControlPlane::start(&testbed, binaries, PlaneOptions::default()).unwrap();
        plane.add_nodes(&testbed).unwrap();
        plane.apply(INSTALL).unwrap();
        let start = |node| KubeProxy::start(&plane, node, mode?).map(Some).unwrap();
        let proxies = testbed.nodes().iter().filter_map(start).collect();
        let mut world = Self {
            agents: [None, None, None],
            _proxies: proxies,
            mode,
            echoes: Vec::new(),
            servers: Vec::new(),
            pods: Vec::new(),
            last_address: 120,
            plane,
            testbed,
        };
        for node in 1..=3 {
            world.add_agent_pod(node);
            world.issue_token(node);
            world.start_agent(node);
            let pod = world.add_pod(node, &format!("web-{node}"), "web");
            world.pods.push(pod);
        }
        world.await_ready();
        Some(world)
    }

    /// How kube-proxy programs the nodes, if it runs.
    pub(crate) fn mode(&self) -> Option<Mode> {
        self.mode
    }

    /// After a scenario: without its objects, and with all agents.
    pub(crate) fn tidy(&mut self) {
        let all = ["delete", "services,endpoints,endpointslices", "--selector", LABEL];
        self.kubectl(&all);
        for node in 1..=3 {
            if self.agents[usize::from(node) - 1].is_none() {
                self.start_agent(node);
            }
        }
        self.await_ready();
    }

    // Agents

    /// The Pod that the DaemonSet would have made; nobody runs it.
    pub(crate) fn add_agent_pod(&self, node: u8) {
        let pod = agent_pod(node);
        self.apply(&format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {pod}, namespace: kube-system}}
spec: {{nodeName: n{node}, serviceAccountName: reweave-lb, containers: [{{name: lb-agent, image: none}}]}}
"
        ));
    }

    /// Writes a new token for a node's agent, as its kubelet does from time to time, and returns the kubeconfig.
    pub(crate) fn issue_token(&self, node: u8) -> PathBuf {
        self.plane.service_account("kube-system", "reweave-lb", Bound::Pod(&agent_pod(node))).unwrap()
    }

    pub(crate) fn kubeconfig(&self, node: u8) -> PathBuf {
        let name = format!("kube-system.reweave-lb.pod-{}.kubeconfig", agent_pod(node));
        self.testbed.directory().join("kubernetes").join(name)
    }

    pub(crate) fn start_agent(&mut self, node: u8) {
        self.start_agent_with(node, &[]);
    }

    /// With more arguments than usual.
    pub(crate) fn start_agent_with(&mut self, node: u8, more: &[&str]) {
        let state = self.testbed.directory().join(format!("state/n{node}"));
        let mut words = vec![
            AGENT.to_owned(),
            "run".to_owned(),
            format!("--node=n{node}"),
            format!("--kubeconfig={}", self.kubeconfig(node).display()),
            format!("--bpffs={}", self.testbed.pins(node).display()),
            format!("--state-dir={}", state.display()),
            // Small tables: the machine has three agents.
            "--max-flows=50000".to_owned(),
            "--max-handshakes=5000".to_owned(),
            "--max-services=100".to_owned(),
            "--max-backends=10000".to_owned(),
            "--max-endpoints=20000".to_owned(),
        ];
        words.extend(more.iter().map(|&word| word.to_owned()));
        let log = self.testbed.directory().join(format!("logs/n{node}-agent.log"));
        let begin = fs::read(log).map_or(0, |log| log.len());
        let process = self.node(node).spawn("agent", &words).unwrap();
        self.agents[usize::from(node) - 1] = Some(Agent { process, begin });
    }

    pub(crate) fn stop_agent(&mut self, node: u8) {
        let status = self.take_agent(node).terminate().unwrap();
        assert!(status.success(), "n{node}: {status}");
    }

    /// SIGKILL.
    pub(crate) fn kill_agent(&mut self, node: u8) {
        self.take_agent(node).kill().unwrap();
    }

    /// SIGSTOP, or SIGCONT.
    pub(crate) fn signal_agent(&self, node: u8, signal: Signal) {
        self.agents[usize::from(node) - 1].as_ref().unwrap().process.signal(signal).unwrap();
    }

    fn take_agent(&mut self, node: u8) -> Process {
        self.agents[usize::from(node) - 1].take().unwrap().process
    }

    /// What a node's agent has said since its start.
    pub(crate) fn said(&self, node: u8) -> String {
        let agent = self.agents[usize::from(node) - 1].as_ref().unwrap();
        agent.process.log().unwrap().split_off(agent.begin)
    }

    pub(crate) fn await_said(&self, node: u8, text: &str) {
        wait::until(&format!("the agent of n{node} says {text:?}"), PATIENCE, || {
            let said = self.said(node);
            ensure!(said.contains(text), "{said}");
            Ok(())
        })
        .unwrap();
    }

    pub(crate) fn await_ready(&self) {
        for node in 1..=3 {
            self.await_node_ready(node);
        }
    }

    pub(crate) fn await_node_ready(&self, node: u8) {
        wait::until(&format!("n{node} is ready"), PATIENCE, || self.readyz(node)).unwrap();
    }

    pub(crate) fn readyz(&self, node: u8) -> Result<String> {
        http::get(self.node(node), PROBES, "/readyz", ANSWER)
    }

    pub(crate) fn maps(&self, node: u8) -> Result<Maps> {
        Ok(Maps::open(&Pins::new(&self.testbed.pins(node)))?)
    }

    // Pods and addresses

    pub(crate) fn node(&self, node: u8) -> &Host {
        self.testbed.node(node).deref()
    }

    /// A pod that runs what [`service`] leads to, and is ready.
    pub(crate) fn add_pod(&mut self, node: u8, name: &str, app: &str) -> Pod {
        let pod = self.testbed.add_pod(node, name).unwrap();
        self.echoes.extend([Echo::tcp(&pod, 8081), Echo::udp(&pod, 5353)]);
        self.servers.push((name.to_owned(), server::http(&pod, 8080).unwrap()));
        self.plane.add_pod(&pod, app).unwrap();
        pod
    }

    /// Whom a pod's nginx has seen.
    pub(crate) fn clients_of(&self, pod: &str) -> Vec<String> {
        let (_, server) = self.servers.iter().find(|(name, _)| name == pod).unwrap();
        server.clients().unwrap()
    }

    /// An address that no node holds and no other scenario uses.
    pub(crate) fn address(&mut self) -> Ipv4Addr {
        self.last_address += 1;
        Ipv4Addr::new(192, 0, 2, self.last_address)
    }

    /// The same, held by this node.
    pub(crate) fn held_by(&mut self, node: u8) -> Ipv4Addr {
        let address = self.address();
        self.hold(node, address);
        address
    }

    pub(crate) fn hold(&self, node: u8, address: Ipv4Addr) {
        self.node(node).ip(&format!("addr add {address}/32 dev eth0")).unwrap();
        // The new holder's gratuitous ARP.
        self.testbed.router().ip(&format!("neigh flush to {address}")).unwrap();
    }

    pub(crate) fn give_up(&self, node: u8, address: Ipv4Addr) {
        self.node(node).ip(&format!("addr del {address}/32 dev eth0")).unwrap();
    }

    // Objects

    pub(crate) fn apply(&self, manifests: &str) {
        self.plane.apply(manifests).unwrap();
    }

    pub(crate) fn kubectl(&self, words: &[&str]) -> String {
        self.plane.kubectl(words).unwrap()
    }

    pub(crate) fn patch(&self, service: &str, patch: &Value) {
        self.kubectl(&["patch", "service", service, "--type=merge", "--patch", &patch.to_string()]);
    }

    /// Writes a status as somebody else would.
    pub(crate) fn write_status(&self, service: &str, ingress: &Value) {
        let patch = json!({ "status": { "loadBalancer": { "ingress": ingress } } }).to_string();
        let words = ["patch", "service", service, "--subresource=status", "--type=merge", "--patch", &patch];
        self.kubectl(&words);
    }

    pub(crate) fn get(&self, what: &str) -> Result<Value> {
        let words = ["get", what, "--output=json", "--ignore-not-found"];
        let text = self.plane.kubectl(&words)?;
        if text.trim().is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_str(&text)?) }
    }

    pub(crate) fn shown(&self, service: &str) -> Result<Value> {
        Ok(self.get(&format!("service/{service}"))?["status"]["loadBalancer"]["ingress"].take())
    }

    /// Waits until a Service's status shows this.
    pub(crate) fn await_shown(&self, service: &str, address: Option<Ipv4Addr>) {
        let expected = address.map_or(Value::Null, |address| json!([{ "ip": address, "ipMode": "Proxy" }]));
        wait::until(&format!("{service} shows {expected}"), PATIENCE, || {
            let shown = self.shown(service)?;
            ensure!(shown == expected, "{shown}");
            Ok(())
        })
        .unwrap();
    }

    /// Waits for an Event of an agent about a Service.
    pub(crate) fn await_event(&self, service: &str, reason: &str, note: &str) {
        self.await_event_said(service, reason, note, 1);
    }

    /// The same, until it has been said so often.
    pub(crate) fn await_event_said(&self, service: &str, reason: &str, note: &str, times: u64) {
        wait::until(&format!("an Event about {service}: {note}"), PATIENCE, || {
            let events = self.get("events.events.k8s.io")?;
            let of_service = |event: &&Value| {
                event["reportingController"] == "reweave.levk.dev/lb-agent"
                    && event["regarding"]["name"] == service
            };
            let ours: Vec<&Value> =
                events["items"].as_array().context("no list")?.iter().filter(of_service).collect();
            let said = |event: &Value| event["series"]["count"].as_u64().unwrap_or(1);
            let is_it =
                |event: &&Value| event["reason"] == reason && event["note"] == note && said(event) == times;
            ensure!(ours.iter().copied().filter(is_it).count() == 1, "{ours:?}");
            Ok(())
        })
        .unwrap();
    }

    // Traffic

    /// Adds a Service in front of the pods `web`, and waits until it is served and shown.
    pub(crate) fn serve(&self, name: &str, address: Ipv4Addr) {
        self.apply(&service(name, address, "web"));
        self.await_served(address);
        self.await_shown(name, Some(address));
    }

    /// The name of the pod that answers.
    pub(crate) fn request(&self, address: Ipv4Addr) -> Result<String> {
        http::get(self.testbed.client(), SocketAddrV4::new(address, WEB), "/", ANSWER)
    }

    pub(crate) fn await_served(&self, address: Ipv4Addr) {
        wait::until(&format!("an answer from {address}"), PATIENCE, || self.request(address)).unwrap();
    }

    /// Waits until the holder forwards to so many endpoints of a Service.
    pub(crate) fn await_backends(&self, holder: u8, address: Ipv4Addr, count: usize) {
        wait::until(&format!("{address} has {count} endpoints"), PATIENCE, || {
            let maps = self.maps(holder)?;
            let key = ServiceKey::new(address.into(), Port::new(WEB), Protocol::TCP);
            let service = maps.services.get(&key)?.context("it is not served")?;
            let ring: BTreeSet<u32> =
                maps.ring(service.id)?.context("it has no table")?.into_iter().collect();
            ensure!(ring.len() == count, "{}", ring.len());
            Ok(())
        })
        .unwrap();
    }

    /// Waits until these pods' nodes know that the holder of the address forwards to them.
    pub(crate) fn await_recognised(&self, address: Ipv4Addr, pods: &[Pod]) {
        wait::until(&format!("the nodes recognise forwards from {address}"), PATIENCE, || {
            let holders = self.servers_of(address)?;
            let [holder] = holders[..] else { bail!("served by {holders:?}") };
            let holder = self.testbed.node(holder);
            for pod in pods.iter().filter(|pod| pod.node() != holder.number()) {
                let maps = self.maps(pod.node())?;
                let mark = maps.holders.get(&Mac::new(holder.overlay_mac()))?.context("unknown holder")?.mark;
                for (port, protocol) in [(8080, Protocol::TCP), (8081, Protocol::TCP), (5353, Protocol::UDP)]
                {
                    let key = EndpointKey::new(pod.ip().into(), Port::new(port), protocol);
                    let is_known = maps.endpoints.get(&key)?.is_some_and(|holders| holders.contains(mark));
                    ensure!(is_known, "{key:?} is not known to n{}", pod.node());
                }
            }
            Ok(())
        })
        .unwrap();
    }

    /// Which nodes forward what comes to this address.
    pub(crate) fn servers_of(&self, address: Ipv4Addr) -> Result<Vec<u8>> {
        let mut nodes = Vec::new();
        for node in 1..=3 {
            if self.maps(node)?.services.all()?.keys().any(|key| Ipv4Addr::from(key.address) == address) {
                nodes.push(node);
            }
        }
        Ok(nodes)
    }

    pub(crate) fn await_served_by(&self, address: Ipv4Addr, nodes: &[u8]) {
        wait::until(&format!("{address} is served by the nodes {nodes:?}"), PATIENCE, || {
            let seen = self.servers_of(address)?;
            ensure!(seen == nodes, "by {seen:?}");
            Ok(())
        })
        .unwrap();
    }

    /// Connections through this address, one at least to each of the pods `web`.
    pub(crate) fn talks(&self, address: Ipv4Addr) -> Vec<Talk> {
        let mut talks: Vec<Talk> = Vec::new();
        self.await_recognised(address, &self.pods);
        let is_missing = |talks: &[Talk], pod: &Pod| !talks.iter().any(|talk| talk.pod == pod.name());
        while self.pods.iter().any(|pod| is_missing(&talks, pod)) {
            assert!(talks.len() < 60, "no connection reaches one of the pods");
            let talk = Talk::open(self.testbed.client(), SocketAddrV4::new(address, TALK)).unwrap();
            assert_eq!(*talk.seen_as.ip(), self.testbed.client_address(), "seen by {}", talk.pod);
            talks.push(talk);
        }
        talks
    }
}

fn agent_pod(node: u8) -> String {
    format!("reweave-lb-n{node}")
}

/// Each connection still leads to its pod.
pub(crate) fn check(talks: &mut [Talk], line: &str) {
    for talk in talks {
        talk.check(line).unwrap_or_else(|error| panic!("{line}, to {}: {error:#}", talk.pod));
    }
}

/// A Service of our class, in front of the pods of that app; of none if it is empty.
pub(crate) fn service(name: &str, address: Ipv4Addr, app: &str) -> String {
    let selector = if app.is_empty() { String::new() } else { format!("selector: {{app: {app}}}") };
    format!(
        "---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: default, labels: {{{LABEL}: {name}}}}}
spec:
  type: LoadBalancer
  loadBalancerClass: reweave.levk.dev/node-address
  loadBalancerIP: {address}
  allocateLoadBalancerNodePorts: false
  {selector}
  ports:
  - {{name: web, port: {WEB}, targetPort: 8080}}
  - {{name: talk, port: {TALK}, targetPort: 8081}}
  - {{name: ask, port: {ASK}, targetPort: 5353, protocol: UDP}}
"
    )
}

/// For objects beside Services that a scenario makes.
pub(crate) fn label(scenario: &str) -> String {
    format!("{LABEL}: {scenario}")
}
