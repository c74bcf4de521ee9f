//! Times changes of single endpoints, from the store of objects to the maps of a node in the testbed, beside 5,000 Services
//! with ten endpoints each, at 50 changes a second. Prints one JSON object per line: percentiles in milliseconds from when
//! a change is due until the kernel has let go of the former table, so waiting behind others counts; CPU time of the agent's
//! thread, and resident memory. First without anything else, then with the agent's period of ten seconds: the look at the
//! node, and the comparison of everything with the maps. Needs root.

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use lb_agent::datapath::attach::{Hooks, best_hook};
use lb_agent::datapath::load::{self, Limits};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::pins::Pins;
use lb_agent::model::{EndpointSlice, ServiceName};
use lb_agent::node::interfaces;
use lb_agent::node::roles::{self, RoleOptions, Roles};
use lb_agent::node::{connect, return_path, sysctl};
use lb_agent::policy::extend::Options;
use lb_agent::policy::sample;
use lb_agent::policy::state::State;
use lb_agent::reconcile::{Busy, Reconciler};
use lb_agent::source::Objects;
use lb_agent::source::store::Store;
use lb_common::config::Config;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use testbed::Testbed;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

const SERVICES: u32 = 5_000;
const ENDPOINTS: u32 = 10;
const PER_SECOND: u32 = 50;
/// As the agent's own default.
const PERIOD: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    let seconds =
        std::env::args().nth(1).map_or(Ok(30), |text| text.parse()).context("seconds to measure")?;
    let testbed = Testbed::weave(testbed::Options::default())?;
    let (pins, state) = (Pins::new(&testbed.pins(1)), testbed.directory().join("state"));
    testbed.node(1).enter(|| {
        // One thread: a network namespace is one thread's.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(bench(&pins, &state, seconds))
    })
}

async fn bench(pins: &Pins, state: &Path, seconds: u64) -> Result<()> {
    fs::create_dir_all(state)?;
    let netlink = connect()?;
    let ebpf = load::load(pins, &Limits::default(), &Config::DEFAULT)?;
    let hooks = Hooks::new(pins.clone(), state, best_hook(), netlink.clone());
    let reconciler = Reconciler::new(
        ebpf,
        Maps::open(pins)?,
        hooks,
        netlink,
        return_path::Options::DEFAULT,
        sysctl::Record::new(state),
    );
    let mut agent = Agent {
        store: Store::default(),
        policy: State::new("node-1", Options::default()),
        reconciler,
        busy: Busy::default(),
        roles: RoleOptions::default(),
    };
    let idle = resident()?;
    let begin = Instant::now();
    let roles = agent.look_at_node().await?;
    agent.store.replace(objects());
    agent.pass(&roles).await?;
    let filled = begin.elapsed();
    ensure!(agent.policy.served().len() == SERVICES as usize, "not all ports are served");
    println!(
        "{{\"what\":\"fill\",\"services\":{SERVICES},\"endpoints\":{},\"ms\":{:.0},\"idle_mib\":{idle:.1}}}",
        SERVICES * ENDPOINTS,
        ms(filled)
    );
    for with_period in [false, true] {
        let Measured { mut latencies, longest_pause, cpu } = agent.measure(seconds, with_period).await?;
        latencies.sort_unstable_by(f64::total_cmp);
        let at = |percent: usize| latencies[(latencies.len() * percent / 100).min(latencies.len() - 1)];
        println!(
            "{{\"what\":\"change\",\"period\":{with_period},\"changes\":{},\"p50_ms\":{:.2},\"p99_ms\":{:.2},\
             \"most_ms\":{:.2},\"longest_pause_ms\":{:.2},\"cpu_percent\":{:.1},\"resident_mib\":{:.1}}}",
            latencies.len(),
            at(50),
            at(99),
            at(100),
            ms(longest_pause),
            100.0 * cpu.as_secs_f64() / f64::from(u32::try_from(seconds)?),
            resident()?,
        );
    }
    Ok(())
}

/// The parts of an agent, without the source that fills its store.
struct Agent {
    store: Store,
    policy: State,
    reconciler: Reconciler,
    busy: Busy,
    roles: RoleOptions,
}

struct Measured {
    /// In milliseconds.
    latencies: Vec<f64>,
    /// The longest that anything but a change took.
    longest_pause: Duration,
    cpu: Duration,
}

