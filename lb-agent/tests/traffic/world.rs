//! Three nodes with running agents, and how a test knows that the agents have done what the manifests say.

use anyhow::{Context as _, Result, ensure};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::pins::Pins;
use lb_agent::policy::extend::{self, Wanted, WantedBackend, WantedState};
use lb_agent::source::{Objects, manifests};
use lb_common::addr::{Mac, Port};
use lb_common::backend::{Backend, BackendState};
use lb_common::flow::ReplyKind;
use lb_common::holder::EndpointKey;
use lb_common::service::ServiceKey;
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;
use testbed::cluster::{Endpoint, Service};
use testbed::{Node, Options, Pod, Process, Testbed, Topology, wait};

/// How long anything may take that takes milliseconds on an idle machine.
pub(crate) const SOON: Duration = Duration::from_secs(10);
/// How long agents may take to start: a second on an idle machine, which checks the packet program.
pub(crate) const START: Duration = Duration::from_secs(60);
const PERIOD: &str = "--period=1";
/// An address of n1, which most tests serve.
pub(crate) const V: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 101);
/// An address of n2.
pub(crate) const V2: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 102);
/// Another address of n1.
pub(crate) const V3: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 103);
/// The number of the node that holds [`V`].
pub(crate) const HOLDER: u8 = 1;

/// A testbed with an agent on every node.
pub(crate) struct World {
    agents: Vec<Process>,
    pub(crate) testbed: Testbed,
    policy: extend::Options,
}

/// What may differ between worlds.
pub(crate) struct Builder {
    options: Options,
    agent: Vec<&'static str>,
    policy: extend::Options,
}

/// A world as it usually is.
pub(crate) fn world() -> World {
    build().start()
}

/// Begins a world that differs.
pub(crate) fn build() -> Builder {
    let options = Options {
        addresses: vec![(1, V), (2, V2), (1, V3)],
        agent: Some(env!("CARGO_BIN_EXE_lb-agent").into()),
        ..Options::default()
    };
    // Short periods: a sweep each second. Small tables, since it reads them all.
    let tables = ["--max-flows=10000", "--max-handshakes=1000", "--max-services=50", "--max-backends=500"];
    let agent = [&[PERIOD, "--max-endpoints=500"], &tables[..]].concat();
    Builder { options, agent, policy: extend::Options::default() }
}

impl Builder {
    /// Whether bridged packets pass iptables on the nodes.
    pub(crate) fn br_netfilter(mut self, on: bool) -> Self {
        self.options.br_netfilter = on;
        self
    }

    /// The nodes' `rp_filter`.
    pub(crate) fn rp_filter(mut self, value: u8) -> Self {
        self.options.rp_filter = value;
        self
    }

    /// The network between the pods, with a FORWARD chain that accepts what its CNI does, and nothing else.
    pub(crate) fn topology(mut self, topology: Topology) -> Self {
        self.options.topology = topology;
        self.options.forward_drop = true;
        self
    }

    /// Any other choices.
    pub(crate) fn options(mut self, change: impl FnOnce(&mut Options)) -> Self {
        change(&mut self.options);
        self
    }

    /// Whole checksums in captures.
    pub(crate) fn software_checksums(mut self) -> Self {
        self.options.checksum_offload = false;
        self
    }

    /// Without a pass now and then: what is done is done because the agents were told.
    pub(crate) fn by_events(mut self) -> Self {
        self.agent.retain(|word| *word != PERIOD);
        self.agent(&["--period=3600"])
    }

    /// More arguments for the agents.
    pub(crate) fn agent(mut self, words: &[&'static str]) -> Self {
        self.agent.extend(words);
        self
    }

    /// `--terminating-fallback`.
    pub(crate) fn terminating_fallback(mut self) -> Self {
        self.policy.terminating_fallback = true;
        self.agent(&["--terminating-fallback"])
    }

    /// Builds the testbed, starts the agents and waits until all serve.
    pub(crate) fn start(self) -> World {
        let world = self.start_unsettled();
        world.await_settled(START);
        world
    }

    /// The same without waiting.
    pub(crate) fn start_unsettled(self) -> World {
        let testbed = Testbed::new(self.options).unwrap();
        let agents = testbed
            .nodes()
            .iter()
            .map(|node| testbed.start_agent(node.number(), &self.agent).unwrap())
            .collect();
        World { agents, testbed, policy: self.policy }
    }
}

impl World {
    /// A new pod.
    pub(crate) fn pod(&self, node: u8, name: &str) -> Pod {
        self.testbed.add_pod(node, name).unwrap()
    }

    /// Adds or changes a Service with its endpoints, and waits until all agents have done so.
    pub(crate) fn serve(&self, name: &str, service: Service, endpoints: &[Endpoint]) {
        self.testbed.cluster().set_service(service).unwrap();
        self.endpoints(name, endpoints);
    }

    /// Replaces a Service's endpoints, and waits until all agents have done so.
    pub(crate) fn endpoints(&self, service: &str, endpoints: &[Endpoint]) {
        self.testbed.cluster().set_endpoints(service, endpoints).unwrap();
        self.settle();
    }

