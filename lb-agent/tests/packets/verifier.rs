//! The verifier's work is a tracked number: a change that multiplies it is seen here, not on a kernel that refuses it.

use crate::lab::LIMITS;
use lb_agent::datapath::load::{PROGRAMS, classifier, load_unpinned};
use lb_common::config::Config;

/// `name = instructions`, a line for each program.
const BUDGET: &str = include_str!("../../../lb-ebpf/verifier-budget.toml");

#[test]
fn verifier_cost_is_within_the_budget() {
    let mut ebpf = load_unpinned(&LIMITS, &Config::DEFAULT).unwrap();
    let mut over = Vec::new();
    for name in PROGRAMS {
        let budget = budget(name);
        // Without a count (before Linux 5.16) there is nothing to compare, and that must be seen.
        let found =
            classifier(&mut ebpf, name).unwrap().info().unwrap().verified_instruction_count().unwrap();
        println!("{name}: {found} instructions verified, budget {budget}");
        if found > budget + budget / 10 {
            over.push(name);
        }
    }
    assert!(over.is_empty(), "more than 10 % above lb-ebpf/verifier-budget.toml: {over:?}");
}

fn budget(name: &str) -> u32 {
    let line = BUDGET.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches([' ', '=']).replace('_', "").trim().parse().unwrap()
}
