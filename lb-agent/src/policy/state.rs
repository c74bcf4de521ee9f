//! The policy's answers, kept up to date change by change: one Service's change costs work for that Service, and for
//! those that it shares a port, an endpoint or a holder with.
//!
//! Pure, like [`super::compute()`] and [`super::wanted()`], and always of their opinion: those say from nothing what this
//! says after any changes.

use super::compute::{describe_unreachable, status_of_served, status_of_unplaced};
use super::extend::{self, Aside, HolderWanted, Options, Recognition, WantedService};
use super::index::Holders;
use super::reach::Reach;
use super::status::{self, Beside};
use crate::model::{EndpointSlice, Node, Service, ServiceName, Status};
use crate::source::store::{Changes, Store};
use lb_common::addr::Port;
use lb_common::holder::EndpointKey;
use lb_common::masquerade::Network;
use lb_common::service::ServiceKey;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;

/// What one node must do.
#[derive(Default)]
pub struct State {
    self_name: String,
    options: Options,
    holders: Holders,
    reach: Reach,
    aside: Aside,
    /// What each Service of our class comes to.
    asks: BTreeMap<ServiceName, Ask>,
    statuses: BTreeMap<ServiceName, Status>,
    /// What is written, or not, though `compute` says otherwise.
    beside: BTreeMap<ServiceName, Beside>,
    /// The Services that ask for a port of this node, in order: the first has it. Each with the place in its ports.
    claims: BTreeMap<ServiceKey, Vec<(ServiceName, usize)>>,
    served: BTreeMap<ServiceKey, Arc<WantedService>>,
    /// The Services of each other node that holds an address.
    forwards_of: BTreeMap<Arc<str>, BTreeSet<ServiceName>>,
    recognised: Vec<HolderWanted>,
    endpoints: BTreeMap<EndpointKey, Expected>,
    service_problems: BTreeMap<ServiceName, Vec<String>>,
    node_problems: BTreeMap<String, Vec<String>>,
    inside: BTreeSet<Network>,
}

/// Which answers are, or may be, others than before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    /// Ports that are served or were.
    pub services: BTreeSet<ServiceKey>,
    /// Endpoints that are forwarded to or were.
    pub endpoints: BTreeSet<EndpointKey>,
    /// Whether the holders are others.
    pub holders: bool,
    /// Whether the problems are others.
    pub problems: bool,
}

/// What a problem is one of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject<'a> {
    /// A Service.
    Service(&'a ServiceName),
    /// The node of this name.
    Node(&'a str),
}

/// Who forwards to an endpoint, each counted: several ports may lead there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    own: u32,
    of_others: Vec<(Arc<str>, u32)>,
}

impl Expected {
    /// Whether this node does.
    pub fn is_own(&self) -> bool {
        self.own > 0
    }

    /// The names of the other nodes that do, each of them in [`State::holders`], in no order.
    pub fn of_others(&self) -> impl Iterator<Item = &str> {
        self.of_others.iter().map(|(name, _)| &**name)
    }

    fn is_nothing(&self) -> bool {
        self.own == 0 && self.of_others.is_empty()
    }

    /// Counts one more. True if it is the first.
    fn add(&mut self, by: By<'_>) -> bool {
        let By::Other(name) = by else {
            self.own += 1;
            return self.own == 1;
        };
        if let Some((_, count)) = self.of_others.iter_mut().find(|(known, _)| known == name) {
            *count += 1;
            return false;
        }
        // Mostly there is one.
        self.of_others.reserve_exact(1);
        self.of_others.push((Arc::clone(name), 1));
        true
    }

    /// Counts one less. True if it was the last.
    fn release(&mut self, by: By<'_>) -> bool {
        let By::Other(name) = by else {
            self.own = self.own.saturating_sub(1);
            return self.own == 0;
        };
        let Some(place) = self.of_others.iter().position(|(known, _)| known == name) else { return false };
        let count = &mut self.of_others[place].1;
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            self.of_others.swap_remove(place);
        }
        is_last
    }
}

/// Who forwards.
#[derive(Clone, Copy)]
enum By<'a> {
    Us,
    Other(&'a Arc<str>),
}

/// What a Service of our class comes to, by itself: what others claim is not in it.
#[derive(PartialEq, Eq)]
enum Ask {
    /// Nobody serves it, and why.
    Nowhere(String),
    /// This node serves it: what it wants of each port, in the order of the spec, or why it cannot be.
    Here(Ipv4Addr, Vec<Result<(ServiceKey, Arc<WantedService>), String>>),
    /// Another node serves it, which may forward to these endpoints here: sorted, each once.
    Elsewhere(Arc<str>, Box<[EndpointKey]>),
}

