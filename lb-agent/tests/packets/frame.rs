//! Packets: built and given their checksums by etherparse, which shares no code with the packet program.

use etherparse::{
    EtherType, Ethernet2Header, Icmpv4Header, Icmpv4Type, IpFragOffset, IpNumber, Ipv4Header, Ipv4Options,
    TcpHeader, UdpHeader, icmpv4,
};
use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::flow::FlowKey;

/// An address and a port.
pub(crate) type End = ([u8; 4], u16);

#[derive(Clone, Debug)]
enum Transport {
    Tcp(Box<TcpHeader>),
    Udp { with_checksum: bool },
    Other(IpNumber),
}

/// One packet, and how to make another of it.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    ethernet: Ethernet2Header,
    ip: Ipv4Header,
    source_port: u16,
    destination_port: u16,
    transport: Transport,
    payload: Vec<u8>,
}

impl Frame {
    fn new(from: End, to: End, transport: Transport) -> Self {
        Self {
            ethernet: Ethernet2Header {
                destination: [2, 0, 0, 0, 0, 0x10],
                source: [2, 0, 0, 0, 0, 1],
                ether_type: EtherType::IPV4,
            },
            ip: Ipv4Header {
                time_to_live: 64,
                identification: 0x1234,
                dont_fragment: false,
                source: from.0,
                destination: to.0,
                ..Ipv4Header::default()
            },
            source_port: from.1,
            destination_port: to.1,
            transport,
            payload: Vec::new(),
        }
    }

    /// TCP without flags.
    pub(crate) fn tcp(from: End, to: End) -> Self {
        let header = TcpHeader { sequence_number: 1000, window_size: 64_000, ..TcpHeader::default() };
        Self::new(from, to, Transport::Tcp(Box::new(header)))
    }

    pub(crate) fn udp(from: End, to: End) -> Self {
        Self::new(from, to, Transport::Udp { with_checksum: true })
    }

    /// Some other protocol, without ports.
    pub(crate) fn protocol(number: u8, from: [u8; 4], to: [u8; 4]) -> Self {
        Self::new((from, 0), (to, 0), Transport::Other(IpNumber(number)))
    }

    fn tcp_header(mut self, change: impl FnOnce(&mut TcpHeader)) -> Self {
        match &mut self.transport {
            Transport::Tcp(header) => change(header),
            _ => panic!("not TCP: {self:?}"),
        }
        self
    }

    pub(crate) fn syn(self) -> Self {
        self.tcp_header(|tcp| tcp.syn = true)
    }

    pub(crate) fn fin(self) -> Self {
        self.tcp_header(|tcp| tcp.fin = true)
    }

    pub(crate) fn rst(self) -> Self {
        self.tcp_header(|tcp| tcp.rst = true)
    }

    pub(crate) fn ack(self, number: u32) -> Self {
        self.tcp_header(|tcp| {
            tcp.ack = true;
            tcp.acknowledgment_number = number;
        })
    }

    pub(crate) fn seq(self, number: u32) -> Self {
        self.tcp_header(|tcp| tcp.sequence_number = number)
    }

    pub(crate) fn window(self, size: u16) -> Self {
        self.tcp_header(|tcp| tcp.window_size = size)
    }

    pub(crate) fn tcp_options(self, options: &[u8]) -> Self {
        self.tcp_header(|tcp| tcp.set_options_raw(options).unwrap())
    }

    /// UDP without a checksum, which IPv4 allows.
    pub(crate) fn without_checksum(mut self) -> Self {
        self.transport = Transport::Udp { with_checksum: false };
        self
    }

    pub(crate) fn payload(mut self, payload: &[u8]) -> Self {
        self.payload = payload.to_vec();
        self
    }

    pub(crate) fn from(mut self, (address, port): End) -> Self {
        self.ip.source = address;
        self.source_port = port;
        self
    }

    pub(crate) fn to(mut self, (address, port): End) -> Self {
        self.ip.destination = address;
        self.destination_port = port;
        self
    }

    pub(crate) fn ttl(mut self, ttl: u8) -> Self {
        self.ip.time_to_live = ttl;
        self
    }

    pub(crate) fn dont_fragment(mut self) -> Self {
        self.ip.dont_fragment = true;
        self
    }

    pub(crate) fn id(mut self, id: u16) -> Self {
        self.ip.identification = id;
        self
    }

    /// A fragment at `offset`, in units of eight bytes.
    pub(crate) fn fragment(mut self, offset: u16, more: bool) -> Self {
        self.ip.fragment_offset = IpFragOffset::try_new(offset).unwrap();
        self.ip.more_fragments = more;
        self
    }

    pub(crate) fn ip_options(mut self, options: &[u8]) -> Self {
        self.ip.options = Ipv4Options::try_from(options).unwrap();
        self
    }

    pub(crate) fn destination_mac(mut self, mac: [u8; 6]) -> Self {
        self.ethernet.destination = mac;
        self
    }

    pub(crate) fn source_mac(mut self, mac: [u8; 6]) -> Self {
        self.ethernet.source = mac;
        self
    }

