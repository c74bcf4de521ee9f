//! Half a million random and mutated packets through both programs, with maps that make every path possible.

use crate::frame::{End, Frame};
use crate::lab::{
    CLIENT, Device, HOLDER, HOLDER_2, Hook, LOCAL, Lab, OWN, REMOTE, REMOTE_2, SERVED, SERVED_SAME_PORT,
    Slot, diff,
};
use etherparse::{Icmpv4Type, IpNumber, Ipv4HeaderSlice, TcpHeader, UdpHeader};
use fastrand::Rng;
use lb_agent::datapath::load::Limits;
use lb_agent::datapath::testrun::Meta;
use lb_common::addr::Protocol;
use lb_common::backend::BackendState;
use lb_common::config::Config;
use lb_common::holder::EndpointHolders;
use lb_common::reason::{Kind, Reason};
use lb_common::{maglev, masquerade};

const PACKETS: u32 = 500_000;
/// Counters are compared after so many packets: narrow enough to find the culprit, wide enough to be quick.
const BATCH: u32 = 50;
/// The same packets in every run, unless the environment has another seed.
const SEED: u64 = 0x5eed_2026;

const TC_ACT_UNSPEC: i32 = -1;
const TC_ACT_SHOT: i32 = 2;
const TC_ACT_REDIRECT: i32 = 7;

/// Served ports: without an endpoint, without a table, and with one backend that is there and one that is not.
const NOBODY: End = ([192, 0, 2, 10], 81);
const NO_RING: End = ([192, 0, 2, 10], 82);
const MIXED: End = ([192, 0, 2, 10], 83);

/// Clients inside the cluster: a pod, this node by both of its addresses, another node, and one that is left alone.
const INSIDE: [End; 5] = [
    ([10, 32, 0, 5], 40_000),
    (SERVED.0, 40_000),
    (OWN, 40_000),
    ([192, 0, 2, 2], 40_000),
    ([127, 0, 0, 1], 40_000),
];

#[test]
fn half_a_million_packets() {
    let seed = std::env::var("REWEAVE_FUZZ_SEED").map_or(SEED, |seed| seed.parse().unwrap());
    println!("REWEAVE_FUZZ_SEED={seed}");
    let mut random = Rng::with_seed(seed);
    // Small tables, so that they are full for much of the time.
    let mut lab = Lab::new(
        &Config::DEFAULT,
        &Limits { flows: 60, handshakes: 64, services: 16, backends: 64, endpoints: 64 },
    );
    fill(&mut lab);
    let devices = [Device::Uplink, Device::Overlay, Device::Pods, Device::Node, Device::Stranger]
        .map(|it| (it, it.index()));
    let mut counted = Tally::of_counters(&lab);
    for batch in 0..PACKETS / BATCH {
        let mut seen = Seen::default();
        for _ in 0..BATCH {
            let (device, interface) = devices[random.choice([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4]).unwrap()];
            let hook = if random.u8(..4) == 0 { Hook::Egress } else { Hook::Ingress };
            let bytes = packet(&mut random);
            let meta = Meta { interface, mark: mark(&mut random), gso_size: gso_size(&mut random) };
            let (verdict, after, mark_after) = lab.run(hook, &bytes, meta);
            if let Err(wrong) = judge(&bytes, after, verdict, mark_after, &mut seen) {
                let both = diff(&bytes, after);
                panic!(
                    "batch {batch}: {hook:?} on {device:?} with {meta:?}: {wrong} (- before, + after)\n{both}"
                );
            }
        }
        let now = Tally::of_counters(&lab);
        if let Err(wrong) = seen.agrees_with(&now.since(&counted)) {
            panic!("batch {batch}: {wrong}");
        }
        counted = now;
    }
    // A fuzz that reaches little proves little.
    let reached = lab.maps.outcomes().unwrap();
    for (reason, outcome) in &reached {
        println!("{:24}{:8}", reason.label(), outcome.packets);
    }
    let rest: Vec<_> = Reason::ALL
        .iter()
        // Test-run cannot make the kernel refuse a change; the node has no sockets and nothing unreachable.
        .filter(|it| !matches!(it, Reason::DropRewrite | Reason::PassOwnSocket | Reason::DropNoRoute))
        // It knows its overlay, and there are few clients for its ports.
        .filter(|it| !matches!(it, Reason::DropNoOverlay | Reason::RejectNoPort))
        .filter(|it| !reached.contains_key(it))
        .collect();
    assert!(rest.is_empty(), "never reached: {rest:?}");
}

