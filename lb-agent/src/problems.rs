//! Problems are said once, until they change.

use std::collections::BTreeSet;
use tracing::{info, warn};

/// What was said and still holds.
#[derive(Debug, Default)]
pub struct Problems {
    said: BTreeSet<String>,
}

impl Problems {
    /// Says what is new and what is over.
    pub fn say(&mut self, now: BTreeSet<String>) {
        for problem in now.difference(&self.said) {
            warn!("{problem}");
        }
        for problem in self.said.difference(&now) {
            info!("no longer: {problem}");
        }
        self.said = now;
    }

    /// How many hold.
    pub fn len(&self) -> usize {
        self.said.len()
    }

    /// Whether none does.
    pub fn is_empty(&self) -> bool {
        self.said.is_empty()
    }
}
