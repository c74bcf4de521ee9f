//! What is not ours: passed on as it is.

use super::remote;
use crate::case::{Case, ingress};
use crate::frame::Frame;
use crate::lab::{CLIENT, Device, REMOTE, SERVED, syn};
use lb_common::reason::Reason;
use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};

fn uplink(bytes: impl Into<Vec<u8>>, reason: Reason) -> Case {
    Case::new(remote).send(ingress(Device::Uplink, bytes).marked(0x3300_4abc).passes(reason))
}

fn ether_type(kind: [u8; 2]) -> Vec<u8> {
    let mut bytes = syn().bytes();
    bytes[12..14].copy_from_slice(&kind);
    bytes
}

pub(crate) fn ipv6() -> Case {
    uplink(ether_type([0x86, 0xdd]), Reason::PassNotIpv4)
}

pub(crate) fn arp() -> Case {
    uplink(ether_type([0x08, 0x06]), Reason::PassNotIpv4)
}

/// I7: a tag in the frame. (One that the driver has taken out stands in the metadata, which test-run cannot set.)
pub(crate) fn vlan() -> Case {
    let mut bytes = syn().bytes();
    bytes.splice(12..12, [0x81, 0x00, 0x00, 0x64]);
    uplink(bytes, Reason::PassNotIpv4)
}

/// The Ethernet type says IPv4, the header says otherwise.
pub(crate) fn version_6_in_ipv4() -> Case {
    let mut bytes = syn().bytes();
    bytes[14] = 0x65;
    uplink(bytes, Reason::PassNotIpv4)
}

pub(crate) fn header_length_below_20() -> Case {
    let mut bytes = syn().bytes();
    bytes[14] = 0x44;
    uplink(bytes, Reason::PassNotIpv4)
}

/// Every length below the shortest that can be judged; from the whole IP header on, as test-run refuses less.
pub(crate) fn short() -> Case {
    let whole = Frame::tcp(CLIENT, SERVED).syn().bytes();
    let datagram = Frame::udp(CLIENT, SERVED).bytes();
    let options = Frame::tcp(CLIENT, SERVED).syn().ip_options(&[1; 40]).bytes();
    let mut case = Case::new(remote);
    for bytes in [&whole[..], &datagram, &options] {
        for length in 34..bytes.len() {
            let cut = ingress(Device::Uplink, &bytes[..length]);
            case = case.send(cut.passes(Reason::PassShort));
        }
    }
    case
}

/// The frame is long enough, but by what the IP header says the transport header is cut off: padding.
pub(crate) fn header_in_the_padding() -> Case {
    let mut bytes = Frame::tcp(CLIENT, SERVED).syn().bytes();
    bytes[16..18].copy_from_slice(&39_u16.to_be_bytes());
    let mut datagram = Frame::udp(CLIENT, SERVED).bytes();
    datagram[16..18].copy_from_slice(&27_u16.to_be_bytes());
    uplink(bytes, Reason::PassShort).send(ingress(Device::Uplink, datagram).passes(Reason::PassShort))
}

/// The IP header announces more than came.
pub(crate) fn truncated() -> Case {
    let mut bytes = Frame::tcp(CLIENT, SERVED).syn().payload(b"all of it").bytes();
    bytes.pop();
    uplink(bytes, Reason::PassShort)
}

/// ICMP, SCTP and the rest, also to the address.
pub(crate) fn other_protocols() -> Case {
    let packet =
        |number| Frame::protocol(number, CLIENT.0, SERVED.0).payload(&[8, 0, 0xf7, 0xff, 0, 0, 0, 0]);
    uplink(packet(1), Reason::PassOtherProtocol)
        .send(ingress(Device::Uplink, packet(132)).passes(Reason::PassOtherProtocol))
        .send(ingress(Device::Pods, packet(1)).passes(Reason::PassOtherProtocol))
}

