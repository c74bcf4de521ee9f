//! The agent's loop: wait for a change, look at objects and node, compute, reconcile, report.

use crate::cluster::Cluster;
use crate::datapath::maps::Maps;
use crate::datapath::pins::Pins;
use crate::datapath::sweep::{self, Swept};
use crate::health::Publisher;
use crate::model::{EndpointSlice, HardwareAddress, Node, Service};
use crate::node::interfaces::{self, Interface, RoleOptions, Roles};
use crate::policy::extend::{self, Options};
use crate::policy::{compute, node};
use crate::problems::Problems;
use crate::reconcile::{Busy, Reconciler};
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

/// How soon a pass that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// What a pass could go by.
enum Seen {
    Everything,
    /// Nothing of the cluster's yet.
    NoObjects,
}

/// What one pass leaves for the next.
#[derive(Default)]
struct Memory {
    problems: Problems,
    busy: Busy,
    was_ready: bool,
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
        let mut memory = Memory::default();
        // Which marks connections carry must be known before one is taken from a holder or given to another.
        match finished(&mut Some(self.sweep())).await {
            Ok(swept) => memory.busy.marks = swept.marks,
            Err(error) => error!("sweep: {error:#}"),
        }
        let mut period = interval_at(tokio::time::Instant::now() + self.period, self.period);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sweeping: Option<JoinHandle<anyhow::Result<Swept>>> = None;
        let (mut is_due, mut is_done) = (true, true);
        loop {
            if is_due {
                is_done = self.pass(&mut reconciler, &mut cluster, &mut memory).await;
            }
            is_due = true;
            let retry = tokio::time::sleep(if is_done { Duration::MAX } else { RETRY });
            tokio::select! {
                () = cluster.changed() => {}
                changed = node_changes.changed() => changed.context("the node's watch ended")?,
                _ = period.tick() => {
                    reconciler.look_again();
                    if sweeping.is_none() {
                        sweeping = Some(self.sweep());
                    }
                }
                swept = finished(&mut sweeping) => {
                    sweeping = None;
                    match swept {
                        Ok(swept) => {
                            is_due = reconciler.awaits_sweep() || memory.busy.marks != swept.marks;
                            memory.busy = Busy { marks: swept.marks.clone(), sweeps: memory.busy.sweeps + 1 };
                            self.health.send_modify(|health| health.swept = swept);
                        }
                        Err(error) => error!("sweep: {error:#}"),
                    }
                }
                () = retry => {}
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
            }
        }
        info!("stopped; the datapath goes on without the agent, `lb-agent cleanup` removes it");
        Ok(())
    }

    /// One look at everything. False when it should be tried again soon.
    async fn pass(&self, reconciler: &mut Reconciler, cluster: &mut Cluster, memory: &mut Memory) -> bool {
        let begun = Instant::now();
        self.health.send_modify(|health| health.alive = Some(begun));
        let mut problems = BTreeSet::new();
        let result = self.try_pass(reconciler, cluster, memory, &mut problems).await;
        let (is_done, is_ready) = match result {
            Ok(Seen::Everything) => (true, true),
            Ok(Seen::NoObjects) => (true, false),
            Err(error) => {
                problems.insert(format!("{error:#}"));
                (false, false)
            }
        };
        self.health.send_modify(|health| {
            health.problems = problems.iter().cloned().collect();
            // What an operator got wrong in a Service is said, but does not make the node less ready; nor does an API
            // that is away.
            health.is_ready = is_ready;
            if is_ready {
                (health.synced, health.duration) = (Some(Instant::now()), begun.elapsed());
            } else {
                health.failures += 1;
            }
        });
        cluster.say(&problems);
        memory.problems.say(problems);
        if is_ready && !std::mem::replace(&mut memory.was_ready, true) {
            info!("ready");
        }
        is_done
    }

    async fn try_pass(
        &self,
        reconciler: &mut Reconciler,
        cluster: &mut Cluster,
        memory: &mut Memory,
        problems: &mut BTreeSet<String>,
    ) -> anyhow::Result<Seen> {
        let interfaces = interfaces::list(&reconciler.netlink).await?;
        let roles = interfaces::find_roles(&interfaces, &self.roles);
        self.publish(cluster, &interfaces, roles.as_ref().ok())?;
        let roles = roles?;
        reconciler.node(&roles).await?;
        let (store, complaints) = cluster.look();
        problems.extend(complaints);
        // Without objects, what a former agent left stays in force.
        let Some(store) = store else { return Ok(Seen::NoObjects) };
        problems.extend(store.annotation_errors().map(ToString::to_string));
        let nodes: Vec<Node> = store.nodes().cloned().collect();
        let services: Vec<Service> = store.services().map(|(_, service)| service.clone()).collect();
        let slices: Vec<EndpointSlice> =
            store.services().flat_map(|(name, _)| store.slices(name)).cloned().collect();
        let desired = compute(&self.node, &nodes, &services, &slices);
        let wanted = extend::wanted(&self.node, &nodes, &services, &slices, &self.policy);
        problems.extend(desired.problems.iter().cloned());
        problems.extend(wanted.problems.iter().cloned());
        problems.extend(reconciler.services(&wanted, &roles, &memory.busy).await?);
        self.health.send_modify(|health| {
            let names = wanted.services.iter().map(|(key, s)| (*key, (s.namespace.clone(), s.name.clone())));
            health.services = names.collect();
        });
        // Only now: a status tells others that the address is served.
        cluster.report(&desired)?;
        Ok(Seen::Everything)
    }

    /// Our annotations.
    fn publish(
        &self,
        cluster: &mut Cluster,
        interfaces: &[Interface],
        roles: Option<&Roles>,
    ) -> anyhow::Result<()> {
        let overlay = roles.map(|roles| {
            node::format_weave(roles.overlay_address, &HardwareAddress::from(roles.overlay_mac))
        });
        let addresses =
            node::format_addresses(&interfaces::host_addresses(interfaces, &self.roles.selection));
        let host: Vec<_> =
            interfaces.iter().flat_map(|i| &i.addresses).map(|(address, _)| *address).collect();
        cluster.publish(&host, &addresses, overlay.as_deref())
    }

    /// In a thread of its own: a full table takes a second.
    fn sweep(&self) -> JoinHandle<anyhow::Result<Swept>> {
        let (pins, timeouts) = (self.pins.clone(), self.timeouts);
        tokio::task::spawn_blocking(move || {
            let mut maps = Maps::open(&pins)?;
            let swept = sweep::sweep(&mut maps, &timeouts, sweep::now())?;
            debug!(?swept, "swept the flow tables");
            Ok(swept)
        })
    }
}

/// Waits for a sweep that runs; for ever where none does.
async fn finished(sweeping: &mut Option<JoinHandle<anyhow::Result<Swept>>>) -> anyhow::Result<Swept> {
    match sweeping {
        Some(task) => task.await.context("the sweep was cut off")?,
        None => std::future::pending().await,
    }
}
