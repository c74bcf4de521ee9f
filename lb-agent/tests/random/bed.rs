//! A testbed that scripts are played on.

use crate::judge::{self, Judge, Strange};
use crate::script::{Event, Link, SLOTS, Script, Thing};
use crate::traffic::{Asker, Client, PORT, Server};
use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use testbed::capture::Capture;
use testbed::cluster::{Endpoint, Service};
use testbed::{Node, Options, Pod, Process, Testbed, Topology, wait};

/// The address that moves; n1 has it when a sequence begins.
const MOVING: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 101);
/// Another, which stays on n2.
const STAYING: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 102);
const HOLDER: u8 = 1;
const NODES: u8 = 3;
/// Services: name, address, port. They have the same pods.
const SERVICES: [(&str, Ipv4Addr, u16); 2] = [("moving", MOVING, 80), ("staying", STAYING, 81)];
/// Until everything works after the last event, several agents starting on a busy machine.
const QUIET: Duration = Duration::from_secs(60);

/// Within that an agent has heard what another has published, on a busy machine.
const HEARS: Duration = Duration::from_secs(3);

/// See the module. Fields go in this order: programs, then the hosts that they are on.
pub(crate) struct Bed {
    clients: Vec<Client>,
    capture: Option<Capture>,
    slots: [Option<(Pod, Server)>; SLOTS as usize],
    ready: [bool; SLOTS as usize],
    agents: [Option<Process>; NODES as usize],
    holder: u8,
    pods: u32,
    /// Of this sequence.
    excuses: Vec<Excuse>,
    played: Vec<Played>,
    judge: Arc<Judge>,
    testbed: Testbed,
}

/// When a sequence was played, and when it could not be judged.
struct Played {
    script: Script,
    begin: SystemTime,
    end: SystemTime,
    excuses: Vec<Excuse>,
    wounds: Vec<(SystemTime, Option<SystemTime>)>,
}

/// A pod's node cannot know an answer of a forward that it has not heard of yet: from what the pod may say to anybody. Its agent
/// hears soon, or does not while it is dead.
#[derive(Clone, Debug)]
struct Excuse {
    pod: Ipv4Addr,
    node: u8,
    begin: SystemTime,
    end: Option<SystemTime>,
}

impl Excuse {
    fn holds(&self, pod: Ipv4Addr, time: SystemTime) -> bool {
        self.pod == pod && self.begin <= time && self.end.is_none_or(|end| time <= end)
    }
}

impl Bed {
    pub(crate) fn start(topology: Topology) -> Result<Self> {
        let agent = Some(env!("CARGO_BIN_EXE_lb-agent").into());
        let testbed = Testbed::new(Options { agent, topology, ..Options::default() })?;
        let judge = Arc::<Judge>::default();
        for (name, address, port) in SERVICES {
            let service = Service::new(name, address).tcp(port, PORT).udp(port, PORT);
            testbed.cluster().set_service(service)?;
        }
        let capture = testbed.client().capture("eth0", "tcp or udp")?;
        let inside = [(1, "pod on n1"), (3, "pod on n3")];
        let mut hosts = vec![("outside", testbed.client().clone()), ("n2", (**testbed.node(2)).clone())];
        for (node, name) in inside {
            hosts.push((name, (*testbed.add_pod(node, &format!("client-{node}"))?).clone()));
        }
        let services = SERVICES.map(|(_, address, port)| SocketAddrV4::new(address, port));
        let askers = hosts.into_iter().map(|(name, host)| Asker {
            name,
            host,
            is_outside: name == "outside",
            services: services.to_vec(),
            judge: Arc::clone(&judge),
        });
        let askers: Vec<_> = askers.collect();
        let mut bed = Self {
            clients: Vec::new(),
            capture: Some(capture),
            slots: Default::default(),
            ready: [true; SLOTS as usize],
            agents: Default::default(),
            holder: HOLDER,
            pods: 0,
            excuses: Vec::new(),
            played: Vec::new(),
            judge,
            testbed,
        };
        bed.restore()?;
        // Nobody asks before an agent is there: what a CNI has once masqueraded stays so.
        bed.await_served_first()?;
        bed.clients = askers.into_iter().map(Client::start).collect();
        Ok(bed)
    }

