//! What `lb-agent explain` says of a client's connection is what the client then gets, on the holder and on the pods' nodes.

use crate::client::{Talk, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, World, at, world};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddrV4;
use testbed::Pod;
use testbed::cluster::Service;

const AGENT: &str = env!("CARGO_BIN_EXE_lb-agent");

fn ask(world: &World, node: u8, from: SocketAddrV4, to: SocketAddrV4) -> Value {
    let (from, to, pins) = (from.to_string(), to.to_string(), world.testbed.pins(node));
    let words = ["explain", "--from", &from, "--to", &to, "--bpffs", pins.to_str().unwrap()];
    let host = world.testbed.node(node);
    // Shown where the test fails.
    println!("n{node}:\n{}", host.run(&[&[AGENT], &words[..]].concat()).unwrap());
    serde_json::from_str(&host.run(&[&[AGENT], &words[..], &["-o", "json"]].concat()).unwrap()).unwrap()
}

fn reasons(told: &Value) -> Vec<&str> {
    told["steps"].as_array().unwrap().iter().map(|step| step["reason"].as_str().unwrap()).collect()
}

fn backend(told: &Value) -> SocketAddrV4 {
    told["steps"][0]["then_to"].as_str().unwrap().parse().unwrap()
}

#[test]
fn the_client_gets_what_was_explained() {
    let mut world = world();
    let pods = [world.pod(HOLDER, "local"), world.pod(2, "remote")];
    let _echo = pods.each_ref().map(|pod| Echo::tcp(pod, 8080));
    world.serve("web", Service::new("web", V).tcp(80, 8080).tcp(82, 82), &pods.each_ref().map(Pod::endpoint));
    let names: BTreeMap<SocketAddrV4, &str> =
        [(at(pods[0].ip(), 8080), "local"), (at(pods[1].ip(), 8080), "remote")].into();
    let (client, address) = (world.testbed.client(), world.testbed.client_address());
    let mut seen = BTreeSet::new();
    for port in 20_001..20_013 {
        let from = at(address, port);
        let told = ask(&world, HOLDER, from, at(V, 80));
        assert_eq!(told["warnings"].as_array().unwrap().len(), 0, "{told:#}");
        let name = names[&backend(&told)];
        let expected = if name == "local" {
            vec!["forward_stack", "pass_reply_to_stack", "reply_translated", "forward_stack"]
        } else {
            vec!["forward_redirect", "reply_redirect", "forward_redirect"]
        };
        assert_eq!(reasons(&told), expected);
        let talk = Talk::from_port(client, port, at(V, 80)).unwrap();
        assert_eq!(talk.pod, name, "explained before, from port {port}");

        // And while it lasts, by the flow.
        let told = ask(&world, HOLDER, from, at(V, 80));
        assert_eq!((names[&backend(&told)], &told["known"][0]["map"]), (name, &Value::from("flows")));
        if name == "remote" {
            let told = ask(&world, 2, from, backend(&told));
            assert_eq!(
                (reasons(&told), &told["via"]),
                (vec!["holder_forward", "holder_reply"], &Value::from("overlay"))
            );
            let table = told["steps"][1]["route"]["table"].as_u64().unwrap();
            assert_eq!(table, 25_000 + told["steps"][1]["mark"].as_u64().unwrap(), "{told:#}");
            assert!(told["steps"][0]["route"]["refused"].is_null(), "{told:#}");
        }
        seen.insert(name);
    }
    assert_eq!(seen.len(), 2, "both backends had their turn");

    // Nothing serves this port in the pods, and the one behind it is taken away.
    world.endpoints("web", &[]);
    let told = ask(&world, HOLDER, at(address, 20_100), at(V, 80));
    assert_eq!(reasons(&told), ["reject_no_endpoint"]);
    assert_eq!(kind(Talk::open(client, at(V, 80))), ErrorKind::ConnectionRefused);
    // Another node does not have the address.
    let told = ask(&world, 3, at(address, 20_100), at(V, 80));
    assert_eq!((reasons(&told), &told["service"]), (vec!["pass_foreign"], &Value::Null));

    // The answer is the same without an agent.
    world.endpoints("web", &[pods[1].endpoint()]);
    let before = ask(&world, HOLDER, at(address, 20_200), at(V, 80));
    world.agent(HOLDER).signal(Signal::SIGKILL).unwrap();
    world.agent(HOLDER).wait(SOON).unwrap();
    assert_eq!(ask(&world, HOLDER, at(address, 20_200), at(V, 80)), before);
}
