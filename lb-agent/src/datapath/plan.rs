//! From what the maps hold to what they should: pure, and in an order in which no packet falls between.
//!
//! New backends are written before the table that names them, a service after its table; what goes, goes in the
//! opposite order. Doing a plan twice does nothing the second time, because what has been done is in
//! [`Observed`], which is read from the maps and never from memory of what was written.

use super::maps::{Maps, MapsError};
use crate::policy::extend::{WantedBackend, WantedService, WantedState};
use crate::policy::maglev;
use lb_common::addr::{Mac, Port};
use lb_common::backend::{Backend, BackendState};
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::interface::Interface;
use lb_common::service::{Service, ServiceKey};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::Ipv4Addr;

mod compare;
pub use compare::Comparison;

/// One change of one map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Write a backend slot.
    SetBackend(u32, Backend),
    /// Exchange the table of a served port: backend ids, empty for none ready.
    SetRing(u32, Vec<u32>),
    /// Set the counters of a served port to zero.
    ClearStats(u32),
    /// Serve a port.
    SetService(ServiceKey, Service),
    /// Serve it no more.
    RemoveService(ServiceKey),
    /// Recognise an endpoint.
    SetEndpoint(EndpointKey, EndpointHolders),
    /// Recognise it no more.
    RemoveEndpoint(EndpointKey),
    /// Recognise a holder.
    SetHolder(Mac, Holder),
    /// Recognise it no more.
    RemoveHolder(Mac),
    /// Give an interface its roles.
    SetInterface(u32, Interface),
    /// Take them.
    RemoveInterface(u32),
}

/// An endpoint's address and port.
type Endpoint = (Ipv4Addr, u16);

/// What the maps hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    services: BTreeMap<ServiceKey, Service>,
    /// Keys whose value cannot be right: the id is out of range, or another service's. We never write such.
    strays: BTreeSet<ServiceKey>,
    /// By service id.
    rings: BTreeMap<u32, Digest>,
    /// By id; slot 0 is never used.
    slots: Vec<Backend>,
    /// The slots in use, by service id and endpoint.
    used: BTreeMap<u32, BTreeMap<Endpoint, u32>>,
    free_slots: BTreeSet<u32>,
    free_services: BTreeSet<u32>,
    holders: BTreeMap<Mac, Holder>,
    endpoints: BTreeMap<EndpointKey, EndpointHolders>,
    interfaces: BTreeMap<u32, Interface>,
}

/// Of a table, in place of its thousands of entries: 64 bits, so that two tables that differ are taken for one as often
/// as memory fails.
type Digest = u64;

fn digest(ring: &[u32]) -> Digest {
    let mut hasher = DefaultHasher::new();
    ring.hash(&mut hasher);
    hasher.finish()
}

/// What is left of plans that were begun: the exchanges of their tables, in one call for all of them, and what comes
/// behind those. A slot that is given back there is not given to another of these plans, since it is in use until then.
#[derive(Debug, Default)]
pub struct Rest {
    rings: Vec<(u32, Vec<u32>)>,
    after: Vec<Operation>,
}

impl Rest {
    /// Each new table is an open file until all are in place; 1,024 are a common limit.
    const AT_ONCE: usize = 512;

    /// Whether it is time to finish.
    pub fn is_full(&self) -> bool {
        self.rings.len() >= Self::AT_ONCE
    }
}

impl Observed {
    /// Reads the maps.
    ///
    /// # Errors
    /// A map that cannot be read.
    pub fn read(maps: &Maps) -> Result<Self, MapsError> {
        let services = maps.services.all()?;
        let slots = maps.backends()?;
        let mut observed = Self {
            slots,
            holders: maps.holders.all()?,
            endpoints: maps.endpoints.all()?,
            interfaces: maps.interfaces.all()?,
            free_services: (0..maps.services.max_entries()?).collect(),
            ..Self::default()
        };
        for (key, service) in services {
            if !observed.free_services.contains(&service.id) {
                observed.strays.insert(key);
                continue;
            }
            observed.note(&Operation::SetService(key, service));
            if let Some(ring) = maps.ring(service.id)? {
                observed.rings.insert(service.id, digest(&ring));
            }
        }
        for (id, backend) in (0..).zip(&observed.slots).skip(1) {
            if backend.state() == BackendState::Absent {
                observed.free_slots.insert(id);
            } else {
                observed.used.entry(backend.service).or_default().insert(endpoint_of(backend), id);
            }
        }
        Ok(observed)
    }