    fn await_served_first(&self) -> Result<()> {
        wait::until("agents that serve", QUIET, || {
            for (holder, (_, address, port)) in [1, 2].into_iter().zip(SERVICES) {
                let services = self.testbed.ask_agent(holder, &["services"])?;
                let log = self.agents[index(holder)].as_ref().context("no agent")?.log()?;
                ensure!(
                    services.contains(&format!("{address}:{port}")),
                    "n{holder} serves {services}: {log}"
                );
            }
            for node in self.testbed.nodes() {
                let log = self.agents[index(node.number())].as_ref().context("no agent")?.log()?;
                ensure!(log.contains(" ready"), "{}: {log}", node.name());
            }
            Ok(())
        })
    }

    /// Plays a script, and says what was wrong.
    pub(crate) fn play(&mut self, script: &Script) -> Result<Vec<String>> {
        self.restore()?;
        self.await_quiet().context("before the sequence")?;
        self.judge.begin(&self.holders());
        self.excuses.clear();
        let begin = SystemTime::now();
        for step in &script.steps {
            self.happen(step.event).with_context(|| format!("{:?}", step.event))?;
            self.await_questions(step.questions)?;
        }
        for node in 1..=NODES {
            self.revive(node)?;
        }
        let quiet = self.await_quiet().context("after the sequence");
        self.judge.heal();
        self.played.push(Played {
            script: script.clone(),
            begin,
            excuses: self.excuses.clone(),
            end: SystemTime::now(),
            wounds: self.judge.wounds(),
        });
        let mut wrong = self.judge.verdict();
        wrong.extend(quiet.err().map(|error| format!("{error:#}\n{}", self.reasons())));
        Ok(wrong)
    }

    /// What became of packets, for the person who repairs it.
    fn reasons(&self) -> String {
        let of_node = |node| {
            let shown = self.testbed.ask_agent(node, &["reasons"]).unwrap_or_else(|error| error.to_string());
            let relevant = shown.lines().filter(|line| line.contains("reject") || line.contains("drop"));
            format!("    n{node}\n{}", relevant.map(|line| format!("      {line}\n")).collect::<String>())
        };
        (1..=NODES).map(of_node).collect()
    }

    /// Ends it, and says in which sequences the client was answered by a stranger.
    pub(crate) fn finish(mut self) -> Result<Vec<(Script, String)>> {
        self.clients.clear();
        let captured = self.capture.take().context("it is finished already")?.finish()?;
        let strange = judge::strange_answers(&captured, self.testbed.client_address())?;
        let of_sequence = |strange: Strange| {
            let Strange { time, source, text } = strange;
            let played = self.played.iter().find(|played| (played.begin..=played.end).contains(&time))?;
            let is_excused = judge::is_within(&played.wounds, time)
                || played.excuses.iter().any(|excuse| excuse.holds(source, time));
            (!is_excused).then(|| (played.script.clone(), text))
        };
        Ok(strange.into_iter().filter_map(of_sequence).collect())
    }

    fn holders(&self) -> [(Ipv4Addr, Ipv4Addr); 2] {
        [(MOVING, self.holder), (STAYING, 2)]
            .map(|(address, node)| (address, self.testbed.node(node).overlay()))
    }

    /// As at the beginning: a pod on each node, ready, all agents, the address on n1.
    fn restore(&mut self) -> Result<()> {
        for node in 1..=NODES {
            self.revive(node)?;
        }
        self.move_address(HOLDER)?;
        for (slot, node) in (0..SLOTS).zip(1..) {
            if self.slots[usize::from(slot)].as_ref().is_none_or(|(pod, _)| pod.node() != node) {
                self.remove(slot)?;
                self.add(slot, node)?;
            }
        }
        self.ready = [true; SLOTS as usize];
        self.publish()
    }

