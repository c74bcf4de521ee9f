//! Traffic through agents on a real API server: what clients, pods and `kubectl` see while things happen to nodes,
//! Services, endpoints, the API and the agents. Needs root, what `cargo xtask setup` installs, and Kubernetes' programs
//! (see `testbed::kubernetes`).
//!
//! Each scenario is a test of its own; they share one world, one after the other (see [`shared`]).

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking, like the tests themselves"
)]

mod recorder;
mod shared;
mod world;

#[path = "../traffic/client.rs"]
#[expect(dead_code, reason = "the traffic tests use all of it")]
mod client;
#[path = "../traffic/echo.rs"]
#[expect(dead_code, reason = "the traffic tests use all of it")]
mod echo;

mod api_server;
mod beside_kube_proxy;
mod endpoints;
mod holders;
mod many_endpoints;
mod services;
mod writes;
