//! An agent on a node where nothing happens does nothing. Invariant 11.

use crate::world::World;
use anyhow::{Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};
use testbed::wait;

/// Passes that compare everything, one a second.
const PERIODS: u32 = 8;

/// The test's agent is built without optimization: small tables, so that reading them all is not what is measured.
const ARGS: &[&str] = &[
    "--period=1",
    "--max-flows=1000",
    "--max-handshakes=1000",
    "--max-services=100",
    "--max-backends=1000",
    "--max-endpoints=1000",
];

#[test]
fn an_idle_agent_neither_works_nor_writes() {
    let world = World::serving(ARGS);
    let n2 = world.node(2).clone();
    let mut monitors = Vec::new();
    for number in [1, 2] {
        let node = world.node(number);
        // Neighbours and states of bridge ports change by themselves.
        for words in [&["ip", "monitor", "address", "route", "rule", "netconf"][..], &["nft", "monitor"]] {
            monitors.push(node.spawn(&format!("monitor-{}", words[0]), words).unwrap());
        }
    }
    // A change that they must see, else their silence says nothing.
    n2.ip("rule add priority 99 fwmark 1 table 99\nrule del priority 99").unwrap();
    n2.feed(&["nft", "-f", "-"], "add table ip seen; delete table ip seen").unwrap();
    let n2_monitors = &mut monitors[2..];
    n2_monitors[0].await_log("lookup 99", Duration::from_secs(5)).unwrap();
    n2_monitors[1].await_log("seen", Duration::from_secs(5)).unwrap();
    let pids: Vec<_> = (1..=3).map(|number| world.agent(number).process.pid()).collect();
    // The agents react to that change; only then it is quiet.
    let mut last = (0, Instant::now());
    wait::until("quiet", Duration::from_secs(10), || {
        let now = ticks(pids[1].as_raw())?;
        if now > last.0 + 1 {
            last = (now, Instant::now());
        }
        ensure!(last.1.elapsed() > Duration::from_millis(300), "busy");
        Ok(())
    })
    .unwrap();

    let (started, wall) = (Instant::now(), SystemTime::now());
    let before: Vec<u64> = pids.iter().map(|pid| ticks(pid.as_raw()).unwrap()).collect();
    let state = |world: &World, monitors: &[testbed::Process]| {
        let said: Vec<_> = (1..=3).map(|number| world.agent(number).said()).collect();
        let maps: Vec<_> = (1..=3).map(|number| rings(world, number)).collect();
        let seen: Vec<_> = monitors.iter().map(|monitor| monitor.log().unwrap()).collect();
        (said, maps, seen)
    };
    let quiet = state(&world, &monitors);
    assert!(quiet.1.iter().any(|rings| !rings.is_empty()), "no ring is seen");
    wait::until("some periods", Duration::from_secs(60), || {
        ensure!(started.elapsed() > Duration::from_secs(PERIODS.into()), "not yet");
        Ok(())
    })
    .unwrap();
    let elapsed = started.elapsed();
    let used: Vec<u64> =
        pids.iter().zip(&before).map(|(pid, before)| ticks(pid.as_raw()).unwrap() - before).collect();
    let now = state(&world, &monitors);
    for (now, before) in now.0.iter().chain(&now.2).zip(quiet.0.iter().chain(&quiet.2)) {
        assert!(now == before, "{:?} was said", &now[before.len()..]);
    }
    assert!(now.1 == quiet.1, "rings were written");
    for directory in [world.cluster().directory().to_owned(), world.testbed.directory().join("state")] {
        let changed = changed_since(&directory, wall).unwrap();
        assert!(changed.is_empty(), "{changed:?}");
    }
    // A tick is 10 ms of CPU time: in a hundred of them one percent is as many as seconds passed.
    let allowed = elapsed.as_secs() + 1;
    println!("CPU time in {elapsed:?}: {used:?} ticks of 10 ms");
    assert!(used.iter().all(|used| *used <= allowed), "{used:?} ticks in {elapsed:?}");
}

/// User and system time of a process, in hundredths of a second.
fn ticks(pid: i32) -> Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Behind the name, which may hold anything, `state` is the third field, `utime` the 14th, `stime` the 15th.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}

/// The inner maps, and what each has at index 0: a write makes another map, or another half that is in use.
fn rings(world: &World, node: u8) -> Vec<(u32, Value)> {
    let pin = world.testbed.pins(node).join("maps-v3/rings");
    let ask = |words: &[&str]| -> Value {
        let shown = world.node(node).run(&[&["bpftool", "-j", "map"], words].concat()).unwrap();
        serde_json::from_str(&shown).unwrap()
    };
    let outer = ask(&["dump", "pinned", pin.to_str().unwrap()]);
    outer
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|ring| id_of(&ring["value"]))
        .map(|id| (id, ask(&["lookup", "id", &id.to_string(), "key", "0", "0", "0", "0"])))
        .collect()
}

/// bpftool shows an inner map's id as its four bytes; where there is none it shows an error.
fn id_of(value: &Value) -> Option<u32> {
    let byte = |byte: &Value| u8::from_str_radix(byte.as_str()?.trim_start_matches("0x"), 16).ok();
    let bytes: Vec<u8> = value.as_array()?.iter().filter_map(byte).collect();
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

fn changed_since(directory: &Path, time: SystemTime) -> Result<Vec<String>> {
    let mut changed = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        if metadata.modified()? > time {
            changed.push(entry.path().display().to_string());
        }
        if metadata.is_dir() {
            changed.extend(changed_since(&entry.path(), time)?);
        }
    }
    Ok(changed)
}