    /// Does each operation and notes it, in order. What comes behind a failed one is not done.
    ///
    /// # Errors
    /// The first that failed.
    pub fn apply(&mut self, maps: &mut Maps, operations: &[Operation]) -> Result<(), MapsError> {
        for operation in operations {
            match operation {
                Operation::SetBackend(id, backend) => maps.set_backend(*id, backend)?,
                Operation::SetRing(service, ring) => maps.set_ring(*service, ring)?,
                Operation::ClearStats(service) => maps.clear_service_stats(*service)?,
                Operation::SetService(key, service) => maps.services.insert(key, service)?,
                Operation::RemoveService(key) => maps.services.remove(key)?,
                Operation::SetEndpoint(key, holders) => maps.endpoints.insert(key, holders)?,
                Operation::RemoveEndpoint(key) => maps.endpoints.remove(key)?,
                Operation::SetHolder(mac, holder) => maps.holders.insert(mac, holder)?,
                Operation::RemoveHolder(mac) => maps.holders.remove(mac)?,
                Operation::SetInterface(index, interface) => maps.interfaces.insert(index, interface)?,
                Operation::RemoveInterface(index) => maps.interfaces.remove(index)?,
            }
            self.note(operation);
        }
        Ok(())
    }

    /// Begins a plan: does what comes before the exchange of its table, and leaves the exchange and what comes behind it
    /// to [`Observed::finish`], together with those of other plans.
    ///
    /// # Errors
    /// The first that failed.
    pub fn begin(
        &mut self,
        maps: &mut Maps,
        mut operations: Vec<Operation>,
        rest: &mut Rest,
    ) -> Result<(), MapsError> {
        let exchange = operations.iter().position(|operation| matches!(operation, Operation::SetRing(..)));
        let mut behind = operations.split_off(exchange.unwrap_or(operations.len())).into_iter();
        self.apply(maps, &operations)?;
        if let Some(Operation::SetRing(service, ring)) = behind.next() {
            rest.rings.push((service, ring));
        }
        rest.after.extend(behind);
        Ok(())
    }

    /// Finishes the plans that were begun.
    ///
    /// # Errors
    /// The first that failed.
    pub fn finish(&mut self, maps: &mut Maps, rest: Rest) -> Result<(), MapsError> {
        let Rest { rings, after } = rest;
        maps.set_rings(&rings)?;
        self.rings.extend(rings.iter().map(|(service, ring)| (*service, digest(ring))));
        self.apply(maps, &after)
    }

    /// What the maps hold after an operation.
    fn note(&mut self, operation: &Operation) {
        match operation {
            Operation::SetBackend(id, backend) => self.note_backend(*id, *backend),
            Operation::SetRing(service, ring) => {
                self.rings.insert(*service, digest(ring));
            }
            // The id is about to be used.
            Operation::ClearStats(service) => {
                self.free_services.remove(service);
            }
            Operation::SetService(key, service) => {
                self.free_services.remove(&service.id);
                self.strays.remove(key);
                self.services.insert(*key, *service);
            }
            Operation::RemoveService(key) => {
                self.strays.remove(key);
                if let Some(service) = self.services.remove(key) {
                    self.rings.remove(&service.id);
                    self.free_services.insert(service.id);
                }
            }
            Operation::SetEndpoint(key, holders) => {
                self.endpoints.insert(*key, *holders);
            }
            Operation::RemoveEndpoint(key) => {
                self.endpoints.remove(key);
            }
            Operation::SetHolder(mac, holder) => {
                self.holders.insert(*mac, *holder);
            }
            Operation::RemoveHolder(mac) => {
                self.holders.remove(mac);
            }
            Operation::SetInterface(index, interface) => {
                self.interfaces.insert(*index, *interface);
            }
            Operation::RemoveInterface(index) => {
                self.interfaces.remove(index);
            }
        }
    }

