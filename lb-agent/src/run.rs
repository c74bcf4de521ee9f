//! The agent's loop: wait for a change, look at objects and node, compute, reconcile, report.

use crate::datapath::maps::Maps;
use crate::datapath::pins::Pins;
use crate::datapath::sweep::{self, Swept};
use crate::health::Publisher;
use crate::model::{HardwareAddress, Node, Status};
use crate::node::interfaces::{self, RoleOptions, Roles};
use crate::policy::extend::{self, Options};
use crate::policy::{compute, node};
use crate::problems::Problems;
use crate::reconcile::{Busy, Reconciler};
use crate::report::manifests as report;
use crate::source::Objects;
use crate::source::manifests::Reader;
use crate::source::watch::Watch;
use anyhow::Context as _;
use lb_common::config::Timeouts;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval_at};
use tracing::{debug, error, info};

/// What the loop needs to know.
pub struct Agent {
    /// This node's name.
    pub node: String,
    /// Where objects come from, and reports go to.
    pub manifests: PathBuf,
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

/// What one pass leaves for the next.
#[derive(Default)]
struct Memory {
    reader: Reader,
    /// The last good objects.
    objects: Option<Objects>,
    problems: Problems,
    busy: Busy,
    was_ready: bool,
}

impl Agent {
    /// Runs until SIGTERM or SIGINT. The datapath goes on without us.
    ///
    /// # Errors
    /// Something that no later pass could mend: no watch, no signal handler.
    pub async fn run(self, mut reconciler: Reconciler) -> anyhow::Result<()> {
        let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
        // Before the first look, so that no change falls between.
        let mut node_changes =
            crate::node::watch::start().context("watch the node's interfaces, rules and routes")?;
        let mut manifests = Watch::new(&self.manifests, crate::source::watch::Timing::default())?;
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
                is_done = self.pass(&mut reconciler, &mut memory).await;
            }
            is_due = true;
            let retry = tokio::time::sleep(if is_done { Duration::MAX } else { RETRY });
            tokio::select! {
                _ = manifests.tick() => {}
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
    async fn pass(&self, reconciler: &mut Reconciler, memory: &mut Memory) -> bool {
        let begun = Instant::now();
        self.health.send_modify(|health| health.alive = Some(begun));
        let mut problems = BTreeSet::new();
        let result = self.try_pass(reconciler, memory, &mut problems).await;
        let is_done = match result {
            Ok(()) => true,
            Err(error) => {
                problems.insert(format!("{error:#}"));
                false
            }
        };
        self.health.send_modify(|health| {
            health.problems = problems.iter().cloned().collect();
            // What an operator got wrong in a Service is said, but does not make the node less ready.
            health.is_ready = is_done && memory.objects.is_some();
            if health.is_ready {
                (health.synced, health.duration) = (Some(Instant::now()), begun.elapsed());
            } else {
                health.failures += 1;
            }
        });
        memory.problems.say(problems);
        if self.health.borrow().is_ready && !std::mem::replace(&mut memory.was_ready, true) {
            info!("ready");
        }
        is_done
    }

    async fn try_pass(
        &self,
        reconciler: &mut Reconciler,
        memory: &mut Memory,
        problems: &mut BTreeSet<String>,
    ) -> anyhow::Result<()> {
        let interfaces = interfaces::list(&reconciler.netlink).await?;
        let addresses = interfaces::host_addresses(&interfaces, &self.roles.selection);
        let roles = interfaces::find_roles(&interfaces, &self.roles);
        self.publish(&addresses, roles.as_ref().ok())?;
        let roles = roles?;
        reconciler.node(&roles).await?;
        match memory.reader.read(&self.manifests) {
            Ok(objects) => memory.objects = Some(objects),
            // The last good state stays in force; without one, what a former agent left does.
            Err(error) => {
                problems.insert(format!("{error}; the last good state stays in force"));
            }
        }
        let Some(objects) = &memory.objects else { return Ok(()) };
        let Objects { nodes, services, slices, ignored: _ } = objects;
        let (nodes, errors): (Vec<Node>, Vec<_>) = nodes.iter().cloned().unzip();
        problems.extend(errors.into_iter().flatten().map(|error| error.to_string()));
        let desired = compute(&self.node, &nodes, services, slices);
        let wanted = extend::wanted(&self.node, &nodes, services, slices, &self.policy);
        problems.extend(desired.problems);
        problems.extend(wanted.problems.iter().cloned());
        problems.extend(reconciler.services(&wanted, &roles, &memory.busy).await?);
        self.health.send_modify(|health| {
            let names = wanted.services.iter().map(|(key, s)| (*key, (s.namespace.clone(), s.name.clone())));
            health.services = names.collect();
        });
        // Only now: a status tells others that the address is served.
        self.report(&desired.status)
    }

    /// Our annotations.
    fn publish(&self, addresses: &[Ipv4Addr], roles: Option<&Roles>) -> anyhow::Result<()> {
        let overlay = roles.map(|roles| {
            node::format_weave(roles.overlay_address, &HardwareAddress::from(roles.overlay_mac))
        });
        let text = node::format_addresses(addresses);
        if report::write_node(&self.manifests, &self.node, &text, overlay.as_deref())? {
            info!(addresses = text, overlay, "published this node's addresses");
        }
        Ok(())
    }

    /// The status of the Services that are ours to write.
    fn report(&self, status: &[Status]) -> anyhow::Result<()> {
        for Status { namespace, name, address } in status {
            if report::write_status(&self.manifests, namespace, name, *address)? {
                info!(namespace, service = name, ?address, "wrote the status");
            }
        }
        Ok(())
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
