//! The packets that an explanation tries, and what they say afterwards.

use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::flow::FlowKey;

const ETHERNET: usize = 14;
const IPV4: usize = 20;

/// What a packet is to its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// TCP: begins a connection.
    Syn,
    /// TCP: the answer to that.
    SynAck,
    /// TCP: any later one.
    Ack,
    /// TCP: ends it at once.
    Rst,
    /// UDP.
    Datagram,
}

impl Segment {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Syn => "SYN",
            Self::SynAck => "SYN-ACK",
            Self::Ack => "ACK",
            Self::Rst => "RST",
            Self::Datagram => "datagram",
        }
    }

    /// RFC 9293, section 3.1.
    const fn flags(self) -> u8 {
        match self {
            Self::Syn => 0x02,
            Self::SynAck => 0x12,
            Self::Ack => 0x10,
            Self::Rst => 0x04,
            Self::Datagram => 0,
        }
    }
}

/// One packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Its tuple.
    pub key: FlowKey,
    /// What it is.
    pub segment: Segment,
    /// Ethernet source.
    pub source_mac: [u8; 6],
    /// TCP.
    pub sequence: u32,
    /// TCP.
    pub acknowledgement: u32,
    /// Bytes from the IP header on; what is too short for the headers is as long as they are.
    pub length: u16,
}

impl Packet {
    /// A packet without data, from a router.
    pub fn new(key: FlowKey, segment: Segment) -> Self {
        let source_mac = [2, 0, 0, 0, 0, 1];
        Self { key, segment, source_mac, sequence: 1_000, acknowledgement: 0, length: 0 }
    }

    /// The frame. Its checksums are zero: the program brings checksums up to date without a look at whether they are right.
    pub fn frame(&self) -> Vec<u8> {
        let l4: &[u8] = &match self.segment {
            Segment::Datagram => self.udp(),
            _ => self.tcp(),
        };
        let length = self.length.max(u16::try_from(IPV4 + l4.len()).unwrap_or(u16::MAX));
        let mut frame = vec![2, 0, 0, 0, 0, 2];
        frame.extend(self.source_mac);
        frame.extend([0x08, 0x00, 0x45, 0]);
        frame.extend(length.to_be_bytes());
        // Not to be fragmented, as hosts send that look for the path's MTU.
        frame.extend([0, 0, 0x40, 0, 64, self.key.protocol.number(), 0, 0]);
        frame.extend(self.key.source.octets());
        frame.extend(self.key.destination.octets());
        frame.extend(l4);
        frame.resize(ETHERNET + usize::from(length), 0);
        frame
    }

    fn tcp(&self) -> Vec<u8> {
        let mut header = self.ports();
        header.extend(self.sequence.to_be_bytes());
        header.extend(self.acknowledgement.to_be_bytes());
        header.extend([0x50, self.segment.flags(), 0xff, 0xff, 0, 0, 0, 0]);
        header
    }

    fn udp(&self) -> Vec<u8> {
        let mut header = self.ports();
        let length = self.length.saturating_sub(20).max(8);
        header.extend(length.to_be_bytes());
        header.extend([0, 0]);
        header
    }

    fn ports(&self) -> Vec<u8> {
        [self.key.source_port.bytes(), self.key.destination_port.bytes()].concat()
    }
}

/// The tuple of a frame; `None` where it is neither TCP nor UDP in IPv4.
pub fn tuple(frame: &[u8]) -> Option<FlowKey> {
    let ip = frame.get(ETHERNET..)?;
    if frame.get(12..ETHERNET)? != [0x08, 0x00] || ip.first()? >> 4 != 4 {
        return None;
    }
    let protocol = Protocol::new(*ip.get(9)?);
    let l4 = ip.get(usize::from(ip.first()? & 0x0f) * 4..)?;
    let bytes = |at: usize, of: &[u8]| Some([*of.get(at)?, *of.get(at + 1)?]);
    let address = |at: usize| ip.get(at..at + 4)?.try_into().ok().map(Ipv4::new);
    (protocol == Protocol::TCP || protocol == Protocol::UDP).then_some(())?;
    Some(FlowKey::new(
        address(12)?,
        Port::from_bytes(bytes(0, l4)?),
        address(16)?,
        Port::from_bytes(bytes(2, l4)?),
        protocol,
    ))
}

/// What kind of answer a refused packet has become.
pub fn answer(frame: &[u8]) -> Option<String> {
    const TCP: u8 = 6;
    const ICMP: u8 = 1;
    let ip = frame.get(ETHERNET..)?;
    let l4 = ip.get(usize::from(ip.first()? & 0x0f) * 4..)?;
    match (*ip.get(9)?, l4) {
        (TCP, _) => Some("a TCP reset".to_owned()),
        // RFC 792 and RFC 1191.
        (ICMP, [3, 3, ..]) => Some("ICMP port unreachable".to_owned()),
        (ICMP, [3, 4, _, _, _, _, high, low, ..]) => {
            Some(format!("ICMP fragmentation needed, MTU {}", u16::from_be_bytes([*high, *low])))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{PacketHeaders, TransportHeader};

    fn key(protocol: Protocol) -> FlowKey {
        let (client, address) = (Ipv4::new([198, 51, 100, 7]), Ipv4::new([192, 0, 2, 10]));
        FlowKey::new(client, Port::new(40_000), address, Port::new(80), protocol)
    }

    /// A parser that shares no code with this one reads what was meant.
    #[test]
    fn frames_say_what_was_meant() {
        let syn = Packet { length: 100, ..Packet::new(key(Protocol::TCP), Segment::Syn) };
        let frame = syn.frame();
        assert_eq!(frame.len(), 114);
        let headers = PacketHeaders::from_ethernet_slice(&frame).unwrap();
        let Some(TransportHeader::Tcp(tcp)) = headers.transport else { panic!("{headers:?}") };
        assert!(tcp.syn && !tcp.ack && !tcp.rst && !tcp.fin);
        assert_eq!((tcp.source_port, tcp.destination_port, tcp.sequence_number), (40_000, 80, 1_000));
        assert_eq!(headers.payload.slice().len(), 60);
        assert_eq!(tuple(&frame), Some(syn.key));

        let datagram = Packet::new(key(Protocol::UDP), Segment::Datagram).frame();
        let headers = PacketHeaders::from_ethernet_slice(&datagram).unwrap();
        let Some(TransportHeader::Udp(udp)) = headers.transport else { panic!("{headers:?}") };
        assert_eq!((udp.length, datagram.len()), (8, 42));
        assert_eq!(tuple(&datagram), Some(key(Protocol::UDP)));
    }

    #[test]
    fn what_is_no_packet_of_ours_has_no_tuple() {
        let mut frame = Packet::new(key(Protocol::TCP), Segment::Ack).frame();
        for length in 0..frame.len() {
            // Whatever it says, it does not reach behind the end.
            let _ = (tuple(&frame[..length]), answer(&frame[..length]));
        }
        frame[12] = 0x86;
        assert_eq!(tuple(&frame), None);
    }
}
