//! The `node` module against the running kernel, in network namespaces of the tests' own. Needs root, `ip` and `nft`.

mod interfaces;
mod namespace;
mod nft;
mod preflight;
mod return_path;
mod sysctl;
mod watch;
