//! What is measured: filled maps, and the packets that are sent through them.

use crate::frame::{End, Frame};
use crate::lab::{CLIENT, Device, HOLDER, LOCAL, Lab, REMOTE, SERVED, Slot, now};
use fastrand::Rng;
use lb_agent::datapath::load::Limits;
use lb_agent::datapath::testrun::Meta;
use lb_common::addr::Protocol;
use lb_common::config::Config;
use lb_common::flow::{Flow, FlowKey, Path, Reply, State};
use lb_common::holder::EndpointHolders;
use lb_common::limits;

const TC_ACT_UNSPEC: i32 = -1;
const TC_ACT_REDIRECT: i32 = 7;

const INGRESS: &str = "reweave_ingress";
const SERVICES: u32 = 10_000;
const FLOWS: u32 = 1_000_000;
/// The same packets in every run.
const SEED: u64 = 1;

/// One set of maps, and what is measured with it.
pub(crate) struct Scene {
    pub(crate) lab: Lab,
    pub(crate) measurements: Vec<(&'static str, Packets)>,
}

/// The packets of one measurement, and the path that they must take.
pub(crate) struct Packets {
    pub(crate) program: &'static str,
    pub(crate) verdict: i32,
    pub(crate) source: Source,
}

/// Packets without end, each fresh.
pub(crate) struct Source {
    bytes: Vec<u8>,
    meta: Meta,
    vary: Vary,
    random: Rng,
    count: u32,
}

/// What differs from packet to packet. Checksums stay as they are: nothing on the way depends on whether they are right.
#[derive(Clone, Copy)]
enum Vary {
    Nothing,
    /// A new client port and address in each.
    Client,
    /// One of this many known clients, at random.
    KnownClient(u32),
    /// The same, seen from the backend.
    KnownClientAsDestination(u32),
    /// One of this many served ports, at random.
    Service(u32),
}

impl Source {
    fn new(frame: &Frame, interface: u32, vary: Vary) -> Self {
        let meta = Meta { interface, ..Meta::default() };
        Self { bytes: frame.bytes(), meta, vary, random: Rng::with_seed(SEED), count: 0 }
    }

    pub(crate) fn next(&mut self) -> (&[u8], Meta) {
        match self.vary {
            Vary::Nothing => {}
            Vary::Client => {
                self.count += 1;
                self.put(26, 34, client(self.count));
            }
            Vary::KnownClient(of) => {
                let one = client(self.random.u32(..of));
                self.put(26, 34, one);
            }
            Vary::KnownClientAsDestination(of) => {
                let one = client(self.random.u32(..of));
                self.put(30, 36, one);
            }
            Vary::Service(of) => {
                let one = served(self.random.u32(..of));
                self.put(30, 36, one);
            }
        }
        (&self.bytes, self.meta)
    }