    fn note_backend(&mut self, id: u32, backend: Backend) {
        let Some(slot) = self.slots.get_mut(id as usize) else { return };
        let before = std::mem::replace(slot, backend);
        if before.state() != BackendState::Absent
            && let Some(of_service) = self.used.get_mut(&before.service)
            && of_service.get(&endpoint_of(&before)) == Some(&id)
        {
            of_service.remove(&endpoint_of(&before));
            if of_service.is_empty() {
                self.used.remove(&before.service);
            }
        }
        if backend.state() == BackendState::Absent {
            self.free_slots.insert(id);
        } else {
            self.free_slots.remove(&id);
            self.used.entry(backend.service).or_default().insert(endpoint_of(&backend), id);
        }
    }

    /// The ports that are served now, rightly or not.
    pub fn served(&self) -> impl Iterator<Item = &ServiceKey> {
        self.services.keys().chain(&self.strays)
    }

    /// The holders that are recognised now.
    pub fn holders(&self) -> &BTreeMap<Mac, Holder> {
        &self.holders
    }

    /// The endpoints that are recognised now.
    pub fn endpoints(&self) -> &BTreeMap<EndpointKey, EndpointHolders> {
        &self.endpoints
    }

    /// The slots, by id.
    pub fn slots(&self) -> &[Backend] {
        &self.slots
    }
}

/// A plan that does not do all that is wanted says what it leaves out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In the order in which they are to be done.
    pub operations: Vec<Operation>,
    /// For people.
    pub problems: Vec<String>,
}

/// Plans one served port: to `wanted`, or away where nothing is wanted. The cost depends on its own endpoints alone.
pub fn service(key: &ServiceKey, wanted: Option<&WantedService>, observed: &Observed) -> Plan {
    let known = observed.services.get(key);
    match (wanted, known) {
        (None, None) if observed.strays.contains(key) => {
            Plan { operations: vec![Operation::RemoveService(*key)], problems: Vec::new() }
        }
        (None, None) => Plan::default(),
        (None, Some(known)) => remove(key, known, observed),
        (Some(wanted), known) => serve(key, wanted, known, observed),
    }
}

fn remove(key: &ServiceKey, known: &Service, observed: &Observed) -> Plan {
    let mut operations = vec![Operation::RemoveService(*key)];
    for id in observed.used.get(&known.id).into_iter().flat_map(BTreeMap::values) {
        operations.push(Operation::SetBackend(*id, absent(&observed.slots[*id as usize])));
    }
    Plan { operations, problems: Vec::new() }
}

