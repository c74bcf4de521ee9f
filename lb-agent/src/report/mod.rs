//! What goes back to the source of the objects.

pub mod manifests;