    fn put(&mut self, address_at: usize, port_at: usize, (address, port): End) {
        self.bytes[address_at..address_at + 4].copy_from_slice(&address);
        self.bytes[port_at..port_at + 2].copy_from_slice(&port.to_be_bytes());
    }
}

/// The nth client: 32 ports of each address.
fn client(n: u32) -> End {
    let [_, a, b, c] = (n >> 5).to_be_bytes();
    ([100, 64 | a, b, c], 40_000 + (n & 31) as u16)
}

/// The nth served port: 2,000 of each address.
fn served(n: u32) -> End {
    ([192, 0, 2, 10 + (n / 2_000) as u8], 80 + (n % 2_000) as u16)
}

/// Every scene. The thread ends up in the last one's namespace; interface indices are the same in all.
pub(crate) fn all() -> Vec<Scene> {
    vec![one_of_each(), flood(), many_services(), many_flows()]
}

/// With room for every handshake of a run: a table that is full is another measurement.
fn limits() -> Limits {
    Limits { endpoints: 64, handshakes: 300_000, ..Limits::default() }
}

fn ingress(verdict: i32, source: Source) -> Packets {
    Packets { program: INGRESS, verdict, source }
}

/// One served port, one flow.
fn one_of_each() -> Scene {
    let mut lab = Lab::new(&Config::DEFAULT, &limits());
    for name in ["bench_empty", "bench_lookup"] {
        lab.load(name);
    }
    let (uplink, overlay, pods) = (Device::Uplink.index(), Device::Overlay.index(), Device::Pods.index());
    lab.serve(SERVED, Protocol::TCP, 0, &[Slot::remote(1, REMOTE)]);
    lab.endpoint(REMOTE, Protocol::TCP, &[EndpointHolders::SELF]);
    establish(&mut lab, [CLIENT], SERVED, 0);
    // As another node, for somebody else's forwards.
    lab.holder(HOLDER);
    lab.endpoint(LOCAL, Protocol::TCP, &[HOLDER.1]);
    let forward = Frame::tcp(CLIENT, LOCAL).ack(1).payload(b"data").source_mac(HOLDER.0);
    let answer = Frame::tcp(LOCAL, CLIENT).ack(1).payload(b"data");
    lab.maps.replies.insert(&answer.key(), &Reply::mark(HOLDER.1, State::Established, now())).unwrap();

    let request = Frame::tcp(CLIENT, SERVED).ack(1).payload(b"data");
    let response = Frame::tcp(REMOTE, CLIENT).ack(1).payload(b"data");
    let ssh = Frame::tcp(CLIENT, (SERVED.0, 22)).ack(1).payload(b"data");
    let between_pods = Frame::tcp(([10, 32, 0, 9], 50_000), ([10, 40, 0, 9], 80)).ack(1).payload(b"data");
    let same = |frame: &Frame, interface| Source::new(frame, interface, Vary::Nothing);
    let measurements = vec![
        ("empty", Packets { program: "bench_empty", verdict: TC_ACT_UNSPEC, source: same(&request, uplink) }),
        (
            "parse_and_one_lookup",
            Packets { program: "bench_lookup", verdict: TC_ACT_UNSPEC, source: same(&request, uplink) },
        ),
        ("established_in", ingress(TC_ACT_REDIRECT, same(&request, uplink))),
        ("established_out", ingress(TC_ACT_REDIRECT, same(&response, overlay))),
        ("new_connection", ingress(TC_ACT_REDIRECT, Source::new(&syn(), uplink, Vary::Client))),
        ("other_node_forward", ingress(TC_ACT_UNSPEC, same(&forward, overlay))),
        ("other_node_reply", ingress(TC_ACT_UNSPEC, same(&answer, pods))),
        ("foreign_uplink", ingress(TC_ACT_UNSPEC, same(&ssh, uplink))),
        ("foreign_pods", ingress(TC_ACT_UNSPEC, same(&between_pods, pods))),
    ];
    Scene { lab, measurements }
}

/// New connections without end: the handshake table is full, and every one evicts another.
fn flood() -> Scene {
    let mut lab = Lab::new(&Config::DEFAULT, &Limits { endpoints: 64, ..Limits::default() });
    let uplink = Device::Uplink.index();
    lab.serve(SERVED, Protocol::TCP, 0, &[Slot::remote(1, REMOTE)]);
    let mut source = Source::new(&syn(), uplink, Vary::Client);
    for _ in 0..limits::HANDSHAKES {
        let (bytes, meta) = source.next();
        lab.run_program(INGRESS, bytes, meta);
    }
    Scene { lab, measurements: vec![("new_connection_in_a_flood", ingress(TC_ACT_REDIRECT, source))] }
}

fn syn() -> Frame {
    Frame::tcp(CLIENT, SERVED).syn()
}

/// Ten thousand served ports, each with one flow of the same client.
fn many_services() -> Scene {
    let mut lab = Lab::new(&Config::DEFAULT, &limits());
    let uplink = Device::Uplink.index();
    for service in 0..SERVICES {
        lab.serve(served(service), Protocol::TCP, service, &[Slot::remote(service + 1, backend(service))]);
        let (flow, reply) = entries(CLIENT, served(service), backend(service), service, service + 1);
        lab.maps.flows.insert(&flow.0, &flow.1).unwrap();
        lab.maps.replies.insert(&reply.0, &reply.1).unwrap();
    }
    let request = Frame::tcp(CLIENT, SERVED).ack(1).payload(b"data");
    let ssh = Frame::tcp(CLIENT, (SERVED.0, 22)).ack(1).payload(b"data");
    let measurements = vec![
        (
            "established_in_10000_services",
            ingress(TC_ACT_REDIRECT, Source::new(&request, uplink, Vary::Nothing)),
        ),
        (
            "established_in_10000_services_at_random",
            ingress(TC_ACT_REDIRECT, Source::new(&request, uplink, Vary::Service(SERVICES))),
        ),
        (
            "new_connection_10000_services",
            ingress(TC_ACT_REDIRECT, Source::new(&syn(), uplink, Vary::Client)),
        ),
        ("foreign_uplink_10000_services", ingress(TC_ACT_UNSPEC, Source::new(&ssh, uplink, Vary::Nothing))),
    ];
    Scene { lab, measurements }
}

/// A million flows through one served port.
fn many_flows() -> Scene {
    let mut lab = Lab::new(&Config::DEFAULT, &limits());
    let (uplink, overlay) = (Device::Uplink.index(), Device::Overlay.index());
    lab.serve(SERVED, Protocol::TCP, 0, &[Slot::remote(1, REMOTE)]);
    establish(&mut lab, (0..FLOWS).map(client), SERVED, 0);
    let request = Frame::tcp(CLIENT, SERVED).ack(1).payload(b"data");
    let response = Frame::tcp(REMOTE, CLIENT).ack(1).payload(b"data");
    let measurements = vec![
        (
            "established_in_1000000_flows",
            ingress(TC_ACT_REDIRECT, Source::new(&request, uplink, Vary::KnownClient(FLOWS))),
        ),
        (
            "established_out_1000000_flows",
            ingress(TC_ACT_REDIRECT, Source::new(&response, overlay, Vary::KnownClientAsDestination(FLOWS))),
        ),
    ];
    Scene { lab, measurements }
}

/// The nth served port's backend.
fn backend(n: u32) -> End {
    let [_, _, b, c] = n.to_be_bytes();
    ([10, 40, b, c], 8080)
}

type Entries = ((FlowKey, Flow), (FlowKey, Reply));

fn entries(client: End, served: End, backend: End, service: u32, slot: u32) -> Entries {
    let key = Frame::tcp(client, served).key();
    let flow = Flow::new(service, slot, 1, Path::Redirect, State::Established, now());
    let reply_key = Frame::tcp(backend, client).key();
    let reply = Reply::translate(key.destination, key.destination_port, service, Path::Redirect, now());
    ((key, flow), (reply_key, reply))
}

/// Established flows of these clients to [`REMOTE`], slot 1.
fn establish(lab: &mut Lab, clients: impl IntoIterator<Item = End>, served: End, service: u32) {
    let (flows, replies): (Vec<_>, Vec<_>) =
        clients.into_iter().map(|client| entries(client, served, REMOTE, service, 1)).unzip();
    let (keys, values): (Vec<_>, Vec<_>) = flows.into_iter().unzip();
    lab.maps.flows.insert_all(&keys, &values).unwrap();
    let (keys, values): (Vec<_>, Vec<_>) = replies.into_iter().unzip();
    lab.maps.replies.insert_all(&keys, &values).unwrap();
}