fn fill(lab: &mut Lab) {
    lab.serve(SERVED, Protocol::TCP, 0, &[Slot::remote(1, REMOTE), Slot::local(2, LOCAL)]);
    lab.serve(SERVED, Protocol::UDP, 1, &[Slot::remote(3, REMOTE), Slot::local(4, LOCAL)]);
    // The same endpoint again, so that tuples collide.
    lab.serve(SERVED_SAME_PORT, Protocol::TCP, 2, &[Slot::remote(5, REMOTE)]);
    lab.serve(SERVED_SAME_PORT, Protocol::UDP, 3, &[Slot::remote(6, REMOTE)]);
    for (service, protocol) in [(4, Protocol::TCP), (5, Protocol::UDP)] {
        lab.serve(NOBODY, protocol, service, &[]);
        lab.announce(NO_RING, protocol, service + 2);
    }
    let gone = Slot::remote(7, REMOTE_2).state(BackendState::Absent);
    lab.serve(MIXED, Protocol::TCP, 8, &[gone, Slot::remote(8, REMOTE_2)]);
    lab.own();
    lab.inside([192, 0, 2, 2], 32);
    lab.holder(HOLDER);
    lab.holder(HOLDER_2);
    for protocol in [Protocol::TCP, Protocol::UDP] {
        lab.endpoint(LOCAL, protocol, &[HOLDER.1, HOLDER_2.1, EndpointHolders::SELF]);
        lab.endpoint(REMOTE, protocol, &[EndpointHolders::SELF]);
    }
    // An established flow whose backend is gone.
    let flow = lb_common::flow::Flow::new(
        8,
        7,
        1,
        lb_common::flow::Path::Redirect,
        lb_common::flow::State::Established,
        crate::lab::now(),
    );
    for port in 0..32 {
        let key = Frame::tcp((CLIENT.0, CLIENT.1 + port), MIXED).key();
        lab.maps.flows.insert(&key, &flow).unwrap();
    }
    crate::lab::sh(
        "
        ip link set weave mtu 1376; ip link set eth0 mtu 1400
        ip neighbour add 10.32.0.5 lladdr 02:00:00:00:00:05 dev weave nud permanent
        ip neighbour add 10.40.0.2 lladdr 02:00:00:00:00:42 dev weave nud permanent
    ",
    );
}

fn mark(random: &mut Rng) -> u32 {
    let other = random.u32(..256);
    let ours = random.choice([0, 0, 0, 0, 17, 251, 252, other]).unwrap();
    ours << 24 | random.u32(..1 << 24)
}

fn gso_size(random: &mut Rng) -> u32 {
    if random.u8(..20) == 0 { random.u32(1..2000) } else { 0 }
}

/// A packet of the connections that exist or could, often a little wrong, sometimes nothing but noise.
fn packet(random: &mut Rng) -> Vec<u8> {
    let mut bytes = match random.u8(..100) {
        0..3 => noise(random),
        _ => frame(random).bytes(),
    };
    if random.u8(..3) == 0 {
        mutate(random, &mut bytes);
    }
    // Test-run refuses what is shorter than the network header that the Ethernet type announces.
    let shortest = match bytes.get(12..14) {
        Some([0x86, 0xdd]) => 54,
        _ => 34,
    };
    if bytes.len() < shortest {
        bytes.resize(shortest, 0);
    }
    bytes
}

fn noise(random: &mut Rng) -> Vec<u8> {
    let length = random.usize(34..300);
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(length).collect();
    if random.bool() {
        bytes[12..15].copy_from_slice(&[8, 0, 0x45]);
    }
    bytes
}

