//! The verifier's work is a tracked number: a change that multiplies it is seen here, not on a kernel that refuses it.

use crate::lab::LIMITS;
use aya::util::KernelVersion;
use lb_agent::datapath::load::{PROGRAMS, classifier, load_unpinned};
use lb_common::config::Config;
use nix::sys::utsname::uname;

/// A section for each kernel, `[6.18]`, with a line `name = instructions` for each program.
const BUDGET: &str = include_str!("../../../lb-ebpf/verifier-budget.toml");

/// The kernel counts since this release (commit aba64c7da983); before, that it takes the program is all there is to see.
const COUNTS: (u8, u8) = (5, 16);

#[test]
fn verifier_cost_is_within_the_budget() {
    let release = uname().unwrap().release().to_string_lossy().into_owned();
    let kernel = major_and_minor(&release);
    let mut ebpf = load_unpinned(&LIMITS, &Config::DEFAULT).unwrap();
    let counts = KernelVersion::current().unwrap() >= KernelVersion::new(COUNTS.0, COUNTS.1, 0);
    let mut over = Vec::new();
    for name in PROGRAMS {
        let found = classifier(&mut ebpf, name).unwrap().info().unwrap().verified_instruction_count();
        let Some(found) = found else {
            assert!(!counts, "Linux {release} should count");
            println!("{name}: verified, Linux {kernel} does not count");
            continue;
        };
        let Some(budget) = budget(BUDGET, kernel, name) else {
            println!("{name}: {found} instructions verified, no budget for Linux {kernel}");
            continue;
        };
        println!("{name}: {found} instructions verified, budget {budget}");
        if found > budget + budget / 10 {
            over.push(name);
        }
    }
    assert!(over.is_empty(), "more than 10 % above lb-ebpf/verifier-budget.toml: {over:?}");
}

/// `6.18` out of `6.18.15+deb13-cloud-amd64`.
fn major_and_minor(release: &str) -> &str {
    let mut dots = release.match_indices(|c: char| !c.is_ascii_digit());
    let end = dots.nth(1).map_or(release.len(), |(index, _)| index);
    &release[..end]
}

fn budget(text: &str, kernel: &str, name: &str) -> Option<u32> {
    let section = format!("[\"{kernel}\"]");
    let lines = text.lines().skip_while(|line| **line != section).skip(1);
    let mut own = lines.take_while(|line| !line.starts_with('['));
    let number = own.find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix('='))?;
    Some(number.replace('_', "").trim().parse().unwrap())
}

#[test]
fn a_budget_is_that_of_the_kernel() {
    let text = "# words\n[\"6.1\"]\none = 1_000\ntwo = 2\n\n[\"6.12\"]\none = 3\n";
    assert_eq!(budget(text, "6.1", "one"), Some(1_000));
    assert_eq!(budget(text, "6.1", "two"), Some(2));
    assert_eq!(budget(text, "6.12", "one"), Some(3));
    assert_eq!(budget(text, "6.12", "two"), None);
    assert_eq!(budget(text, "6", "one"), None);
    for (release, kernel) in
        [("6.18.15+deb13-cloud-amd64", "6.18"), ("5.10.0-46-cloud-amd64", "5.10"), ("7.3", "7.3")]
    {
        assert_eq!(major_and_minor(release), kernel);
    }
}
