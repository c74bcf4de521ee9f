//! Bytes to one parsed packet. No opinion on load balancing: what is unusual is recorded as a fact.

use crate::{
    outcome::{Step, pass},
    packet::{ETH_LEN, IPV4_LEN, Packet, TCP_LEN, UDP_LEN},
    wire::{Frame, Ipv4Header, L4Head, TcpRest},
};
use core::ops::ControlFlow;
use lb_common::{
    addr::{Ipv4, Mac, Port, Protocol},
    flow::{FlowKey, State},
    fragment::Part,
    masquerade::Client,
    reason::Reason,
};

const ETHER_TYPE_IPV4: u16 = 0x0800;

/// How far behind the expected acknowledgement a third packet may be: data of a Fast Open server, in bytes.
const ACK_WINDOW: u32 = 1 << 20;

/// What one packet says.
#[derive(Clone, Copy)]
pub(crate) struct Parsed {
    /// The 5-tuple, as it stands, but for the client's end of a connection that is masqueraded: there it is the tuple that
    /// backends know. Ports are zero in a later fragment.
    pub(crate) key: FlowKey,
    /// The client's end as the client has it. No flag tells the two cases apart: the verifier would walk all that follows
    /// once for each.
    pub(crate) client: Client,
    /// The address at the client's end as backends have it: that of `key`, or the Service's own.
    pub(crate) outer: Ipv4,
    pub(crate) source_mac: Mac,
    pub(crate) ip: Ip,
    /// Of TCP or UDP, as on the wire, in native byte order.
    pub(crate) checksum: u16,
    pub(crate) tcp: Tcp,
}

/// Facts of the IPv4 header.
#[derive(Clone, Copy)]
pub(crate) struct Ip {
    pub(crate) tos: u8,
    pub(crate) ttl: u8,
    /// As on the wire, in native byte order: for the incremental update.
    pub(crate) checksum: u16,
    /// Header and payload, bytes.
    pub(crate) total_length: u16,
    /// Header, bytes: 20 to 60.
    pub(crate) header_length: u8,
    /// Flags and offset, host order.
    fragment: u16,
}

impl Ip {
    /// What a header says, right or not.
    #[inline(always)]
    pub(crate) fn new(header: &Ipv4Header) -> Self {
        Self {
            tos: header.tos,
            ttl: header.ttl,
            checksum: u16::from_ne_bytes(header.checksum),
            total_length: u16::from_be_bytes(header.total_length),
            header_length: header.length(),
            fragment: u16::from_be_bytes(header.fragment),
        }
    }

    #[inline(always)]
    pub(crate) fn dont_fragment(&self) -> bool {
        self.fragment & 0x4000 != 0
    }

    /// Any fragment of a larger datagram, the first one included.
    #[inline(always)]
    pub(crate) fn is_fragment(&self) -> bool {
        self.fragment & 0x3fff != 0
    }

    /// A fragment without the transport header.
    #[inline(always)]
    pub(crate) fn is_later_fragment(&self) -> bool {
        self.fragment & 0x1fff != 0
    }

    /// What it has of its datagram's payload.
    #[inline(always)]
    pub(crate) fn part(&self) -> Part {
        Part {
            offset: (self.fragment & 0x1fff) << 3,
            length: self.total_length.wrapping_sub(self.header_length.into()),
            is_last: self.fragment & 0x2000 == 0,
        }
    }

    /// Where the transport header begins, from the Ethernet header on.
    #[inline(always)]
    pub(crate) fn l4_offset(&self) -> u32 {
        ETH_LEN as u32 + u32::from(self.header_length)
    }
}

/// Facts of the TCP header; all zero for UDP.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tcp {
    /// Host order.
    pub(crate) sequence: u32,
    /// Host order.
    pub(crate) acknowledgement: u32,
    /// Header, bytes.
    pub(crate) header_length: u8,
    flags: u8,
}

impl Tcp {
    pub(crate) const FIN: u8 = 1;
    pub(crate) const SYN: u8 = 2;
    pub(crate) const RST: u8 = 4;
    pub(crate) const ACK: u8 = 16;

