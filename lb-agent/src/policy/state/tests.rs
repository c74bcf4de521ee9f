//! The same answers as from nothing, after any changes.

use super::*;
use crate::model::{Conditions, HardwareAddress, Node, ServicePort, Shown, SliceEndpoint, SlicePort};
use crate::policy::extend::Wanted;
use crate::policy::node::AnnotationError;
use crate::policy::{compute, wanted};
use crate::source::Objects;
use fastrand::Rng;
use std::collections::btree_map::Entry;

/// A cluster so small that its parts collide all the time.
struct Universe(Rng);

const NODES: [&str; 4] = ["n1", "n2", "n3", "n4"];
const NAMESPACES: [&str; 2] = ["a", "a-b"];
const NAMES: [&str; 3] = ["x", "y", "z"];
const SLICES: [&str; 4] = ["s1", "s2", "s3", "s4"];

impl Universe {
    fn one<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.0.usize(..of.len())].clone()
    }

    fn some<T: Clone>(&mut self, of: &[T], at_most: usize) -> Vec<T> {
        (0..self.0.usize(..=at_most)).map(|_| self.one(of)).collect()
    }

    fn once_in(&mut self, times: u32) -> bool {
        self.0.u32(..times) == 0
    }

    fn address(&mut self) -> Ipv4Addr {
        Ipv4Addr::new(192, 0, 2, self.0.u8(1..=5))
    }

    fn node(&mut self, name: &str) -> (Node, Option<AnnotationError>) {
        let mut node = Node { name: name.to_owned(), ..Node::default() };
        node.addresses = (0..self.0.usize(1..=2)).map(|_| self.address()).collect();
        if !self.once_in(4) {
            node.weave_ip = Some(Ipv4Addr::new(10, 32, 0, self.0.u8(1..=5)));
            let mac = [0xfe, 0, 0, 0, 0, self.0.u8(1..=4)];
            node.weave_mac = Some(HardwareAddress::from(mac));
            if self.once_in(6) {
                node.weave_mac = HardwareAddress::parse("02:00:5e:10:00:00:00:01");
            }
        }
        let error = AnnotationError::Weave { node: name.to_owned(), value: String::new() };
        (node, self.once_in(5).then_some(error))
    }

    fn service(&mut self, name: &ServiceName) -> Service {
        let wanted = match self.0.u8(..8) {
            0 => String::new(),
            1 => "192.0.2.x".to_owned(),
            _ => self.address().to_string(),
        };
        let shown = match self.0.u8(..3) {
            0 => Shown::Nothing,
            1 => Shown::Address(self.address()),
            _ => Shown::Other,
        };
        Service {
            namespace: name.namespace.clone(),
            name: name.name.clone(),
            eligible: !self.once_in(10),
            wanted,
            ports: (0..self.0.usize(1..=4)).map(|_| self.port()).collect(),
            shown,
            is_shown_by_proxy: self.once_in(2),
            affinity: self.once_in(4),
            deleting: self.once_in(8),
        }
    }

    fn port(&mut self) -> ServicePort {
        let (protocol, port) = self.one(&[
            ("TCP", 80),
            ("TCP", 80),
            ("UDP", 80),
            ("TCP", 81),
            ("TCP", 22),
            ("SCTP", 80),
            ("UDP", 0),
        ]);
        ServicePort { name: self.one(&["", "", "", "p"]).to_owned(), protocol: protocol.to_owned(), port }
    }

    fn slice(&mut self, namespace: &str, name: &str) -> EndpointSlice {
        let port = |universe: &mut Self| SlicePort {
            name: universe.one(&["", "", "", "p"]).to_owned(),
            protocol: universe.one(&["TCP", "TCP", "UDP"]).to_owned(),
            port: universe.one(&[Some(8080), Some(8080), Some(8081), Some(0), None]),
        };
        EndpointSlice {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            service: self.one(&NAMES).to_owned(),
            ipv4: !self.once_in(10),
            ports: (0..self.0.usize(1..=2)).map(|_| port(self)).collect(),
            endpoints: (0..self.0.usize(1..=4)).map(|_| self.endpoint()).collect(),
        }
    }

    fn endpoint(&mut self) -> SliceEndpoint {
        let pods: Vec<Ipv4Addr> = (1..=3).map(|last| Ipv4Addr::new(10, 32, 0, last)).collect();
        let condition = [None, Some(true), Some(false)];
        SliceEndpoint {
            addresses: self.some(&pods, 2),
            conditions: Conditions {
                ready: self.one(&condition),
                serving: self.one(&condition),
                terminating: self.one(&condition),
            },
            node_name: Some(self.one(&NODES).into()).filter(|_| !self.once_in(3)),
        }
    }

    /// Changes one object, in the store and in the lists beside it.
    fn change(&mut self, store: &mut Store, lists: &mut Lists) {
        let is_gone = self.once_in(6);
        let namespace = self.one(&NAMESPACES);
        match self.0.u8(..10) {
            0 => {
                let name = self.one(&NODES);
                let node = self.node(name);
                store.set_node(name, (!is_gone).then(|| node.clone()));
                set(&mut lists.nodes, name.to_owned(), (!is_gone).then_some(node));
            }
            1..5 => {
                let name = ServiceName { namespace: namespace.to_owned(), name: self.one(&NAMES).to_owned() };
                let service = self.service(&name);
                store.set_service(&name, (!is_gone).then(|| service.clone()));
                set(&mut lists.services, name, (!is_gone).then_some(service));
            }
            _ => {
                let name = self.one(&SLICES);
                let slice = self.slice(namespace, name);
                store.set_slice(namespace, name, (!is_gone).then(|| slice.clone()));
                let key = (namespace.to_owned(), name.to_owned());
                set(&mut lists.slices, key, (!is_gone).then_some(slice));
            }
        }
    }
}

