//! Times the policy and prints one JSON object per line: the best of several runs, in milliseconds.

use lb_agent::policy::extend::Options;
use lb_agent::policy::{compute, maglev, sample, wanted};
use std::hint::black_box;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

const ENDPOINTS: u32 = 10;
const RUNS: u32 = 20;

fn main() {
    for services in [1_000, 10_000] {
        let sample::Cluster { nodes, services: all, slices } = sample::cluster(services, ENDPOINTS);
        let ms = best(|| drop(black_box(compute("node-1", &nodes, &all, &slices))));
        println!("{{\"what\":\"compute\",\"services\":{services},\"endpoints\":{ENDPOINTS},\"ms\":{ms:.3}}}");
        let options = Options::default();
        let ms = best(|| drop(black_box(wanted("node-1", &nodes, &all, &slices, &options))));
        println!("{{\"what\":\"wanted\",\"services\":{services},\"endpoints\":{ENDPOINTS},\"ms\":{ms:.3}}}");
    }
    for backends in [1, 10, 100, 1_000] {
        let set = (0..backends).map(|i| (Ipv4Addr::from(0x0a00_0001 + i), 8080)).collect();
        let ms = best(|| drop(black_box(maglev::table(&set))));
        println!("{{\"what\":\"maglev\",\"backends\":{backends},\"ms\":{ms:.4}}}");
    }
}

fn best(run: impl Fn()) -> f64 {
    let timed = |_| {
        let begin = Instant::now();
        run();
        begin.elapsed()
    };
    (0..RUNS).map(timed).min().unwrap_or(Duration::ZERO).as_secs_f64() * 1e3
}
