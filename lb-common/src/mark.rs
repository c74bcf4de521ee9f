//! Our byte of the packet mark.
//!
//! ```text
//!  31            24 23                                             0
//! +----------------+------------------------------------------------+
//! |    our byte    |  other programs' bits: kept as they are         |
//! +----------------+------------------------------------------------+
//! ```
//!
//! Which byte is ours is configurable (`Config::mark_shift`); the picture shows the default, shift 24.
//! 1..=250 name a holder on another node; the rest is used inside one node, never between nodes.

/// The highest mark that names a holder. As in the Go agent.
pub const MAX_HOLDERS: u8 = 250;
/// A forward on its way through the stack to a pod: the identity NAT rule keeps the CNI's masquerade off it.
pub const FORWARDED: u8 = 251;
/// The packet is finished (translated and redirected); the egress program lets it go.
pub const DONE: u8 = 252;

/// The mark that a name gets on a fresh node: 32-bit FNV-1a of its bytes, modulo [`MAX_HOLDERS`], plus 1.
pub fn preferred(name: &str) -> u8 {
    // FNV-1a (draft-eastlake-fnv): offset basis and prime for 32 bits.
    let hash =
        name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    #[expect(clippy::cast_possible_truncation, reason = "below 250 after the modulo")]
    let mark = (hash % u32::from(MAX_HOLDERS)) as u8 + 1;
    mark
}

/// The next mark to try when one is taken.
pub const fn next(mark: u8) -> u8 {
    mark % MAX_HOLDERS + 1
}
