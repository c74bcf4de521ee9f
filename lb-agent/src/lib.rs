//! The agent, as a library for its tests.

pub mod api;
pub mod cli;
pub mod cluster;
pub mod datapath;
pub mod explain;
pub mod health;
pub mod http;
pub mod lock;
pub mod metrics;
pub mod model;
pub mod node;
pub mod policy;
pub mod problems;
pub mod reconcile;
pub mod report;
pub mod run;
pub mod source;
