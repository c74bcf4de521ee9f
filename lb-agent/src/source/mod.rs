//! Where objects come from. Only this module knows; everything behind it sees the [`store::Store`].

pub mod kubernetes;
pub mod manifests;
pub mod store;
pub mod watch;

use crate::model::{EndpointSlice, Node, Service};
use crate::policy::node::AnnotationError;

/// Everything that the policy needs, reduced, in a fixed order: a whole list, as a source reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// By name, each with what cannot be read in its annotations. What stood before the error is in the node.
    pub nodes: Vec<(Node, Option<AnnotationError>)>,
    /// By namespace and name.
    pub services: Vec<Service>,
    /// By namespace and name.
    pub slices: Vec<EndpointSlice>,
    /// How many objects of other kinds there were.
    pub ignored: usize,
}
