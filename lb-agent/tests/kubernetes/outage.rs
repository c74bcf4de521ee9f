//! The API goes away, and comes back another.

use crate::world::{HELD, PATIENCE, World, service};
use anyhow::ensure;
use serde_json::{Value, json};
use testbed::kubernetes::Component;
use testbed::wait;

#[test]
fn an_api_that_is_away_changes_nothing_and_its_news_are_heard_after() {
    let Some(mut world) = World::serving() else { return };
    world.plane.kill(Component::ApiServer).unwrap();
    world.await_said(1, "last good state stays in force");
    assert_eq!(world.ask(1, "/readyz").unwrap(), "ok");
    for _ in 0..20 {
        world.request().unwrap();
    }
    // An agent that starts meanwhile looks after what is there.
    world.stop(1);
    world.start(1);
    world.await_said(1, "cannot watch nodes");
    world.ask(1, "/readyz").unwrap_err();
    for _ in 0..20 {
        world.request().unwrap();
    }
    world.plane.start_again(Component::ApiServer).unwrap();
    world.await_said(1, " ready");
    wait::until("no complaint is left", PATIENCE, || {
        let metrics = world.ask(2, "/metrics")?;
        ensure!(metrics.lines().any(|line| line == "reweave_lb_problems 0.0"), "{metrics}");
        Ok(())
    })
    .unwrap();
    world.kubectl(&["delete", "service/web"]);
    wait::until("the Service is gone", PATIENCE, || {
        ensure!(world.request().is_err(), "an answer");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_store_that_was_put_back_is_believed() {
    let Some(mut world) = World::new() else { return };
    world.start_all();
    world.add_web();
    for component in [Component::ApiServer, Component::Etcd] {
        world.plane.stop(component).unwrap();
    }
    world.plane.back_up_store().unwrap();
    for component in [Component::Etcd, Component::ApiServer] {
        world.plane.start_again(component).unwrap();
    }
    world.apply(&service("web", HELD[0]));
    world.await_served();
    world.await_shown("web", &json!([{ "ip": HELD[0].to_string(), "ipMode": "Proxy" }]));
    // The versions that the agents have seen lie in the future now. Controllers do not notice that, and must start again.
    for component in [Component::ControllerManager, Component::ApiServer, Component::Etcd] {
        world.plane.stop(component).unwrap();
    }
    world.plane.restore_store().unwrap();
    for component in [Component::Etcd, Component::ApiServer, Component::ControllerManager] {
        world.plane.start_again(component).unwrap();
    }
    assert_eq!(world.get("service/web").unwrap(), Value::Null);
    wait::until("the Service is gone", PATIENCE, || {
        ensure!(world.request().is_err(), "an answer");
        Ok(())
    })
    .unwrap();
    world.apply(&service("web", HELD[0]));
    world.await_served();
}
