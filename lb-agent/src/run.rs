//! The agent's loop: wait for a change, look at objects and node, compute, reconcile, report.

use crate::cluster::{Cluster, Presence};
use crate::datapath::maps::Maps;
use crate::datapath::pins::Pins;
use crate::datapath::sweep::{self, Swept};
use crate::health::Publisher;
use crate::model::HardwareAddress;
use crate::node::interfaces::{self, Interface};
use crate::node::roles::{RoleOptions, Roles, find};
use crate::policy::extend::Options;
use crate::policy::node;
use crate::policy::state::{Delta, State};
use crate::problems::Problems;
use crate::reconcile::{Busy, Reconciler};
use crate::source::store::Changes;
use anyhow::Context as _;
use lb_common::config::Timeouts;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval_at};
use tracing::{debug, error, info};

/// What the loop needs to know.
pub struct Agent {
    /// This node's name.
    pub node: String,
    /// How devices are found.
    pub roles: RoleOptions,
    /// Choices of the policy.
    pub policy: Options,
    /// Idle times of flows.
    pub timeouts: Timeouts,
    /// The maps, for the sweep.
    pub pins: Pins,
    /// Between full comparisons of everything, and between sweeps.
    pub period: Duration,
    /// For probes and metrics.
    pub health: Publisher,
}

/// A sweep that runs, and in the end what it found and how long it took.
type Sweep = JoinHandle<anyhow::Result<(Swept, Duration)>>;

/// How soon a pass that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// What a pass looks at anew. Everything else is as the last one left it.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    /// Interfaces, sysctls, nftables, programs, rules and routes.
    node: bool,
    /// What the cluster shows.
    objects: bool,
}

impl Look {
    const EVERYTHING: Self = Self { node: true, objects: true };
}

/// What one pass leaves for the next.
struct Memory {
    /// Whether the cluster has shown all that there is.
    has_objects: bool,
    /// What is wrong between the cluster and this agent.
    complaints: Vec<String>,
    policy: State,
    /// What this node is to others.
    presence: Presence,
    /// Of the last good look at the node.
    roles: Option<Roles>,
    problems: Problems,
    busy: Busy,
    was_ready: bool,
    /// Whether the last pass reached what is wanted.
    was_done: bool,
}

impl Agent {
    /// Runs until SIGTERM or SIGINT, by what `cluster` shows. The datapath goes on without us.
    ///
    /// # Errors
    /// Something that no later pass could mend: no watch, no signal handler.
    pub async fn run(self, mut reconciler: Reconciler, mut cluster: Cluster) -> anyhow::Result<()> {
        let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
        // Before the first look, so that no change falls between.
        let mut node_changes =
            crate::node::watch::start().context("watch the node's interfaces, rules and routes")?;
        let mut memory = Memory::new(State::new(&self.node, self.policy.clone()));
        self.health.send_modify(|health| {
            (health.alive, health.period) = (Some(Instant::now()), self.period);
        });
        // Which marks connections carry must be known before one is taken from a holder or given to another.
        match finished(&mut Some(self.sweep())).await {
            Ok((swept, duration)) => {
                memory.busy.marks.clone_from(&swept.marks);
                self.health.send_modify(|health| health.note_sweep(swept, duration));
            }
            Err(error) => error!("sweep: {error:#}"),
        }
        let mut period = interval_at(tokio::time::Instant::now() + self.period, self.period);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sweeping: Option<Sweep> = None;
        let mut look = Some(Look::EVERYTHING);
        loop {
            if let Some(look) = look {
                self.pass(look, &mut reconciler, &mut cluster, &mut memory).await;
            }
            let retry = tokio::time::sleep(if memory.was_done { Duration::MAX } else { RETRY });
            // In this order: what changes comes before a comparison, which takes many turns.
            look = tokio::select! {
                biased;
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                () = cluster.changed() => Some(Look { objects: true, ..Look::default() }),
                changed = node_changes.changed() => {
                    changed.context("the node's watch ended")?;
                    Some(Look { node: true, ..Look::default() })
                }
                _ = period.tick() => {
                    reconciler.look_again();
                    if sweeping.is_none() {
                        sweeping = Some(self.sweep());
                    }
                    Some(Look::EVERYTHING)
                }
                swept = finished(&mut sweeping) => {
                    sweeping = None;
                    self.heed(swept, &reconciler, &mut memory)
                }
                () = retry => Some(Look::EVERYTHING),
                () = std::future::ready(()), if reconciler.is_comparing() => compare(&mut reconciler),
            };
        }
        info!("stopped; the datapath goes on without the agent, `lb-agent cleanup` removes it");
        Ok(())
    }

