//! What the agent knows the cluster by: a directory of manifests, or the Kubernetes API. The loop sees no difference.

use crate::model::ServiceName;
use crate::policy::index::Holders;
use crate::policy::speaker;
use crate::policy::state::State;
use crate::report::kubernetes::Reporter;
use crate::report::kubernetes::events::{About, about};
use crate::report::manifests::{self as files, ReportError};
use crate::source::kubernetes::Kubernetes;
use crate::source::manifests::Reader;
use crate::source::store::Store;
use crate::source::watch::{Timing, Watch, WatchError};
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use thiserror::Error;
use tracing::info;

/// Where objects come from, and reports go to.
pub enum Cluster {
    /// Files that all agents share.
    Manifests(Box<Directory>),
    /// The API.
    Kubernetes(Box<Api>),
}

/// A directory of manifests.
pub struct Directory {
    node_name: String,
    path: PathBuf,
    watch: Watch,
    reader: Reader,
    store: Store,
    is_read: bool,
}

/// The Kubernetes API.
pub struct Api {
    node_name: String,
    source: Kubernetes,
    reporter: Reporter,
    /// Since when the Node lacks what this agent is to publish on it.
    bare_since: Option<Instant>,
}

/// A Node without our annotations looks like one that holds nothing. Until it has them, nothing is decided from it: a Node
/// that was deleted and made again would cost its connections. One that cannot be written is believed after this time.
const PUBLISHED: Duration = Duration::from_secs(10);

/// What this node is to others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Presence {
    /// Every IPv4 address of this host, whoever's it is.
    pub host: Vec<Ipv4Addr>,
    /// The value of the addresses annotation.
    pub addresses: String,
    /// The value of the overlay annotation; none where the node has no overlay (yet).
    pub weave: Option<String>,
}

/// This agent must not speak for the Node whose name it was given.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum IdentityError {
    /// There is none.
    #[error(
        "node {name}: the API has no Node of this name, and the agent makes none; --node (LB_NODE) must be the Node's \
         name, as the downward API gives it in spec.nodeName"
    )]
    NoSuchNode {
        /// As given.
        name: String,
    },
    /// It is another machine's.
    #[error(
        "node {name}: the API shows it with the addresses {shown:?}, and this host has none of them; --node (LB_NODE) \
         must name the Node of this host"
    )]
    AnotherHost {
        /// As given.
        name: String,
        /// Its internal addresses.
        shown: Vec<Ipv4Addr>,
    },
}

impl Cluster {
    /// A directory, for the agent of the node called `node_name`.
    ///
    /// # Errors
    /// It cannot be watched.
    pub fn manifests(path: PathBuf, node_name: &str) -> Result<Self, WatchError> {
        let watch = Watch::new(&path, Timing::default())?;
        let (reader, store) = (Reader::default(), Store::default());
        let node_name = node_name.to_owned();
        Ok(Self::Manifests(Box::new(Directory { node_name, path, watch, reader, store, is_read: false })))
    }

    /// The API, for the agent of the node called `node_name`.
    pub fn kubernetes(source: Kubernetes, reporter: Reporter, node_name: &str) -> Self {
        Self::Kubernetes(Box::new(Api {
            node_name: node_name.to_owned(),
            source,
            reporter,
            bare_since: None,
        }))
    }

    /// Waits until there may be something new. Nothing is lost when the future is dropped.
    pub async fn changed(&mut self) {
        match self {
            Self::Manifests(directory) => {
                directory.watch.tick().await;
            }
            Self::Kubernetes(api) => api.source.changed().await,
        }
    }

    /// Looks at what is there now; answers with what is wrong between the cluster and this agent.
    pub fn look(&mut self) -> Vec<String> {
        match self {
            Self::Manifests(directory) => directory.look().into_iter().collect(),
            Self::Kubernetes(api) => {
                let mut problems = api.source.problems();
                problems.extend(api.reporter.problems());
                problems
            }
        }
    }

    /// The objects: the last good ones, none if there were none yet, or while they lack what was just published.
    pub fn store(&mut self) -> Option<&mut Store> {
        match self {
            Self::Manifests(directory) => directory.is_read.then_some(&mut directory.store),
            Self::Kubernetes(api) => api.store(),
        }
    }