fn serve(key: &ServiceKey, wanted: &WantedService, known: Option<&Service>, observed: &Observed) -> Plan {
    let mut plan = Plan::default();
    let Some(id) = known.map(|service| service.id).or_else(|| observed.free_services.first().copied()) else {
        plan.problems.push(format!(
            "{}/{}: port {} is not served: the limit of served ports is reached; raise --max-services",
            wanted.namespace,
            wanted.name,
            key.port.number()
        ));
        return plan;
    };
    let none = BTreeMap::new();
    let used = observed.used.get(&id).unwrap_or(&none);
    let mut free = observed.free_slots.iter();
    let mut ids: BTreeMap<Endpoint, u32> = BTreeMap::new();
    let (mut before, mut after) = (Vec::new(), Vec::new());
    let mut left_out = 0;
    for backend in &wanted.backends {
        let endpoint = (backend.address, backend.port);
        let slot = used.get(&endpoint).copied().or_else(|| free.next().copied());
        let Some(slot) = slot else {
            left_out += 1;
            continue;
        };
        ids.insert(endpoint, slot);
        let current = &observed.slots[slot as usize];
        let next = next_backend(id, backend, current, used.contains_key(&endpoint));
        if next != *current {
            // A slot that is new here is written at once, or the next plan that is begun takes it too.
            let comes_first = backend.state == WantedState::Active || !used.contains_key(&endpoint);
            if comes_first { &mut before } else { &mut after }.push(Operation::SetBackend(slot, next));
        }
    }
    if left_out > 0 {
        plan.problems.push(format!(
            "{}/{}: {left_out} endpoints are left out: the limit of backends is reached; raise --max-backends",
            wanted.namespace, wanted.name
        ));
    }
    for (endpoint, slot) in used {
        if !ids.contains_key(endpoint) {
            after.push(Operation::SetBackend(*slot, absent(&observed.slots[*slot as usize])));
        }
    }
    let ring = ring(wanted, &ids);
    plan.operations = before;
    if known.is_none() {
        plan.operations.push(Operation::ClearStats(id));
    }
    if known.is_none() || observed.rings.get(&id) != Some(&digest(&ring)) {
        plan.operations.push(Operation::SetRing(id, ring));
    }
    let masquerades = wanted.backends.iter().any(|backend| backend.masqueraded);
    let service = Service::new(id, wanted.affinity).masquerading(masquerades);
    if known != Some(&service) {
        plan.operations.push(Operation::SetService(*key, service));
    }
    plan.operations.append(&mut after);
    plan
}

/// Frees slots that no table can name: of a service that is not there (its agent died between two operations), or
/// an endpoint's second one. Only after the services are planned, which may still take them up.
pub fn orphans(observed: &Observed) -> Vec<Operation> {
    let services: BTreeSet<u32> = observed.services.values().map(|service| service.id).collect();
    let owner = |backend: &Backend| {
        let of_service = observed.used.get(&backend.service).filter(|_| services.contains(&backend.service));
        of_service.and_then(|used| used.get(&endpoint_of(backend))).copied()
    };
    (0..)
        .zip(&observed.slots)
        .skip(1)
        .filter(|(id, backend)| backend.state() != BackendState::Absent && owner(backend) != Some(*id))
        .map(|(id, backend)| Operation::SetBackend(id, absent(backend)))
        .collect()
}

/// The slot's next content. An endpoint that keeps its slot keeps its generation, and so its flows.
fn next_backend(service: u32, wanted: &WantedBackend, current: &Backend, keeps: bool) -> Backend {
    let generation = if keeps { current.generation } else { current.generation.wrapping_add(1) };
    Backend::new(
        service,
        generation,
        wanted.address.into(),
        Port::new(wanted.port),
        wanted.state.into(),
        wanted.local,
    )
    .masqueraded(wanted.masqueraded)
}

/// A free slot keeps its generation: the next one counts on from it.
fn absent(current: &Backend) -> Backend {
    let mut backend = Backend::default();
    backend.generation = current.generation;
    backend
}

/// The Maglev table of the active backends, as slots.
fn ring(wanted: &WantedService, ids: &BTreeMap<Endpoint, u32>) -> Vec<u32> {
    let active: BTreeSet<Endpoint> = wanted
        .backends
        .iter()
        .filter(|backend| backend.state == WantedState::Active)
        .map(|backend| (backend.address, backend.port))
        .filter(|endpoint| ids.contains_key(endpoint))
        .collect();
    let slots: Vec<u32> = active.iter().filter_map(|endpoint| ids.get(endpoint).copied()).collect();
    maglev::table(&active).into_iter().map(|position| slots[position as usize]).collect()
}

fn endpoint_of(backend: &Backend) -> Endpoint {
    (backend.address.into(), backend.port.number())
}