/// What a change has touched and is not settled yet.
#[derive(Default)]
struct Unsettled {
    /// Their claims changed.
    keys: BTreeSet<ServiceKey>,
    /// Their problems may have changed.
    services: BTreeSet<ServiceName>,
    /// Whether a node began or ceased to forward, or nodes changed.
    nodes: bool,
    delta: Delta,
}

impl State {
    /// What the node of this name must do where nothing is known yet.
    pub fn new(self_name: &str, options: Options) -> Self {
        Self { self_name: self_name.to_owned(), options, ..Self::default() }
    }

    /// Sets which nodes this one can exchange packets with. True where that is another answer than before: then
    /// everything is to be decided anew, by [`State::update`] with [`Changes::Everything`].
    pub fn set_reach(&mut self, reach: Reach) -> bool {
        let is_other = self.reach != reach;
        self.reach = reach;
        is_other
    }

    /// Brings the answers up to a store in which this has changed.
    pub fn update(&mut self, store: &Store, changes: Changes) -> Delta {
        let mut unsettled = Unsettled::default();
        let names = match changes {
            Changes::Nothing => return Delta::default(),
            Changes::Services(names) => names,
            Changes::Everything => {
                self.holders = Holders::of(store.nodes());
                self.inside = extend::inside(self.holders.nodes());
                self.aside = Aside::new(&self.self_name, self.holders.nodes(), &self.reach);
                unsettled.nodes = true;
                self.asks.keys().chain(store.services().map(|(name, _)| name)).cloned().collect()
            }
        };
        for name in names {
            self.ask_again(store, name, &mut unsettled);
        }
        self.settle_claims(&mut unsettled);
        if unsettled.nodes {
            self.settle_nodes(store, &mut unsettled);
        }
        for name in std::mem::take(&mut unsettled.services) {
            let problems = self.problems_of(store, &name);
            let known = self.service_problems.get(&name).map_or(&[][..], Vec::as_slice);
            if known != problems {
                unsettled.delta.problems = true;
                set(&mut self.service_problems, name, Some(problems).filter(|problems| !problems.is_empty()));
            }
        }
        unsettled.delta
    }

    /// The ports that this node serves.
    pub fn served(&self) -> &BTreeMap<ServiceKey, Arc<WantedService>> {
        &self.served
    }

    /// The other nodes that forward something and can be recognised, by name. Not limited to the number of marks.
    pub fn holders(&self) -> &[HolderWanted] {
        &self.recognised
    }

    /// The endpoints that this node forwards to, and those that others forward to and that run here or may.
    pub fn endpoints(&self) -> &BTreeMap<EndpointKey, Expected> {
        &self.endpoints
    }

    /// The writes to Services' statuses that are due, by Service.
    pub fn statuses(&self) -> impl Iterator<Item = &Status> {
        self.statuses.values()
    }

    /// What to write to Services' statuses, by Service: those, and what [`super::compute()`] leaves alone but the API shows
    /// wrongly. None clears the status. `corrects_ip_mode` is false where the API server is known to drop it.
    pub fn writes(&self, corrects_ip_mode: bool) -> impl Iterator<Item = (&ServiceName, Option<Ipv4Addr>)> {
        status::writes(&self.statuses, &self.beside, corrects_ip_mode)
    }

    /// Who is inside the cluster, as far as addresses tell: nodes, and the networks of pods.
    pub fn inside(&self) -> &BTreeSet<Network> {
        &self.inside
    }

    /// What an operator should hear about: Services first, then nodes.
    pub fn problems(&self) -> impl Iterator<Item = (Subject<'_>, &str)> {
        let of_services = self.service_problems.iter().map(|(name, texts)| (Subject::Service(name), texts));
        let of_nodes = self.node_problems.iter().map(|(name, texts)| (Subject::Node(name), texts));
        of_services
            .chain(of_nodes)
            .flat_map(|(subject, texts)| texts.iter().map(move |text| (subject, text.as_str())))
    }

    fn ask_again(&mut self, store: &Store, name: ServiceName, unsettled: &mut Unsettled) {
        let service = store.service(&name).filter(|service| service.eligible);
        let (ask, status) = match service {
            Some(service) => {
                let (ask, status) = self.ask(service, store.slices(&name));
                (Some(ask), status)
            }
            None => (None, None),
        };
        let beside = match (service, &ask) {
            (Some(service), Some(Ask::Here(address, _))) => status::beside(service, *address),
            _ => None,
        };
        set(&mut self.statuses, name.clone(), status);
        set(&mut self.beside, name.clone(), beside);
        if self.asks.get(&name) == ask.as_ref() {
            return;
        }
        if let Some(before) = self.asks.remove(&name) {
            self.withdraw(&name, &before, unsettled);
        }
        if let Some(ask) = ask {
            self.enter(&name, &ask, unsettled);
            self.asks.insert(name.clone(), ask);
        }
        unsettled.services.insert(name);
    }

