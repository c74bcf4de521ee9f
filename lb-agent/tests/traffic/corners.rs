//! What TCP does seldom: halves that stay open for long, FINs that cross, ports that are used again when their pod is gone, resets
//! that are not one, data in the SYN.

use crate::client::{Talk, kind};
use crate::echo::{Echo, pattern};
use crate::raw;
use crate::world::{HOLDER, SOON, V, World, at, build};
use anyhow::{Result, ensure};
use lb_common::flow::State;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrIn, sendto, setsockopt, socket, sockopt,
};
use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddrV4, TcpStream};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};
use testbed::cluster::Service;
use testbed::{Host, Pod, wait};

const PORT: u16 = 45_100;
const LENGTH: usize = 8 << 20;
/// Less than the time until a SYN comes again.
const AT_ONCE: Duration = Duration::from_millis(900);

/// A pod on the holder and one elsewhere, each alone behind a port.
fn start() -> (World, [(u16, Pod, Echo); 2]) {
    let world = build().agent(&["--timeout-closed=1", "--timeout-reset=1"]).start();
    let pods = [(80, HOLDER), (81, 2)].map(|(port, node)| {
        let pod = world.pod(node, &format!("pod-{node}"));
        let echo = Echo::tcp(&pod, 8080);
        world.serve(pod.name(), Service::new(pod.name(), V).tcp(port, 8080), &[pod.endpoint()]);
        (port, pod, echo)
    });
    (world, pods)
}

/// From one port, without a lost SYN.
fn open_at_once(host: &Host, port: u16) -> Talk {
    let begun = Instant::now();
    let talk = Talk::from_port(host, PORT, at(V, port)).unwrap();
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    talk
}

#[test]
fn megabytes_follow_after_half_a_close() {
    let (world, pods) = start();
    for (port, pod, echo) in &pods {
        let mut talk = Talk::open(world.testbed.client(), at(V, *port)).unwrap();
        talk.tell(&format!("send {LENGTH}")).unwrap();
        talk.stream().shutdown(Shutdown::Write).unwrap();
        assert!(talk.take(LENGTH).unwrap() == pattern(LENGTH), "{}", pod.name());
        assert_eq!(talk.hear().unwrap(), format!("{} farewell", pod.name()));

        let mut talk = Talk::open(world.testbed.client(), at(V, *port)).unwrap();
        talk.tell("half").unwrap();
        assert_eq!(kind(talk.hear()), ErrorKind::UnexpectedEof);
        // One line, since the pod could not answer a second one.
        let line: String = (0..1_000_000).map(|n| format!("{n},")).collect();
        talk.tell(&line).unwrap();
        wait::until("the long line", SOON, || {
            ensure!(echo.received().last() == Some(&line), "{} has not heard it", pod.name());
            Ok(())
        })
        .unwrap();
    }
}

/// Both ends have sent their FIN before they see the other's.
#[test]
fn a_port_can_be_used_again_when_both_have_closed_at_once() {
    let (world, pods) = start();
    for (port, pod, echo) in &pods {
        let mut talk = open_at_once(world.testbed.client(), *port);
        talk.check("hello").unwrap();
        let ends: [&Host; 2] = [world.testbed.client(), pod];
        let hold = |order: &str| {
            let rule = [order, "OUTPUT", "-p", "tcp", "--tcp-flags", "FIN", "FIN", "-j", "DROP"];
            for end in ends {
                end.run(&[&["iptables", "-w"], &rule[..]].concat()).unwrap();
            }
        };
        hold("-A");
        talk.tell("half").unwrap();
        wait::until("the pod's FIN", SOON, || {
            ensure!(echo.received().last().is_some_and(|line| line == "half"), "not yet");
            in_state(pod, "fin-wait-1")
        })
        .unwrap();
        talk.stream().shutdown(Shutdown::Write).unwrap();
        in_state(world.testbed.client(), "fin-wait-1").unwrap();
        hold("-D");
        world.await_over(PORT);
        drop(talk);
        open_at_once(world.testbed.client(), *port).check("again").unwrap();
        world.await_over(PORT);
    }
}

/// Whether a host has a connection in that state, as `ss` names it.
fn in_state(host: &Host, state: &str) -> Result<()> {
    let sockets = host.run(&["ss", "-Htn", "state", state])?;
    ensure!(!sockets.is_empty(), "{} has none in {state}", host.name());
    Ok(())
}

/// A6: what is known of a connection to a pod that is gone is not in the way of the next one, whether it was over or not.
#[test]
fn a_port_can_be_used_again_at_once_when_its_pod_is_gone() {
    let (world, _pods) = start();
    world.testbed.client().sysctls(&[("ipv4/tcp_max_tw_buckets", "0")]).unwrap();
    let ends: [fn(Talk); 3] = [
        |mut talk| {
            talk.tell("close").unwrap();
            talk.hear().unwrap_err();
        },
        |talk| drop(talk),
        Talk::reset,
    ];
    world.serve("coming", Service::new("coming", V).tcp(90, 8080), &[]);
    let mut last: Option<Pod> = None;
    for (number, end) in ends.into_iter().enumerate() {
        for node in [2, HOLDER] {
            let pod = world.pod(node, &format!("coming-{number}-{node}"));
            let _echo = Echo::tcp(&pod, 8080);
            world.endpoints("coming", &[pod.endpoint()]);
            if let Some(gone) = last.take() {
                world.testbed.remove_pod(gone).unwrap();
            }
            let mut talk = open_at_once(world.testbed.client(), 90);
            talk.check("hello").unwrap();
            assert_eq!(talk.pod, pod.name());
            end(talk);
            last = Some(pod);
        }
    }
}