/// Plans what this node recognises: all holders, and those endpoints that are given. Endpoints come before the holders whose forwards they make
/// recognisable, and go after them.
pub fn recognition(
    holders: &BTreeMap<Mac, Holder>,
    endpoints: &BTreeMap<EndpointKey, Option<EndpointHolders>>,
    observed: &Observed,
) -> Vec<Operation> {
    let mut operations = Vec::new();
    let differing = endpoints.iter().filter(|(key, wanted)| observed.endpoints.get(*key) != wanted.as_ref());
    let (wanted, gone): (Vec<_>, Vec<_>) = differing.partition(|(_, wanted)| wanted.is_some());
    for (key, holders) in wanted {
        operations.extend(holders.map(|holders| Operation::SetEndpoint(*key, holders)));
    }
    // Gone ones first: the map has room for as many as there are marks.
    for mac in observed.holders.keys().filter(|mac| !holders.contains_key(*mac)) {
        operations.push(Operation::RemoveHolder(*mac));
    }
    for (mac, holder) in holders {
        if observed.holders.get(mac) != Some(holder) {
            operations.push(Operation::SetHolder(*mac, *holder));
        }
    }
    operations.extend(gone.into_iter().map(|(key, _)| Operation::RemoveEndpoint(*key)));
    operations
}

/// Plans the roles of interfaces.
pub fn interfaces(wanted: &BTreeMap<u32, Interface>, observed: &Observed) -> Vec<Operation> {
    let mut operations = Vec::new();
    for index in observed.interfaces.keys().filter(|index| !wanted.contains_key(*index)) {
        operations.push(Operation::RemoveInterface(*index));
    }
    for (index, interface) in wanted {
        if observed.interfaces.get(index) != Some(interface) {
            operations.push(Operation::SetInterface(*index, *interface));
        }
    }
    operations
}

#[cfg(test)]
mod tests {
    use super::*;
    use lb_common::addr::Protocol;

    fn key() -> ServiceKey {
        ServiceKey::new(Ipv4Addr::new(192, 0, 2, 1).into(), Port::new(80), Protocol::TCP)
    }

    fn backend(last: u8, state: WantedState) -> WantedBackend {
        WantedBackend {
            address: Ipv4Addr::new(10, 32, 0, last),
            port: 8080,
            state,
            local: false,
            masqueraded: false,
        }
    }

    fn wanted(backends: &[WantedBackend]) -> WantedService {
        WantedService {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            port_name: String::new(),
            affinity: false,
            backends: backends.to_vec(),
        }
    }

    fn empty(slots: u32) -> Observed {
        Observed {
            slots: vec![Backend::default(); slots as usize + 1],
            free_slots: (1..=slots).collect(),
            free_services: (0..4).collect(),
            ..Observed::default()
        }
    }

    fn perform(observed: &mut Observed, plan: &Plan) {
        for operation in &plan.operations {
            observed.note(operation);
        }
    }

    fn settle(observed: &mut Observed, wanted: &WantedService) {
        let plan = service(&key(), Some(wanted), observed);
        perform(observed, &plan);
    }

    #[test]
    fn a_new_service_comes_after_its_backends_and_its_table() {
        let mut observed = empty(8);
        let plan = service(&key(), Some(&wanted(&[backend(1, WantedState::Active)])), &observed);
        let kinds: Vec<&str> = plan.operations.iter().map(kind).collect();
        assert_eq!(kinds, ["backend", "stats", "ring", "service"]);
        perform(&mut observed, &plan);
        let again = service(&key(), Some(&wanted(&[backend(1, WantedState::Active)])), &observed);
        assert_eq!(again, Plan::default());
    }

    #[test]
    fn a_backend_that_goes_goes_after_the_table_and_its_slot_counts_on() {
        let mut observed = empty(8);
        let two = wanted(&[backend(1, WantedState::Active), backend(2, WantedState::Active)]);
        settle(&mut observed, &two);
        let one = wanted(&[backend(2, WantedState::Active)]);
        let plan = service(&key(), Some(&one), &observed);
        assert_eq!(plan.operations.iter().map(kind).collect::<Vec<_>>(), ["ring", "backend"]);
        perform(&mut observed, &plan);
        assert_eq!(observed.slots[1].state(), BackendState::Absent);
        settle(&mut observed, &two);
        assert_eq!((observed.slots[1].generation, observed.slots[2].generation), (2, 1));
    }

