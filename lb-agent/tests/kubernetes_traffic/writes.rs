//! Agents that die while they write.

use crate::recorder::{Recorder, proxied};
use crate::shared;
use serde_json::json;
use std::time::{Duration, Instant};

const ROUNDS: u64 = 10;

/// The holder's agent is killed at any moment between the change that asks for a write and the moment after it. Every
/// status is right in the end, each is shown once, and what is right is not written again.
#[test]
fn a_status_is_right_and_written_once_though_its_writer_is_killed_at_any_moment() {
    let Some(mut world) = shared::world() else { return };
    let addresses = [world.held_by(1), world.held_by(1)];
    world.serve("written", addresses[0]);
    let record = Recorder::start(&world, "written");
    let mut expected = vec![proxied(addresses[0])];
    let mut was_written = 0;
    for round in 1..=ROUNDS {
        let address = addresses[usize::from(round % 2 == 1)];
        world.patch("written", &json!({ "spec": { "loadBalancerIP": address } }));
        // From before the agent has heard of it to after its write.
        let moment = Instant::now() + Duration::from_millis((round - 1) * 8);
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        world.kill_agent(1);
        was_written += usize::from(record.seen().last() == Some(&proxied(address)));
        world.start_agent(1);
        record.await_last(&proxied(address));
        expected.push(proxied(address));
    }
    println!("in {was_written} of {ROUNDS} rounds the write had come through before the kill");
    assert_eq!(record.seen(), expected);
    world.await_node_ready(1);
    world.await_served(addresses[0]);

    // An agent that finds everything right leaves it alone.
    let version =
        |world: &shared::Shared| world.get("service/written").unwrap()["metadata"]["resourceVersion"].take();
    let before = version(&world);
    world.stop_agent(1);
    world.start_agent(1);
    world.await_node_ready(1);
    // A later write is done: an earlier one would be too.
    let fresh = world.held_by(1);
    world.serve("later", fresh);
    assert_eq!(version(&world), before);
}
