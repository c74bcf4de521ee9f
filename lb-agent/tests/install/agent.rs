//! A real agent with the chart's rights, and no others: nothing that it needs is forbidden.

use crate::world::{PATIENCE, World};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::net::{Ipv4Addr, SocketAddrV4};
use testbed::{http, wait};

const PROBES: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9213);

/// One that n1 holds, one that nobody does.
const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata: {name: held, namespace: default}
spec: {type: LoadBalancer, loadBalancerClass: reweave.levk.dev/node-address, loadBalancerIP: 192.0.2.101, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: unheld, namespace: default}
spec: {type: LoadBalancer, loadBalancerClass: reweave.levk.dev/node-address, loadBalancerIP: 192.0.2.103, ports: [{port: 80}]}
";

fn get(world: &World, what: &str) -> Result<Value> {
    Ok(serde_json::from_str(&world.plane.kubectl(&["get", what, "--output=json"])?)?)
}

fn await_ingress(world: &World, expected: Option<&str>) {
    wait::until(&format!("the Service shows {expected:?}"), PATIENCE, || {
        let service = get(world, "service/held")?;
        let shown = &service["status"]["loadBalancer"]["ingress"][0]["ip"];
        ensure!(shown.as_str() == expected, "{shown}");
        Ok(())
    })
    .unwrap();
}

/// Waits until the Event about the unheld Service was said so often.
fn await_event(world: &World, count: u64) {
    wait::until(&format!("the Event, {count} times"), PATIENCE, || {
        let events = get(world, "events.events.k8s.io")?;
        let of_unheld = |event: &&Value| event["regarding"]["name"] == "unheld";
        let event = events["items"].as_array().and_then(|all| all.iter().find(of_unheld));
        let event = event.context("there is none")?;
        let said = event["series"]["count"].as_u64().unwrap_or(1);
        ensure!(said == count, "{event}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_agent_does_all_its_work_with_the_rights_of_the_chart() {
    let Some(world) = World::installed() else { return };
    let kubeconfig = world.kubeconfig_on("n1");
    world.plane.apply(SERVICES).unwrap();
    let agent = world.testbed.start_agent_as(&kubeconfig, 1, &[]).unwrap();
    await_ingress(&world, Some("192.0.2.101"));
    let node = get(&world, "node/n1").unwrap();
    assert_eq!(node["metadata"]["annotations"]["reweave.levk.dev/addresses"], "192.0.2.101,192.0.2.11");
    await_event(&world, 1);

    // It repeats the Event that there is already, for which it must read it.
    assert!(agent.terminate().unwrap().success());
    let mut agent = world.testbed.start_agent_as(&kubeconfig, 1, &[]).unwrap();
    await_event(&world, 2);

    // It takes its word back when the address has gone.
    world.testbed.node(1).ip("addr del 192.0.2.101/32 dev eth0").unwrap();
    await_ingress(&world, None);

    assert!(agent.is_running().unwrap());
    let metrics = http::get(world.testbed.node(1), PROBES, "/metrics", PATIENCE).unwrap();
    let refused: Vec<_> = metrics
        .lines()
        .filter(|line| line.starts_with("reweave_lb_api_errors") && line.contains("\"4"))
        .collect();
    assert_eq!(refused, [""; 0], "{}", agent.log().unwrap());
}