    /// Waits until every node's maps hold what the cluster's state asks of them.
    pub(crate) fn settle(&self) {
        self.await_settled(SOON);
    }

    fn await_settled(&self, limit: Duration) {
        wait::until("the agents do what the manifests say", limit, || {
            self.testbed.nodes().iter().try_for_each(|node| {
                self.is_settled(node).with_context(|| format!("{} is not there yet", node.name()))
            })
        })
        .unwrap();
    }

    /// The pinned maps of a node.
    pub(crate) fn maps(&self, node: u8) -> Result<Maps> {
        Ok(Maps::open(&Pins::new(&self.testbed.pins(node)))?)
    }

    /// Waits until every node has seen the end of all connections from a port of the client: packets that the client
    /// sends from two CPUs may overtake each other.
    pub(crate) fn await_over(&self, client_port: u16) {
        wait::until(&format!("the end of what came from port {client_port}"), SOON, || {
            for node in self.testbed.nodes() {
                let maps = self.maps(node.number())?;
                let of_client = |port: Port| port.number() == client_port;
                let flows = maps.flows.list()?.into_iter();
                let mut flows = flows.filter(|(key, _)| of_client(key.source_port));
                ensure!(flows.all(|(_, flow)| flow.state().is_over()), "a flow on {}", node.name());
                let mut replies = maps.replies.list()?.into_iter().filter(|(key, reply)| {
                    of_client(key.destination_port) && reply.kind() == ReplyKind::Mark
                });
                ensure!(replies.all(|(_, reply)| reply.state().is_over()), "a reply on {}", node.name());
            }
            Ok(())
        })
        .unwrap();
    }

    /// The log of a node's agent.
    pub(crate) fn agent(&mut self, node: u8) -> &mut Process {
        &mut self.agents[usize::from(node) - 1]
    }

    fn is_settled(&self, node: &Node) -> Result<()> {
        let Objects { nodes, services, slices, .. } = manifests::read(self.testbed.cluster().directory())?;
        let (nodes, _): (Vec<_>, Vec<_>) = nodes.into_iter().unzip();
        ensure!(nodes.iter().all(|node| node.weave_mac.is_some()), "a node is not published");
        let wanted = extend::wanted(node.name(), &nodes, &services, &slices, &self.policy);
        let maps = self.maps(node.number())?;
        let services = maps.services.all()?;
        ensure!(services.keys().eq(wanted.services.keys()), "it serves {:?}", services.keys());
        let backends = maps.backends()?;
        for (key, service) in &services {
            let of_service = |(id, backend): (u32, &Backend)| {
                (backend.service == service.id).then(|| Some((id, seen(backend)?)))?
            };
            let held: Vec<_> = (0..).zip(&backends).filter_map(of_service).collect();
            let shown: BTreeSet<_> = held.iter().map(|(_, backend)| *backend).collect();
            let asked: BTreeSet<_> = wanted.services[key].backends.iter().copied().collect();
            ensure!(shown == asked, "{key:?} has {shown:?}");
            let active = held.iter().filter(|(_, b)| b.state == WantedState::Active).map(|(id, _)| *id);
            let ring: BTreeSet<_> = maps.ring(service.id)?.context("no ring")?.into_iter().collect();
            ensure!(ring == active.collect(), "{key:?} has the ring {ring:?}");
        }
        let endpoints: BTreeSet<_> = maps.endpoints.all()?.into_keys().collect();
        ensure!(endpoints == asked_endpoints(&wanted), "it knows {endpoints:?}");
        let holders: BTreeSet<_> = maps.holders.all()?.into_keys().collect();
        let asked: BTreeSet<_> = wanted.holders.iter().map(|holder| Mac::new(holder.mac)).collect();
        // One that left is known, without an endpoint, until sweeps have found no connection with its mark.
        ensure!(asked.is_subset(&holders), "it knows the holders {holders:?}");
        Ok(())
    }
}

/// A slot in use, as the policy would ask for it.
fn seen(backend: &Backend) -> Option<WantedBackend> {
    let state = match backend.state() {
        BackendState::Absent => return None,
        BackendState::Active => WantedState::Active,
        BackendState::Draining => WantedState::Draining,
    };
    let (address, port) = (backend.address.into(), backend.port.number());
    Some(WantedBackend {
        address,
        port,
        state,
        local: backend.is_local(),
        masqueraded: backend.is_masqueraded(),
    })
}

fn asked_endpoints(wanted: &Wanted) -> BTreeSet<EndpointKey> {
    let own = |(key, service): (&ServiceKey, &extend::WantedService)| {
        let protocol = key.protocol;
        let key = move |backend: &WantedBackend| {
            EndpointKey::new(backend.address.into(), Port::new(backend.port), protocol)
        };
        service.backends.iter().map(key).collect::<Vec<_>>()
    };
    wanted.services.iter().flat_map(own).chain(wanted.endpoints.keys().copied()).collect()
}

/// An address with a port.
pub(crate) fn at(address: Ipv4Addr, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(address, port)
}