    /// Publishes what this node is to others where that is not shown.
    ///
    /// # Errors
    /// The file cannot be written; or the API's Node of this name is not this host.
    pub fn publish(&mut self, presence: &Presence) -> anyhow::Result<()> {
        match self {
            Self::Manifests(directory) => directory.publish(presence)?,
            Self::Kubernetes(api) => api.publish(presence)?,
        }
        Ok(())
    }

    /// Writes the statuses that are this node's to write.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn report(&mut self, policy: &State) -> anyhow::Result<()> {
        match self {
            Self::Manifests(directory) => directory.report(policy)?,
            Self::Kubernetes(api) => api.report(policy),
        }
        Ok(())
    }

    /// Tells the objects' owners of these problems.
    pub fn say(&mut self, problems: &BTreeSet<String>) {
        match self {
            // They are in the log.
            Self::Manifests(_) => {}
            Self::Kubernetes(api) => api.say(problems),
        }
    }
}

impl Directory {
    /// Where the manifests cannot be read, the last good state stays in force.
    fn look(&mut self) -> Option<String> {
        match self.reader.read(&self.path) {
            Ok(objects) => {
                self.store.replace(objects);
                self.is_read = true;
                None
            }
            Err(error) => Some(format!("{error}; the last good state stays in force")),
        }
    }

    fn publish(&self, presence: &Presence) -> Result<(), ReportError> {
        let Presence { host: _, addresses, weave } = presence;
        if files::write_node(&self.path, &self.node_name, addresses, weave.as_deref())? {
            info!(addresses, weave, "published this node's addresses");
        }
        Ok(())
    }

    fn report(&self, policy: &State) -> Result<(), ReportError> {
        for (ServiceName { namespace, name }, address) in policy.writes(true) {
            if files::write_status(&self.path, namespace, name, address)? {
                info!(namespace, service = name, ?address, "wrote the status");
            }
        }
        Ok(())
    }
}

impl Api {
    fn store(&mut self) -> Option<&mut Store> {
        let is_bare = self.bare_since.is_some_and(|since| since.elapsed() < PUBLISHED);
        if is_bare { None } else { self.source.store() }
    }

    fn publish(&mut self, presence: &Presence) -> Result<(), IdentityError> {
        let Presence { host, addresses, weave } = presence;
        if self.source.store().is_none() {
            return Ok(());
        }
        let name = || self.node_name.clone();
        let own = self.source.own_node().ok_or_else(|| IdentityError::NoSuchNode { name: name() })?;
        if !own.internal.is_empty() && !own.internal.iter().any(|address| host.contains(address)) {
            return Err(IdentityError::AnotherHost { name: name(), shown: own.internal.clone() });
        }
        self.reporter.annotate(own, addresses, weave.as_deref().unwrap_or_default());
        let is_bare = own.addresses.is_empty() && !addresses.is_empty();
        self.bare_since = is_bare.then(|| self.bare_since.unwrap_or_else(Instant::now));
        Ok(())
    }

    fn report(&self, policy: &State) {
        let writes = policy.writes(self.reporter.corrects_ip_mode());
        let seen = writes.filter_map(|(name, address)| Some((name, self.source.seen(name)?, address)));
        self.reporter.show(seen);
    }

    /// Only those that this node is to speak of.
    fn say(&mut self, problems: &BTreeSet<String>) {
        let mut ours: BTreeMap<(About, String), String> = BTreeMap::new();
        let Some(store) = self.source.store() else { return };
        let holders = if problems.is_empty() { Holders::default() } else { Holders::of(store.nodes()) };
        let said: Vec<(About, &str)> = problems.iter().filter_map(|problem| about(problem)).collect();
        let said = said.into_iter().filter(|(about, _)| match about {
            About::Service(name) => store
                .service(name)
                .is_some_and(|service| speaker::of_service(&holders, service) == self.node_name),
            About::Node(name) if *name == self.node_name => true,
            About::Node(name) => speaker::of_node(&holders, name) == Some(&self.node_name),
        });
        let said: Vec<(About, &str)> = said.collect();
        for (about, message) in said {
            let uid = match &about {
                About::Service(name) => self.source.seen(name).map(|seen| seen.uid.clone()),
                About::Node(name) => self.source.node_uid(name).map(str::to_owned),
            };
            if let Some(uid) = uid {
                ours.insert((about, message.to_owned()), uid);
            }
        }
        self.reporter.say(ours);
    }
}
