//! What stops and starts of the agent cost: nothing.

use crate::clients::{Downloads, Idle};
use crate::world::{AGENT, End, WEB, World};
use std::fs;
use std::path::Path;
use std::time::Duration;
use testbed::load::Load;

/// Limited by the open files that a process may have.
const IDLE: usize = 10_000;

/// Invariants 4 and 6; cases K5, K6, K7.
#[test]
fn connections_outlive_restart_kill_and_upgrade() {
    let mut world = World::serving(&[]);
    let client = world.testbed.client().clone();
    let resets = client.capture("eth0", "tcp[tcpflags] & tcp-rst != 0").unwrap();
    let mut idle = Idle::open(&client, IDLE);
    let downloads = Downloads::start(&client, 6);
    downloads.await_progress();
    let known = world.maps(1).flows.list().unwrap().len();
    assert!(known >= IDLE, "{known} flows");
    // Another file, as a package brings it.
    let upgraded = world.testbed.directory().join("lb-agent-next");
    fs::copy(AGENT, &upgraded).unwrap();

    let steps: [(&str, End, &Path, &[&str]); 4] = [
        ("restart", World::terminate, Path::new(AGENT), &[]),
        ("kill", World::kill, Path::new(AGENT), &[]),
        (
            "upgrade",
            World::terminate,
            &upgraded,
            &["--timeout-established=9000", "--timeout-closed=5", "--forwarding=stack"],
        ),
        ("downgrade", World::kill, Path::new(AGENT), &[]),
    ];
    for (step, stop, binary, args) in steps {
        println!("{step}");
        for node in 1..=3 {
            stop(&mut world, node);
        }
        // Nobody is there to help now.
        world.await_served();
        idle.check().unwrap_or_else(|error| panic!("{step}, while no agent runs: {error:#}"));
        downloads.await_progress();
        for node in 1..=3 {
            world.start_binary(binary, node, args);
        }
        world.await_ready();
        world.await_nodes("tcx");
        idle.check().unwrap_or_else(|error| panic!("{step}: {error:#}"));
        downloads.await_progress();
        world.await_served();
    }
    downloads.finish();
    assert!(idle.len() == IDLE && world.maps(1).flows.list().unwrap().len() >= IDLE);
    // Leaving a download unfinished makes the client itself send resets.
    let received = resets.finish().unwrap().packets("ip.dst == 198.51.100.10").unwrap();
    assert!(received.is_empty(), "{received:?}");
}

/// Case K1.
#[test]
fn fifty_kills_leave_one_of_each() {
    const KILLS: u64 = 50;
    const MOMENTS: u64 = 300;
    let mut world = World::serving(&[]);
    let load = Load::start(world.testbed.client(), WEB, 2);
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut random = Random(seed);
    for kill in 0..KILLS {
        // At a random moment of an agent's life, measured by the requests that were answered since its start: before it has
        // loaded anything, while it attaches, when it serves.
        load.await_answers(random.below(MOMENTS), Duration::from_secs(20)).unwrap();
        for node in 1..=3 {
            world.kill(node);
            world.start(node, &[]);
        }
        assert!(load.counts().failures.is_empty(), "kill {kill}: {:?}", load.counts().failures);
    }
    world.await_ready();
    world.await_nodes("tcx");
    world.await_served();
    let counts = load.finish().unwrap();
    assert!(counts.failures.is_empty(), "of {}: {:?}", counts.answered, counts.failures);
}

/// The generator of Steele, Lea and Flood, 2014: one seed, one sequence.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % end
    }
}