    /// What a Service comes to, and the write to its status that is due.
    fn ask(&self, service: &Service, slices: &[EndpointSlice]) -> (Ask, Option<Status>) {
        let Self { self_name, options, holders, aside, .. } = self;
        let (address, holder) = match holders.place(service) {
            Ok(placed) => placed,
            Err(unplaced) => {
                let status = status_of_unplaced(self_name, service, holders);
                return (Ask::Nowhere(unplaced.describe(service)), status);
            }
        };
        if holder.name != *self_name {
            let mut endpoints: Vec<EndpointKey> =
                extend::expected_forwards(self_name, service, slices).collect();
            endpoints.sort_unstable();
            endpoints.dedup();
            let known = self.forwards_of.get_key_value(holder.name.as_str());
            let name = known.map_or_else(|| Arc::from(holder.name.as_str()), |(name, _)| Arc::clone(name));
            return (Ask::Elsewhere(name, endpoints.into()), None);
        }
        let ports = service.ports.iter().map(|port| {
            let key = extend::admit(address, port, options)?;
            let served = extend::serve(self_name, service, port, slices, options, aside);
            Ok((key, Arc::new(served)))
        });
        (Ask::Here(address, ports.collect()), status_of_served(service, address))
    }

    fn enter(&mut self, name: &ServiceName, ask: &Ask, unsettled: &mut Unsettled) {
        match ask {
            Ask::Nowhere(_) => {}
            Ask::Here(_, ports) => {
                for (place, (key, _)) in
                    ports.iter().enumerate().filter_map(|(n, port)| Some((n, port.as_ref().ok()?)))
                {
                    let claim = (name.clone(), place);
                    let claims = self.claims.entry(*key).or_default();
                    let at = claims.partition_point(|known| *known < claim);
                    // Mostly there is one.
                    claims.reserve_exact(1);
                    claims.insert(at, claim);
                    unsettled.keys.insert(*key);
                }
            }
            Ask::Elsewhere(holder, endpoints) => {
                let services = self.forwards_of.entry(Arc::clone(holder)).or_default();
                unsettled.nodes |= services.is_empty();
                services.insert(name.clone());
                if self.recognises(holder) {
                    self.expect(endpoints, By::Other(holder), &mut unsettled.delta);
                }
            }
        }
    }

    fn withdraw(&mut self, name: &ServiceName, ask: &Ask, unsettled: &mut Unsettled) {
        match ask {
            Ask::Nowhere(_) => {}
            Ask::Here(_, ports) => {
                for (key, _) in ports.iter().flatten() {
                    let Some(claims) = self.claims.get_mut(key) else { continue };
                    claims.retain(|(known, _)| known != name);
                    if claims.is_empty() {
                        self.claims.remove(key);
                    }
                    unsettled.keys.insert(*key);
                }
            }
            Ask::Elsewhere(holder, endpoints) => {
                if let Some(services) = self.forwards_of.get_mut(holder) {
                    services.remove(name);
                    if services.is_empty() {
                        self.forwards_of.remove(holder);
                        unsettled.nodes = true;
                    }
                }
                if self.recognises(holder) {
                    self.release(endpoints, By::Other(holder), &mut unsettled.delta);
                }
            }
        }
    }

    /// Gives each port whose claims changed to the first that claims it.
    fn settle_claims(&mut self, unsettled: &mut Unsettled) {
        for key in std::mem::take(&mut unsettled.keys) {
            let claims = self.claims.get(&key).map_or(&[][..], Vec::as_slice);
            unsettled.services.extend(claims.iter().map(|(name, _)| name.clone()));
            let next = claims.first().and_then(|(name, place)| match self.asks.get(name)? {
                Ask::Here(_, ports) => {
                    ports.get(*place)?.as_ref().ok().map(|(_, service)| Arc::clone(service))
                }
                Ask::Nowhere(_) | Ask::Elsewhere(..) => None,
            });
            let is_same = self.served.get(&key) == next.as_ref();
            let endpoints = |service: &WantedService| -> Vec<EndpointKey> {
                let key = |port: u16, address: Ipv4Addr| {
                    EndpointKey::new(address.into(), Port::new(port), key.protocol)
                };
                service.backends.iter().map(|backend| key(backend.port, backend.address)).collect()
            };
            let (after, delta) = (next.as_deref().map(endpoints), &mut unsettled.delta);
            // Also where it is the same, so that there is one of it.
            let before = set(&mut self.served, key, next);
            if !is_same {
                delta.services.insert(key);
                self.expect(&after.unwrap_or_default(), By::Us, delta);
                self.release(&before.as_deref().map(endpoints).unwrap_or_default(), By::Us, delta);
            }
        }
    }

