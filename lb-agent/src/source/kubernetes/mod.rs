//! Objects from the Kubernetes API: three watches, into one [`Store`].
//!
//! Nothing is handed on before all three first lists are complete. After that the last good state stays in force
//! whatever the API does; [`Kubernetes::problems`] says since when it does not answer.

mod reduced;
mod watch;

pub use reduced::OwnNode;
pub use watch::Timing;

use crate::api::stats::{Resource, Stats};
use crate::model::{EndpointSlice, Service, ServiceName};
use crate::source::store::Store;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use reduced::{Kind, Reduced, SeenNode};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use watch::{Follower, Happened};

/// Events that wait for the loop; beyond that the watches wait.
const QUEUE: usize = 256;
/// A change is handed on when no other has come for so long.
const QUIET: Duration = Duration::from_millis(2);
/// A change is handed on after so long at the latest, though others go on.
const AT_MOST: Duration = Duration::from_millis(10);

/// Namespace (empty for Nodes) and name.
type Key = (String, String);

/// The API as a source of objects.
pub struct Kubernetes {
    node_name: String,
    nodes: Watched<core::Node>,
    services: Watched<core::Service>,
    slices: Watched<discovery::EndpointSlice>,
    store: Store,
    own: Option<OwnNode>,
    /// What an Event about a Node must know of it, by name.
    node_uids: BTreeMap<String, String>,
    /// What a write to a Service's status must know.
    seen: BTreeMap<ServiceName, Seen>,
    /// Something has changed that was not handed on.
    is_changed: bool,
}

/// Which object a decision was made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Tells it from another that has its name later.
    pub uid: String,
    /// Changes with each write to it.
    pub version: String,
}

/// One kind: what comes of it, and how far that is.
struct Watched<K: Kind> {
    happens: mpsc::Receiver<Happened<K>>,
    /// A whole list was seen.
    is_complete: bool,
    /// What a list that is under way has had so far.
    listed: Option<BTreeSet<Key>>,
    /// Why the API does not answer, and since when.
    failure: Option<(String, Timestamp)>,
    /// Objects that cannot be decoded, and why.
    broken: BTreeMap<Key, String>,
}

impl<K: Kind> Watched<K> {
    fn start(client: &Client, timing: Timing, stats: &Stats) -> Self {
        let (tell, happens) = mpsc::channel(QUEUE);
        tokio::spawn(Follower::<K>::new(client.clone(), timing, stats.clone(), tell).run());
        Self { happens, is_complete: false, listed: None, failure: None, broken: BTreeMap::new() }
    }

    /// Keeps account of lists and failures. What is left to do is a change of the store.
    fn take(&mut self, happened: Happened<K>) -> Change<K> {
        match happened {
            Happened::ListBegins => {
                self.listed = Some(BTreeSet::new());
                self.failure = None;
            }
            Happened::Answers => self.failure = None,
            Happened::Fails(why) => {
                let since = self.failure.take().map_or_else(Timestamp::now, |(_, since)| since);
                self.failure = Some((why, since));
            }
            Happened::Set(object) => {
                let key = object.key();
                if let Some(listed) = &mut self.listed {
                    listed.insert(key.clone());
                }
                match &object.content {
                    // The last good state of it stays in force.
                    Err(why) => {
                        self.broken.insert(key, why.clone());
                    }
                    Ok(_) => {
                        self.broken.remove(&key);
                        return Change::Set(object);
                    }
                }
            }
            Happened::Gone(object) => {
                self.broken.remove(&object.key());
                return Change::Gone(object);
            }
            Happened::ListEnds => {
                self.is_complete = true;
                let listed = self.listed.take().unwrap_or_default();
                self.broken.retain(|key, _| listed.contains(key));
                return Change::Only(listed);
            }
        }
        Change::Nothing
    }

    fn problems(&self) -> impl Iterator<Item = String> {
        let kind = K::kind(&());
        let broken = self.broken.iter().map(move |((namespace, name), why)| {
            let slash = if namespace.is_empty() { "" } else { "/" };
            format!(
                "{kind} {namespace}{slash}{name} cannot be read, so its last good state stays in force: {why}"
            )
        });
        let failure = self.failure.iter().map(|(why, since)| {
            format!("{why}; since {since:.0}, and until it answers the last good state stays in force")
        });
        failure.chain(broken)
    }
}

/// What is to be done to the store.
enum Change<K: Kind> {
    Nothing,
    Set(Reduced<K>),
    Gone(Reduced<K>),
    /// Remove all others than these.
    Only(BTreeSet<Key>),
}

impl Kubernetes {
    /// Begins to watch, for the agent of the node called `node_name`.
    pub fn start(client: &Client, node_name: &str, timing: Timing, stats: &Stats) -> Self {
        Self {
            node_name: node_name.to_owned(),
            nodes: Watched::start(client, timing, stats),
            services: Watched::start(client, timing, stats),
            slices: Watched::start(client, timing, stats),
            store: Store::default(),
            own: None,
            node_uids: BTreeMap::new(),
            seen: BTreeMap::new(),
            is_changed: false,
        }
    }

    /// Waits until something has changed that the agent must look at, for a few milliseconds more so that many changes
    /// are one. Nothing is lost when the future is dropped.
    pub async fn changed(&mut self) {
        while !self.is_changed {
            self.receive().await;
        }
        let latest = Instant::now() + AT_MOST;
        let until_quiet = || latest.min(Instant::now() + QUIET);
        while Instant::now() < latest && timeout_at(until_quiet(), self.receive()).await.is_ok() {}
        self.is_changed = false;
    }

