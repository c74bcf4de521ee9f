//! Packets that belong to nobody, by the million. Invariant 7; case C6.

use crate::clients::Idle;
use crate::world::{PATIENCE, WEB, World};
use anyhow::{Result, ensure};
use lb_common::reason::Kind;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::Range;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use testbed::cluster::Service;
use testbed::wait;

/// Established connections that must survive.
const IDLE: usize = 2_000;
/// Together a million SYNs: those that pods answer, and those that are dropped behind the last of our programs, since a
/// million answers would take minutes and try nothing new.
const ANSWERED: u32 = 100_000;
const UNANSWERED: u32 = 900_000;
const OTHERS: u32 = 50_000;

const DROPPED: &str = "SYNs without an answer";

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

#[derive(Clone, Copy)]
enum Packet {
    /// With these flags, and an acknowledgement number that nobody waits for.
    Tcp(u8),
    Udp,
}

#[test]
fn floods_evict_no_established_connection_and_fill_no_table() {
    let world = World::serving_alone(&["--timeout-closed=1", "--timeout-reset=1", "--period=1"]);
    let udp = SocketAddrV4::new(*WEB.ip(), 53);
    // Nobody listens there: what comes back is an ICMP error, never an answer.
    world.cluster().set_service(Service::new("silent", *udp.ip()).udp(udp.port(), 5_353)).unwrap();
    world.cluster().set_endpoints("silent", &[world.pods[1].endpoint(), world.pods[2].endpoint()]).unwrap();
    wait::until("both ports served", PATIENCE, || {
        ensure!(world.maps(1).services.all()?.len() == 2, "not yet");
        Ok(())
    })
    .unwrap();
    // Answers to nobody end here.
    world.testbed.router().ip("route add blackhole 100.64.0.0/10").unwrap();
    let mut idle = Idle::open(world.testbed.client(), IDLE);
    let flows = || world.maps(1).flows.list().unwrap().len();
    let entries = || {
        let replies: usize = (1..=3).map(|node| world.maps(node).replies.list().unwrap().len()).sum();
        (flows(), replies)
    };
    wait::until("nothing else in the table", PATIENCE, || {
        ensure!(flows() == IDLE, "{} flows", flows());
        Ok(())
    })
    .unwrap();
    let (flows_before, replies_before) = entries();
    let mut guessed = 0;
    for (what, packet, to, numbers) in [
        ("datagrams", Packet::Udp, udp, 0..OTHERS),
        ("SYNs", Packet::Tcp(SYN), WEB, 0..ANSWERED),
        // Of the handshakes that the last SYNs began, as if their senders had seen the answers.
        ("ACKs", Packet::Tcp(ACK), WEB, ANSWERED - OTHERS..ANSWERED),
        (DROPPED, Packet::Tcp(SYN), WEB, ANSWERED..ANSWERED + UNANSWERED),
    ] {
        let count = numbers.len() as u64;
        if what == DROPPED {
            drop_behind_tc(&world);
        }
        let (seen, entered) = (forwarded(&world), connections(&world));
        let started = std::time::Instant::now();
        world.testbed.client().enter(|| flood(packet, to, numbers)).unwrap();
        // Guessing an acknowledgement number works once in 4,096 times.
        let entered = connections(&world) - entered;
        assert!(entered <= count / 1_000, "{entered} of {count} {what} entered the flow table");
        guessed += usize::try_from(entered).unwrap();
        println!("{count} {what} in {:?}", started.elapsed());
        let pod = world.get().unwrap_or_else(|error| panic!("a new connection after {what}: {error:#}"));
        assert!(pod.starts_with("web-"), "{pod}");
        idle.check().unwrap_or_else(|error| panic!("after {what}: {error:#}"));
        // Else the test has flooded somebody else.
        let reached = forwarded(&world) - seen;
        assert!(reached > count / 2, "only {reached} of {count} {what} arrived");
        wait::until(&format!("only established connections after {what}"), PATIENCE, || {
            let (flows, replies) = entries();
            // Each of those has a flow and a reply here, and perhaps a reply on the pod's node.
            ensure!(
                flows <= flows_before + guessed,
                "{flows_before} flows before, {flows} now, {guessed} guessed"
            );
            ensure!(
                replies <= replies_before + 2 * guessed,
                "{replies_before} replies before, {replies} now"
            );
            Ok(())
        })
        .unwrap();
        println!("all well after {:?}", started.elapsed());
    }
    world.await_served();
}

