//! What the datapath needs beside [`crate::model::Desired`]: draining backends, locality, and the endpoints that
//! other nodes forward to.
//!
//! The plain answers of [`super::compute()`] are never changed here; where the datapath must refuse something that
//! they contain, a problem says so.

use super::index::{self, Holders, Slices, eligible};
use super::reach::Reach;
use crate::model::{Conditions, EndpointSlice, Node, Service, ServicePort, SliceEndpoint};
use lb_common::addr::{Port, Protocol};
use lb_common::backend::BackendState;
use lb_common::holder::EndpointKey;
use lb_common::mark::MAX_HOLDERS;
use lb_common::masquerade::Network;
use lb_common::service::ServiceKey;
use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

/// TCP ports that a node cannot lose: ssh, the API server, the kubelet, etcd.
pub const RESERVED_PORTS: [u16; 5] = [22, 2379, 2380, 6443, 10250];

/// Where answers to a client would not come back to this node by themselves, so that connections get this node as their
/// source.
#[derive(Debug, Default)]
pub(super) struct Aside {
    /// The names of the nodes that do not know this one's forwards: see [`super::reach`].
    pub(super) nodes: BTreeSet<String>,
    /// Those of which that is not known yet: they get nothing new.
    pub(super) silent: BTreeSet<String>,
    /// The addresses of the nodes: an endpoint on the network of its node answers by the node's own routes.
    pub(super) hosts: BTreeSet<Ipv4Addr>,
}

impl Aside {
    pub(super) fn new(own_name: &str, all: &[Node], reach: &Reach) -> Self {
        let out_of_reach = all.iter().filter(|node| !reach.includes(node, own_name));
        let (nodes, silent): (Vec<_>, Vec<_>) = out_of_reach.partition(|node| node.weave_ip.is_some());
        let names = |nodes: Vec<&Node>| nodes.into_iter().map(|node| node.name.clone()).collect();
        Self {
            nodes: names(nodes),
            silent: names(silent),
            hosts: all.iter().flat_map(|node| node.addresses.iter().copied()).collect(),
        }
    }

    /// Of an endpoint that is not on this node.
    fn takes_in(&self, address: Ipv4Addr, node: Option<&str>) -> bool {
        self.hosts.contains(&address) || node.is_some_and(|node| self.nodes.contains(node))
    }
}

/// Choices of the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// TCP ports on which the agent itself listens: reserved as well.
    pub own_ports: BTreeSet<u16>,
    /// Serve reserved ports all the same.
    pub force_reserved_ports: bool,
    /// When no endpoint is ready, use those that terminate but still serve, as kube-proxy does.
    pub terminating_fallback: bool,
}

/// What the datapath of one node must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The ports that this node serves.
    pub services: BTreeMap<ServiceKey, WantedService>,
    /// The other nodes that forward something, by name. Not limited to the number of marks.
    pub holders: Vec<HolderWanted>,
    /// Endpoints that run (or may run) here and that other nodes forward to: the names of those, each in `holders`.
    pub endpoints: BTreeMap<EndpointKey, BTreeSet<String>>,
    /// What an operator should hear about, beside the problems of `Desired`: Services first, then nodes.
    pub problems: Vec<String>,
}

/// One served port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedService {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// The Service port's name, empty if it has none.
    pub port_name: String,
    /// Whether all connections of a client get one backend (`sessionAffinity: ClientIP`).
    pub affinity: bool,
    /// By address and port, each pair once.
    pub backends: Vec<WantedBackend>,
}

/// One endpoint behind a served port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WantedBackend {
    /// The pod's address.
    pub address: Ipv4Addr,
    /// The pod's port.
    pub port: u16,
    /// What it may get.
    pub state: WantedState,
    /// Whether it runs on this node.
    pub local: bool,
    /// Whether connections to it get this node as their source, so that it does not see the client.
    pub masqueraded: bool,
}