    #[test]
    fn draining_keeps_slot_and_generation_but_leaves_the_table() {
        let mut observed = empty(8);
        let two = wanted(&[backend(1, WantedState::Active), backend(2, WantedState::Active)]);
        settle(&mut observed, &two);
        let draining = wanted(&[backend(1, WantedState::Draining), backend(2, WantedState::Active)]);
        settle(&mut observed, &draining);
        assert_eq!(observed.slots[1].state(), BackendState::Draining);
        assert_eq!(observed.slots[1].generation, 1);
        let ring: Vec<u32> = vec![2; lb_common::maglev::size_for(1) as usize];
        assert_eq!(observed.rings[&0], digest(&ring));
    }

    #[test]
    fn a_service_that_goes_frees_all_that_it_used() {
        let start = empty(8);
        let mut observed = start.clone();
        let two = wanted(&[backend(1, WantedState::Active), backend(2, WantedState::Draining)]);
        perform(&mut observed, &service(&key(), Some(&two), &start));
        let plan = service(&key(), None, &observed);
        assert_eq!(kind(&plan.operations[0]), "no service");
        perform(&mut observed, &plan);
        assert_eq!((observed.free_slots.len(), observed.free_services.len()), (8, 4));
        assert!(observed.used.is_empty() && observed.services.is_empty());
    }

    /// As a kill between two operations leaves it, or a stranger's write.
    #[test]
    fn what_nothing_names_is_freed_and_what_cannot_be_right_is_replaced() {
        let mut observed = empty(8);
        let one = wanted(&[backend(1, WantedState::Active)]);
        let plan = service(&key(), Some(&one), &observed);
        perform(&mut observed, &plan);
        assert_eq!(orphans(&observed), []);
        let slot = |service, last| {
            let address = Ipv4Addr::new(10, 32, 0, last).into();
            Backend::new(service, 7, address, Port::new(8080), BackendState::Active, false)
        };
        observed.note(&Operation::SetBackend(5, slot(99, 1)));
        observed.note(&Operation::SetBackend(6, slot(99, 1)));
        let freed = Plan { operations: orphans(&observed), problems: Vec::new() };
        assert_eq!(freed.operations.len(), 2);
        perform(&mut observed, &freed);
        assert_eq!((observed.slots[5].generation, observed.free_slots.len()), (7, 7));
        assert_eq!(orphans(&observed), []);

        let stray = ServiceKey::new(Ipv4Addr::new(192, 0, 2, 9).into(), Port::new(1), Protocol::UDP);
        observed.strays.insert(stray);
        assert!(observed.served().any(|key| *key == stray));
        let replaced = service(&stray, Some(&one), &observed);
        assert!(replaced.operations.iter().any(|o| matches!(o, Operation::SetService(_, s) if s.id == 1)));
        let plan = service(&stray, None, &observed);
        assert_eq!(plan.operations, [Operation::RemoveService(stray)]);
        perform(&mut observed, &plan);
        assert!(observed.served().all(|key| *key != stray));
        assert_eq!(observed.free_services.len(), 3, "a stray owns no id");
    }

    #[test]
    fn what_does_not_fit_is_said_and_the_rest_is_served() {
        let mut observed = empty(1);
        let two = wanted(&[backend(1, WantedState::Active), backend(2, WantedState::Active)]);
        let plan = service(&key(), Some(&two), &observed);
        assert_eq!(plan.problems.len(), 1);
        assert!(plan.problems[0].contains("--max-backends"), "{}", plan.problems[0]);
        perform(&mut observed, &plan);
        let ring: Vec<u32> = vec![1; lb_common::maglev::size_for(1) as usize];
        assert_eq!(observed.rings[&0], digest(&ring));
    }

    fn kind(operation: &Operation) -> &'static str {
        match operation {
            Operation::SetBackend(..) => "backend",
            Operation::SetRing(..) => "ring",
            Operation::ClearStats(..) => "stats",
            Operation::SetService(..) => "service",
            Operation::RemoveService(..) => "no service",
            _ => "other",
        }
    }
}
