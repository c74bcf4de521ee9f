//! A real Kubernetes API for tests: etcd, kube-apiserver, kube-controller-manager and kube-proxy as processes on hosts of
//! the testbed.
//!
//! ```text
//!   client ── router ──┬── n1 ── pods        kube-proxy, if a test starts it
//!                      ├── n2 ── pods
//!                      ├── n3 ── pods
//!                      └── control           192.0.2.2:6443, with etcd on its loopback
//! ```
//!
//! There is no kubelet and no scheduler: tests say what runs where, with [`ControlPlane::add_pod`]. All else is as in a
//! cluster: RBAC, the Node authorizer, admission policies, bound tokens of ServiceAccounts, EndpointSlices by the
//! controller that makes them.

mod binaries;
mod build;
#[cfg(feature = "kube")]
mod client;
mod control_plane;
mod credentials;
mod kube_proxy;
mod objects;

pub use binaries::{Binaries, CACHE, Program, Unavailable, cache_root};
#[cfg(feature = "kube")]
pub use client::ApiClient;
pub use control_plane::{Component, ControlPlane, Options};
pub use credentials::{Bound, Identity};
pub use kube_proxy::{KubeProxy, Mode};
