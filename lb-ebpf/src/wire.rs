//! Headers as they lie in a packet.

// They are bytes, aligned to two: frames lie at even addresses, and the BPF backend reads a byte at a
// time what may lie anywhere.

/// Ethernet and IPv4 headers as they lie in the packet (RFC 894, RFC 791).
#[derive(Clone, Copy)]
#[repr(C, align(2))]
pub(crate) struct Frame {
    pub(crate) destination_mac: [u8; 6],
    pub(crate) source_mac: [u8; 6],
    pub(crate) ether_type: [u8; 2],
    pub(crate) ip: Ipv4Header,
}

/// RFC 791, section 3.1, without options.
#[derive(Clone, Copy)]
#[repr(C, align(2))]
pub(crate) struct Ipv4Header {
    pub(crate) version_ihl: u8,
    pub(crate) tos: u8,
    pub(crate) total_length: [u8; 2],
    pub(crate) id: [u8; 2],
    pub(crate) fragment: [u8; 2],
    pub(crate) ttl: u8,
    pub(crate) protocol: u8,
    pub(crate) checksum: [u8; 2],
    pub(crate) source: [u8; 4],
    pub(crate) destination: [u8; 4],
}

/// The first eight bytes of TCP (RFC 9293) and all of UDP (RFC 768).
#[derive(Clone, Copy)]
#[repr(C, align(2))]
pub(crate) struct L4Head {
    pub(crate) source_port: [u8; 2],
    pub(crate) destination_port: [u8; 2],
    /// TCP: sequence number. UDP: length and checksum.
    pub(crate) word: [u8; 4],
}

/// The rest of TCP, without options.
#[derive(Clone, Copy)]
#[repr(C, align(2))]
pub(crate) struct TcpRest {
    pub(crate) acknowledgement: [u8; 4],
    pub(crate) offset: u8,
    pub(crate) flags: u8,
    pub(crate) window: [u8; 2],
    pub(crate) checksum: [u8; 2],
    /// Of no interest, but it has to be there.
    pub(crate) urgent: [u8; 2],
}

impl Ipv4Header {
    #[inline(always)]
    pub(crate) fn version(&self) -> u8 {
        self.version_ihl >> 4
    }

    /// Of the header, bytes.
    #[inline(always)]
    pub(crate) fn length(&self) -> u8 {
        (self.version_ihl & 0x0f) * 4
    }
}