/// What a backend may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WantedState {
    /// New and existing flows.
    Active,
    /// Existing flows only.
    Draining,
}

impl From<WantedState> for BackendState {
    fn from(state: WantedState) -> Self {
        match state {
            WantedState::Active => Self::Active,
            WantedState::Draining => Self::Draining,
        }
    }
}

/// Another node that forwards something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderWanted {
    /// The Node's name.
    pub name: String,
    /// The address of its overlay device.
    pub address: Ipv4Addr,
    /// The hardware address of its overlay device.
    pub mac: [u8; 6],
}

/// What the datapath of the node called `self_name` must hold.
pub fn wanted(
    self_name: &str,
    nodes: &[Node],
    services: &[Service],
    slices: &[EndpointSlice],
    options: &Options,
) -> Wanted {
    let holders = Holders::of(nodes);
    let slices = Slices::of(slices);
    let eligible = eligible(services);
    let placed = eligible.iter().filter_map(|service| {
        let (address, holder) = holders.place(service).ok()?;
        Some((*service, address, holder))
    });
    let mut wanted = Wanted::default();
    let aside = Aside::new(self_name, nodes, &Reach::Everybody);
    let mut forwards_of: BTreeMap<&str, (&Node, Vec<&Service>)> = BTreeMap::new();
    for (service, address, holder) in placed {
        if holder.name == self_name {
            wanted.serve(self_name, service, address, slices.of_service(service), (options, &aside));
        } else {
            forwards_of.entry(&holder.name).or_insert_with(|| (holder, Vec::new())).1.push(service);
        }
    }
    let Recognition { holders, problems } = recognise(forwards_of.values().map(|(holder, _)| *holder));
    for holder in &holders {
        for service in forwards_of.get(holder.name.as_str()).into_iter().flat_map(|(_, services)| services) {
            for key in expected_forwards(self_name, service, slices.of_service(service)) {
                wanted.endpoints.entry(key).or_default().insert(holder.name.clone());
            }
        }
    }
    wanted.holders = holders;
    wanted.problems.extend(problems.into_iter().map(|(_, problem)| problem));
    wanted
}

impl Wanted {
    /// Adds the ports of a Service whose address this node holds.
    fn serve(
        &mut self,
        self_name: &str,
        service: &Service,
        address: Ipv4Addr,
        slices: &[&EndpointSlice],
        (options, aside): (&Options, &Aside),
    ) {
        for port in &service.ports {
            let free = |key: ServiceKey| match self.services.get(&key) {
                None => Ok(key),
                Some(first) => Err(describe_taken(service, address, port, (&first.namespace, &first.name))),
            };
            match admit(address, port, options).and_then(free) {
                Ok(key) => {
                    self.services.insert(key, serve(self_name, service, port, slices, options, aside));
                }
                Err(problem) => self.problems.push(format!("{}: {problem}", service.key())),
            }
        }
    }
}

/// One port of a Service whose address this node holds.
pub(super) fn serve(
    self_name: &str,
    service: &Service,
    port: &ServicePort,
    slices: &[impl Borrow<EndpointSlice>],
    options: &Options,
    aside: &Aside,
) -> WantedService {
    WantedService {
        namespace: service.namespace.clone(),
        name: service.name.clone(),
        port_name: port.name.clone(),
        affinity: service.affinity,
        backends: backends(self_name, service, port, slices, options, aside),
    }
}

/// The key of a port that this node can serve, or why it cannot.
pub(super) fn admit(address: Ipv4Addr, port: &ServicePort, options: &Options) -> Result<ServiceKey, String> {
    let ServicePort { name: _, protocol: text, port: written } = port;
    let Some(protocol) = protocol(text) else {
        return Err(format!("port {written}/{text} is not served; only TCP and UDP are"));
    };
    let Some(number) = number(*written) else {
        return Err(format!("port {written}/{text} is not served; a port number is 1 to 65535"));
    };
    let reserved = RESERVED_PORTS.contains(&number) || options.own_ports.contains(&number);
    if protocol == Protocol::TCP && reserved && !options.force_reserved_ports {
        return Err(format!(
            "port {number}/TCP is reserved for the node itself and not served; \
             use another port or force reserved ports"
        ));
    }
    Ok(ServiceKey::new(address.into(), Port::new(number), protocol))
}