    /// The same connection, seen from the other side.
    pub(crate) fn key(&self) -> FlowKey {
        let protocol = match self.transport {
            Transport::Tcp(_) => Protocol::TCP,
            Transport::Udp { .. } => Protocol::UDP,
            Transport::Other(number) => Protocol::new(number.0),
        };
        FlowKey::new(
            Ipv4::new(self.ip.source),
            Port::new(self.source_port),
            Ipv4::new(self.ip.destination),
            Port::new(self.destination_port),
            protocol,
        )
    }

    /// Header and payload of the IP packet.
    fn transport_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match &self.transport {
            Transport::Tcp(header) => {
                let mut header = header.clone();
                header.source_port = self.source_port;
                header.destination_port = self.destination_port;
                header.checksum = header.calc_checksum_ipv4(&self.ip, &self.payload).unwrap();
                header.write(&mut bytes).unwrap();
            }
            Transport::Udp { with_checksum } => {
                let ports = (self.source_port, self.destination_port);
                let header = if *with_checksum {
                    UdpHeader::with_ipv4_checksum(ports.0, ports.1, &self.ip, &self.payload).unwrap()
                } else {
                    UdpHeader::without_ipv4_checksum(ports.0, ports.1, self.payload.len()).unwrap()
                };
                header.write(&mut bytes).unwrap();
            }
            Transport::Other(_) => {}
        }
        bytes.extend_from_slice(&self.payload);
        bytes
    }

    /// The IP packet.
    fn ip_bytes(&self) -> Vec<u8> {
        let mut ip = self.ip.clone();
        ip.protocol = match self.transport {
            Transport::Tcp(_) => IpNumber::TCP,
            Transport::Udp { .. } => IpNumber::UDP,
            Transport::Other(number) => number,
        };
        let body = Self { ip: ip.clone(), ..self.clone() }.transport_bytes();
        ip.set_payload_len(body.len()).unwrap();
        ip.header_checksum = ip.calc_header_checksum();
        let mut bytes = Vec::new();
        ip.write_raw(&mut bytes).unwrap();
        bytes.extend_from_slice(&body);
        bytes
    }

    /// The whole frame, every checksum right.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.ethernet.to_bytes().to_vec();
        bytes.extend_from_slice(&self.ip_bytes());
        bytes
    }

    /// The answer's Ethernet and IP headers: back the way it came.
    fn answer(&self, transport: Transport) -> Self {
        let mut answer = Self::new(
            (self.ip.destination, self.destination_port),
            (self.ip.source, self.source_port),
            transport,
        );
        answer.ethernet.source = self.ethernet.destination;
        answer.ethernet.destination = self.ethernet.source;
        answer.id(0).dont_fragment()
    }

    /// The reset that this packet is to be answered with, by RFC 9293, section 3.5.2.
    pub(crate) fn reset(&self) -> Vec<u8> {
        let Transport::Tcp(header) = &self.transport else { panic!("not TCP: {self:?}") };
        let reset = self.answer(Transport::Tcp(Box::default())).rst().window(0);
        let reset = if header.ack {
            reset.seq(header.acknowledgment_number)
        } else {
            let length = u32::try_from(self.payload.len()).unwrap();
            let length = length + u32::from(header.syn) + u32::from(header.fin);
            reset.seq(0).ack(header.sequence_number.wrapping_add(length))
        };
        reset.bytes()
    }

    /// The ICMP error of `from` about this packet, quoting its IP header and `quoted` bytes behind it.
    pub(crate) fn error_from(&self, from: [u8; 4], kind: Icmpv4Type, quoted: usize) -> Self {
        let quote = &self.ip_bytes()[..self.ip.header_len() + quoted];
        let mut payload = Icmpv4Header::with_checksum(kind, quote).to_bytes().to_vec();
        payload.extend_from_slice(quote);
        Self::protocol(1, from, self.ip.source).payload(&payload)
    }

    /// The ICMP error that this packet is to be answered with, quoting its IP header and `quoted` bytes behind it.
    fn icmp_error(&self, kind: icmpv4::DestUnreachableHeader, quoted: usize) -> Vec<u8> {
        let quote = &self.ip_bytes()[..self.ip.header_len() + quoted];
        let icmp = Icmpv4Header::with_checksum(Icmpv4Type::DestinationUnreachable(kind), quote);
        let mut payload = icmp.to_bytes().to_vec();
        payload.extend_from_slice(quote);
        self.answer(Transport::Other(IpNumber::ICMP)).payload(&payload).bytes()
    }

    /// ICMP port unreachable, quoting the UDP header.
    pub(crate) fn port_unreachable(&self) -> Vec<u8> {
        self.icmp_error(icmpv4::DestUnreachableHeader::Port, 8)
    }

    /// ICMP fragmentation needed, quoting the transport header.
    pub(crate) fn fragmentation_needed(&self, next_hop_mtu: u16) -> Vec<u8> {
        let quoted = if matches!(self.transport, Transport::Tcp(_)) { 20 } else { 8 };
        self.icmp_error(icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu }, quoted)
    }
}
