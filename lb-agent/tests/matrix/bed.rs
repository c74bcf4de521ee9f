//! A testbed with agents, Services and their pods, and what a cell does on it.

use crate::cells::{CLIENTS, Client, Place, Protocol, Source};
use crate::kinds::Kind;
use crate::table::Outcome;
use crate::talk::{self, Server};
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;
use testbed::cluster::{Endpoint, Service};
use testbed::{Host, Options, Pod, Process, Testbed, wait};

/// Held by n1.
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 101);
/// How long agents may take until all is in place, several testbeds starting at once.
const START: Duration = Duration::from_secs(60);
/// Connections in which each of two backends is met: all but once in 2^39.
const CONNECTIONS: usize = 40;

/// Who answers.
pub(crate) struct Backend {
    /// The number of its node.
    pub(crate) node: u8,
    /// Whether it is on that node's own network.
    pub(crate) is_host: bool,
    endpoint: Endpoint,
}

impl Backend {
    /// Where its sockets are.
    pub(crate) fn host<'a>(&self, bed: &'a Bed) -> &'a Host {
        if self.is_host { bed.testbed.node(self.node) } else { &bed.pods[&self.node] }
    }
}

/// See the module. Fields go in this order: programs, then the hosts that they are on.
pub(crate) struct Bed {
    _servers: Vec<Server>,
    agents: Vec<Process>,
    /// By name.
    pub(crate) backends: BTreeMap<&'static str, Backend>,
    /// By the number of their node.
    pods: BTreeMap<u8, Pod>,
    /// Pods that serve nobody, likewise.
    pub(crate) clients: BTreeMap<u8, Pod>,
    pub(crate) testbed: Testbed,
}

impl Bed {
    /// Builds it and waits until the Services are served.
    pub(crate) fn start(kind: &Kind) -> Result<Self> {
        let agent = Some(env!("CARGO_BIN_EXE_lb-agent").into());
        let testbed = Testbed::new(Options { agent, ..kind.options.clone() })?;
        let pod = |node| Ok((node, testbed.add_pod(node, &format!("pod-{node}"))?));
        let pods = [1, 2].into_iter().map(pod).collect::<Result<BTreeMap<_, _>>>()?;
        let client = |node| Ok((node, testbed.add_pod(node, &format!("client-{node}"))?));
        let clients = [1, 2, 3].into_iter().map(client).collect::<Result<BTreeMap<_, _>>>()?;
        let pod = |name, node| (name, Backend { node, is_host: false, endpoint: pods[&node].endpoint() });
        let host = |name, node: u8| {
            let endpoint = Endpoint::ready(testbed.node(node).address(), name);
            (name, Backend { node, is_host: true, endpoint })
        };
        let backends = BTreeMap::from([pod("pod-1", 1), pod("pod-2", 2), host("n1", 1), host("n2", 2)]);
        let hosts = pods.values().map(|pod| &**pod).chain([1, 2].map(|node| &**testbed.node(node)));
        let servers = hosts.map(Server::start).collect::<Result<_>>()?;
        for place in Place::ALL {
            let (name, port) = place.service();
            let service = Service::new(name, ADDRESS).tcp(port, talk::PORT).udp(port, talk::PORT);
            let endpoints: Vec<_> =
                place.backends().iter().map(|name| backends[name].endpoint.clone()).collect();
            testbed.cluster().set_service(service)?;
            testbed.cluster().set_endpoints(name, &endpoints)?;
        }
        // Small tables are quicker made and swept.
        let tables =
            ["--max-flows=10000", "--max-handshakes=1000", "--max-services=50", "--max-backends=500"];
        let words = [&["--period=1", "--max-endpoints=500"], &tables[..], kind.words].concat();
        let agents = testbed.nodes().iter().map(|node| testbed.start_agent(node.number(), &words));
        let agents = agents.collect::<Result<_>>()?;
        let mut bed = Self { agents, _servers: servers, backends, pods, clients, testbed };
        bed.await_serving()?;
        Ok(bed)
    }

    /// Until an outside client's datagrams reach each place and are seen as they should be. When that takes too long, cells
    /// say what is wrong.
    fn await_serving(&mut self) -> Result<()> {
        let awaited = wait::until("datagrams to every place", START, || {
            // Nobody waits for an agent that has refused to start.
            let alive = self.agents.iter_mut().try_for_each(|agent| {
                ensure!(agent.is_running()?, "an agent has ended: {}", agent.log()?.trim());
                Ok(())
            });
            if alive.is_ok() {
                Place::ALL.into_iter().try_for_each(|place| self.is_reached(place))?;
            }
            Ok(alive)
        });
        awaited.unwrap_or(Ok(()))
    }

    fn is_reached(&self, place: Place) -> Result<()> {
        match self.try_with(&CLIENTS[0], place, Protocol::Udp, &|_, _| Ok(())) {
            Outcome::Failed(why) => bail!(why),
            Outcome::Right => Ok(()),
        }
    }

    /// Connects until each backend that the Service should have has answered, and exchanges a megabyte with each.
    pub(crate) fn try_cell(&self, client: &Client, place: Place, protocol: Protocol) -> Outcome {
        self.try_with(client, place, protocol, &|talk, pod| {
            talk.exchange().with_context(|| format!("with {pod}"))
        })
    }

    fn try_with(
        &self,
        client: &Client,
        place: Place,
        protocol: Protocol,
        with_each: Exchange<'_>,
    ) -> Outcome {
        let tried = self.meet(client, place, protocol, with_each).map(|()| Outcome::Right);
        tried.unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")))
    }

    fn service(&self, place: Place) -> SocketAddrV4 {
        SocketAddrV4::new(ADDRESS, place.service().1)
    }

    /// Connects until each backend has answered, and does something with the first connection to each.
    fn meet(&self, client: &Client, place: Place, protocol: Protocol, with_each: Exchange<'_>) -> Result<()> {
        let host = (client.host)(self, place);
        let mut missing: BTreeSet<_> = place.backends().iter().map(|name| (*name).to_owned()).collect();
        let expected = missing.clone();
        for _ in 0..CONNECTIONS {
            let mut talk = talk::open(host, self.service(place), protocol)?;
            let name = talk.pod().to_owned();
            let backend = self.backends.get(name.as_str()).context("a stranger has answered")?;
            ensure!(expected.contains(&name), "{name} has answered, which is not of this Service");
            let seen = talk.seen_as();
            match (client.source)(self, backend) {
                Source::Itself => {
                    let itself = talk.local()?;
                    ensure!(seen == itself, "{name} sees {seen}, and the client is {itself}");
                }
                Source::Address(address) => {
                    ensure!(*seen.ip() == address, "{name} sees {seen}, which should be {address}");
                }
            }
            if missing.remove(&name) {
                with_each(&mut talk, &name)?;
            }
            if missing.is_empty() {
                return Ok(());
            }
        }
        bail!("no answer from {missing:?}")
    }
}

type Exchange<'a> = &'a dyn Fn(&mut talk::Talk, &str) -> Result<()>;