/// What people must know of a port with backends on the networks of other nodes. (Of nodes that are out of reach they hear by
/// the node.)
pub(super) fn describe_masqueraded(
    port: &ServicePort,
    served: &WantedService,
    aside: &Aside,
) -> Option<String> {
    let is_host = |backend: &&WantedBackend| backend.masqueraded && aside.hosts.contains(&backend.address);
    let masqueraded = served.backends.iter().find(is_host)?;
    Some(format!(
        "port {}/{}: answers of the endpoint {}, which is on its node's own network, would not come back to this node, so \
         connections to it get this node as their source, and it does not see clients' addresses",
        port.port, port.protocol, masqueraded.address
    ))
}

/// The problem with a port that is served already, for the Service of this namespace and name.
pub(super) fn describe_taken(
    service: &Service,
    address: Ipv4Addr,
    port: &ServicePort,
    (namespace, name): (&str, &str),
) -> String {
    let ServicePort { name: _, protocol, port: number } = port;
    if (namespace, name) == (&service.namespace, &service.name) {
        format!("port {number}/{protocol} is listed twice; the first one counts")
    } else {
        format!(
            "port {number}/{protocol} of {address} is already served for {namespace}/{name}; \
             use another port or address"
        )
    }
}

/// The holders whose forwards can be told from others.
#[derive(Default)]
pub(super) struct Recognition {
    pub(super) holders: Vec<HolderWanted>,
    /// What is wrong with the others, each with the name of the node; none where it concerns all of them.
    pub(super) problems: Vec<(Option<String>, String)>,
}

/// Who is inside the cluster: a client with such an address may be where an answer to it would not pass this node.
pub(super) fn inside(nodes: &[Node]) -> BTreeSet<Network> {
    let hosts = nodes.iter().flat_map(|node| node.addresses.iter().chain(&node.weave_ip)).map(|a| (*a, 32));
    let networks = nodes.iter().flat_map(|node| node.networks.iter().copied());
    hosts.chain(networks).map(network).collect()
}

fn network((address, prefix): (Ipv4Addr, u8)) -> Network {
    let mask = u32::MAX.checked_shl(u32::from(32 - prefix.min(32))).unwrap_or(0);
    Network { prefix: prefix.into(), address: Ipv4Addr::from_bits(address.to_bits() & mask).into() }
}

/// Tells apart the other nodes that forward something, given by name. One without an overlay is left out:
/// [`super::compute()`] reports it.
pub(super) fn recognise<'a>(nodes: impl Iterator<Item = &'a Node>) -> Recognition {
    let Recognition { mut holders, mut problems } = Recognition::default();
    let mut macs: BTreeMap<[u8; 6], &str> = BTreeMap::new();
    for node in nodes {
        let (Some(address), Some(mac)) = (node.weave_ip, &node.weave_mac) else { continue };
        let name = &node.name;
        let mut wrong = |problem| problems.push((Some(name.clone()), problem));
        let Some(ethernet) = mac.ethernet() else {
            wrong(format!(
                "node {name}: {mac} is not an Ethernet address; its forwards cannot be recognised here, \
                 publish the 6 bytes of its overlay device"
            ));
            continue;
        };
        if let Some(first) = macs.get(&ethernet) {
            wrong(format!(
                "node {name}: {mac} is also the overlay address of node {first}; \
                 its forwards cannot be recognised here, give one of them another"
            ));
            continue;
        }
        macs.insert(ethernet, name);
        holders.push(HolderWanted { name: name.clone(), address, mac: ethernet });
    }
    if holders.len() > usize::from(MAX_HOLDERS) {
        let problem = format!(
            "{} other nodes forward to pods, but a node can tell {MAX_HOLDERS} apart; \
             replies to the forwards of the others cannot reach them",
            holders.len()
        );
        problems.push((None, problem));
    }
    Recognition { holders, problems }
}