/// The address's other ports: ssh to the node works.
pub(crate) fn other_ports() -> Case {
    let ssh = Frame::tcp(CLIENT, (SERVED.0, 22)).syn();
    let other = Frame::tcp(CLIENT, ([192, 0, 2, 99], 80)).syn();
    let udp = Frame::udp(CLIENT, (SERVED.0, 53));
    uplink(ssh, Reason::PassForeign)
        .send(ingress(Device::Uplink, other).passes(Reason::PassForeign))
        .send(ingress(Device::Uplink, udp).passes(Reason::PassForeign))
}

/// A pod's own connections, to the world and to other pods, also from ports that are endpoints.
pub(crate) fn pods_own_traffic() -> Case {
    let out = Frame::tcp(([10, 32, 0, 2], 50_000), CLIENT).syn();
    let answer = Frame::tcp(([10, 32, 0, 2], 8080), ([10, 40, 0, 9], 40_000)).syn().ack(1);
    Case::new(remote)
        .send(ingress(Device::Pods, &out).passes(Reason::PassForeign))
        .send(ingress(Device::Pods, &answer).passes(Reason::PassForeign))
        .send(ingress(Device::Overlay, &answer).passes(Reason::PassForeign))
        // An endpoint's packet to another pod is not an answer to a client.
        .send(
            ingress(Device::Overlay, Frame::tcp(REMOTE, ([10, 32, 0, 2], 9)).syn())
                .passes(Reason::PassForeign),
        )
}

pub(crate) fn unknown_interface() -> Case {
    Case::new(remote)
        .send(ingress(Device::Stranger, syn()).passes(Reason::PassUnknownInterface))
        .send(ingress(Device::Stranger, ether_type([8, 6])).passes(Reason::PassUnknownInterface))
        .send(crate::case::egress(Device::Stranger, syn()).passes(Reason::PassUnknownInterface))
}

/// A8: the node's own connection from a served port: its packets are the node's.
pub(crate) fn own_connection() -> Case {
    let keep = RefCell::new(None);
    // Somebody that the node can connect to, inside the namespace: an address of its own on another port.
    let peer: SocketAddr = (Ipv4Addr::new(10, 32, 0, 1), 7000).into();
    let from_peer = Frame::tcp(([10, 32, 0, 1], 7000), SERVED).ack(5001).payload(b"for the node");
    let from_other = Frame::tcp(([10, 32, 0, 1], 7001), SERVED).ack(5001);
    Case::new(remote)
        .then(move |_| {
            let listener = TcpListener::bind(peer).unwrap();
            let stream = connect_from(SERVED, peer);
            let datagrams = UdpSocket::bind((Ipv4Addr::from(SERVED.0), SERVED.1)).unwrap();
            datagrams.connect(peer).unwrap();
            keep.replace(Some((listener, stream, datagrams)));
        })
        .send(ingress(Device::Uplink, &from_peer).passes(Reason::PassOwnSocket))
        .send(
            ingress(Device::Uplink, Frame::udp(([10, 32, 0, 1], 7000), SERVED)).passes(Reason::PassOwnSocket),
        )
        // Without a socket it is the middle of a connection that another holder began.
        .goes_to(&from_other, REMOTE)
}

pub(super) fn connect_from(from: crate::frame::End, to: SocketAddr) -> TcpStream {
    use nix::sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, socket, sockopt,
    };
    use std::os::fd::AsRawFd as _;
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    setsockopt(&fd, sockopt::ReuseAddr, &true).unwrap();
    let [a, b, c, d] = from.0;
    bind(fd.as_raw_fd(), &SockaddrIn::new(a, b, c, d, from.1)).unwrap();
    let SocketAddr::V4(to) = to else { panic!("IPv4 only") };
    connect(fd.as_raw_fd(), &SockaddrIn::from(to)).unwrap();
    fd.into()
}

/// The answer to a connection that the node has masqueraded: it has no socket, but conntrack knows it.
pub(crate) fn syn_ack_without_flow() -> Case {
    uplink(Frame::tcp(CLIENT, SERVED).syn().ack(1), Reason::PassSynAck)
}
