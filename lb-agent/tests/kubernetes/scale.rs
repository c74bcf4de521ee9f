//! A large cluster: 5,000 Services with 50,000 endpoints, all of them this node's. The agent stays small. How quick a change
//! is, the test prints: that depends on what else the machine does.

use crate::world::{HELD, World};
use anyhow::{Context as _, Result, ensure};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::pins::Pins;
use lb_common::addr::{Port, Protocol};
use lb_common::service::ServiceKey;
use serde_json::{Value, from_value, json};
use std::fs;
use std::time::{Duration, Instant};
use testbed::kubernetes::Identity;
use testbed::wait;

const SERVICES: u16 = 5_000;
const ENDPOINTS: u16 = 10;
/// Loading ten thousand objects into an API server on a busy machine.
const LOADING: Duration = Duration::from_secs(240);
const MEGABYTE: u64 = 1 << 20;
const CHANGES: u16 = 200;
/// A change that is not there by then never comes.
const LATEST: Duration = Duration::from_secs(5);

fn service(n: u16) -> Service {
    from_value(json!({
        "metadata": { "name": format!("s{n}") },
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "reweave.levk.dev/node-address",
            "loadBalancerIP": "192.0.2.101", "allocateLoadBalancerNodePorts": false,
            "ports": [{ "port": port(n) }],
        },
    }))
    .unwrap()
}

fn port(n: u16) -> u16 {
    20_000 + n
}

fn endpoints(n: u16) -> Value {
    let endpoint = |e: u16| {
        let [high, low] = (n * ENDPOINTS + e).to_be_bytes();
        json!({ "addresses": [format!("10.40.{high}.{low}")], "nodeName": format!("n{}", e % 3 + 1) })
    };
    (0..ENDPOINTS).map(endpoint).collect()
}

fn slice(n: u16) -> EndpointSlice {
    from_value(json!({
        "metadata": { "name": format!("s{n}-1"), "labels": { "kubernetes.io/service-name": format!("s{n}") } },
        "addressType": "IPv4", "ports": [{ "port": 8080, "protocol": "TCP", "name": "" }],
        "endpoints": endpoints(n),
    }))
    .unwrap()
}

/// Many requests at one time: the server's own limits are in the hundreds.
async fn load(client: Client) -> kube::Result<()> {
    let services: Api<Service> = Api::default_namespaced(client.clone());
    let slices: Api<EndpointSlice> = Api::default_namespaced(client);
    let (services, slices, params) = (&services, &slices, &PostParams::default());
    let one = |n| async move {
        services.create(params, &service(n)).await?;
        slices.create(params, &slice(n)).await.map(|_| ())
    };
    stream::iter(0..SERVICES).map(one).buffer_unordered(32).try_collect().await
}

async fn move_port(client: Client, n: u16, to: u16) -> kube::Result<()> {
    let services: Api<Service> = Api::default_namespaced(client);
    let patch = Patch::Merge(json!({ "spec": { "ports": [{ "port": to }] } }));
    services.patch(&format!("s{n}"), &PatchParams::default(), &patch).await.map(|_| ())
}

async fn count_shown(client: Client) -> kube::Result<usize> {
    let services = Api::<Service>::default_namespaced(client).list(&ListParams::default()).await?;
    let is_shown = |service: &&Service| {
        let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        status.is_some_and(|status| status.ingress.is_some())
    };
    Ok(services.items.iter().filter(is_shown).count())
}

fn key(port: u16) -> ServiceKey {
    ServiceKey::new(HELD[0].into(), Port::new(port), Protocol::TCP)
}

/// Resident memory of the process, now and at its highest, in bytes.
fn memory(pid: i32) -> Result<(u64, u64)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| -> Result<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).context("no such line")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
    };
    Ok((field("VmRSS:")?, field("VmHWM:")?))
}

#[test]
#[ignore = "takes minutes; run it by name when the source or the queue of writes changes"]
fn a_large_cluster_fits_in_little_memory_and_changes_reach_the_maps() {
    let Some(mut world) = World::new() else { return };
    let admin = world.plane.api(&world.plane.kubeconfig(&Identity::Admin)).unwrap();
    admin.run(load).unwrap();
    world.start(1);
    let maps = || Maps::open(&Pins::new(&world.testbed.pins(1)));
    wait::until("all Services are served", LOADING, || {
        let served = maps()?.services.all()?.len();
        ensure!(served == usize::from(SERVICES), "{served}");
        Ok(())
    })
    .unwrap();
    wait::until("all Services show their address", LOADING, || {
        let shown = admin.run(count_shown)?;
        ensure!(shown == usize::from(SERVICES), "{shown}");
        Ok(())
    })
    .unwrap();
    let maps = maps().unwrap();
    let mut latencies: Vec<Duration> = (0..CHANGES)
        .map(|n| {
            let to = port(n) + SERVICES;
            admin.run(move |client| move_port(client, n, to)).unwrap();
            let answered = Instant::now();
            while maps.services.get(&key(to)).unwrap().is_none() {
                assert!(answered.elapsed() < LATEST, "port {to} is not served");
                std::thread::yield_now();
            }
            answered.elapsed()
        })
        .collect();
    latencies.sort_unstable();
    let of = |share: usize| latencies[usize::from(CHANGES) * share / 100];
    let (settled, highest) = memory(world.agent(1).pid()).unwrap();
    println!(
        "from the API's answer to the map: median {:?}, p99 {:?}; memory {} MiB, at most {} MiB",
        of(50),
        of(99),
        settled / MEGABYTE,
        highest / MEGABYTE
    );
    assert!(highest < 100 * MEGABYTE, "{} MiB", highest / MEGABYTE);
}
