//! How the agent gets on with the API: counted where it happens, read by metrics and problems.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What the agent watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// `nodes`
    Nodes,
    /// `services`
    Services,
    /// `endpointslices`
    Slices,
}

impl Resource {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nodes, Self::Services, Self::Slices];

    /// As the API names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nodes => "nodes",
            Self::Services => "services",
            Self::Slices => "endpointslices",
        }
    }
}

/// What the agent asks of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// A list of objects, in pages.
    List,
    /// A watch, its first list too.
    Watch,
    /// Its Node's annotations.
    Annotate,
    /// A Service's status.
    Status,
    /// An Event.
    Event,
}

impl Operation {
    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Watch => "watch",
            Self::Annotate => "annotate",
            Self::Status => "status",
            Self::Event => "event",
        }
    }
}

/// Shared by all that talk to the API.
#[derive(Clone, Debug, Default)]
pub struct Stats(Arc<Mutex<Snapshot>>);

/// The numbers at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// When the API last sent something about these objects: an event, a bookmark, a list.
    pub contact: BTreeMap<Resource, Instant>,
    /// Errors, by what was asked and by the HTTP status (`none` where no answer came).
    pub errors: BTreeMap<(Operation, String), u64>,
}

impl Stats {
    /// The API has sent something.
    pub fn heard(&self, resource: Resource) {
        self.lock().contact.insert(resource, Instant::now());
    }

    /// The API has refused, or has not answered.
    pub fn failed(&self, operation: Operation, code: String) {
        *self.lock().errors.entry((operation, code)).or_default() += 1;
    }

    /// The numbers now.
    pub fn snapshot(&self) -> Snapshot {
        self.lock().clone()
    }

    /// The numbers stay usable when a thread panicked while it held them.
    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
