//! One Service with 5,000 endpoints, in slices of 100 as the controller makes them.

use crate::shared;
use crate::world::{PATIENCE, SOON, World, service};
use anyhow::{Result, ensure};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use lb_common::addr::{Port, Protocol};
use lb_common::backend::BackendState;
use lb_common::holder::EndpointKey;
use serde_json::{Value, from_value, json};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};
use testbed::kubernetes::Identity;
use testbed::{Host, wait};

const SLICES: u8 = 50;
const IN_SLICE: u8 = 100;
const CHANGES: u8 = 20;

/// Of the endpoints that live on this node: all of 10.41.0.0/16 for n1. The overlay is 10.32.0.0/12.
fn network(node: u8) -> String {
    format!("10.4{node}.0.0/16")
}

fn endpoint(slice: u8, number: u8) -> (u8, Ipv4Addr) {
    let node = number % 3 + 1;
    (node, Ipv4Addr::new(10, 40 + node, slice, number + 1))
}

fn endpoints(slice: u8, numbers: impl Iterator<Item = u8>) -> Value {
    let one = |number| {
        let (node, address) = endpoint(slice, number);
        json!({ "addresses": [address], "nodeName": format!("n{node}") })
    };
    numbers.map(one).collect()
}

fn name(slice: u8) -> String {
    format!("many-{slice}")
}

async fn create(client: Client) -> kube::Result<()> {
    let slices: Api<EndpointSlice> = Api::default_namespaced(client);
    let (slices, params) = (&slices, &PostParams::default());
    let one = |slice| async move {
        let object = json!({
            "metadata": {
                "name": name(slice),
                "labels": { "kubernetes.io/service-name": "many", "test.reweave.levk.dev/scenario": "many" },
            },
            "addressType": "IPv4",
            "ports": [{ "name": "web", "port": 8080, "protocol": "TCP" }],
            "endpoints": endpoints(slice, 0..IN_SLICE),
        });
        slices.create(params, &from_value(object).unwrap()).await.map(drop)
    };
    stream::iter(0..SLICES).map(one).buffer_unordered(8).try_collect().await
}

async fn replace(client: Client, slice: u8, endpoints: Value) -> kube::Result<()> {
    let slices: Api<EndpointSlice> = Api::default_namespaced(client);
    let patch = Patch::Merge(json!({ "endpoints": endpoints }));
    slices.patch(&name(slice), &PatchParams::default(), &patch).await.map(drop)
}

/// The endpoints that a node recognises, out of ours.
fn recognised(world: &World, node: u8) -> Result<BTreeSet<EndpointKey>> {
    let ours = |key: &EndpointKey| (41..=43).contains(&Ipv4Addr::from(key.address).octets()[1]);
    Ok(world.maps(node)?.endpoints.all()?.into_keys().filter(ours).collect())
}

fn expected(is_wanted: impl Fn(u8) -> bool) -> BTreeSet<EndpointKey> {
    let all = (0..SLICES).flat_map(|slice| (0..IN_SLICE).map(move |number| endpoint(slice, number)));
    all.filter(|(node, _)| is_wanted(*node))
        .map(|(_, address)| EndpointKey::new(address.into(), Port::new(8080), Protocol::TCP))
        .collect()
}

/// Every address of its node's network is (or is no longer) the pod's own: it stands for all the endpoints there.
fn be_all_of_them(world: &World, action: &str) {
    for pod in &world.pods {
        let host: &Host = pod;
        host.ip(&format!("route {action} local {} dev lo", network(pod.node()))).unwrap();
    }
}

fn is_active(world: &World, address: Ipv4Addr) -> Result<bool> {
    let backends = world.maps(1)?.backends()?;
    Ok(backends.iter().any(|b| Ipv4Addr::from(b.address) == address && b.state() == BackendState::Active))
}

#[test]
fn five_thousand_endpoints_are_all_recognised_and_changes_are_quick() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    be_all_of_them(&world, "add");
    world.apply(&service("many", address, ""));
    let admin = world.plane.api(&world.plane.kubeconfig(&Identity::Admin)).unwrap();
    admin.run(create).unwrap();
    // The holder knows all, the others their own.
    for node in 1..=3 {
        let expected = expected(|of| node == 1 || of == node);
        wait::until(&format!("n{node} recognises all"), PATIENCE, || {
            let seen = recognised(&world, node)?;
            ensure!(seen == expected, "{} instead of {}", seen.len(), expected.len());
            Ok(())
        })
        .unwrap();
    }
    world.await_shown("many", Some(address));
    let mut answered = BTreeSet::new();
    for _ in 0..200 {
        answered.insert(world.request(address).unwrap());
    }
    assert_eq!(answered.len(), 3, "{answered:?}");

    let mut latencies: Vec<Duration> = (0..CHANGES)
        .map(|change| {
            // An endpoint leaves its slice, another one comes back.
            let (_, gone) = endpoint(change, change);
            let rest = endpoints(change, (0..IN_SLICE).filter(|number| *number != change));
            admin.run(move |client| replace(client, change, rest)).unwrap();
            let answered = Instant::now();
            while is_active(&world, gone).unwrap() {
                assert!(answered.elapsed() < SOON, "{gone} stays");
                std::thread::yield_now();
            }
            let latency = answered.elapsed();
            world.request(address).unwrap();
            latency
        })
        .collect();
    latencies.sort_unstable();
    println!("from the API's answer to the map: median {:?}, most {:?}", latencies[10], latencies[19]);
    // Of a debug build, beside whatever else the machine does.
    assert!(latencies[10] < Duration::from_secs(2), "{latencies:?}");
    be_all_of_them(&world, "del");
}
