//! Reports to the Kubernetes API: this Node's annotations, Services' status, Events.
//!
//! Nothing here waits for the API: what is to be written goes into a queue, and a task of its own carries it out. What
//! fails is tried again and told as a problem; the node is served all the same.

pub mod events;
mod queue;
mod write;

use crate::api::stats::Stats;
use crate::model::ServiceName;
use crate::source::kubernetes::{OwnNode, Seen};
use events::{About, Speaker};
use kube::Client;
use queue::Queue;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};
use write::{Done, Target, Write, perform};

/// Writes under way at one time.
const AT_ONCE: usize = 4;

/// Writes what this agent has to say.
pub struct Reporter {
    node_name: String,
    shared: Arc<Shared>,
    speaker: Speaker,
    task: JoinHandle<()>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Notify,
    /// The server does not know `ipMode`.
    drops_ip_mode: AtomicBool,
}

impl Shared {
    /// Nothing panics while it holds the queue, and a queue is usable at any time.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reporter {
    /// Starts the task that writes, for the agent of the node called `node_name`.
    pub fn start(client: Client, node_name: &str, stats: Stats) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue::new(fastrand::Rng::new())),
            changed: Notify::new(),
            drops_ip_mode: AtomicBool::new(false),
        });
        let task = tokio::spawn(work(client, Arc::clone(&shared), stats));
        Self { node_name: node_name.to_owned(), shared, speaker: Speaker::default(), task }
    }

    /// Publishes this node's addresses and overlay where its object does not show them.
    pub fn annotate(&self, shown: &OwnNode, addresses: &str, weave: &str) {
        let OwnNode { uid, addresses: shown_addresses, weave: shown_weave, internal: _ } = shown;
        let is_shown = (shown_addresses.as_str(), shown_weave.as_str()) == (addresses, weave);
        let wish = (!is_shown).then(|| Write::Annotations {
            uid: uid.clone(),
            addresses: addresses.to_owned(),
            weave: weave.to_owned(),
        });
        self.want([(Target::Node(self.node_name.clone()), wish)]);
    }

    /// Shows these addresses (or none), each decided from the Service as it was seen; statuses that are not named here
    /// stay as they are.
    pub fn show<'a>(&self, statuses: impl Iterator<Item = (&'a ServiceName, &'a Seen, Option<Ipv4Addr>)>) {
        let statuses: BTreeMap<&ServiceName, (&Seen, Option<Ipv4Addr>)> =
            statuses.map(|(name, seen, address)| (name, (seen, address))).collect();
        let is_over =
            |target: &&Target| matches!(target, Target::Service(name) if !statuses.contains_key(name));
        let over: Vec<Target> = self.shared.queue().wished().filter(is_over).cloned().collect();
        let wishes = statuses.into_iter().map(|(name, (seen, address))| {
            let write = Write::Status { version: seen.version.clone(), address };
            (Target::Service(name.clone()), Some(write))
        });
        self.want(over.into_iter().map(|target| (target, None)).chain(wishes));
    }

    /// Whether to write a status again only because its `ipMode` is not ours: not to a server that drops it.
    pub fn corrects_ip_mode(&self) -> bool {
        !self.shared.drops_ip_mode.load(Ordering::Relaxed)
    }

    /// Says these problems, each with the uid of the object that it is about, and which former ones are over.
    pub fn say(&mut self, problems: BTreeMap<(About, String), String>) {
        let events = self.speaker.say(&self.node_name, problems, Instant::now());
        self.want(events.into_iter().map(|(target, write)| (target, Some(write))));
    }

    fn want(&self, wishes: impl IntoIterator<Item = (Target, Option<Write>)>) {
        let (mut queue, now) = (self.shared.queue(), Instant::now());
        let mut is_changed = false;
        for (target, wish) in wishes {
            is_changed |= queue.want(&target, wish, now);
        }
        if is_changed {
            self.shared.changed.notify_one();
        }
    }

    /// What an operator should hear about: what cannot be written, and who writes it too.
    pub fn problems(&self) -> Vec<String> {
        let queue = self.shared.queue();
        let mut problems: Vec<String> =
            queue.failures().map(|(target, why)| format!("{target}: {why}")).collect();
        problems.extend(queue.contested(Instant::now()).map(|target| match target {
            Target::Node(name) => {
                format!("node {name}: another program writes the annotations of this agent")
            }
            Target::Service(name) => format!(
                "{name}: another controller writes its status.loadBalancer too; this agent writes it ever more \
                 seldom. Take the other off this Service: its loadBalancerClass is not its own"
            ),
            Target::Event(namespace, name) => format!("another program writes the event {namespace}/{name}"),
        }));
        if !self.corrects_ip_mode() {
            problems.push(format!(
                "node {}: the API server drops ipMode from status.loadBalancer (Kubernetes before 1.30, or its \
                 feature LoadBalancerIPMode is off), so kube-proxy leads clients in the cluster straight to pods, \
                 past the holder",
                self.node_name
            ));
        }
        problems
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Carries out what is in the queue.
async fn work(client: Client, shared: Arc<Shared>, stats: Stats) {
    let mut running: JoinSet<(Target, Write, Done)> = JoinSet::new();
    loop {
        shared.queue().forget(Instant::now());
        while running.len() < AT_ONCE {
            let Some((target, write)) = shared.queue().next(Instant::now()) else { break };
            let (client, stats) = (client.clone(), stats.clone());
            running.spawn(async move {
                let done = perform(&client, &target, &write, &stats).await;
                (target, write, done)
            });
        }
        let due = shared.queue().due().filter(|_| running.len() < AT_ONCE);
        let due = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shared.changed.notified() => {}
            () = due => {}
            Some(Ok((target, write, Done { outcome, kept_ip_mode }))) = running.join_next() => {
                if let Some(kept) = kept_ip_mode {
                    shared.drops_ip_mode.store(!kept, Ordering::Relaxed);
                }
                shared.queue().done(&target, write, outcome, Instant::now());
            }
        }
    }
}
