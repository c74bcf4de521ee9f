//! Clients inside the cluster: pods of the holder, its own processes, other nodes. Backends see the holder's overlay address
//! and a port that it has given out.

use super::route::told;
use super::{REMOTE_SAME_PORT, remote};
use crate::case::{Case, Place, ingress};
use crate::frame::{End, Frame};
use crate::lab::{
    CLIENT, Device, Hook, LOCAL, Lab, OWN, REMOTE, REMOTE_2, SERVED, SERVED_SAME_PORT, Slot, TCP_80, UDP_80,
    now, sh,
};
use lb_agent::datapath::testrun::Meta;
use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::backend::{Backend, BackendState};
use lb_common::flow::{Flow, FlowKey, Path, State};
use lb_common::maglev;
use lb_common::masquerade::{self, Client, MasqueradedKey};
use lb_common::reason::Reason;
use lb_common::service::{Service, ServiceKey};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream};

/// A pod of the holder.
pub(crate) const POD: End = ([10, 32, 0, 5], 40_000);
/// A process of the holder, by the address that it holds and by its overlay address.
pub(crate) const PROCESS: End = (SERVED.0, 40_000);
const PROCESS_ON_OVERLAY: End = (OWN, 40_000);
/// Another node, and a machine beside it that is no node.
pub(super) const OTHER_NODE: End = ([192, 0, 2, 2], 40_000);
const NO_NODE: End = ([192, 0, 2, 3], 40_000);

/// Link-layer addresses.
const WEAVE: [u8; 6] = [2, 0, 0, 0, 0, 0x20];
const ETH0: [u8; 6] = [2, 0, 0, 0, 0, 0x10];
const POD_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x05];
const LOCAL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x22];
const REMOTE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x42];
const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x01];
const OTHER_NODE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x12];

