//! Network namespaces as hosts: three nodes with a weave-like overlay, pods with real servers, a client outside.
//!
//! ```text
//!   client ── router ──┬── n1 ── weave bridge ── pods     192.0.2.0/24 between router and nodes
//!  198.51.100.10       ├── n2 ── weave bridge ── pods     198.51.100.0/24 between router and client
//!                      └── n3 ── weave bridge ── pods     10.32.0.0/12 one overlay, the bridges joined by VXLAN
//! ```
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
mod process;
mod run;
pub mod server;
pub mod skip;
pub mod wait;
mod weave;

pub use host::Host;
pub use process::Process;
pub use weave::{Node, Options, Pod, Testbed};
