//! A testbed with a control plane and agents that are ServiceAccounts.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::Deref as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use testbed::kubernetes::{Binaries, Bound, ControlPlane, Options as PlaneOptions};
use testbed::server::Server;
use testbed::{Host, Options, Pod, Process, Testbed, http, server, skip, wait};

/// How long what must come about may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// "Within a second", on such a machine.
pub(crate) const SOON: Duration = Duration::from_secs(3);
/// The addresses that n1 and n2 hold beside their own.
pub(crate) const HELD: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 101), Ipv4Addr::new(192, 0, 2, 102)];
pub(crate) const WEB: SocketAddrV4 = SocketAddrV4::new(HELD[0], 80);

const AGENT: &str = env!("CARGO_BIN_EXE_lb-agent");
const PROBES: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9213);

/// What the agent asks of the API, and nothing else.
const ROLE: &str = "
apiVersion: v1
kind: ServiceAccount
metadata: {name: lb-agent, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: lb-agent}
rules:
- {apiGroups: [''], resources: [nodes], verbs: [list, watch, patch]}
- {apiGroups: [''], resources: [services], verbs: [list, watch]}
- {apiGroups: [''], resources: [services/status], verbs: [patch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
- {apiGroups: [events.k8s.io], resources: [events], verbs: [create, get, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: lb-agent}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lb-agent}
subjects: [{kind: ServiceAccount, name: lb-agent, namespace: kube-system}]
";

/// See the module. Everything goes when it is dropped, in this order.
pub(crate) struct World {
    agents: [Option<Agent>; 3],
    servers: Vec<Server>,
    pub(crate) pods: Vec<Pod>,
    pub(crate) plane: ControlPlane,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) testbed: Testbed,
}

/// A running agent and what it has said since its start.
pub(crate) struct Agent {
    process: Process,
    /// Where its part of the node's log begins, in bytes.
    begin: usize,
}

impl Agent {
    pub(crate) fn pid(&self) -> i32 {
        self.process.pid().as_raw()
    }

    pub(crate) fn said(&self) -> String {
        self.process.log().unwrap().split_off(self.begin)
    }
}

impl World {
    /// With Nodes and without agents; none if this machine cannot have Kubernetes.
    pub(crate) fn new() -> Option<Self> {
        let binaries = skip::unless(Binaries::find())?;
        let testbed = Testbed::weave(Options::default()).unwrap();
        let plane = ControlPlane::start(&testbed, binaries, PlaneOptions::default()).unwrap();
        plane.add_nodes(&testbed).unwrap();
        plane.apply(ROLE).unwrap();
        let kubeconfig = plane.service_account("kube-system", "lb-agent", Bound::No).unwrap();
        Some(Self {
            agents: [None, None, None],
            servers: Vec::new(),
            pods: Vec::new(),
            plane,
            kubeconfig,
            testbed,
        })
    }

    /// With agents, pods of the app `web` on each node, and the Service `web` in front of them, served.
    pub(crate) fn serving() -> Option<Self> {
        let mut world = Self::new()?;
        world.start_all();
        world.add_web();
        world.apply(&service("web", HELD[0]));
        world.await_served();
        Some(world)
    }

    pub(crate) fn add_web(&mut self) {
        for node in 1..=3 {
            let pod = self.testbed.add_pod(node, &format!("web-{node}")).unwrap();
            self.servers.push(server::http(&pod, 8080).unwrap());
            self.plane.add_pod(&pod, "web").unwrap();
            self.pods.push(pod);
        }
    }

    pub(crate) fn start_all(&mut self) {
        for node in 1..=3 {
            self.start(node);
        }
        for node in 1..=3 {
            self.await_said(node, " ready");
        }
    }

    pub(crate) fn start(&mut self, node: u8) {
        self.start_as(node, &format!("n{node}"));
    }

    /// Starts the agent of a node under the name of a Node.
    pub(crate) fn start_as(&mut self, node: u8, name: &str) {
        let show = |path: &Path| path.to_str().unwrap().to_owned();
        let state = self.testbed.directory().join(format!("state/n{node}"));
        let words = [
            AGENT.to_owned(),
            "run".to_owned(),
            format!("--node={name}"),
            format!("--kubeconfig={}", show(&self.kubeconfig)),
            format!("--bpffs={}", show(&self.testbed.pins(node))),
            format!("--state-dir={}", show(&state)),
        ];
        let log = self.testbed.directory().join(format!("logs/n{node}-agent.log"));
        let begin = fs::read(log).map_or(0, |log| log.len());
        let process = self.node(node).spawn("agent", &words).unwrap();
        self.agents[usize::from(node) - 1] = Some(Agent { process, begin });
    }

    pub(crate) fn stop(&mut self, node: u8) {
        let agent = self.agents[usize::from(node) - 1].take().unwrap();
        let status = agent.process.terminate().unwrap();
        assert!(status.success(), "n{node}: {status}");
    }

    pub(crate) fn node(&self, node: u8) -> &Host {
        self.testbed.node(node).deref()
    }

    pub(crate) fn agent(&self, node: u8) -> &Agent {
        self.agents[usize::from(node) - 1].as_ref().unwrap()
    }

    pub(crate) fn await_said(&self, node: u8, text: &str) {
        wait::until(&format!("the agent of n{node} says {text:?}"), PATIENCE, || {
            let said = self.agent(node).said();
            ensure!(said.contains(text), "{said}");
            Ok(())
        })
        .unwrap();
    }

    /// What a probe or a scrape of an agent answers.
    pub(crate) fn ask(&self, node: u8, path: &str) -> Result<String> {
        http::get(self.node(node), PROBES, path, SOON)
    }

    pub(crate) fn apply(&self, manifests: &str) {
        self.plane.apply(manifests).unwrap();
    }

    pub(crate) fn kubectl(&self, words: &[&str]) -> String {
        self.plane.kubectl(words).unwrap()
    }

    /// An object, `null` if there is none.
    pub(crate) fn get(&self, what: &str) -> Result<Value> {
        let words = ["get", what, "--output=json", "--ignore-not-found", "--show-managed-fields"];
        let text = self.plane.kubectl(&words)?;
        if text.trim().is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_str(&text)?) }
    }

    /// Waits until a Service's status shows this.
    pub(crate) fn await_shown(&self, service: &str, ingress: &Value) {
        wait::until(&format!("{service} shows {ingress}"), PATIENCE, || self.check_shown(service, ingress))
            .unwrap();
    }

    pub(crate) fn check_shown(&self, service: &str, ingress: &Value) -> Result<()> {
        let shown = self.get(&format!("service/{service}"))?["status"]["loadBalancer"]["ingress"].take();
        ensure!(shown == *ingress, "{shown}");
        Ok(())
    }

    /// The Events of the agents about an object: reason and note, each with how often it was said.
    pub(crate) fn events(&self, about: &str) -> Result<Vec<(String, String, u64)>> {
        let events = self.get("events.events.k8s.io")?;
        let ours = events["items"].as_array().context("no list")?.iter().filter(|event| {
            event["reportingController"] == "reweave.levk.dev/lb-agent" && event["regarding"]["name"] == about
        });
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let count = |event: &Value| event["series"]["count"].as_u64().unwrap_or(1);
        Ok(ours.map(|event| (text(&event["reason"]), text(&event["note"]), count(event))).collect())
    }

    /// Waits until the client is answered over new connections.
    pub(crate) fn await_served(&self) {
        wait::until("an answer", PATIENCE, || self.request()).unwrap();
    }

    pub(crate) fn request(&self) -> Result<String> {
        http::get(self.testbed.client(), WEB, "/", Duration::from_secs(1))
    }
}

pub(crate) fn service(name: &str, address: Ipv4Addr) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: default}}
spec:
  type: LoadBalancer
  loadBalancerClass: reweave.levk.dev/node-address
  loadBalancerIP: {address}
  allocateLoadBalancerNodePorts: false
  selector: {{app: web}}
  ports: [{{port: 80, targetPort: 8080}}]
"
    )
}