    /// The pass that is due after a sweep, if one is.
    fn heed(
        &self,
        swept: anyhow::Result<(Swept, Duration)>,
        reconciler: &Reconciler,
        memory: &mut Memory,
    ) -> Option<Look> {
        match swept {
            Ok((swept, duration)) => {
                let is_due = reconciler.awaits_sweep() || memory.busy.marks != swept.marks;
                memory.busy = Busy { marks: swept.marks.clone(), sweeps: memory.busy.sweeps + 1 };
                self.health.send_modify(|health| health.note_sweep(swept, duration));
                is_due.then(Look::default)
            }
            Err(error) => {
                error!("sweep: {error:#}");
                None
            }
        }
    }

    /// One look, and everything that follows from it.
    async fn pass(
        &self,
        look: Look,
        reconciler: &mut Reconciler,
        cluster: &mut Cluster,
        memory: &mut Memory,
    ) {
        let begun = Instant::now();
        self.health.send_modify(|health| health.alive = Some(begun));
        let result = self.try_pass(look, reconciler, cluster, memory).await;
        let was_done = std::mem::replace(&mut memory.was_done, result.is_ok());
        let is_ready = memory.was_done && memory.has_objects;
        let problems = match result {
            // Most passes change none, and there may be many.
            Ok(Said::AsBefore) if was_done => None,
            Ok(_) => Some(memory.problems_now(reconciler)),
            Err(error) => {
                let mut problems = memory.problems_now(reconciler);
                problems.insert(format!("{error:#}"));
                Some(problems)
            }
        };
        self.health.send_modify(|health| {
            if let Some(problems) = &problems {
                health.problems = problems.iter().cloned().collect();
            }
            // What an operator got wrong in a Service is said, but does not make the node less ready; nor does an API
            // that is away.
            health.is_ready = is_ready;
            if is_ready {
                (health.synced, health.duration) = (Some(Instant::now()), begun.elapsed());
            } else if !memory.was_done {
                health.failures += 1;
            }
        });
        if let Some(problems) = problems {
            cluster.say(&problems);
            memory.problems.say(problems);
        }
        if is_ready && !std::mem::replace(&mut memory.was_ready, true) {
            info!("ready");
        }
    }

    async fn try_pass(
        &self,
        look: Look,
        reconciler: &mut Reconciler,
        cluster: &mut Cluster,
        memory: &mut Memory,
    ) -> anyhow::Result<Said> {
        // With each look at the node too: who is to speak of a problem may be another.
        let mut is_said_anew = look.node;
        if look.objects {
            let complaints = cluster.look();
            is_said_anew |= complaints != memory.complaints;
            memory.complaints = complaints;
        }
        if look.node || memory.roles.is_none() {
            self.look_at_node(reconciler, cluster, memory).await?;
        } else {
            // Somebody may have removed it.
            cluster.publish(&memory.presence)?;
        }
        let (Some(roles), Some(store)) = (&memory.roles, cluster.store()) else {
            return Ok(Said::Anew);
        };
        memory.has_objects = true;
        let mut changes = store.take_changes();
        if memory.policy.set_reach(roles.reach()) {
            changes = Changes::Everything;
        }
        let is_of_nodes = changes == Changes::Everything;
        let delta = memory.policy.update(store, changes);
        self.name_services(&delta, &memory.policy);
        is_said_anew |= is_of_nodes || delta.problems;
        is_said_anew |= reconciler.services(&memory.policy, delta, roles, &memory.busy).await?;
        // Only now: a status tells others that the address is served.
        cluster.report(&memory.policy)?;
        Ok(if is_said_anew { Said::Anew } else { Said::AsBefore })
    }

