//! Addresses and clients on devices that not every kernel makes: dummy and VLAN devices; and a protocol that not every kernel
//! speaks. `cargo xtask vm` runs these, on kernels that do.

use crate::client::Talk;
use crate::echo::{Echo, pattern};
use crate::world::{HOLDER, SOON, V, World, at, build, world};
use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{Backlog, SockaddrIn, accept, bind, connect, listen};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::thread;
use testbed::cluster::Service;
use testbed::{Host, Pod, wait};

const LENGTH: usize = 1 << 20;
const VLAN: &str = "eth0.5";

/// As load balancers' guides have it: the address is on a device that no packet ever comes by.
#[test]
#[ignore = "needs dummy devices: cargo xtask vm"]
fn an_address_on_a_dummy_device_is_served() {
    const HELD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 104);
    let world = world();
    let orders = format!("link add held type dummy\naddr add {HELD}/32 dev held\nlink set held up");
    world.testbed.node(HOLDER).ip(&orders).unwrap();
    for (node, name) in [(HOLDER, "local"), (2, "remote")] {
        let (pod, _echo) = serve(&world, node, name, HELD);
        // Agents may not have seen the address yet when they have done all else.
        let open = || answered_by(world.testbed.client(), HELD, pod.name());
        whole_files(wait::until("the address is served", SOON, open).unwrap());
    }
}

/// I7: the frames of a VLAN pass the parent device's hooks with their tag in the metadata, and look like any other frame there.
#[test]
#[ignore = "needs VLAN devices: cargo xtask vm"]
fn frames_of_a_vlan_that_is_no_uplink_are_left_alone() {
    let world = build().agent(&["--uplink=eth0"]).start();
    let tagged = tagged_host(&world);
    let (pod, _echo) = serve(&world, 2, "remote", V);
    let node = world.testbed.node(HOLDER);
    let _own = Echo::tcp(node, 80);
    // The same address and port, by the same cable.
    whole_files(answered_by(world.testbed.client(), V, pod.name()).unwrap());
    let own = answered_by(&tagged, V, node.name()).unwrap();
    assert_eq!(own.seen_as, own.local());
    whole_files(own);
}

/// The client is in a VLAN, and the holder's device in it is an uplink.
#[test]
#[ignore = "needs VLAN devices: cargo xtask vm"]
fn clients_in_a_vlan_are_served() {
    let world = world();
    let tagged = tagged_host(&world);
    let twice = tagged.capture("eth0", "vlan and vlan").unwrap();
    for (node, name) in [(HOLDER, "local"), (2, "remote")] {
        let (pod, _echo) = serve(&world, node, name, V);
        // The device is new: until the agent has seen it, the node itself refuses.
        let talk = wait::until("the VLAN is served", SOON, || answered_by(&tagged, V, pod.name())).unwrap();
        assert_eq!(talk.seen_as, talk.local(), "{name}");
        whole_files(talk);
    }
    let file = twice.finish().unwrap();
    let file = file.path().to_str().unwrap();
    let packets = tagged.run(&["tcpdump", "-n", "-r", file]).unwrap();
    assert_eq!(packets, "", "frames with two tags");
}

/// A Service may have a port of that number, but not in this protocol.
#[test]
#[ignore = "needs SCTP sockets: cargo xtask vm"]
fn sctp_to_a_served_number_is_the_nodes_own() {
    let world = world();
    let (pod, _echo) = serve(&world, 2, "remote", V);
    let server = sctp(world.testbed.node(HOLDER)).unwrap();
    bind(server.as_raw_fd(), &SockaddrIn::from(at(V, 80))).unwrap();
    listen(&server, Backlog::new(1).unwrap()).unwrap();
    let answering = thread::spawn(move || -> Result<()> {
        Ok(TcpStream::from(accept(&server)?).write_all(b"the node")?)
    });
    let socket = sctp(world.testbed.client()).unwrap();
    connect(socket.as_raw_fd(), &SockaddrIn::from(at(V, 80))).unwrap();
    let mut heard = [0; 8];
    // Reads and writes of a stream socket, whatever its protocol.
    TcpStream::from(socket).read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"the node");
    answering.join().unwrap().unwrap();
    assert_eq!(answered_by(world.testbed.client(), V, pod.name()).unwrap().pod, "remote");
}

fn sctp(host: &Host) -> Result<OwnedFd> {
    host.enter(|| {
        // SAFETY: no memory is passed.
        let fd = unsafe {
            libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::IPPROTO_SCTP)
        };
        ensure!(fd >= 0, io::Error::last_os_error());
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    })
    .context("no SCTP socket")
}

/// A host beside the nodes that reaches [`V`] by VLAN 5, in which the holder has a device too.
fn tagged_host(world: &World) -> Host {
    let host = world.testbed.add_host("tagged", Ipv4Addr::new(192, 0, 2, 60)).unwrap();
    let device = |address: &str| {
        format!(
            "link add link eth0 name {VLAN} type vlan id 5\naddr add {address}/24 dev {VLAN}\nlink set {VLAN} up\n"
        )
    };
    world.testbed.node(HOLDER).ip(&device("203.0.113.1")).unwrap();
    host.ip(&(device("203.0.113.2") + &format!("route add {V}/32 via 203.0.113.1"))).unwrap();
    host
}

fn serve(world: &World, node: u8, name: &str, address: Ipv4Addr) -> (Pod, Echo) {
    let pod = world.pod(node, name);
    let echo = Echo::tcp(&pod, 8080);
    world.serve("web", Service::new("web", address).tcp(80, 8080), &[pod.endpoint()]);
    (pod, echo)
}

/// A connection to port 80, if it is this server that answers.
fn answered_by(client: &Host, address: Ipv4Addr, name: &str) -> Result<Talk> {
    let talk = Talk::open(client, SocketAddrV4::new(address, 80))?;
    ensure!(talk.pod == name, "{} answers", talk.pod);
    Ok(talk)
}

fn whole_files(mut talk: Talk) {
    talk.tell(&format!("send {LENGTH}")).unwrap();
    assert!(talk.take(LENGTH).unwrap() == pattern(LENGTH), "the download differs");
    talk.tell(&format!("take {LENGTH}")).unwrap();
    talk.give(&pattern(LENGTH)).unwrap();
    assert_eq!(talk.hear().unwrap(), "same", "the upload differs");
}
