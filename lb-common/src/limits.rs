//! How much fits, and what it costs, in one place.
//!
//! The agent can lower or raise each at load time; these are the defaults. Costs are kernel memory on x86-64, measured
//! by `cargo xtask bench` where they depend on use.

/// Established connections, of which each has an entry in `flows` and one in `replies`. Allocated on use.
pub const FLOWS: u32 = 1_000_000;
/// Connections in the middle of a handshake (two entries each). Allocated at load; the least recently used goes first.
pub const HANDSHAKES: u32 = 65_536;
/// Datagrams in fragments, on their way (see [`crate::fragment`]). Allocated at load; the least recently used goes first.
pub const FRAGMENTS: u32 = 16_384;
/// Served ports.
pub const SERVICES: u32 = 10_000;
/// Backend slots, one for each endpoint of each served port, draining ones included.
pub const BACKENDS: u32 = 100_000;
/// Endpoints that this node forwards to, and endpoints of this node that others forward to.
pub const ENDPOINTS: u32 = 200_000;
/// Connections of clients inside the cluster (two entries each). Allocated on use.
pub const MASQUERADES: u32 = 262_144;
/// Networks of clients inside the cluster: each node's addresses, and those of pods. Allocated on use.
pub const INSIDE: u32 = 65_536;
/// Holders on other nodes.
pub const HOLDERS: u32 = 250;
/// Slots for interfaces with a role: where each pod has one, a node may have hundreds. A power of two, and so many
/// that each finds a free one near its own. 8 bytes each.
pub const INTERFACES: u32 = 4096;
