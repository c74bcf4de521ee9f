//! Times `policy::compute` and prints one JSON object per size: the best of several runs, in milliseconds.

use lb_agent::policy::{compute, sample};
use std::hint::black_box;
use std::time::{Duration, Instant};

const ENDPOINTS: u32 = 10;
const RUNS: u32 = 20;

fn main() {
    for services in [1_000, 10_000] {
        let cluster = sample::cluster(services, ENDPOINTS);
        let run = |_| {
            let begin = Instant::now();
            black_box(compute("node-1", &cluster.nodes, &cluster.services, &cluster.slices));
            begin.elapsed()
        };
        let best = (0..RUNS).map(run).min().unwrap_or(Duration::ZERO).as_secs_f64() * 1e3;
        println!("{{\"services\":{services},\"endpoints\":{ENDPOINTS},\"ms\":{best:.3}}}");
    }
}