    /// Takes one event of any kind.
    async fn receive(&mut self) {
        tokio::select! {
            Some(happened) = self.nodes.happens.recv() => self.take_node(happened),
            Some(happened) = self.services.happens.recv() => self.take_service(happened),
            Some(happened) = self.slices.happens.recv() => self.take_slice(happened),
            // A task of ours has panicked: nothing comes any more, and the metrics show how old the state gets.
            else => std::future::pending().await,
        }
        self.is_changed |= self.store.is_changed();
    }

    fn take_node(&mut self, happened: Happened<core::Node>) {
        self.is_changed |= is_news(&happened);
        let own = match self.nodes.take(happened) {
            Change::Nothing => return,
            Change::Set(object) => {
                let (_, name) = object.key();
                let Ok(SeenNode { parsed, own }) = object.content else { return };
                self.store.set_node(&name, Some(parsed));
                self.node_uids.insert(name.clone(), own.uid.clone());
                if name != self.node_name {
                    return;
                }
                Some(own)
            }
            Change::Gone(object) => {
                let (_, name) = object.key();
                self.store.set_node(&name, None);
                self.node_uids.remove(&name);
                if name != self.node_name {
                    return;
                }
                None
            }
            Change::Only(listed) => {
                let is_listed = |name: &str| listed.contains(&(String::new(), name.to_owned()));
                self.store.retain_nodes(is_listed);
                self.node_uids.retain(|name, _| is_listed(name));
                self.own.take().filter(|_| is_listed(&self.node_name))
            }
        };
        self.is_changed |= self.own != own;
        self.own = own;
    }

    fn take_service(&mut self, happened: Happened<core::Service>) {
        self.is_changed |= is_news(&happened);
        match self.services.take(happened) {
            Change::Nothing => {}
            Change::Set(object) => {
                let text = |value: Option<&str>| value.unwrap_or_default().to_owned();
                let seen = Seen { uid: text(object.uid()), version: text(object.version()) };
                let name = service_name(object.key());
                let Ok(service): Result<Service, _> = object.content else { return };
                self.store.set_service(&name, Some(service));
                // A write that met another version is decided anew, though nothing that counts has changed.
                self.is_changed |= self.seen.insert(name, seen.clone()) != Some(seen);
            }
            Change::Gone(object) => {
                let name = service_name(object.key());
                self.store.set_service(&name, None);
                self.seen.remove(&name);
            }
            Change::Only(listed) => {
                let is_listed =
                    |name: &ServiceName| listed.contains(&(name.namespace.clone(), name.name.clone()));
                self.store.retain_services(is_listed);
                self.seen.retain(|name, _| is_listed(name));
            }
        }
    }

    fn take_slice(&mut self, happened: Happened<discovery::EndpointSlice>) {
        self.is_changed |= is_news(&happened);
        match self.slices.take(happened) {
            Change::Nothing => {}
            Change::Set(object) => {
                let (namespace, name) = object.key();
                let Ok(slice): Result<EndpointSlice, _> = object.content else { return };
                self.store.set_slice(&namespace, &name, Some(slice));
            }
            Change::Gone(object) => {
                let (namespace, name) = object.key();
                self.store.set_slice(&namespace, &name, None);
            }
            Change::Only(listed) => {
                self.store.retain_slices(|namespace, name| {
                    listed.contains(&(namespace.to_owned(), name.to_owned()))
                });
            }
        }
    }

    /// The objects, once there was a whole list of each kind.
    pub fn store(&mut self) -> Option<&mut Store> {
        self.missing().is_empty().then_some(&mut self.store)
    }

    /// This agent's Node; none if the API has none of its name.
    pub fn own_node(&self) -> Option<&OwnNode> {
        self.own.as_ref()
    }

    /// The uid of a Node.
    pub fn node_uid(&self, name: &str) -> Option<&str> {
        self.node_uids.get(name).map(String::as_str)
    }

    /// The Service as it was last seen.
    pub fn seen(&self, service: &ServiceName) -> Option<&Seen> {
        self.seen.get(service)
    }

    fn missing(&self) -> Vec<&'static str> {
        let complete = [self.nodes.is_complete, self.services.is_complete, self.slices.is_complete];
        let missing = Resource::ALL.iter().zip(complete).filter(|(_, is_complete)| !is_complete);
        missing.map(|(resource, _)| resource.name()).collect()
    }

    /// What an operator should hear about: since when the API does not answer, what cannot be read, what is awaited.
    pub fn problems(&self) -> Vec<String> {
        let mut problems: Vec<String> = self.nodes.problems().collect();
        problems.extend(self.services.problems());
        problems.extend(self.slices.problems());
        let missing = self.missing();
        if !missing.is_empty() && problems.is_empty() {
            problems.push(format!("the first list of {} is not complete", missing.join(", ")));
        }
        problems
    }
}

/// What changes a problem, or completes a list.
fn is_news<K: Kind>(happened: &Happened<K>) -> bool {
    match happened {
        Happened::ListEnds | Happened::Fails(_) | Happened::Answers => true,
        Happened::Set(object) => object.content.is_err(),
        Happened::Gone(_) | Happened::ListBegins => false,
    }
}

fn service_name((namespace, name): Key) -> ServiceName {
    ServiceName { namespace, name }
}