fn mutate(random: &mut Rng, bytes: &mut Vec<u8>) {
    match random.u8(..4) {
        0 => bytes.truncate(random.usize(1..=bytes.len())),
        1 => bytes.resize(bytes.len() + random.usize(..30), random.u8(..)),
        _ => {
            // Headers are where it hurts.
            for _ in 0..random.u8(1..4) {
                let at = random.usize(..bytes.len().min(60));
                bytes[at] = random.u8(..);
            }
        }
    }
}

fn frame(random: &mut Rng) -> Frame {
    let mut client = (CLIENT.0, CLIENT.1 + random.u16(..32));
    let mut known = client;
    let served = random.choice([SERVED, SERVED, SERVED_SAME_PORT, NOBODY, NO_RING, MIXED]).unwrap();
    let backend = random.choice([REMOTE, REMOTE_2, LOCAL]).unwrap();
    let other = ([random.u8(..), random.u8(..), random.u8(..), random.u8(..)], random.u16(..));
    if random.u8(..4) == 0 {
        client = random.choice(INSIDE).unwrap();
        client.1 += random.u16(..8);
        known = (OWN, port_of(client, served));
    }
    let (from, to) = match random.u8(..10) {
        0..4 => (client, served),
        4..7 => (backend, known),
        7..9 => (known, backend),
        _ => (other, random.choice([served, backend, client]).unwrap()),
    };
    let mac = random.choice([HOLDER.0, HOLDER_2.0, [2, 0, 0, 0, 0, 1]]).unwrap();
    if random.u8(..16) == 0 {
        let (from, to) = random.choice([(served, client), (known, backend)]).unwrap();
        return error(random, from, to).source_mac(mac).ttl(random.choice([64, 64, 2, 1]).unwrap());
    }
    let frame = match random.u8(..20) {
        // ICMP half the time.
        0 => Frame::protocol(if random.bool() { 1 } else { random.u8(..) }, from.0, to.0),
        1..8 => {
            let frame = Frame::udp(from, to);
            if random.u8(..4) == 0 { frame.without_checksum() } else { frame }
        }
        _ => tcp(random, from, to),
    };
    let frame = frame.source_mac(mac).id(random.u16(..));
    dress(random, frame)
}

/// The port that a client inside is given first; of TCP, which most packets are.
fn port_of(client: End, served: End) -> u16 {
    masquerade::first_port(maglev::hash(&Frame::tcp(client, served).key()))
}

/// An ICMP error about a packet between these.
fn error(random: &mut Rng, from: End, to: End) -> Frame {
    let quoted = if random.bool() { Frame::udp(from, to) } else { Frame::tcp(from, to).ack(5001) };
    let length = if matches!(quoted.key().protocol, Protocol::UDP) { 8 } else { random.usize(8..=20) };
    let (type_u8, code_u8) = (random.choice([3, 11, 12, 8]).unwrap(), random.u8(..6));
    let kind = Icmpv4Type::Unknown { type_u8, code_u8, bytes5to8: [0, 0, 5, 120] };
    quoted.error_from(random.choice([to.0, [192, 0, 2, 1], [10, 40, 0, 254]]).unwrap(), kind, length)
}

/// Sequence numbers come from few, so that handshakes are completed.
fn tcp(random: &mut Rng, from: End, to: End) -> Frame {
    let frame = Frame::tcp(from, to).seq(random.choice([1000, 5000, u32::MAX]).unwrap());
    let number = random.choice([1001, 5001, 0, 7]).unwrap();
    match random.u8(..12) {
        0..3 => frame.syn(),
        3..5 => frame.syn().ack(number),
        5..9 => frame.ack(number),
        9 => frame.fin().ack(number),
        10 => frame.rst(),
        _ => frame.rst().ack(number).fin(),
    }
}