    fn happen(&mut self, event: Event) -> Result<()> {
        match event {
            Event::PodAdded { slot, node } => {
                if self.slots[usize::from(slot)].is_none() {
                    self.add(slot, node)?;
                }
                self.publish()
            }
            Event::PodRemoved { slot } => {
                self.remove(slot)?;
                self.publish()
            }
            Event::PodMoved { slot, node } => {
                self.remove(slot)?;
                self.add(slot, node)?;
                self.publish()
            }
            Event::EndpointsChanged { ready } => {
                let was_ready = std::mem::replace(&mut self.ready, ready);
                let slots = self.slots.iter().zip(was_ready.iter().zip(ready));
                let turned = slots.filter(|(_, (before, now))| !**before && *now);
                let turned: Vec<_> = turned.filter_map(|(slot, _)| Some(slot.as_ref()?.0.clone())).collect();
                turned.iter().for_each(|pod| self.excuse(pod));
                self.publish()
            }
            Event::AgentKilled { node } => self.kill(node),
            Event::AgentRestarted { node } => {
                self.kill(node)?;
                self.revive(node)
            }
            Event::CablePulled { node } => self.pull(node),
            Event::LinkFlapped { node, link } => self.flap(node, link),
            Event::Lost { node, what } => self.lose(node, what),
            Event::AddressMoved { to } => self.move_address(to),
        }
    }

    fn add(&mut self, slot: u8, node: u8) -> Result<()> {
        self.pods += 1;
        let pod = self.testbed.add_pod(node, &format!("pod-{}", self.pods))?;
        let server = Server::start(&pod, &self.judge)?;
        self.excuse(&pod);
        self.slots[usize::from(slot)] = Some((pod, server));
        Ok(())
    }

    fn remove(&mut self, slot: u8) -> Result<()> {
        let Some((pod, server)) = self.slots[usize::from(slot)].take() else { return Ok(()) };
        drop(server);
        self.testbed.remove_pod(pod)
    }

    /// The pods there are, and whether they are ready.
    fn endpoints(&self) -> impl Iterator<Item = (&Pod, bool)> {
        let with_state = self.slots.iter().zip(self.ready);
        with_state.filter_map(|(slot, ready)| Some((&slot.as_ref()?.0, ready)))
    }

    fn publish(&self) -> Result<()> {
        let endpoint = |(pod, ready): (&Pod, bool)| {
            if ready { pod.endpoint() } else { Endpoint::not_ready(pod.endpoint()) }
        };
        let endpoints: Vec<_> = self.endpoints().map(endpoint).collect();
        SERVICES.iter().try_for_each(|(name, _, _)| self.testbed.cluster().set_endpoints(name, &endpoints))
    }

    fn kill(&mut self, node: u8) -> Result<()> {
        let Some(agent) = self.agents[index(node)].take() else { return Ok(()) };
        agent.kill()?;
        let now = SystemTime::now();
        let unheard = |excuse: &&mut Excuse| excuse.node == node && excuse.end.is_some_and(|end| end > now);
        self.excuses.iter_mut().filter(unheard).for_each(|excuse| excuse.end = None);
        Ok(())
    }

    /// Every node has something to hear.
    fn excuse_all(&mut self) {
        let pods: Vec<_> = self.endpoints().map(|(pod, _)| pod.clone()).collect();
        pods.iter().for_each(|pod| self.excuse(pod));
    }

    /// The pod's node has something to hear.
    fn excuse(&mut self, pod: &Pod) {
        let begin = SystemTime::now();
        let end = self.agents[index(pod.node())].is_some().then(|| begin + HEARS);
        self.excuses.push(Excuse { pod: pod.ip(), node: pod.node(), begin, end });
    }

    fn revive(&mut self, node: u8) -> Result<()> {
        // Small tables are quicker made and swept.
        const WORDS: [&str; 6] = [
            "--period=1",
            "--max-flows=20000",
            "--max-handshakes=2000",
            "--max-services=50",
            "--max-backends=500",
            "--max-endpoints=500",
        ];
        if self.agents[index(node)].is_none() {
            self.agents[index(node)] = Some(self.testbed.start_agent(node, &WORDS)?);
        }
        Ok(())
    }

    fn move_address(&mut self, to: u8) -> Result<()> {
        self.judge.allow(MOVING, self.testbed.node(to).overlay());
        if to != self.holder {
            self.excuse_all();
            self.testbed.move_address(MOVING, self.holder, to)?;
            self.holder = to;
            // As the new holder's gratuitous ARP would.
            let forget = format!("neigh flush to {MOVING}");
            self.testbed.nodes().iter().try_for_each(|node| node.ip(&forget))?;
        }
        Ok(())
    }

