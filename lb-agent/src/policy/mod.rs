//! The policy: pure functions from what the API shows to what one node must do. No clock, no network, no map.

pub mod compute;
pub mod explain;
pub mod extend;
pub(crate) mod index;
pub mod maglev;
pub mod marks;
pub mod node;
pub mod quote;
pub mod reach;
pub mod sample;
pub(crate) mod speaker;
pub mod state;
mod status;

pub use compute::compute;
pub use extend::wanted;