/// What the holder knows of the connection from a port of the client.
fn state(world: &World, port: u16) -> Option<State> {
    let flows = world.maps(HOLDER).unwrap().flows.list().unwrap();
    flows.iter().find(|(key, _)| key.source_port.number() == port).map(|(_, flow)| flow.state())
}

fn await_state(world: &World, port: u16, expected: State) {
    wait::until(&format!("{expected:?}"), SOON, || {
        let found = state(world, port);
        ensure!(found == Some(expected), "{found:?}");
        Ok(())
    })
    .unwrap();
}

/// The number of the next byte that a socket sends.
fn next_byte(stream: &TcpStream) -> u32 {
    let set = |name: libc::c_int, value: libc::c_int| {
        // SAFETY: the value outlives the call, and has the length that is given.
        let done = unsafe {
            libc::setsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, name, (&raw const value).cast(), 4)
        };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    };
    const SEND_QUEUE: libc::c_int = 2;
    // Without a probe of the window, which would be a packet more.
    const OFF: libc::c_int = -1;
    set(libc::TCP_REPAIR, 1);
    set(libc::TCP_REPAIR_QUEUE, SEND_QUEUE);
    let (mut next, mut length) = (0_u32, 4);
    // SAFETY: as above.
    let done = unsafe {
        let value = (&raw mut next).cast();
        libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_QUEUE_SEQ, value, &raw mut length)
    };
    assert_eq!(done, 0);
    set(libc::TCP_REPAIR, OFF);
    next
}

fn send_reset(host: &Host, from: SocketAddrV4, to: SocketAddrV4, sequence: u32) {
    let builder = etherparse::PacketBuilder::ipv4(from.ip().octets(), to.ip().octets(), 64);
    let builder = builder.tcp(from.port(), to.port(), sequence, 0).rst();
    let mut packet = Vec::new();
    builder.write(&mut packet, &[]).unwrap();
    raw::send(&raw::socket(host), to, &packet);
}

/// A reset outside of the window, or in it beside the next byte (RFC 5961, section 3.2), ends nothing, and we forget nothing, though
/// we follow no window: the next packet shows that the connection goes on. One with the right number ends it.
#[test]
fn a_reset_with_a_wrong_number_ends_nothing() {
    let (world, pods) = start();
    let client = world.testbed.client();
    for (port, pod, _) in &pods {
        let mut talk = open_at_once(client, *port);
        talk.check("hello").unwrap();
        let local = talk.local();
        for offset in [1 << 30, 100] {
            send_reset(client, local, at(V, *port), next_byte(talk.stream()).wrapping_add(offset));
            talk.check("still here").unwrap();
            await_state(&world, PORT, State::Established);
        }
        send_reset(pod, at(pod.ip(), 8080), local, 1);
        talk.check("still here").unwrap();
        await_state(&world, PORT, State::Established);

        send_reset(client, local, at(V, *port), next_byte(talk.stream()));
        wait::until("the pod's end", SOON, || {
            let found = pod.run(&["ss", "-Htn", "state", "established"])?;
            ensure!(!found.contains(&PORT.to_string()), "{found}");
            Ok(())
        })
        .unwrap();
        assert_eq!(kind(talk.check("anybody?")), ErrorKind::ConnectionReset);
        drop(talk);
        world.await_over(PORT);
        open_at_once(client, *port).check("anew").unwrap();
        world.await_over(PORT);
    }
}

/// With the first line in the SYN, once the client has a cookie (RFC 7413).
fn open_fast(host: &Host, to: SocketAddrV4) -> Talk {
    let stream = host.enter(|| {
        let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
        let flags = MsgFlags::from_bits_retain(libc::MSG_FASTOPEN);
        sendto(fd.as_raw_fd(), b"early\n", &SockaddrIn::from(to), flags)?;
        Ok(TcpStream::from(fd))
    });
    Talk::begin(stream.unwrap()).unwrap()
}

/// A counter of `/proc/net/netstat`.
fn counter(host: &Host, name: &str) -> u64 {
    let text = host.run(&["cat", "/proc/net/netstat"]).unwrap();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let mut pairs = lines.chunks(2).flat_map(|pair| pair[0].iter().zip(&pair[1]));
    pairs.find(|(found, _)| **found == name).unwrap().1.parse().unwrap()
}

/// The cookie is the pod's, and the client keeps it for the address: another pod does not know it, and hears the line after the
/// handshake.
#[test]
fn data_in_the_syn_arrives() {
    let world = build().start();
    let inside = world.pod(HOLDER, "inside");
    let hosts: [&Host; 2] = [world.testbed.client(), &inside];
    for host in hosts {
        host.sysctls(&[("ipv4/tcp_fastopen", "1")]).unwrap();
    }
    for (port, node) in [(80, HOLDER), (81, 2)] {
        let pod = world.pod(node, &format!("pod-{node}"));
        // Servers: every listener, also those that do not ask for it.
        pod.sysctls(&[("ipv4/tcp_fastopen", "1026")]).unwrap();
        let _echo = Echo::tcp(&pod, 8080);
        world.serve(pod.name(), Service::new(pod.name(), V).tcp(port, 8080), &[pod.endpoint()]);
        for host in hosts {
            let before = counter(&pod, "TCPFastOpenPassive");
            for number in 0..3 {
                let mut talk = open_fast(host, at(V, port));
                assert_eq!(talk.hear().unwrap(), format!("{} early", pod.name()));
                talk.check("later").unwrap();
                let early = counter(&pod, "TCPFastOpenPassive") - before;
                assert_eq!(early, number, "{} to {}", host.name(), pod.name());
            }
        }
    }
}