/// What the store should hold.
#[derive(Default)]
struct Lists {
    nodes: BTreeMap<String, (Node, Option<AnnotationError>)>,
    services: BTreeMap<ServiceName, Service>,
    slices: BTreeMap<(String, String), EndpointSlice>,
}

/// Everything that the agent takes from the policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Answers {
    services: BTreeMap<ServiceKey, WantedService>,
    holders: Vec<HolderWanted>,
    /// Whether this node forwards there, and which others do.
    endpoints: BTreeMap<EndpointKey, (bool, BTreeSet<String>)>,
    status: Vec<Status>,
    problems: Vec<String>,
}

impl Answers {
    fn from_nothing(lists: &Lists, self_name: &str, options: &Options) -> Self {
        let (nodes, errors): (Vec<Node>, Vec<_>) = lists.nodes.values().cloned().unzip();
        let services: Vec<Service> = lists.services.values().cloned().collect();
        let slices: Vec<EndpointSlice> = lists.slices.values().cloned().collect();
        let desired = compute(self_name, &nodes, &services, &slices);
        let Wanted { services, holders, endpoints, problems } =
            wanted(self_name, &nodes, &services, &slices, options);
        let mut expected: BTreeMap<EndpointKey, (bool, BTreeSet<String>)> =
            endpoints.into_iter().map(|(key, names)| (key, (false, names))).collect();
        for (key, service) in &services {
            for backend in &service.backends {
                let key = EndpointKey::new(backend.address.into(), Port::new(backend.port), key.protocol);
                match expected.entry(key) {
                    Entry::Vacant(entry) => entry.insert((true, BTreeSet::new())).0,
                    Entry::Occupied(mut entry) => std::mem::replace(&mut entry.get_mut().0, true),
                };
            }
        }
        let errors = errors.into_iter().flatten().map(|error| error.to_string());
        let mut problems: Vec<String> = desired.problems.into_iter().chain(problems).chain(errors).collect();
        problems.sort();
        Self { services, holders, endpoints: expected, status: desired.status, problems }
    }

    fn of(state: &State) -> Self {
        let mut problems: Vec<String> = state.problems().map(|(_, text)| text.to_owned()).collect();
        problems.sort();
        let names = |expected: &Expected| expected.of_others().map(str::to_owned).collect();
        Self {
            services: state.served().iter().map(|(key, service)| (*key, (**service).clone())).collect(),
            holders: state.holders().to_vec(),
            endpoints: state.endpoints().iter().map(|(key, e)| (*key, (e.is_own(), names(e)))).collect(),
            status: state.statuses().cloned().collect(),
            problems,
        }
    }
}

/// The keys whose values differ.
fn differing<K: Ord + Copy, V: PartialEq>(a: &BTreeMap<K, V>, b: &BTreeMap<K, V>) -> BTreeSet<K> {
    a.keys().chain(b.keys()).filter(|key| a.get(key) != b.get(key)).copied().collect()
}

/// Says how often services, holders and nodes got into each other's way.
fn check(seed: u64, steps: usize) -> Collisions {
    let mut universe = Universe(Rng::with_seed(seed));
    let self_name = universe.one(&["n1", "n2", "n3", "n4", "other"]);
    let options = Options { terminating_fallback: seed.is_multiple_of(2), ..Options::default() };
    let (mut store, mut lists) = (Store::default(), Lists::default());
    let mut state = State::new(self_name, options.clone());
    let mut before = Answers::default();
    let mut seen = Collisions::default();
    for step in 0..steps {
        for _ in 0..universe.one(&[1, 1, 2, 5]) {
            universe.change(&mut store, &mut lists);
        }
        if universe.once_in(20) {
            store.replace(Objects {
                nodes: lists.nodes.values().cloned().collect(),
                services: lists.services.values().cloned().collect(),
                slices: lists.slices.values().cloned().collect(),
                ignored: 0,
            });
        }
        let changes = store.take_changes();
        let delta = state.update(&store, changes);
        let (now, expected) = (Answers::of(&state), Answers::from_nothing(&lists, self_name, &options));
        let at = format!("seed {seed}, step {step}, node {self_name}");
        assert_eq!(now, expected, "{at}");
        assert!(delta.services.is_superset(&differing(&before.services, &now.services)), "{at}: {delta:?}");
        assert!(
            delta.endpoints.is_superset(&differing(&before.endpoints, &now.endpoints)),
            "{at}: {delta:?}"
        );
        assert!(delta.holders || before.holders == now.holders, "{at}");
        assert!(delta.problems || before.problems == now.problems, "{at}");
        seen.add(&now);
        before = now;
    }
    let changes = Changes::Everything;
    assert_eq!(state.update(&store, changes), Delta::default(), "seed {seed}: nothing has changed");
    seen
}

