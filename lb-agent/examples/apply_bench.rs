//! Times one endpoint's change, planned and applied to real maps, beside 1, 1,000 and 10,000 served ports with ten
//! endpoints each. Prints one JSON object per line, times in milliseconds: until a packet would find the new table, as a
//! second thread sees it, and until the call returns, which is when no packet can be using the former one. Needs root.

use anyhow::{Context as _, Result, ensure};
use lb_agent::datapath::load::{self, Limits};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::pins::Pins;
use lb_agent::datapath::plan::{self, Observed, Rest};
use lb_agent::policy::extend::{Options, Wanted, WantedService};
use lb_agent::policy::{sample, wanted};
use lb_common::config::Config;
use lb_common::limits;
use lb_common::service::ServiceKey;
use std::fs;
use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

const ENDPOINTS: u32 = 10;
/// Changes that are timed for each number of services.
const CHANGES: usize = 100;
/// No change takes longer.
const LIMIT: Duration = Duration::from_secs(5);

fn main() -> Result<()> {
    for services in [1, 1_000, 10_000] {
        bench(services)?;
    }
    Ok(())
}

fn bench(services: u32) -> Result<()> {
    let pins = Directory::new();
    // Slot 0 means "none", so it takes one more for every endpoint to have one.
    let limits =
        Limits { flows: 1_000, handshakes: 1_000, backends: limits::BACKENDS + 1, ..Limits::default() };
    let _ebpf = load::load(&pins.0, &limits, &Config::DEFAULT)?;
    let (mut maps, watched) = (Maps::open(&pins.0)?, Maps::open(&pins.0)?);
    let sample::Cluster { nodes, services: all, slices } = sample::cluster(services, ENDPOINTS);
    let Wanted { services: served, .. } = wanted("node-1", &nodes, &all, &slices, &Options::default());
    ensure!(served.len() == services as usize, "{} of {services} ports are served", served.len());

    let mut observed = Observed::read(&maps)?;
    let begin = Instant::now();
    change(&served.iter().collect::<Vec<_>>(), &mut observed, &mut maps)?;
    let fill_ms = ms(begin.elapsed());

    // The one in the middle, so that sorted collections have something on either side.
    let (key, whole) = served.iter().nth(served.len() / 2).context("nothing is served")?;
    let id = maps.services.get(key)?.context("the port is not served")?.id;
    let mut smaller = whole.clone();
    smaller.backends.pop().context("the service has no endpoint")?;
    let (mut seen, mut returned) = (Vec::new(), Vec::new());
    for next in [&smaller, whole].into_iter().cycle().take(CHANGES) {
        let before = watched.ring(id)?;
        let watching = Barrier::new(2);
        thread::scope(|scope| {
            let watcher = scope.spawn(|| -> Result<Instant> {
                watching.wait();
                let limit = Instant::now() + LIMIT;
                while watched.ring(id)? == before {
                    ensure!(Instant::now() < limit, "the table did not change");
                }
                Ok(Instant::now())
            });
            watching.wait();
            let begin = Instant::now();
            let result = change(&[(key, next)], &mut observed, &mut maps);
            returned.push(ms(begin.elapsed()));
            result?;
            let then = watcher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            seen.push(ms(then.duration_since(begin)));
            anyhow::Ok(())
        })?;
    }
    ensure!(Observed::read(&maps)? == observed, "the maps do not hold what was applied");
    seen.sort_unstable_by(f64::total_cmp);
    returned.sort_unstable_by(f64::total_cmp);
    println!(
        "{{\"what\":\"apply\",\"services\":{services},\"endpoints\":{ENDPOINTS},\"seen_ms\":{:.4},\
         \"seen_p99_ms\":{:.4},\"ms\":{:.4},\"fill_ms\":{fill_ms:.1}}}",
        seen[CHANGES / 2],
        seen[CHANGES * 99 / 100],
        returned[CHANGES / 2],
    );
    Ok(())
}

/// A directory for pins, gone with this.
struct Directory(Pins);

impl Directory {
    fn new() -> Self {
        Self(Pins::new(&Path::new("/sys/fs/bpf").join(format!("reweave-lb-bench-{}", std::process::id()))))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(self.0.root()) {
            eprintln!("{} stays: {error}", self.0.root().display());
        }
    }
}

/// Plans and applies, as the reconciler does.
fn change(wanted: &[(&ServiceKey, &WantedService)], observed: &mut Observed, maps: &mut Maps) -> Result<()> {
    let mut rest = Rest::default();
    for (key, service) in wanted {
        let plan = plan::service(key, Some(service), observed);
        ensure!(plan.problems.is_empty() && !plan.operations.is_empty(), "not a whole change: {plan:?}");
        observed.begin(maps, plan.operations, &mut rest)?;
        if rest.is_full() {
            observed.finish(maps, std::mem::take(&mut rest))?;
        }
    }
    Ok(observed.finish(maps, rest)?)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