    /// Tells holders apart anew.
    fn settle_nodes(&mut self, store: &Store, unsettled: &mut Unsettled) {
        let nodes = self.forwards_of.keys().filter_map(|name| self.holders.node(name));
        let mut problems: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut add =
            |node: &str, problem: String| problems.entry(node.to_owned()).or_default().push(problem);
        for error in store.annotation_errors() {
            add(error.node(), error.to_string());
        }
        for node in nodes.clone().filter(|node| node.weave_ip.is_none()) {
            add(&node.name, describe_unreachable(node));
        }
        for node in self.holders.nodes() {
            if let Some(problem) = self.unreachable_problem(node) {
                add(&node.name, problem);
            }
        }
        let near = nodes.filter(|node| self.reach.includes(node, &self.self_name));
        let Recognition { holders, problems: unrecognised } = extend::recognise(near);
        for (node, problem) in unrecognised {
            add(node.as_ref().unwrap_or(&self.self_name), problem);
        }
        unsettled.delta.problems |= self.node_problems != problems;
        self.node_problems = problems;
        self.recognise(holders, &mut unsettled.delta);
    }

    fn unreachable_problem(&self, node: &Node) -> Option<String> {
        self.reach.problem(node, &self.self_name)
    }

    /// From now on the forwards of these holders are recognised, and of no others.
    fn recognise(&mut self, holders: Vec<HolderWanted>, delta: &mut Delta) {
        if self.recognised == holders {
            return;
        }
        delta.holders = true;
        let before = std::mem::replace(&mut self.recognised, holders);
        let names = |holders: &[HolderWanted]| -> BTreeSet<String> {
            holders.iter().map(|holder| holder.name.clone()).collect()
        };
        let (before, after) = (names(&before), names(&self.recognised));
        for name in before.symmetric_difference(&after) {
            let Some((holder, services)) = self.forwards_of.get_key_value(name.as_str()) else { continue };
            let holder = Arc::clone(holder);
            let asks = services.iter().filter_map(|service| self.asks.get(service));
            let endpoints: Vec<EndpointKey> = asks
                .filter_map(|ask| match ask {
                    Ask::Elsewhere(_, endpoints) => Some(endpoints),
                    Ask::Nowhere(_) | Ask::Here(..) => None,
                })
                .flatten()
                .copied()
                .collect();
            if after.contains(name) {
                self.expect(&endpoints, By::Other(&holder), delta);
            } else {
                self.release(&endpoints, By::Other(&holder), delta);
            }
        }
    }

    fn recognises(&self, holder: &str) -> bool {
        self.recognised.binary_search_by(|known| known.name.as_str().cmp(holder)).is_ok()
    }

    fn expect(&mut self, endpoints: &[EndpointKey], by: By<'_>, delta: &mut Delta) {
        for key in endpoints {
            if self.endpoints.entry(*key).or_default().add(by) {
                delta.endpoints.insert(*key);
            }
        }
    }

    fn release(&mut self, endpoints: &[EndpointKey], by: By<'_>, delta: &mut Delta) {
        for key in endpoints {
            let Some(expected) = self.endpoints.get_mut(key) else { continue };
            if expected.release(by) {
                delta.endpoints.insert(*key);
            }
            if expected.is_nothing() {
                self.endpoints.remove(key);
            }
        }
    }

    fn problems_of(&self, store: &Store, name: &ServiceName) -> Vec<String> {
        let (Some(ask), Some(service)) = (self.asks.get(name), store.service(name)) else {
            return Vec::new();
        };
        let (address, ports) = match ask {
            Ask::Nowhere(problem) => return vec![problem.clone()],
            Ask::Elsewhere(..) => return Vec::new(),
            Ask::Here(address, ports) => (*address, ports),
        };
        let problem_of = |place: usize| -> Option<String> {
            match &ports[place] {
                Err(problem) => Some(format!("{name}: {problem}")),
                Ok((key, served)) => {
                    let (first, at) = self.claims.get(key)?.first()?;
                    let port = service.ports.get(place)?;
                    if (first, *at) == (name, place) {
                        let note = extend::describe_masqueraded(port, served, &self.aside)?;
                        return Some(format!("{name}: {note}"));
                    }
                    let first = (first.namespace.as_str(), first.name.as_str());
                    Some(format!("{name}: {}", extend::describe_taken(service, address, port, first)))
                }
            }
        };
        (0..ports.len()).filter_map(problem_of).collect()
    }
}

/// Sets or removes; answers what was there.
fn set<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) -> Option<V> {
    match value {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    }
}

#[cfg(test)]
mod tests;