/// What makes this hard, counted, so that a universe in which it does not happen is noticed.
#[derive(Debug, Default)]
struct Collisions {
    ports: usize,
    macs: usize,
    holders: usize,
    endpoints: usize,
}

impl Collisions {
    fn add(&mut self, answers: &Answers) {
        let problems = |text: &str| answers.problems.iter().filter(|problem| problem.contains(text)).count();
        self.ports += problems("is already served for");
        self.macs += problems("is also the overlay address of");
        self.holders += usize::from(answers.holders.len() > 1);
        self.endpoints +=
            answers.endpoints.values().filter(|(own, others)| *own && !others.is_empty()).count();
    }
}

#[test]
fn after_any_changes_the_answers_are_those_from_nothing() {
    let mut all = Collisions::default();
    for seed in 0..120 {
        let Collisions { ports, macs, holders, endpoints } = check(seed, 300);
        all.ports += ports;
        all.macs += macs;
        all.holders += holders;
        all.endpoints += endpoints;
    }
    println!("{all:?}");
    assert!([all.ports, all.macs, all.holders, all.endpoints].iter().all(|times| *times > 100), "{all:?}");
}

/// A change of one endpoint of one Service names that Service's keys and no others.
#[test]
fn one_endpoint_is_a_change_of_its_service_alone() {
    let cluster = crate::policy::sample::cluster(100, 3);
    let mut store = Store::default();
    let mut state = State::new("node-1", Options::default());
    let objects = Objects {
        nodes: cluster.nodes.into_iter().map(|node| (node, None)).collect(),
        services: cluster.services,
        slices: cluster.slices.clone(),
        ignored: 0,
    };
    store.replace(objects);
    let changes = store.take_changes();
    let delta = state.update(&store, changes);
    assert_eq!((delta.services.len(), delta.endpoints.len()), (100, 300));
    let mut slice = cluster.slices[42].clone();
    let gone = slice.endpoints.remove(1);
    store.set_slice(&slice.namespace.clone(), &slice.name.clone(), Some(slice));
    let changes = store.take_changes();
    let delta = state.update(&store, changes);
    let endpoint =
        EndpointKey::new(gone.addresses[0].into(), Port::new(8080), lb_common::addr::Protocol::TCP);
    assert_eq!(delta.endpoints, BTreeSet::from([endpoint]));
    assert_eq!(delta.services.len(), 1);
    assert!(!delta.holders && !delta.problems);
}

/// The sample's first node holds all addresses. Cut off, the second gets forwards with the first as their source, and its own
/// are not recognised there; when they are neighbours again, all is as before.
#[test]
fn what_is_out_of_reach_is_masqueraded_and_comes_back() {
    let cluster = crate::policy::sample::cluster(20, 4);
    let mut store = Store::default();
    let objects = Objects {
        nodes: cluster.nodes.into_iter().map(|node| (node, None)).collect(),
        services: cluster.services,
        slices: cluster.slices,
        ignored: 0,
    };
    store.replace(objects);
    for (own, far) in [("node-1", "node-2"), ("node-2", "node-1")] {
        let mut state = State::new(own, Options::default());
        state.update(&store, Changes::Everything);
        let near = Answers::of(&state);

        let others = store.nodes().filter(|node| node.name != far).filter_map(|node| node.weave_ip);
        let networks = others.map(|address| (address, 32)).collect();
        assert!(state.set_reach(Reach::Networks { device: "eth0".to_owned(), networks }));
        let delta = state.update(&store, Changes::Everything);
        let cut = Answers::of(&state);
        let backends = |answers: &Answers| {
            let sees_clients = |backend: &&extend::WantedBackend| !backend.masqueraded;
            let count = |service: &WantedService| service.backends.iter().filter(sees_clients).count();
            answers.services.values().map(count).collect::<Vec<_>>()
        };
        if own == "node-1" {
            // Of four endpoints of each Service, the second runs there.
            assert_eq!((backends(&near), backends(&cut)), (vec![4; 20], vec![3; 20]));
            assert_eq!(delta.services.len(), 20);
        } else {
            assert_eq!((near.holders.len(), near.endpoints.len()), (1, 20));
            assert_eq!((cut.holders.len(), cut.endpoints.len(), delta.holders), (0, 0, true));
        }
        assert!(delta.problems, "{own}");
        assert!(
            matches!(cut.problems.as_slice(), [one] if one.contains(far) && one.contains(own)),
            "{:?}",
            cut.problems
        );

        assert!(state.set_reach(Reach::Everybody));
        assert!(!state.set_reach(Reach::Everybody), "once more is no change");
        state.update(&store, Changes::Everything);
        assert!(Answers::of(&state) == near, "{own}");
    }
}