/// An object that changed.
struct Change {
    due: Instant,
    slice: EndpointSlice,
}

impl Agent {
    async fn look_at_node(&mut self) -> Result<Roles> {
        let interfaces = interfaces::list(&self.reconciler.netlink).await?;
        let roles = roles::find(&self.reconciler.netlink, &interfaces, &self.roles).await??;
        self.reconciler.node(&roles).await?;
        Ok(roles)
    }

    async fn pass(&mut self, roles: &Roles) -> Result<()> {
        let changes = self.store.take_changes();
        let delta = self.policy.update(&self.store, changes);
        self.reconciler.services(&self.policy, delta, roles, &self.busy).await?;
        let problem = self.policy.problems().map(|(_, text)| text).chain(self.reconciler.problems()).next();
        ensure!(problem.is_none(), "{problem:?}");
        Ok(())
    }

    /// As the agent's loop: what has changed meanwhile is one pass.
    async fn measure(&mut self, seconds: u64, with_period: bool) -> Result<Measured> {
        let roles = self.look_at_node().await?;
        self.pass(&roles).await?;
        let count = usize::try_from(seconds)? * PER_SECOND as usize;
        let mut changes = feed(self.changes(count));
        let mut period = interval(PERIOD);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut measured =
            Measured { latencies: Vec::with_capacity(count), longest_pause: Duration::ZERO, cpu: cpu()? };
        loop {
            let begin = tokio::select! {
                biased;
                change = changes.recv() => {
                    let Some(change) = change else { break };
                    let mut due = Vec::new();
                    for Change { due: at, slice } in std::iter::once(change).chain(waiting(&mut changes)) {
                        self.store.set_slice(&slice.namespace.clone(), &slice.name.clone(), Some(slice));
                        due.push(at);
                    }
                    self.pass(&roles).await?;
                    measured.latencies.extend(due.iter().map(|due| ms(due.elapsed())));
                    continue;
                }
                _ = period.tick(), if with_period => {
                    let begin = Instant::now();
                    self.reconciler.look_again();
                    let roles = self.look_at_node().await?;
                    self.pass(&roles).await?;
                    begin
                }
                () = std::future::ready(()), if self.reconciler.is_comparing() => {
                    let begin = Instant::now();
                    ensure!(self.reconciler.compare()?, "the maps do not hold what was written");
                    begin
                }
            };
            measured.longest_pause = measured.longest_pause.max(begin.elapsed());
        }
        measured.cpu = cpu()?.saturating_sub(measured.cpu);
        Ok(measured)
    }

    /// Slices of which one endpoint goes, or is back.
    fn changes(&self, count: usize) -> Vec<EndpointSlice> {
        let names: Vec<&ServiceName> = self.store.services().map(|(name, _)| name).collect();
        let mut rng = Rng::with_seed(1);
        let change = |_| {
            let mut slice = self.store.slices(names[rng.usize(..names.len())])[0].clone();
            let endpoint = rng.usize(..slice.endpoints.len());
            slice.endpoints.remove(endpoint);
            slice
        };
        (0..count).map(change).collect()
    }
}

/// What waits already.
fn waiting(changes: &mut mpsc::UnboundedReceiver<Change>) -> impl Iterator<Item = Change> {
    std::iter::from_fn(|| changes.try_recv().ok())
}

/// Lets them come one by one from another thread, evenly, whether or not the agent keeps up.
fn feed(slices: Vec<EndpointSlice>) -> mpsc::UnboundedReceiver<Change> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        runtime.block_on(async {
            let begin = tokio::time::Instant::now();
            for (number, slice) in (1..).zip(slices) {
                let due = begin + Duration::from_secs(1) * number / PER_SECOND;
                tokio::time::sleep_until(due).await;
                sender.send(Change { due: due.into_std(), slice })?;
            }
            Ok(())
        })
    });
    receiver
}

fn objects() -> Objects {
    let sample::Cluster { nodes, services, slices } = sample::cluster(SERVICES, ENDPOINTS);
    let nodes = nodes.into_iter().map(|node| (node, None)).collect();
    Objects { nodes, services, slices, ignored: 0 }
}

/// User and system time of this thread.
fn cpu() -> Result<Duration> {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID)?;
    Ok(Duration::from(time))
}

/// Resident memory of this process, in MiB.
fn resident() -> Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
    Ok(kib.context("no VmRSS")?.parse::<f64>()? / 1024.0)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