/// The endpoints, ready or not, of a Service that another node forwards: those that run here, and those of which nobody
/// says where they run. An endpoint that is listed several times may come several times.
pub(super) fn expected_forwards<'a>(
    self_name: &'a str,
    service: &'a Service,
    slices: &'a [impl Borrow<EndpointSlice>],
) -> impl Iterator<Item = EndpointKey> {
    let ports = service.ports.iter().filter_map(|port| Some((port, protocol(&port.protocol)?)));
    ports.flat_map(move |(port, protocol)| {
        let is_here = move |endpoint: &SliceEndpoint| {
            endpoint.node_name.as_deref().is_none_or(|node| node == self_name)
        };
        let here = index::endpoints(slices, port).filter(move |(_, endpoint)| is_here(endpoint));
        let usable = here.filter_map(|(target, endpoint)| Some((Port::new(number(target)?), endpoint)));
        usable.flat_map(move |(port, endpoint)| {
            let addresses = endpoint.addresses.iter();
            addresses.map(move |address| EndpointKey::new((*address).into(), port, protocol))
        })
    })
}

/// The backends of one port. An endpoint that is listed as ready and as not ready (in two slices,
/// say) is ready.
fn backends(
    self_name: &str,
    service: &Service,
    port: &ServicePort,
    slices: &[impl Borrow<EndpointSlice>],
    options: &Options,
    aside: &Aside,
) -> Vec<WantedBackend> {
    let listed = index::endpoints(slices, port);
    let listed: Vec<_> = listed.filter_map(|(p, e)| Some((number(p)?, e))).collect();
    let none_ready = !listed.iter().any(|(_, endpoint)| endpoint.conditions.is_ready());
    let fallback = options.terminating_fallback && none_ready;
    let mut found: BTreeMap<(Ipv4Addr, u16), WantedBackend> = BTreeMap::new();
    for (port, endpoint) in listed {
        let node = endpoint.node_name.as_deref();
        let gets_none = service.deleting || node.is_some_and(|node| aside.silent.contains(node));
        let state = if gets_none { WantedState::Draining } else { state(endpoint.conditions, fallback) };
        let local = node == Some(self_name);
        for address in &endpoint.addresses {
            let masqueraded = !local && aside.takes_in(*address, node);
            let backend = WantedBackend { address: *address, port, state, local, masqueraded };
            let known = found.entry((*address, port)).or_insert(backend);
            known.state = known.state.min(state);
            known.local |= local;
            known.masqueraded &= masqueraded;
        }
    }
    found.into_values().collect()
}

/// Ready wins over everything: with `publishNotReadyAddresses` a terminating endpoint is ready and gets traffic.
/// What is not ready keeps its flows until it leaves the slice, whatever else is said of it.
fn state(conditions: Conditions, fallback: bool) -> WantedState {
    if conditions.is_ready() || (fallback && conditions.is_serving_out()) {
        WantedState::Active
    } else {
        WantedState::Draining
    }
}

fn protocol(text: &str) -> Option<Protocol> {
    match text {
        "TCP" => Some(Protocol::TCP),
        "UDP" => Some(Protocol::UDP),
        _ => None,
    }
}