    /// The first packet of a connection.
    #[inline(always)]
    pub(crate) fn is_opening(self) -> bool {
        self.flags & (Self::SYN | Self::ACK | Self::RST | Self::FIN) == Self::SYN
    }

    #[inline(always)]
    pub(crate) fn is_syn_ack(self) -> bool {
        self.flags & (Self::SYN | Self::ACK | Self::RST) == Self::SYN | Self::ACK
    }

    #[inline(always)]
    pub(crate) fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Whether it is the third packet of a handshake in `state` whose second acknowledged up to `expected`. Without the
    /// number, anybody could fill the flow table with packets from addresses that are not theirs.
    #[inline(always)]
    pub(crate) fn completes(self, state: State, expected: u32) -> bool {
        state == State::Answered
            && !self.has(Self::SYN)
            && self.has(Self::ACK)
            && self.acknowledgement.wrapping_sub(expected) < ACK_WINDOW
    }

    /// Whether it changes a connection's state.
    #[inline(always)]
    pub(crate) fn is_turning(self) -> bool {
        self.flags & (Self::FIN | Self::SYN | Self::RST) != 0
    }
}

impl Parsed {
    #[inline(always)]
    pub(crate) fn is_udp(&self) -> bool {
        self.key.protocol == Protocol::UDP
    }

    /// From here on it is a packet from `address` and `port`, but for those who write or answer it.
    #[inline(always)]
    pub(crate) fn masquerade(&mut self, address: Ipv4, port: Port) {
        self.key.source = address;
        self.key.source_port = port;
        self.outer = address;
    }

    /// Whether a client's packet has another source than the client.
    #[inline(always)]
    pub(crate) fn is_masqueraded(&self) -> bool {
        self.client != Client::new(self.key.source, self.key.source_port)
    }

    /// The tuple as it stands in a packet of a client.
    #[inline(always)]
    pub(crate) fn client_key(&self) -> FlowKey {
        let FlowKey { destination, destination_port, protocol, .. } = self.key;
        FlowKey::new(self.client.address, self.client.port, destination, destination_port, protocol)
    }
}

/// Reads Ethernet, IPv4 and TCP or UDP.
#[inline(always)]
pub(crate) fn parse(packet: &Packet<'_>) -> Step<Parsed> {
    if packet.ether_type() != ETHER_TYPE_IPV4 || packet.is_tagged() {
        return pass(Reason::PassNotIpv4);
    }
    let frame = read_frame(packet)?;
    if frame.ip.version() != 4 || frame.ip.length() < IPV4_LEN as u8 {
        return pass(Reason::PassNotIpv4);
    }
    let ip = Ip::new(&frame.ip);
    let protocol = Protocol::new(frame.ip.protocol);
    if protocol != Protocol::TCP && protocol != Protocol::UDP {
        return pass(Reason::PassOtherProtocol);
    }
    check_length(packet, &ip, protocol)?;
    let L4 { ports, checksum, tcp } = read_l4(packet, &ip, protocol)?;
    ControlFlow::Continue(Parsed {
        key: FlowKey::new(
            Ipv4::new(frame.ip.source),
            ports.0,
            Ipv4::new(frame.ip.destination),
            ports.1,
            protocol,
        ),
        client: Client::new(Ipv4::new(frame.ip.source), ports.0),
        outer: Ipv4::new(frame.ip.source),
        source_mac: Mac::new(frame.source_mac),
        ip,
        checksum,
        tcp,
    })
}

/// Whether it is ICMP. Asked before all else is parsed, since little of that matters for it.
#[inline(always)]
pub(crate) fn is_icmp(packet: &Packet<'_>) -> bool {
    /// The time to live and the protocol.
    const PROTOCOL: usize = ETH_LEN + 8;
    packet.ether_type() == ETHER_TYPE_IPV4
        && !packet.is_tagged()
        && packet.read::<[u8; 2]>(PROTOCOL).is_some_and(|word| word[1] == Protocol::ICMP.number())
}