fn neighbours() {
    sh("
        ip neighbour add 10.32.0.5 lladdr 02:00:00:00:00:05 dev weave nud permanent
        ip neighbour add 10.32.0.2 lladdr 02:00:00:00:00:22 dev weave nud permanent
        ip neighbour add 10.40.0.2 lladdr 02:00:00:00:00:42 dev weave nud permanent
        ip neighbour add 192.0.2.2 lladdr 02:00:00:00:00:12 dev eth0 nud permanent
    ");
}

/// The holder, whose backends are elsewhere.
pub(crate) fn node(lab: &mut Lab) {
    remote(lab);
    lab.own();
    lab.inside(OTHER_NODE.0, 32);
    neighbours();
}

/// The holder, whose backend is its own pod.
pub(super) fn node_with_local(lab: &mut Lab) {
    super::route::local(lab);
    lab.endpoint(LOCAL, Protocol::TCP, &[lb_common::holder::EndpointHolders::SELF]);
    lab.own();
    neighbours();
}

/// The holder, whose backend is a process on another node's own network.
pub(super) fn node_with_aside(lab: &mut Lab) {
    node(lab);
    for (id, protocol, service) in [(1, Protocol::TCP, TCP_80), (2, Protocol::UDP, UDP_80)] {
        let (address, port) = (Ipv4::new(ASIDE.backend.0), Port::new(ASIDE.backend.1));
        let backend = Backend::new(service, 1, address, port, BackendState::Active, false);
        lab.maps.set_backend(id, &backend.masqueraded(true)).unwrap();
        let served = ServiceKey::new(Ipv4::new(SERVED.0), Port::new(SERVED.1), protocol);
        lab.maps.services.insert(&served, &Service::new(service, false).masquerading(true)).unwrap();
    }
}

/// Where a client is, and how the kernel knows it and its backend.
#[derive(Clone, Copy)]
pub(super) struct Walk {
    pub(super) client: End,
    pub(super) backend: End,
    /// The address that the backend takes for the client's.
    pub(super) outer: [u8; 4],
    /// Where the client's packets come in, and the backend's.
    pub(super) ways_in: (Device, Device),
    /// Ethernet destination and source of what leaves, to the backend and to the client; `None`: those that were there.
    forward: Option<([u8; 6], [u8; 6])>,
    back: Option<([u8; 6], [u8; 6])>,
}

pub(super) const POD_TO_REMOTE: Walk = Walk {
    client: POD,
    backend: REMOTE,
    outer: OWN,
    ways_in: (Device::Pods, Device::Overlay),
    forward: Some((REMOTE_MAC, WEAVE)),
    back: Some((POD_MAC, WEAVE)),
};

/// Another node's own process, from outside: it sees the Service's address, and answers to there.
pub(super) const ASIDE: Walk = Walk {
    client: CLIENT,
    backend: (OTHER_NODE.0, 8080),
    outer: SERVED.0,
    ways_in: (Device::Uplink, Device::Uplink),
    forward: Some((OTHER_NODE_MAC, ETH0)),
    back: Some((ROUTER_MAC, ETH0)),
};

/// To `lo`, whose link-layer address is zero.
const TO_SELF: Option<([u8; 6], [u8; 6])> = Some(([0; 6], [2, 0, 0, 0, 0, 1]));

impl Walk {
    pub(super) fn from(self, client: End) -> Self {
        Self { client, ..self }
    }

    pub(super) fn to_local(self) -> Self {
        let forward = Some((LOCAL_MAC, WEAVE));
        Self { backend: LOCAL, ways_in: (self.ways_in.0, Device::Pods), forward, ..self }
    }

    pub(super) fn of_process(self, client: End) -> Self {
        Self { client, ways_in: (Device::Node, self.ways_in.1), back: TO_SELF, ..self }
    }

    pub(super) fn of_other_node(self) -> Self {
        let ways_in = (Device::Uplink, self.ways_in.1);
        Self { client: OTHER_NODE, ways_in, back: Some((OTHER_NODE_MAC, ETH0)), ..self }
    }

    /// What leaves to the backend, and to the client.
    pub(super) fn forth(&self, packet: Frame) -> Frame {
        with_ethernet(packet, self.forward)
    }

    pub(super) fn back(&self, packet: Frame) -> Frame {
        with_ethernet(packet, self.back)
    }

    /// The tuple's first port.
    fn port(&self, protocol: Protocol) -> u16 {
        port_of(self.client, SERVED, protocol)
    }

    /// What the backend takes the client for.
    pub(super) fn source(&self, protocol: Protocol) -> End {
        (self.outer, self.port(protocol))
    }

    pub(super) fn tcp(&self) -> Frame {
        Frame::tcp(self.client, SERVED)
    }

    pub(super) fn answer(&self) -> Frame {
        Frame::tcp(self.backend, self.source(Protocol::TCP))
    }

    /// The client's packet as it leaves.
    fn forwarded(&self, packet: &Frame) -> Frame {
        let source = self.source(packet.key().protocol);
        self.forth(packet.clone().from(source).to(self.backend).ttl(63))
    }

    /// The backend's as it leaves.
    fn returned(&self, packet: &Frame) -> Frame {
        self.back(packet.clone().from(SERVED).to(self.client).ttl(63))
    }

    /// What the flow tables know of the connection.
    fn known_as(&self) -> Frame {
        self.tcp().from((OWN, self.port(Protocol::TCP)))
    }
}

fn with_ethernet(frame: Frame, ethernet: Option<([u8; 6], [u8; 6])>) -> Frame {
    match ethernet {
        Some((destination, source)) => frame.destination_mac(destination).source_mac(source),
        None => frame,
    }
}

fn key(client: End, address: End, protocol: Protocol) -> FlowKey {
    FlowKey::new(
        Ipv4::new(client.0),
        Port::new(client.1),
        Ipv4::new(address.0),
        Port::new(address.1),
        protocol,
    )
}

fn port_of(client: End, address: End, protocol: Protocol) -> u16 {
    masquerade::first_port(maglev::hash(&key(client, address, protocol)))
}

/// The ports that a connection is given, the first to try first.
fn ports_of(client: End) -> impl Iterator<Item = u16> {
    let first = port_of(client, SERVED, Protocol::TCP);
    std::iter::successors(Some(first), |port| Some(masquerade::next_port(*port)))
        .take(masquerade::TRIES as usize)
}

fn owned(port: u16) -> MasqueradedKey {
    MasqueradedKey::new(Ipv4::new(SERVED.0), Port::new(SERVED.1), Port::new(port), Protocol::TCP)
}

/// Somebody else has the port.
fn taken(lab: &mut Lab, port: u16, by: End) {
    let client = Client::new(Ipv4::new(by.0), Port::new(by.1));
    lab.maps.masqueraded.insert(&owned(port), &client).unwrap();
}

/// Its port is nobody's any more.
pub(super) fn forget_owner(lab: &mut Lab, walk: Walk) {
    lab.maps.masqueraded.remove(&owned(walk.port(Protocol::TCP))).unwrap();
}

/// And a connection with it.
fn connected(lab: &mut Lab, port: u16, state: State) {
    let flow = Flow::new(TCP_80, 1, 1, Path::Redirect, state, now());
    lab.maps.flows.insert(&key((OWN, port), SERVED, Protocol::TCP), &flow).unwrap();
}

impl Case {
    pub(super) fn walks(self, walk: Walk, packet: &Frame) -> Self {
        let forward = walk.forwarded(packet);
        self.send(ingress(walk.ways_in.0, packet).redirected(Reason::ForwardRedirect, forward))
    }

    pub(super) fn walks_back(self, walk: Walk, packet: &Frame) -> Self {
        let back = walk.returned(packet);
        self.send(ingress(walk.ways_in.1, packet).redirected(Reason::ReplyRedirect, back))
    }

    pub(super) fn shakes_hands(self, walk: Walk) -> Self {
        self.walks(walk, &walk.tcp().syn())
            .flow(&walk.known_as(), walk.backend, Place::Handshakes(State::Opening))
            .walks_back(walk, &walk.answer().syn().seq(5000).ack(1001))
            .flow(&walk.known_as(), walk.backend, Place::Handshakes(State::Answered))
            .walks(walk, &walk.tcp().seq(1001).ack(5001))
            .flow(&walk.known_as(), walk.backend, Place::Flows(State::Established))
    }
}

/// A connection's whole life.
fn life(case: Case, walk: Walk) -> Case {
    case.shakes_hands(walk)
        .walks(walk, &walk.tcp().seq(1001).ack(5001).payload(b"GET / HTTP/1.0\r\n\r\n"))
        .walks_back(walk, &walk.answer().seq(5001).ack(1019).payload(b"HTTP/1.0 200 OK\r\n\r\n."))
        .walks(walk, &walk.tcp().fin().seq(1019).ack(5020))
        .flow(&walk.known_as(), walk.backend, Place::Flows(State::ClientClosed))
        .walks_back(walk, &walk.answer().fin().seq(5020).ack(1020))
        .flow(&walk.known_as(), walk.backend, Place::Flows(State::Closed))
        .walks(walk, &walk.tcp().seq(1020).ack(5021))
}

pub(crate) fn pod_to_remote() -> Case {
    life(Case::new(node), POD_TO_REMOTE)
}

/// Never through the stack, which takes a packet from an address of its own that comes in for a forged one.
pub(crate) fn pod_to_local() -> Case {
    life(Case::new(node_with_local), POD_TO_REMOTE.to_local())
}

/// `--forwarding stack` does not hold for them, for the same reason.
pub(crate) fn forwarding_stack() -> Case {
    life(Case::new(node).config(|config| config.through_stack = 1), POD_TO_REMOTE)
}

/// A process of the holder: the answer comes to it by `lo`.
pub(crate) fn process_to_remote() -> Case {
    life(Case::new(node), POD_TO_REMOTE.of_process(PROCESS))
}

pub(crate) fn process_to_local() -> Case {
    life(Case::new(node_with_local), POD_TO_REMOTE.to_local().of_process(PROCESS))
}

/// One that uses the overlay address itself: it gets a port of ours nevertheless.
pub(crate) fn process_on_overlay() -> Case {
    life(Case::new(node), POD_TO_REMOTE.of_process(PROCESS_ON_OVERLAY))
}

/// A port that happens to be the client's own would not look like one that was given.
pub(crate) fn own_port_is_not_given() -> Case {
    let all = masquerade::FIRST_PORT..masquerade::FIRST_PORT + masquerade::PORTS;
    let (client, place) = all
        .map(|port| (OWN, port))
        .find_map(|client| Some((client, ports_of(client).take(8).position(|port| port == client.1)?)))
        .unwrap();
    let syn = Frame::tcp(client, SERVED).syn();
    let given = (OWN, ports_of(client).nth(place + 1).unwrap());
    let forward = with_ethernet(syn.clone().from(given).to(REMOTE).ttl(63), POD_TO_REMOTE.forward);
    Case::new(node)
        .then(move |lab| {
            for port in ports_of(client).take(place) {
                taken(lab, port, POD);
            }
        })
        .send(ingress(Device::Node, &syn).redirected(Reason::ForwardRedirect, forward))
}

/// On the uplink the address tells, since clients outside come in there too. The sieve, which knows 256 addresses as one, is
/// no more than a first look.
pub(crate) fn other_node() -> Case {
    let walk = POD_TO_REMOTE.of_other_node();
    let beside = Frame::tcp(NO_NODE, SERVED).syn();
    life(Case::new(node), walk).goes_to(&beside, REMOTE).flow(
        &beside,
        REMOTE,
        Place::Handshakes(State::Opening),
    )
}

/// A network, and what is just outside it.
pub(crate) fn network_behind_the_uplink() -> Case {
    let within = Walk {
        client: ([192, 0, 2, 127], 40_000),
        ways_in: (Device::Uplink, Device::Overlay),
        ..POD_TO_REMOTE
    };
    Case::new(|lab| {
        node(lab);
        lab.inside([192, 0, 2, 64], 26);
    })
    .walks(within, &within.tcp().syn())
    .goes_to(&Frame::tcp(([192, 0, 2, 128], 40_000), SERVED).syn(), REMOTE)
    .goes_to(&Frame::tcp(([192, 0, 2, 63], 40_000), SERVED).syn(), REMOTE)
}

/// A client outside in the middle of a connection that nobody knows: its answers from there would have the backend's address.
pub(crate) fn stray_to_backend_aside() -> Case {
    let stray = Frame::tcp(CLIENT, SERVED).seq(1001).ack(5001).payload(b"more");
    let refused = ingress(Device::Uplink, &stray).redirected(Reason::RejectCollision, stray.reset());
    Case::new(node_with_aside).send(refused)
}

/// Such a backend sees the Service's address, whoever the client is: its answers come back there.
pub(crate) fn backend_aside() -> Case {
    let beside = Walk { client: ([198, 51, 100, 8], 40_000), ..ASIDE };
    let pod =
        Walk { client: POD, ways_in: (Device::Pods, Device::Uplink), back: POD_TO_REMOTE.back, ..ASIDE };
    let case = [ASIDE, beside].into_iter().fold(Case::new(node_with_aside), life);
    life(case, pod)
}

pub(crate) fn udp() -> Case {
    let walk = POD_TO_REMOTE;
    let query = Frame::udp(POD, SERVED).payload(b"query");
    let answer = Frame::udp(REMOTE, walk.source(Protocol::UDP)).payload(b"answer");
    let known = query.clone().from((OWN, walk.port(Protocol::UDP)));
    Case::new(node)
        .walks(walk, &query)
        .flow(&known, REMOTE, Place::Handshakes(State::Opening))
        .walks_back(walk, &answer)
        .flow(&known, REMOTE, Place::Flows(State::Established))
        .walks(walk, &query)
        // RFC 768: none stays none.
        .walks(walk, &query.without_checksum())
        .walks_back(walk, &answer.without_checksum())
}

/// The transport header is further behind.
pub(crate) fn ip_options() -> Case {
    let (walk, options) = (POD_TO_REMOTE, [1; 8]);
    Case::new(node)
        .walks(walk, &walk.tcp().syn().ip_options(&options))
        .walks_back(walk, &walk.answer().syn().seq(5000).ack(1001).ip_options(&options))
        .walks(walk, &walk.tcp().seq(1001).ack(5001).ip_options(&options))
        .flow(&walk.known_as(), REMOTE, Place::Flows(State::Established))
}

/// What the kernel does not know of the next hop is not made up: it will write the whole header itself.
pub(crate) fn unknown_neighbours() -> Case {
    let walk = Walk { forward: None, back: None, ..POD_TO_REMOTE };
    Case::new(|lab| {
        node(lab);
        sh("ip neighbour del 10.40.0.2 dev weave; ip neighbour del 10.32.0.5 dev weave");
    })
    .shakes_hands(walk)
}

/// 127/8 never leaves a node: whoever connects from there means the node itself.
pub(crate) fn loopback_is_left_alone() -> Case {
    let from = |client: [u8; 4]| Frame::tcp((client, 40_000), SERVED);
    let query = Frame::udp(([127, 0, 0, 53], 40_000), SERVED);
    Case::new(node)
        .send(ingress(Device::Node, from([127, 0, 0, 1]).syn()).passes(Reason::PassLoopback))
        .send(ingress(Device::Node, from([127, 255, 255, 254]).ack(1)).passes(Reason::PassLoopback))
        .send(ingress(Device::Node, query).passes(Reason::PassLoopback))
        // Forged, and the stack's to drop.
        .send(ingress(Device::Uplink, from([127, 0, 0, 1]).syn()).passes(Reason::PassLoopback))
        .send(ingress(Device::Node, from([127, 0, 0, 1]).to((SERVED.0, 9)).syn()).passes(Reason::PassForeign))
}

/// One port of the client's, two services: two connections, each with a port of its own.
pub(crate) fn one_port_two_services() -> Case {
    let (walk, other) = (POD_TO_REMOTE, Frame::tcp(POD, SERVED_SAME_PORT).syn());
    let source = (OWN, port_of(POD, SERVED_SAME_PORT, Protocol::TCP));
    let forward = with_ethernet(other.clone().from(source).to(REMOTE_SAME_PORT).ttl(63), walk.forward);
    let answer = Frame::tcp(REMOTE_SAME_PORT, source).syn().ack(1001);
    let back = with_ethernet(answer.clone().from(SERVED_SAME_PORT).to(POD).ttl(63), walk.back);
    Case::new(node)
        .shakes_hands(walk)
        .send(ingress(Device::Pods, &other).redirected(Reason::ForwardRedirect, forward))
        .send(ingress(Device::Overlay, &answer).redirected(Reason::ReplyRedirect, back))
        .walks(walk, &walk.tcp().seq(1001).ack(5001).payload(b"still the first one's"))
        .then(|lab| assert_eq!(lab.maps.masquerades.list().unwrap().len(), 2))
}

/// The next one is taken, whether its owner's connection is alive or not: that is the sweep's to find out.
pub(crate) fn port_of_another() -> Case {
    let syn = POD_TO_REMOTE.tcp().syn();
    let second = (OWN, ports_of(POD).nth(1).unwrap());
    let forward = with_ethernet(syn.clone().from(second).to(REMOTE).ttl(63), POD_TO_REMOTE.forward);
    let data = POD_TO_REMOTE.tcp().seq(1001).ack(5001);
    let next = with_ethernet(data.clone().from(second).to(REMOTE).ttl(63), POD_TO_REMOTE.forward);
    Case::new(node)
        .then(|lab| taken(lab, port_of(POD, SERVED, Protocol::TCP), OTHER_NODE))
        .send(ingress(Device::Pods, &syn).redirected(Reason::ForwardRedirect, forward.clone()))
        // It keeps it.
        .send(ingress(Device::Pods, &syn).redirected(Reason::ForwardRedirect, forward))
        .send(ingress(Device::Pods, &data).redirected(Reason::ForwardRedirect, next))
}

/// Every port that is tried has an owner, and those that are looked at have connections.
fn exhausted(lab: &mut Lab) {
    node(lab);
    for port in ports_of(POD) {
        taken(lab, port, OTHER_NODE);
        connected(lab, port, State::Established);
    }
}

pub(crate) fn no_port() -> Case {
    let (syn, query) = (POD_TO_REMOTE.tcp().syn(), Frame::udp(POD, SERVED).payload(b"query"));
    Case::new(exhausted)
        .send(ingress(Device::Pods, &syn).marked(0x0000_4abc).redirected(Reason::RejectNoPort, syn.reset()))
        .then(|lab| assert!(lab.maps.masquerades.list().unwrap().is_empty()))
        // Other protocols have ports of their own.
        .walks(POD_TO_REMOTE, &query)
}

/// The third of them is over, so its port is free for whoever needs it; the fifth is not looked at.
pub(crate) fn port_of_what_is_over() -> Case {
    let syn = POD_TO_REMOTE.tcp().syn();
    let third = (OWN, ports_of(POD).nth(2).unwrap());
    let forward = with_ethernet(syn.clone().from(third).to(REMOTE).ttl(63), POD_TO_REMOTE.forward);
    let over = |place: usize, state: State| {
        move |lab: &mut Lab| connected(lab, ports_of(POD).nth(place).unwrap(), state)
    };
    Case::new(exhausted)
        .then(over(4, State::Closed))
        .send(ingress(Device::Pods, &syn).redirected(Reason::RejectNoPort, syn.reset()))
        .then(over(2, State::Reset))
        .send(ingress(Device::Pods, &syn).redirected(Reason::ForwardRedirect, forward))
}

/// No room in the tables of ports, whose limit is fixed: not among the cases, since each of those is run twice.
#[test]
fn table_of_ports_is_full() {
    let other = POD_TO_REMOTE.from((POD.0, 40_001));
    let case = Case::new(|lab| {
        node(lab);
        let limit = lab.maps.masquerades.max_entries().unwrap();
        for number in 0..limit {
            let client = (u32::from_be_bytes([10, 33, 0, 0]) + number).to_be_bytes();
            let port = masquerade::Masquerade::new(Port::new(1));
            lab.maps.masquerades.insert(&key((client, 1), SERVED, Protocol::TCP), &port).unwrap();
        }
    })
    .send(
        ingress(Device::Pods, other.tcp().syn()).redirected(Reason::RejectNoPort, other.tcp().syn().reset()),
    )
    .then(|lab| assert!(lab.maps.masqueraded.list().unwrap().is_empty(), "a port without an owner"));
    crate::case::run("table_of_ports_is_full", &case);
}

/// The middle of a connection that began through another holder: the port that it had there cannot be guessed.
pub(crate) fn unknown_source() -> Case {
    let data = POD_TO_REMOTE.tcp().seq(1001).ack(5001).payload(b"more");
    Case::new(node)
        .send(ingress(Device::Pods, &data).redirected(Reason::RejectUnknownSource, data.reset()))
        .send(ingress(Device::Pods, POD_TO_REMOTE.tcp().rst()).dropped(Reason::RejectUnknownSource))
        .then(|lab| assert!(lab.maps.masquerades.list().unwrap().is_empty()))
        .shakes_hands(POD_TO_REMOTE)
        .walks(POD_TO_REMOTE, &data)
}

/// The holder's own connection to a pod, from a served port: its packets are the holder's.
pub(crate) fn own_socket() -> Case {
    let keep = RefCell::new(None);
    let peer: SocketAddr = (OWN, 7000).into();
    let from_peer = Frame::tcp((OWN, 7000), SERVED).ack(5001).payload(b"for the node");
    let from_other = Frame::tcp((OWN, 7001), SERVED).ack(5001);
    Case::new(node)
        .then(move |_| {
            let listener = TcpListener::bind(peer).unwrap();
            let stream: TcpStream = super::foreign::connect_from(SERVED, peer);
            keep.replace(Some((listener, stream)));
        })
        .send(ingress(Device::Pods, &from_peer).passes(Reason::PassOwnSocket))
        .send(ingress(Device::Node, &from_peer).passes(Reason::PassOwnSocket))
        .send(ingress(Device::Pods, &from_other).redirected(Reason::RejectUnknownSource, from_other.reset()))
}

pub(crate) fn syn_ack() -> Case {
    Case::new(node).send(ingress(Device::Pods, POD_TO_REMOTE.tcp().syn().ack(1)).passes(Reason::PassSynAck))
}

/// `sessionAffinity: ClientIP` is by the client's own address: by the overlay address all would get one backend.
pub(crate) fn affinity() -> Case {
    fn chosen(lab: &mut Lab, clients: impl Iterator<Item = End>) -> BTreeSet<u32> {
        clients
            .map(|client| {
                let syn = Frame::tcp(client, SERVED).syn();
                let meta = Meta { interface: Device::Pods.index(), ..Meta::default() };
                lab.run(Hook::Ingress, &syn.bytes(), meta);
                let port = lab.maps.masquerades.get(&syn.key()).unwrap().unwrap().port;
                let known = key((OWN, port.number()), SERVED, Protocol::TCP);
                lab.maps.handshakes.get(&known).unwrap().unwrap().backend
            })
            .collect()
    }
    let served = ServiceKey::new(Ipv4::new(SERVED.0), Port::new(SERVED.1), Protocol::TCP);
    Case::new(move |lab| {
        node(lab);
        lab.serve(SERVED, Protocol::TCP, TCP_80, &[Slot::remote(1, REMOTE), Slot::remote(5, REMOTE_2)]);
        lab.maps.services.insert(&served, &Service::new(TCP_80, true)).unwrap();
    })
    .then(|lab| {
        assert_eq!(chosen(lab, (0..32).map(|n| (POD.0, 30_000 + n))).len(), 1, "one client");
        assert_eq!(chosen(lab, (0..32).map(|n| ([10, 32, 1, n], 30_000))).len(), 2, "many clients");
    })
}

/// Somebody else owns the port by now: the client begins anew, and no answer goes to either by mistake.
pub(crate) fn owner_has_changed() -> Case {
    let walk = POD_TO_REMOTE;
    let second = (OWN, ports_of(POD).nth(1).unwrap());
    let forward = with_ethernet(walk.tcp().syn().from(second).to(REMOTE).ttl(63), walk.forward);
    let data = walk.tcp().seq(1001).ack(5001).payload(b"more");
    let answer = walk.answer().seq(5001).ack(1019).payload(b"answer");
    Case::new(node)
        .shakes_hands(walk)
        .then(move |lab| forget_owner(lab, walk))
        .send(ingress(Device::Overlay, &answer).dropped(Reason::DropReplyUnknown))
        .send(ingress(Device::Pods, &data).redirected(Reason::RejectUnknownSource, data.reset()))
        .then(move |lab| taken(lab, walk.port(Protocol::TCP), OTHER_NODE))
        .send(ingress(Device::Pods, walk.tcp().syn()).redirected(Reason::ForwardRedirect, forward))
}

/// Before the agent knows the overlay.
pub(crate) fn no_overlay_address() -> Case {
    Case::new(remote)
        .send(ingress(Device::Pods, POD_TO_REMOTE.tcp().syn()).dropped(Reason::DropNoOverlay))
        .send(ingress(Device::Pods, Frame::udp(POD, SERVED)).dropped(Reason::DropNoOverlay))
        .then(node)
        .shakes_hands(POD_TO_REMOTE)
}

/// The answer is for who has asked, in its own terms.
pub(crate) fn refused() -> Case {
    let (syn, query) = (POD_TO_REMOTE.tcp().syn(), Frame::udp(POD, SERVED).payload(b"query"));
    Case::new(|lab| {
        node(lab);
        lab.serve(SERVED, Protocol::TCP, TCP_80, &[]);
        lab.serve(SERVED, Protocol::UDP, UDP_80, &[]);
    })
    .send(
        ingress(Device::Pods, &syn)
            .redirected(Reason::RejectNoEndpoint, syn.reset())
            .counts(TCP_80, |stats| stats.refused = 1),
    )
    .send(
        ingress(Device::Pods, &query)
            .redirected(Reason::RejectNoEndpoint, query.port_unreachable())
            .counts(UDP_80, |stats| stats.refused = 1),
    )
}

/// The pod's own MTU is larger than the way to the backend.
pub(crate) fn too_big() -> Case {
    let walk = POD_TO_REMOTE;
    let big = walk.tcp().seq(1001).ack(5001).payload(&[0x2a; 1400]).dont_fragment();
    let datagram = Frame::udp(POD, SERVED).payload(&[0x2a; 1400]).dont_fragment();
    Case::new(node)
        .shakes_hands(walk)
        .walks(walk, &Frame::udp(POD, SERVED))
        .then(|_| sh("ip link set weave mtu 1376"))
        .send(
            ingress(Device::Pods, &big)
                .redirected(Reason::RejectTooBig, big.fragmentation_needed(told(1376)))
                .counts(TCP_80, |stats| stats.refused = 1),
        )
        .send(
            ingress(Device::Pods, &datagram)
                .redirected(Reason::RejectTooBig, datagram.fragmentation_needed(told(1376))),
        )
}

/// An established connection of a client inside that is reset when its backend goes: the reset is the client's.
pub(crate) fn backend_gone() -> Case {
    let data = POD_TO_REMOTE.tcp().seq(1001).ack(5001).payload(b"more");
    Case::new(node)
        .shakes_hands(POD_TO_REMOTE)
        .then(|lab| {
            lab.set_backend(TCP_80, &Slot::remote(1, REMOTE).state(BackendState::Absent));
        })
        .send(ingress(Device::Pods, &data).redirected(Reason::RejectBackendGone, data.reset()))
}