/// Drops the flood on every node before the stack looks at it; the programs on TC ingress, of the overlay too, have seen it.
fn drop_behind_tc(world: &World) {
    for node in 1..=3 {
        let table = "table ip flood { chain c { type filter hook prerouting priority -400; ip saddr 100.64.0.0/10 drop; }; }";
        world.node(node).feed(&["nft", "-f", "-"], table).unwrap();
    }
}

/// Packets that n1 has sent on their way, or dropped as ours.
fn forwarded(world: &World) -> u64 {
    let outcomes = world.maps(1).outcomes().unwrap();
    outcomes
        .iter()
        .filter(|(reason, _)| reason.kind() != Kind::Pass)
        .map(|(_, outcome)| outcome.packets)
        .sum()
}

/// Connections that have entered the flow table of n1.
fn connections(world: &World) -> u64 {
    let maps = world.maps(1);
    let services = maps.services.all().unwrap();
    services.values().map(|service| maps.service_stats(service.id).unwrap().connections).sum()
}

/// Sends a packet for each number, each from another address of 100.64.0.0/10.
fn flood(packet: Packet, to: SocketAddrV4, numbers: Range<u32>) -> Result<()> {
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_RAW) };
    ensure!(fd >= 0, "a raw socket: {}", std::io::Error::last_os_error());
    // SAFETY: it is a new descriptor, which nobody else has.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let target = libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET)?,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(to.ip().octets()) },
        sin_zero: [0; 8],
    };
    for number in numbers {
        // Odd, so that the low 22 bits take every value once.
        let host = number.wrapping_mul(2_654_435_761) & 0x3f_ffff;
        let source = Ipv4Addr::from_bits(Ipv4Addr::new(100, 64, 0, 0).to_bits() | host);
        let bytes = build(packet, source, to, number);
        // SAFETY: both pointers are valid for their lengths.
        let sent = unsafe {
            libc::sendto(
                socket.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                0,
                (&raw const target).cast(),
                libc::socklen_t::try_from(size_of_val(&target))?,
            )
        };
        // A full queue is part of a flood.
        let error = std::io::Error::last_os_error();
        ensure!(sent > 0 || error.raw_os_error() == Some(libc::ENOBUFS), "{error}");
    }
    Ok(())
}

fn build(packet: Packet, source: Ipv4Addr, to: SocketAddrV4, number: u32) -> Vec<u8> {
    let [high, low, ..] = number.wrapping_mul(40_503).to_be_bytes();
    let mut segment = vec![high | 0x80, low];
    segment.extend(to.port().to_be_bytes());
    let (protocol, checksum_at) = match packet {
        Packet::Tcp(flags) => {
            segment.extend(number.to_be_bytes());
            segment.extend(number.wrapping_mul(2_246_822_519).to_be_bytes());
            segment.extend([5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
            (6, 16)
        }
        Packet::Udp => {
            segment.extend([0, 12, 0, 0]);
            segment.extend(number.to_be_bytes());
            (17, 6)
        }
    };
    let mut pseudo = [source.octets(), to.ip().octets()].concat();
    pseudo.extend([0, protocol]);
    // Segments are far below 64 KiB.
    pseudo.extend(u16::try_from(segment.len()).unwrap().to_be_bytes());
    let sum = checksum(&[pseudo.as_slice(), &segment].concat());
    segment[checksum_at..checksum_at + 2].copy_from_slice(&sum.to_be_bytes());
    // The kernel fills in length, identification and checksum (raw(7)).
    let mut bytes = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0];
    bytes.extend(source.octets());
    bytes.extend(to.ip().octets());
    bytes.extend(segment);
    bytes
}

/// RFC 1071, of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap()
}
