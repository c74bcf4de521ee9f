//! Nanoseconds per packet, by `BPF_PROG_TEST_RUN` and the kernel's own clock of programs; one JSON array on standard
//! output, progress on standard error. `cargo xtask bench packet` runs it.
//!
//! Each run gets a fresh packet: test-run with repetitions would hand the program what its previous run has made of the
//! packet. All measurements take turns within one run, in rounds, and the median of the rounds counts, so that a
//! moment when the machine is busy spoils none of them alone.

#![expect(clippy::unwrap_used, reason = "a bench that cannot run ends")]

#[expect(dead_code, reason = "shared with the packet tests, which use more of it")]
#[path = "../../tests/packets/frame.rs"]
mod frame;
#[expect(dead_code, reason = "shared with the packet tests, which use more of it")]
#[path = "../../tests/packets/lab.rs"]
mod lab;

mod scene;

use aya::sys::{Stats, enable_stats};
use lab::Lab;
use scene::{Packets, Scene};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Together at least 200,000 runs of each measurement.
const ROUNDS: usize = 50;
const RUNS: usize = 5_000;

fn main() {
    // Dropped at the end, when the kernel stops its clock again.
    let _clock = enable_stats(Stats::RunTime).unwrap();
    pin_to_one_cpu();
    eprintln!("filling the maps");
    // Each in a network namespace of its own; interfaces are looked up by index, so the last one serves them all.
    let mut scenes = scene::all();
    let mut rounds: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for round in 0..ROUNDS {
        if round % 10 == 0 {
            eprintln!("round {round} of {ROUNDS}");
        }
        for Scene { lab, measurements } in &mut scenes {
            for (name, packets) in measurements {
                rounds.entry(name).or_default().push(time(lab, packets));
            }
        }
    }
    let median = rounds.into_iter().map(|(name, values)| (name, middle(values))).collect();
    println!("{}", Value::from(report(&median)));
}

/// Nanoseconds of one run, on average over a round.
fn time(lab: &mut Lab, packets: &mut Packets) -> f64 {
    let clock = |lab: &Lab| {
        let info = lab.program(packets.program).info().unwrap();
        (info.run_time().as_nanos(), info.run_count())
    };
    let before = clock(lab);
    for _ in 0..RUNS {
        let (bytes, meta) = packets.source.next();
        let verdict = lab.run_program(packets.program, bytes, meta);
        assert_eq!(verdict, packets.verdict, "{} did not take its path", packets.program);
    }
    let after = clock(lab);
    assert_eq!(after.1 - before.1, RUNS as u64, "somebody else ran the program too");
    (after.0 - before.0) as f64 / RUNS as f64
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn pin_to_one_cpu() {
    let mut cpus = nix::sched::CpuSet::new();
    cpus.set(0).unwrap();
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &cpus).unwrap();
}

/// Net of the empty program, with the goals.
fn report(median: &BTreeMap<&'static str, f64>) -> Vec<Value> {
    let empty = median["empty"];
    let net = |name: &str| median[name] - empty;
    let value = |name: &str, value: f64, unit: &str, goal: Option<f64>| {
        let rounded = (value * 100.0).round() / 100.0;
        json!({ "name": format!("packet/{name}"), "value": rounded, "unit": unit, "at_most": goal })
    };
    // What katran costs, measured the same way on such a machine.
    let goal = |name: &str| match name {
        "established_in" | "established_out" => Some(150.0),
        "new_connection" => Some(280.0),
        _ => None,
    };
    let mut lines = vec![value("empty (gross)", empty, "ns", None)];
    lines.extend(
        median.keys().filter(|name| **name != "empty").map(|name| value(name, net(name), "ns", goal(name))),
    );
    for (name, over, under, at_most) in [
        ("foreign_uplink / established_in", "foreign_uplink", "established_in", 0.3),
        ("foreign_pods / established_in", "foreign_pods", "established_in", 0.3),
        ("established_in, 10000 services / 1", "established_in_10000_services", "established_in", 1.1),
        ("new_connection, 10000 services / 1", "new_connection_10000_services", "new_connection", 1.1),
        ("foreign_uplink, 10000 services / 1", "foreign_uplink_10000_services", "foreign_uplink", 1.1),
        ("established_in, 1000000 flows / 1", "established_in_1000000_flows", "established_in", 1.6),
        ("established_out, 1000000 flows / 1", "established_out_1000000_flows", "established_out", 1.6),
    ] {
        lines.push(value(name, net(over) / net(under), "ratio", Some(at_most)));
    }
    lines
}