    /// What does not depend on any object, but for the Node that it is published on.
    async fn look_at_node(
        &self,
        reconciler: &mut Reconciler,
        cluster: &mut Cluster,
        memory: &mut Memory,
    ) -> anyhow::Result<()> {
        memory.roles = None;
        let interfaces = interfaces::list(&reconciler.netlink).await?;
        let roles = find(&reconciler.netlink, &interfaces, &self.roles).await?;
        memory.presence = self.presence(&interfaces, roles.as_ref().ok());
        cluster.publish(&memory.presence)?;
        let roles = roles?;
        reconciler.node(&roles).await?;
        memory.roles = Some(roles);
        Ok(())
    }

    fn presence(&self, interfaces: &[Interface], roles: Option<&Roles>) -> Presence {
        let weave = roles.map(|roles| {
            node::format_weave(roles.overlay_address, &HardwareAddress::from(roles.overlay_mac))
        });
        let addresses = interfaces::host_addresses(interfaces, &self.roles.selection);
        Presence {
            host: interfaces.iter().flat_map(|i| &i.addresses).map(|(address, _)| *address).collect(),
            addresses: node::format_addresses(&addresses),
            weave,
        }
    }

    /// For metrics.
    fn name_services(&self, delta: &Delta, policy: &State) {
        if delta.services.is_empty() {
            return;
        }
        self.health.send_modify(|health| {
            for key in &delta.services {
                match policy.served().get(key) {
                    Some(served) => {
                        health.services.insert(*key, (served.namespace.clone(), served.name.clone()));
                    }
                    None => {
                        health.services.remove(key);
                    }
                }
            }
        });
    }

    /// In a thread of its own: a full table takes a second.
    fn sweep(&self) -> Sweep {
        let (pins, timeouts) = (self.pins.clone(), self.timeouts);
        tokio::task::spawn_blocking(move || {
            let begun = Instant::now();
            let mut maps = Maps::open(&pins)?;
            let swept = sweep::sweep(&mut maps, &timeouts, sweep::now())?;
            debug!(?swept, "swept the flow tables");
            Ok((swept, begun.elapsed()))
        })
    }
}

impl Memory {
    fn new(policy: State) -> Self {
        Self {
            has_objects: false,
            complaints: Vec::new(),
            policy,
            presence: Presence::default(),
            roles: None,
            problems: Problems::default(),
            busy: Busy::default(),
            was_ready: false,
            was_done: false,
        }
    }

    /// What an operator should hear about.
    fn problems_now(&self, reconciler: &Reconciler) -> BTreeSet<String> {
        let policy = self.policy.problems().map(|(_, problem)| problem);
        policy.chain(reconciler.problems()).map(str::to_owned).chain(self.complaints.clone()).collect()
    }
}

/// Whether a pass may have found other problems than the one before.
enum Said {
    AsBefore,
    Anew,
}

/// Goes on with a comparison. The pass that is due after it, if one is: of the node too, which has a map of its own.
fn compare(reconciler: &mut Reconciler) -> Option<Look> {
    let is_same = reconciler.compare().unwrap_or_else(|error| {
        error!("compare the maps: {error}");
        false
    });
    (!is_same).then_some(Look { node: true, objects: false })
}

/// Waits for a sweep that runs; for ever where none does.
async fn finished(sweeping: &mut Option<Sweep>) -> anyhow::Result<(Swept, Duration)> {
    match sweeping {
        Some(task) => task.await.context("the sweep was cut off")?,
        None => std::future::pending().await,
    }
}