    fn pull(&self, node: u8) -> Result<()> {
        let wire = self.testbed.wire();
        wire.ip(&format!("link set n{node} down"))?;
        self.await_questions(4)?;
        wire.ip(&format!("link set n{node} up"))
    }

    /// Its node publishes the addresses of a device without it while it is down, so others hear of a holder that is new when it
    /// is up again.
    fn flap(&mut self, node: u8, link: Link) -> Result<()> {
        let node = self.testbed.node(node);
        let device = match link {
            Link::Uplink => node.uplink(),
            Link::Overlay => node.overlay_device(),
        };
        let what_goes = what_goes_with(node, device)?;
        node.ip(&format!("link set {device} down"))?;
        self.await_questions(4)?;
        node.ip(&format!("link set {device} up\n{what_goes}"))?;
        self.excuse_all();
        Ok(())
    }

    fn lose(&self, node: u8, what: Thing) -> Result<()> {
        if what.is_missed() {
            self.judge.wound();
        }
        let host = self.testbed.node(node);
        match what {
            Thing::Rules => {
                let rules = host.run(&["ip", "-details", "rule"])?;
                let ours = rules.lines().filter(|rule| rule.contains("proto 213"));
                // As many as there are: an order takes the first of its priority.
                let priorities = ours.filter_map(|rule| rule.split(':').next());
                let orders: String =
                    priorities.map(|number| format!("rule del priority {number}\n")).collect();
                host.ip(&orders)?;
            }
            Thing::Routes => {
                let routes = host.run(&["ip", "route", "show", "table", "all", "protocol", "213"])?;
                let orders: String =
                    routes.lines().map(|route| format!("route del {}\n", route.trim())).collect();
                host.ip(&orders)?;
            }
            Thing::Table => {
                let tables = host.run(&["nft", "list", "tables"])?;
                let ours = tables.lines().filter(|table| table.contains("reweave"));
                let orders: String = ours.map(|table| format!("delete {table}\n")).collect();
                host.feed(&["nft", "-f", "-"], &orders)?;
            }
            Thing::Programs => {
                for pin in fs::read_dir(self.testbed.pins(host.number()).join("links"))? {
                    fs::remove_file(pin?.path())?;
                }
            }
        }
        Ok(())
    }

    /// Until clients have asked so many more questions.
    fn await_questions(&self, more: u64) -> Result<()> {
        let until = self.judge.questions() + more;
        wait::until("questions", QUIET, || {
            ensure!(self.judge.questions() >= until, "{} of {until}", self.judge.questions());
            Ok(())
        })
    }

    /// Until all clients are answered, as they should be.
    fn await_quiet(&self) -> Result<()> {
        let ready = self.endpoints().filter(|(_, ready)| *ready);
        let pods: BTreeSet<_> = ready.map(|(pod, _)| pod.name().to_owned()).collect();
        self.judge.begin_to_count();
        wait::until("everything works", QUIET, || self.judge.works(&pods))
    }
}

/// What the kernel removes with a device that goes down, and whoever set it down puts back: routes and neighbours, but none
/// of ours. As orders to `ip`.
fn what_goes_with(node: &Node, device: &str) -> Result<String> {
    let routes = node.run(&["ip", "route", "show", "dev", device])?;
    let routes = routes.lines().filter(|route| !route.contains("proto kernel"));
    let routes = routes.map(|route| format!("route replace {} dev {device}\n", with_onlink_last(route)));
    let neighbours = node.run(&["ip", "neigh", "show", "dev", device, "nud", "permanent"])?;
    let neighbours = neighbours
        .lines()
        .map(|line| format!("neigh replace {} dev {device} nud permanent\n", line.replace("PERMANENT", "")));
    Ok(neighbours.chain(routes).collect())
}

/// `ip` prints a route's flags where it does not read them: the device's name goes before them.
fn with_onlink_last(route: &str) -> String {
    let words: Vec<_> = route.split_whitespace().filter(|word| *word != "linkdown").collect();
    words.join(" ")
}

fn index(node: u8) -> usize {
    usize::from(node) - 1
}