fn number(port: i32) -> Option<u16> {
    u16::try_from(port).ok().filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{HardwareAddress, SlicePort};
    use std::sync::Arc;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const POD: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

    fn mk_node(name: &str, address: Ipv4Addr, mac: u8) -> Node {
        Node {
            networks: Vec::new(),
            name: name.to_owned(),
            addresses: vec![address],
            weave_ip: Some(Ipv4Addr::new(10, 32, 0, mac)),
            weave_mac: Some(HardwareAddress::from([0xfe, 0, 0, 0, 0, mac])),
        }
    }

    /// `a` holds [`ADDRESS`], `b` does not.
    fn mk_nodes() -> Vec<Node> {
        vec![mk_node("a", ADDRESS, 1), mk_node("b", Ipv4Addr::new(192, 0, 2, 2), 2)]
    }

    fn mk_port(protocol: &str, port: i32) -> ServicePort {
        ServicePort { name: String::new(), protocol: protocol.to_owned(), port }
    }

    fn mk_service(name: &str, ports: Vec<ServicePort>) -> Service {
        Service {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            eligible: true,
            wanted: ADDRESS.to_string(),
            ports,
            ..Service::default()
        }
    }

    fn mk_endpoint(address: Ipv4Addr, conditions: Conditions, node: Option<&str>) -> SliceEndpoint {
        SliceEndpoint { addresses: vec![address], conditions, node_name: node.map(Arc::from) }
    }

    fn mk_slice(service: &str, port: i32, endpoints: Vec<SliceEndpoint>) -> EndpointSlice {
        EndpointSlice {
            namespace: "default".to_owned(),
            name: service.to_owned(),
            service: service.to_owned(),
            ipv4: true,
            ports: vec![SlicePort { name: String::new(), protocol: "TCP".to_owned(), port: Some(port) }],
            endpoints,
        }
    }

    fn not_ready() -> Conditions {
        Conditions { ready: Some(false), ..Conditions::default() }
    }

    fn key(port: u16, protocol: Protocol) -> ServiceKey {
        ServiceKey::new(ADDRESS.into(), Port::new(port), protocol)
    }

    fn backends_of(wanted: &Wanted) -> &[WantedBackend] {
        &wanted.services[&key(80, Protocol::TCP)].backends
    }

    fn wanted_by_a(services: &[Service], slices: &[EndpointSlice], options: &Options) -> Wanted {
        wanted("a", &mk_nodes(), services, slices, options)
    }

    /// D1, D2, D3: every combination of the three conditions, alone in its slice.
    #[test]
    fn conditions_decide_the_state() {
        use WantedState::{Active, Draining};
        let values = [None, Some(true), Some(false)];
        let mut combinations = 0;
        for ready in values {
            for serving in values {
                for terminating in values {
                    // ready: missing and true are one; the fallback looks only at what says serving and terminating.
                    let (plain, with_fallback) = match (ready, serving, terminating) {
                        (None | Some(true), _, _) => (Active, Active),
                        (Some(false), Some(true), Some(true)) => (Draining, Active),
                        (Some(false), _, _) => (Draining, Draining),
                    };
                    let conditions = Conditions { ready, serving, terminating };
                    let services = [mk_service("web", vec![mk_port("TCP", 80)])];
                    let slices = [mk_slice("web", 8080, vec![mk_endpoint(POD, conditions, None)])];
                    for (terminating_fallback, state) in [(false, plain), (true, with_fallback)] {
                        let options = Options { terminating_fallback, ..Options::default() };
                        let wanted = wanted_by_a(&services, &slices, &options);
                        let expected = WantedBackend {
                            address: POD,
                            port: 8080,
                            state,
                            local: false,
                            masqueraded: false,
                        };
                        assert_eq!(backends_of(&wanted), [expected], "{conditions:?} {options:?}");
                    }
                    combinations += 1;
                }
            }
        }
        assert_eq!(combinations, 27);
    }

    #[test]
    fn the_fallback_is_not_used_while_an_endpoint_is_ready() {
        let going = Conditions { ready: Some(false), serving: Some(true), terminating: Some(true) };
        let other = Ipv4Addr::new(10, 0, 0, 2);
        let endpoints = vec![mk_endpoint(POD, going, None), mk_endpoint(other, Conditions::default(), None)];
        let options = Options { terminating_fallback: true, ..Options::default() };
        let services = [mk_service("web", vec![mk_port("TCP", 80)])];
        let wanted = wanted_by_a(&services, &[mk_slice("web", 8080, endpoints)], &options);
        let states: Vec<WantedState> = backends_of(&wanted).iter().map(|backend| backend.state).collect();
        assert_eq!(states, [WantedState::Draining, WantedState::Active]);
    }

    /// D11: a port that is missing or cannot be one contributes nothing.
    #[test]
    fn a_slice_port_without_a_usable_number_contributes_no_backend() {
        let services = [mk_service("web", vec![mk_port("TCP", 80)])];
        let endpoints = || vec![mk_endpoint(POD, Conditions::default(), None)];
        let mut unset = mk_slice("web", 1, endpoints());
        unset.ports[0].port = None;
        let mut no_ports = mk_slice("web", 1, endpoints());
        no_ports.ports.clear();
        let slices = [
            unset,
            no_ports,
            mk_slice("web", 0, endpoints()),
            mk_slice("web", -1, endpoints()),
            mk_slice("web", 65_536, endpoints()),
        ];
        assert_eq!(backends_of(&wanted_by_a(&services, &slices, &Options::default())), []);
        assert_eq!(
            wanted("b", &mk_nodes(), &services, &slices, &Options::default()).endpoints,
            BTreeMap::new()
        );
    }

    #[test]
    fn an_endpoint_is_local_where_its_node_is_this_one_and_listed_once() {
        let services = [mk_service("web", vec![mk_port("TCP", 80)])];
        let other = Ipv4Addr::new(10, 0, 0, 2);
        let slices = [
            mk_slice("web", 8080, vec![mk_endpoint(POD, not_ready(), Some("a"))]),
            mk_slice("web", 8080, vec![mk_endpoint(POD, Conditions::default(), None)]),
            mk_slice("web", 8080, vec![mk_endpoint(other, Conditions::default(), Some("b"))]),
        ];
        let wanted = wanted_by_a(&services, &slices, &Options::default());
        let expected = [
            WantedBackend {
                address: POD,
                port: 8080,
                state: WantedState::Active,
                local: true,
                masqueraded: false,
            },
            WantedBackend {
                address: other,
                port: 8080,
                state: WantedState::Active,
                local: false,
                masqueraded: false,
            },
        ];
        assert_eq!(backends_of(&wanted), expected);
    }

    #[test]
    fn a_node_that_may_be_out_of_reach_gets_nothing_new() {
        let (near, mut silent) = (mk_node("a", ADDRESS, 1), mk_node("b", Ipv4Addr::new(192, 0, 2, 2), 2));
        silent.weave_ip = None;
        let networks = vec![(Ipv4Addr::new(10, 32, 0, 1), 24)];
        let reach = Reach::Networks { device: "eth0".to_owned(), networks };
        let slices = [mk_slice("web", 8080, vec![mk_endpoint(POD, Conditions::default(), Some("b"))])];
        let of = |nodes: &[Node], reach| {
            let aside = Aside::new("a", nodes, reach);
            let (service, port) = (mk_service("web", Vec::new()), mk_port("TCP", 80));
            let found = backends("a", &service, &port, &slices, &Options::default(), &aside);
            (found[0].state, found[0].masqueraded)
        };
        assert_eq!(of(&[near.clone(), silent.clone()], &reach), (WantedState::Draining, false));
        assert_eq!(of(&[near, silent], &Reach::Everybody), (WantedState::Active, false));
    }

    #[test]
    fn a_pod_on_another_nodes_own_network_is_masqueraded() {
        let hosts = [(Ipv4Addr::new(192, 0, 2, 2), "b"), (ADDRESS, "a"), (POD, "b")];
        let nodes = [mk_node("a", ADDRESS, 1), mk_node("b", hosts[0].0, 2)];
        let endpoints = hosts.map(|(address, node)| mk_endpoint(address, Conditions::default(), Some(node)));
        let services = [mk_service("web", vec![mk_port("TCP", 80)])];
        let slices = [mk_slice("web", 8080, endpoints.into())];
        let wanted = wanted("a", &nodes, &services, &slices, &Options::default());
        let masqueraded = backends_of(&wanted).iter().filter(|backend| backend.masqueraded);
        assert_eq!(masqueraded.map(|backend| backend.address).collect::<Vec<_>>(), [hosts[0].0]);
    }

    #[test]
    fn a_service_on_its_way_out_only_drains() {
        let mut service = mk_service("web", vec![mk_port("TCP", 80)]);
        service.deleting = true;
        let slices = [mk_slice("web", 8080, vec![mk_endpoint(POD, Conditions::default(), None)])];
        let wanted = wanted_by_a(&[service], &slices, &Options::default());
        assert_eq!(backends_of(&wanted)[0].state, WantedState::Draining);
    }

    #[test]
    fn of_two_services_with_one_port_the_first_by_key_has_it() {
        let services = [
            mk_service("z", vec![mk_port("TCP", 80)]),
            mk_service("y", vec![mk_port("TCP", 80), mk_port("UDP", 80)]),
        ];
        let wanted = wanted_by_a(&services, &[], &Options::default());
        let names: Vec<&str> = wanted.services.values().map(|service| service.name.as_str()).collect();
        assert_eq!(names, ["y", "y"]);
        assert_eq!(
            wanted.problems,
            [
                "default/z: port 80/TCP of 192.0.2.1 is already served for default/y; use another port or address"
            ]
        );
    }

    #[test]
    fn a_port_listed_twice_counts_once() {
        let services = [mk_service("web", vec![mk_port("TCP", 80), mk_port("TCP", 80)])];
        let wanted = wanted_by_a(&services, &[], &Options::default());
        assert_eq!(wanted.services.len(), 1);
        assert_eq!(wanted.problems, ["default/web: port 80/TCP is listed twice; the first one counts"]);
    }

    #[test]
    fn what_cannot_be_served_is_a_problem() {
        let ports = vec![mk_port("SCTP", 1), mk_port("TCP", 0), mk_port("UDP", 65_536), mk_port("tcp", 80)];
        let wanted = wanted_by_a(&[mk_service("web", ports)], &[], &Options::default());
        assert_eq!(wanted.services, BTreeMap::new());
        assert_eq!(
            wanted.problems,
            [
                "default/web: port 1/SCTP is not served; only TCP and UDP are",
                "default/web: port 0/TCP is not served; a port number is 1 to 65535",
                "default/web: port 65536/UDP is not served; a port number is 1 to 65535",
                "default/web: port 80/tcp is not served; only TCP and UDP are",
            ]
        );
    }

    #[test]
    fn reserved_ports_are_refused_unless_forced() {
        let own = 7_000;
        let ports = RESERVED_PORTS.into_iter().chain([own]);
        let tcp: Vec<ServicePort> = ports.clone().map(|port| mk_port("TCP", port.into())).collect();
        let udp: Vec<ServicePort> = ports.map(|port| mk_port("UDP", port.into())).collect();
        let mut options = Options { own_ports: BTreeSet::from([own]), ..Options::default() };
        let refused = wanted_by_a(&[mk_service("web", tcp.clone())], &[], &options);
        assert_eq!((refused.services.len(), refused.problems.len()), (0, 6));
        assert_eq!(
            refused.problems[0],
            "default/web: port 22/TCP is reserved for the node itself and not served; \
             use another port or force reserved ports"
        );
        let other_protocol = wanted_by_a(&[mk_service("web", udp)], &[], &options);
        assert_eq!((other_protocol.services.len(), other_protocol.problems.len()), (6, 0));
        options.force_reserved_ports = true;
        let forced = wanted_by_a(&[mk_service("web", tcp)], &[], &options);
        assert_eq!((forced.services.len(), forced.problems.len()), (6, 0));
    }

    #[test]
    fn another_node_expects_forwards_to_its_own_endpoints_and_to_those_without_a_node() {
        let services = [mk_service("web", vec![mk_port("TCP", 80)])];
        let pod = |last| Ipv4Addr::new(10, 0, 0, last);
        let endpoints = vec![
            mk_endpoint(pod(1), not_ready(), Some("b")),
            mk_endpoint(pod(2), Conditions::default(), None),
            mk_endpoint(pod(3), Conditions::default(), Some("a")),
        ];
        let slices = [mk_slice("web", 8080, endpoints)];
        let wanted = wanted("b", &mk_nodes(), &services, &slices, &Options::default());
        let key = |last| EndpointKey::new(pod(last).into(), Port::new(8080), Protocol::TCP);
        let from_a = || BTreeSet::from(["a".to_owned()]);
        assert_eq!(wanted.endpoints, BTreeMap::from([(key(1), from_a()), (key(2), from_a())]));
        let holder = HolderWanted {
            name: "a".to_owned(),
            address: Ipv4Addr::new(10, 32, 0, 1),
            mac: [0xfe, 0, 0, 0, 0, 1],
        };
        assert_eq!(wanted.holders, [holder]);
        assert_eq!(wanted.services, BTreeMap::new());
    }

    #[test]
    fn holders_that_cannot_be_told_apart_are_skipped() {
        let address = |last| Ipv4Addr::new(192, 0, 2, last);
        let mut long = mk_node("c", address(3), 3);
        long.weave_mac = HardwareAddress::parse("02:00:5e:10:00:00:00:01");
        let mut silent = mk_node("e", address(5), 5);
        (silent.weave_ip, silent.weave_mac) = (None, None);
        let nodes = [mk_node("a", address(1), 1), long, mk_node("d", address(4), 1), silent];
        let services: Vec<Service> = [1, 3, 4, 5]
            .map(|last| Service {
                wanted: address(last).to_string(),
                ..mk_service(&format!("s{last}"), vec![mk_port("TCP", 80)])
            })
            .into();
        let slices = [1, 3, 4, 5].map(|last| {
            mk_slice(&format!("s{last}"), 8080, vec![mk_endpoint(POD, Conditions::default(), None)])
        });
        let wanted = wanted("b", &nodes, &services, &slices, &Options::default());
        let names: Vec<&str> = wanted.holders.iter().map(|holder| holder.name.as_str()).collect();
        assert_eq!(names, ["a"]);
        assert_eq!(wanted.endpoints.values().flatten().collect::<Vec<_>>(), ["a"]);
        assert_eq!(
            wanted.problems,
            [
                "node c: 02:00:5e:10:00:00:00:01 is not an Ethernet address; its forwards cannot be recognised \
                 here, publish the 6 bytes of its overlay device",
                "node d: fe:00:00:00:00:01 is also the overlay address of node a; its forwards cannot be \
                 recognised here, give one of them another",
            ]
        );
    }

    #[test]
    fn more_holders_than_marks_is_said() {
        let holder = |i: u8| mk_node(&format!("n{i:03}"), Ipv4Addr::new(192, 0, 2, i), i);
        let nodes: Vec<Node> = (0..=250).map(holder).collect();
        let service = |i: u8| Service {
            wanted: Ipv4Addr::new(192, 0, 2, i).to_string(),
            ..mk_service(&format!("s{i}"), vec![mk_port("TCP", 80)])
        };
        let all: Vec<Service> = (0..=250).map(service).collect();
        let said =
            |services: &[Service]| wanted("b", &nodes, services, &[], &Options::default()).problems.len();
        assert_eq!(said(&all[1..]), 0);
        assert_eq!(said(&all), 1);
    }
}
