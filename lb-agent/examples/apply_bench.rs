//! Times one endpoint's change, planned and applied to real maps, beside 1, 1,000 and 10,000 served ports with ten
//! endpoints each. Prints one JSON object per line, times in milliseconds. Needs root; the maps are its own.

use anyhow::{Context as _, Result, ensure};
use lb_agent::datapath::load::{self, Limits};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::plan::{self, Observed};
use lb_agent::policy::extend::{Options, Wanted, WantedService};
use lb_agent::policy::{sample, wanted};
use lb_common::config::Config;
use lb_common::service::ServiceKey;
use std::time::{Duration, Instant};

const ENDPOINTS: u32 = 10;
/// Changes that are timed for each number of services.
const CHANGES: usize = 200;

fn main() -> Result<()> {
    for services in [1, 1_000, 10_000] {
        bench(services)?;
    }
    Ok(())
}

fn bench(services: u32) -> Result<()> {
    let limits = Limits { flows: 1_000, handshakes: 1_000, ..Limits::default() };
    let mut ebpf = load::load_unpinned(&limits, &Config::DEFAULT)?;
    let mut maps = Maps::take(&mut ebpf)?;
    let sample::Cluster { nodes, services: all, slices } = sample::cluster(services, ENDPOINTS);
    let Wanted { services: served, .. } = wanted("node-1", &nodes, &all, &slices, &Options::default());
    ensure!(served.len() == services as usize, "{} of {services} ports are served", served.len());

    let mut observed = Observed::read(&maps)?;
    let begin = Instant::now();
    for (key, service) in &served {
        change(key, service, &mut observed, &mut maps)?;
    }
    let fill_ms = ms(begin.elapsed());

    // The one in the middle, so that sorted collections have something on either side.
    let (key, whole) = served.iter().nth(served.len() / 2).context("nothing is served")?;
    let mut smaller = whole.clone();
    smaller.backends.pop().context("the service has no endpoint")?;
    let mut times = Vec::new();
    for next in [&smaller, whole].into_iter().cycle().take(CHANGES) {
        let begin = Instant::now();
        let operations = change(key, next, &mut observed, &mut maps)?;
        times.push(begin.elapsed());
        ensure!(operations > 0, "the change was none");
    }
    ensure!(Observed::read(&maps)? == observed, "the maps do not hold what was applied");
    times.sort_unstable();
    let (median, p99) = (ms(times[times.len() / 2]), ms(times[times.len() * 99 / 100]));
    println!(
        "{{\"what\":\"apply\",\"services\":{services},\"endpoints\":{ENDPOINTS},\"ms\":{median:.4},\"p99_ms\":{p99:.4},\
         \"fill_ms\":{fill_ms:.1}}}"
    );
    Ok(())
}

/// Plans and applies, as the reconciler does.
fn change(
    key: &ServiceKey,
    wanted: &WantedService,
    observed: &mut Observed,
    maps: &mut Maps,
) -> Result<usize> {
    let plan = plan::service(key, Some(wanted), observed);
    ensure!(plan.problems.is_empty(), "{:?}", plan.problems);
    observed.apply(maps, &plan.operations)?;
    Ok(plan.operations.len())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