fn dress(random: &mut Rng, mut frame: Frame) -> Frame {
    frame = frame.ttl(random.choice([64, 64, 64, 64, 255, 2, 1, 0]).unwrap());
    let length = random.choice([0, 0, 0, 1, 2, 9, 100, 1337, 1371, 1400]).unwrap();
    let mut payload: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(length).collect();
    if let Some(first) = payload.first_mut().filter(|_| random.u8(..8) == 0) {
        // Of ICMP, a redirect.
        *first = 5;
    }
    frame = frame.payload(&payload);
    if random.bool() {
        frame = frame.dont_fragment();
    }
    match random.u8(..12) {
        0 => frame.ip_options(&[1; 40][..4 * random.usize(1..=10)]),
        // Few numbers, so that some follow one another.
        1 if length.is_multiple_of(8) => frame.id(random.u16(..4)).fragment(random.u16(..3), random.bool()),
        _ => frame,
    }
}

/// Whether the packet's checksums are right: `None` where there is nothing that could be.
fn checksums_are_right(frame: &[u8]) -> Option<bool> {
    let packet = frame.get(14..)?;
    let ip = Ipv4HeaderSlice::from_slice(packet).ok()?.to_header();
    if frame[12..14] != [8, 0] {
        return None;
    }
    // The transport's is over all fragments.
    if ip.is_fragmenting_payload() {
        return Some(ip.header_checksum == ip.calc_header_checksum());
    }
    let payload = packet.get(ip.header_len()..usize::from(ip.total_len))?;
    let transport = match ip.protocol {
        IpNumber::TCP => {
            let (header, rest) = TcpHeader::from_slice(payload).ok()?;
            header.checksum == header.calc_checksum_ipv4(&ip, rest).ok()?
        }
        IpNumber::UDP => {
            let (header, rest) = UdpHeader::from_slice(payload).ok()?;
            // A length of its own that disagrees is summed up differently by everybody.
            if usize::from(header.length) != payload.len() {
                return None;
            }
            let due =
                UdpHeader::with_ipv4_checksum(header.source_port, header.destination_port, &ip, rest).ok()?;
            header.checksum == 0 || header.checksum == due.checksum
        }
        IpNumber::ICMP => {
            let (header, rest) = etherparse::Icmpv4Header::from_slice(payload).ok()?;
            header.checksum == header.icmp_type.calc_checksum(rest)
        }
        _ => return None,
    };
    Some(transport && ip.header_checksum == ip.calc_header_checksum())
}

/// What one packet may have become. An error says what is wrong.
fn judge(before: &[u8], after: &[u8], verdict: i32, mark: u32, seen: &mut Seen) -> Result<(), String> {
    let same = before == after;
    match verdict {
        TC_ACT_UNSPEC if same => seen.untouched += 1,
        TC_ACT_UNSPEC => seen.to_stack += 1,
        TC_ACT_REDIRECT => seen.redirected += 1,
        TC_ACT_SHOT => seen.dropped += 1,
        other => return Err(format!("verdict {other}")),
    }
    if verdict == TC_ACT_SHOT || (verdict == TC_ACT_UNSPEC && same) {
        return Ok(());
    }
    // To `lo`, for the stack to forward it, or finished.
    let expected = if mark >> 24 == 251 && after[..6] == [0; 6] { 251 } else { 252 };
    if verdict == TC_ACT_REDIRECT && mark >> 24 != expected {
        return Err(format!("redirected with mark {mark:#x}"));
    }
    let swapped = after.get(26..34) == Some(&[&before[30..34], &before[26..30]].concat());
    let answer = verdict == TC_ACT_REDIRECT && swapped;
    if (answer || checksums_are_right(before) == Some(true)) && checksums_are_right(after) != Some(true) {
        return Err("a wrong checksum".to_owned());
    }
    if !answer && !only_translated(before, after) {
        return Err("bytes were changed that are not ours to change".to_owned());
    }
    Ok(())
}

