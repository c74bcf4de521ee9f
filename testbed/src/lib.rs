//! Network namespaces as hosts: three nodes as a CNI leaves them, pods with real servers, a client outside.
//!
//! ```text
//!   client ── router ──┬── n1 ── pods     192.0.2.0/24 between router and nodes
//!  198.51.100.10       ├── n2 ── pods     198.51.100.0/24 between router and client
//!                      └── n3 ── pods     and one of these:
//! ```
//!
//! | [`Topology`] | pods of a node | on a node | between nodes |
//! | --- | --- | --- | --- |
//! | `weave` | 10.32.N.0 of 10.32.0.0/12 | bridge `weave` | one Ethernet, by VXLAN |
//! | `flannel` | 10.244.N.0/24 | bridge `cni0` | routes over VXLAN, `flannel.1` |
//! | `host-gw` | 10.244.N.0/24 | bridge `cni0` | routes between the nodes |
//! | `calico-vxlan` | 10.244.N.0/26 | a device each | routes over VXLAN, `vxlan.calico` |
//! | `calico` | 10.244.N.0/26 | a device each | routes between the nodes |
//! | `routed` | 10.244.N.0/26 | a device each | routes by the router; nodes in subnets of 203.0.113.0/24 |
//!
//! Made for the demo, the tests and the benches alike. All traffic stays inside; what was made is gone when the
//! [`Testbed`] is dropped, on a panic and on SIGINT, SIGTERM or SIGHUP too. What a killed run left behind is removed by the next one.
//!
//! Needs root, and the programs that `cargo xtask setup` installs.

pub mod capture;
pub mod cluster;
pub mod dns;
mod host;
pub mod http;
pub mod kubernetes;
pub mod load;
mod namespace;
mod node;
mod options;
mod outside;
mod process;
mod run;
pub mod server;
pub mod skip;
mod testbed;
mod topology;
pub mod wait;

pub use self::testbed::Testbed;
pub use host::Host;
pub use node::{Node, Pod};
pub use options::{Masquerade, Options, Uplink};
pub use process::Process;
pub use topology::{Topology, plugin_directory};
