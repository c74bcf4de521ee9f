//! Where objects come from. Only this module knows; everything behind it sees [`Objects`].

pub mod manifests;
pub mod watch;

use crate::model::{EndpointSlice, Node, Service};
use crate::policy::node::AnnotationError;

/// Everything that the policy needs, reduced, in a fixed order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// By name.
    pub nodes: Vec<Node>,
    /// Annotations that cannot be read, in the order of the nodes. What stood before the error is in `nodes`.
    pub annotation_errors: Vec<AnnotationError>,
    /// By namespace and name.
    pub services: Vec<Service>,
    /// By namespace and name.
    pub slices: Vec<EndpointSlice>,
    /// How many objects of other kinds there were.
    pub ignored: usize,
}
