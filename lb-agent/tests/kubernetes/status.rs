//! Services' status: whose it is, when it goes, and who else writes it.

use crate::world::{HELD, PATIENCE, World, service};
use anyhow::ensure;
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};
use testbed::wait;

fn shown(address: Ipv4Addr) -> Value {
    json!([{ "ip": address.to_string(), "ipMode": "Proxy" }])
}

/// Writes a status as another controller would.
fn write(world: &World, service: &str, ingress: &Value) {
    let patch = json!({ "status": { "loadBalancer": { "ingress": ingress } } }).to_string();
    let service = format!("service/{service}");
    world.kubectl(&["patch", &service, "--subresource=status", "--type=merge", "--patch", &patch]);
}

#[test]
fn a_status_goes_when_nobody_serves_it_though_no_agent_ran() {
    let Some(mut world) = World::new() else { return };
    world.start_all();
    for (name, address) in [("web", HELD[0]), ("two", HELD[0]), ("gone", HELD[0])] {
        world.apply(&service(name, address).replace("port: 80,", &format!("port: {},", 80 + name.len())));
        world.await_shown(name, &shown(address));
    }
    // Of another class: not ours, whatever it shows.
    world.apply(&service("other", HELD[1]).replace("reweave.levk.dev/node-address", "example.com/other"));
    write(&world, "other", &json!([{ "ip": HELD[1].to_string() }]));

    for node in 1..=3 {
        world.stop(node);
    }
    world.kubectl(&[
        "patch",
        "service/web",
        "--patch",
        r#"{"spec":{"type":"ClusterIP","loadBalancerClass":null}}"#,
    ]);
    world.kubectl(&["patch", "service/two", "--patch", r#"{"spec":{"loadBalancerIP":"192.0.2.99"}}"#]);
    world.node(1).ip("address del 192.0.2.101/32 dev eth0").unwrap();
    world.start_all();
    for name in ["web", "two", "gone"] {
        world.await_shown(name, &Value::Null);
    }
    world.check_shown("other", &json!([{ "ip": HELD[1].to_string(), "ipMode": "VIP" }])).unwrap();

    // Held by two: served by none, and one of them says so.
    for node in [1, 2] {
        world.node(node).ip("address add 192.0.2.150/32 dev eth0").unwrap();
    }
    world.apply(&service("both", Ipv4Addr::new(192, 0, 2, 150)));
    let problem = "192.0.2.150 is held by several nodes (n1, n2); serving it from none";
    wait::until("an Event", PATIENCE, || {
        let events = world.events("both")?;
        ensure!(events == [("LoadBalancerProblem".to_owned(), problem.to_owned(), 1)], "{events:?}");
        Ok(())
    })
    .unwrap();
    // An agent that starts again repeats its Event, and writes no other.
    world.stop(1);
    world.start(1);
    wait::until("the Event is repeated", PATIENCE, || {
        let events = world.events("both")?;
        ensure!(events == [("LoadBalancerProblem".to_owned(), problem.to_owned(), 2)], "{events:?}");
        Ok(())
    })
    .unwrap();
    world.node(1).ip("address del 192.0.2.150/32 dev eth0").unwrap();
    world.await_shown("both", &shown(Ipv4Addr::new(192, 0, 2, 150)));
    wait::until("its end", PATIENCE, || {
        let events = world.events("both")?;
        ensure!(
            events.iter().any(|(reason, note, _)| reason == "LoadBalancerProblemOver" && note == problem),
            "{events:?}"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn another_controller_is_not_fought_with() {
    let Some(mut world) = World::new() else { return };
    world.start_all();
    world.apply(&service("web", HELD[0]));
    world.await_shown("web", &shown(HELD[0]));
    let foreign = json!([{ "ip": "203.0.113.1", "ipMode": "VIP" }]);
    let mut rounds = 0;
    let begun = Instant::now();
    // As a controller would: it writes again as soon as it sees our address.
    while begun.elapsed() < Duration::from_secs(12) {
        if world.check_shown("web", &foreign).is_err() {
            write(&world, "web", &foreign);
            rounds += 1;
        }
    }
    assert!((2..=6).contains(&rounds), "{rounds} rounds in 12 s");
    wait::until("an Event", PATIENCE, || {
        let events = world.events("web")?;
        ensure!(events.iter().any(|(_, note, _)| note.contains("another controller writes")), "{events:?}");
        Ok(())
    })
    .unwrap();
    // It gives up, and the status is ours in the end.
    world.await_shown("web", &shown(HELD[0]));
}