/// Whether it is an ICMP redirect (RFC 792, type 5), without IP options, as the kernel sends them.
#[inline(always)]
pub(crate) fn is_icmp_redirect(packet: &Packet<'_>) -> bool {
    const REDIRECT: u8 = 5;
    packet.ether_type() == ETHER_TYPE_IPV4
        && packet.read::<Frame>(0).is_some_and(|frame| frame.ip.protocol == Protocol::ICMP.number())
        && packet.read::<[u8; 2]>(ETH_LEN + IPV4_LEN).is_some_and(|icmp| icmp[0] == REDIRECT)
}

#[inline(always)]
fn read_frame(packet: &Packet<'_>) -> Step<Frame> {
    if let Some(frame) = packet.read::<Frame>(0) {
        return ControlFlow::Continue(frame);
    }
    // The headers may lie in fragments of the skb: a packet straight from some drivers, or from a tunnel.
    let wanted = (packet.len() as usize).min(ETH_LEN + IPV4_LEN + TCP_LEN);
    if packet.pull(wanted)
        && let Some(frame) = packet.read::<Frame>(0)
    {
        return ControlFlow::Continue(frame);
    }
    pass(Reason::PassShort)
}

/// What the IP header announces must be there, and must have room for the transport header. A GSO packet was put
/// together by the kernel from whole ones, and one of more than 65,535 bytes announces zero.
#[inline(always)]
fn check_length(packet: &Packet<'_>, ip: &Ip, protocol: Protocol) -> Step<()> {
    let announced = u32::from(ip.total_length);
    let l4 = if ip.is_later_fragment() {
        0
    } else if protocol == Protocol::UDP {
        UDP_LEN
    } else {
        TCP_LEN
    };
    let whole =
        announced >= u32::from(ip.header_length) + l4 as u32 && announced <= packet.len() - ETH_LEN as u32;
    if whole || packet.gso_size() != 0 { ControlFlow::Continue(()) } else { pass(Reason::PassShort) }
}

/// Facts of the transport header; all zero in a later fragment.
#[derive(Default)]
struct L4 {
    /// Source and destination.
    ports: (Port, Port),
    checksum: u16,
    tcp: Tcp,
}

#[inline(always)]
fn read_l4(packet: &Packet<'_>, ip: &Ip, protocol: Protocol) -> Step<L4> {
    if ip.is_later_fragment() {
        return ControlFlow::Continue(L4::default());
    }
    let Some(head) = read_head(packet, ip) else { return pass(Reason::PassShort) };
    let ports = (Port::from_bytes(head.source_port), Port::from_bytes(head.destination_port));
    if protocol == Protocol::UDP {
        let [_, _, checksum @ ..] = head.word;
        return ControlFlow::Continue(L4 {
            ports,
            checksum: u16::from_ne_bytes(checksum),
            tcp: Tcp::default(),
        });
    }
    let Some(rest) = read_rest(packet, ip) else { return pass(Reason::PassShort) };
    let tcp = Tcp {
        sequence: u32::from_be_bytes(head.word),
        acknowledgement: u32::from_be_bytes(rest.acknowledgement),
        header_length: (rest.offset >> 4) * 4,
        flags: rest.flags,
    };
    ControlFlow::Continue(L4 { ports, checksum: u16::from_ne_bytes(rest.checksum), tcp })
}

#[inline(always)]
fn read_head(packet: &Packet<'_>, ip: &Ip) -> Option<L4Head> {
    // Without IP options, which is nearly always, the offset is a constant and the read needs no helper.
    if ip.header_length == IPV4_LEN as u8
        && let Some(head) = packet.read::<L4Head>(ETH_LEN + IPV4_LEN)
    {
        return Some(head);
    }
    packet.load(ip.l4_offset())
}

#[inline(always)]
fn read_rest(packet: &Packet<'_>, ip: &Ip) -> Option<TcpRest> {
    if ip.header_length == IPV4_LEN as u8
        && let Some(rest) = packet.read::<TcpRest>(ETH_LEN + IPV4_LEN + UDP_LEN)
    {
        return Some(rest);
    }
    packet.load(ip.l4_offset() + UDP_LEN as u32)
}
