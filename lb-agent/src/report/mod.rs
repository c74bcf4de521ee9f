//! What goes back to the source of the objects.

pub mod kubernetes;
pub mod manifests;