/// Whether nothing but addresses, ports, time to live and checksums differ; of a packet both of whose ends have changed, the
/// Ethernet addresses too.
fn only_translated(before: &[u8], after: &[u8]) -> bool {
    let differs = |part: std::ops::Range<usize>| before.get(part.clone()) != after.get(part);
    let l4 = 14 + usize::from(before[14] & 0xf) * 4;
    if before[23] == 1 {
        // Behind the error's own checksum, the quoted packet's header begins at 42 and its ports at 62.
        let is_ethernet = |at: usize| {
            at < 12 && (differs(54..58) || differs(62..64)) && (differs(58..62) || differs(64..66))
        };
        let ours = [22..23, 24..34, 36..38, 52..66, 68..70, 78..80];
        return before.len() == after.len()
            && (0..before.len()).all(|at| {
                before[at] == after[at] || is_ethernet(at) || ours.iter().any(|part| part.contains(&at))
            });
    }
    if before[20] & 0x1f != 0 || before[21] != 0 {
        // No ports, no other checksum.
        return before.len() == after.len()
            && (0..before.len()).all(|at| before[at] == after[at] || at == 22 || (24..34).contains(&at));
    }
    let checksum = l4 + if before[23] == 17 { 6 } else { 16 };
    let is_ethernet = |at: usize| {
        let (source, destination) = (differs(26..30), differs(30..34));
        at < 12 && (source || differs(l4..l4 + 2)) && (destination || differs(l4 + 2..l4 + 4))
    };
    let ours = |at: usize| {
        at == 22
            || is_ethernet(at)
            || (24..34).contains(&at)
            || (l4..l4 + 4).contains(&at)
            || (checksum..checksum + 2).contains(&at)
    };
    before.len() == after.len() && (0..before.len()).all(|at| before[at] == after[at] || ours(at))
}

/// What came out of a batch.
#[derive(Debug, Default)]
struct Seen {
    untouched: u64,
    to_stack: u64,
    redirected: u64,
    dropped: u64,
}

/// What was counted, by what can be seen of it from outside.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    pass: u64,
    recognised: u64,
    to_stack: u64,
    redirected: u64,
    /// To the stack or redirected.
    either: u64,
    reject: u64,
    drop: u64,
}

impl Tally {
    fn of_counters(lab: &Lab) -> Self {
        let mut tally = Self::default();
        for (reason, outcome) in lab.maps.outcomes().unwrap() {
            let field = match reason {
                Reason::HolderForward | Reason::HolderReply => &mut tally.recognised,
                Reason::ForwardStack | Reason::ReplyTranslated => &mut tally.to_stack,
                Reason::ForwardRedirect | Reason::ReplyRedirect => &mut tally.redirected,
                Reason::ForwardIcmpError | Reason::ReplyIcmpError => &mut tally.either,
                other => match other.kind() {
                    Kind::Pass => &mut tally.pass,
                    Kind::Reject => &mut tally.reject,
                    Kind::Drop => &mut tally.drop,
                    Kind::Forward => panic!("{other:?} is new here"),
                },
            };
            *field += outcome.packets;
        }
        tally
    }

    fn since(&self, earlier: &Self) -> Self {
        Self {
            pass: self.pass - earlier.pass,
            recognised: self.recognised - earlier.recognised,
            to_stack: self.to_stack - earlier.to_stack,
            redirected: self.redirected - earlier.redirected,
            either: self.either - earlier.either,
            reject: self.reject - earlier.reject,
            drop: self.drop - earlier.drop,
        }
    }
}

impl Seen {
    /// Every packet adds to exactly one counter, of the right kind: what passed is untouched.
    fn agrees_with(&self, counted: &Tally) -> Result<(), String> {
        // A refused reset is dropped without an answer, so the two are told apart by their sum only.
        let agrees = self.untouched == counted.pass + counted.recognised
            && (counted.to_stack..=counted.to_stack + counted.either).contains(&self.to_stack)
            && self.redirected >= counted.redirected
            && self.dropped >= counted.drop
            && self.to_stack + self.redirected + self.dropped
                == counted.to_stack + counted.redirected + counted.either + counted.reject + counted.drop;
        if agrees { Ok(()) } else { Err(format!("{self:?}, but counted {counted:?}")) }
    }
}
