//! Pods see the client's own address and port, and the client sees nobody but the address (invariant 3): on every path,
//! beside every setting of the node that is known to break it. nginx and dnsmasq say whom they saw, tshark what passed.

use crate::client::{Asker, Talk};
use crate::echo::Echo;
use crate::world::{Builder, HOLDER, SOON, V, at, build};
use std::collections::BTreeSet;
use testbed::cluster::Service;
use testbed::{Pod, dns, http, server, wait};

/// A9 and A10 as well: no answer leaves with a pod's address, and each path is tried by itself.
fn pods_see_the_client(builder: Builder) {
    let world = builder.software_checksums().start();
    let pods = [world.pod(HOLDER, "local"), world.pod(2, "remote")];
    let client = world.testbed.client();
    let web = pods.each_ref().map(|pod| server::http(pod, 8080).unwrap());
    let dns = pods.each_ref().map(|pod| server::dns(pod).unwrap());
    let echo = pods.each_ref().map(|pod| Echo::udp(pod, 5353));
    world.serve("web", Service::new("web", V).tcp(80, 8080).udp(53, 53).udp(5353, 5353), &[]);

    let at_client = client.capture("eth0", "ip").unwrap();
    let at_pods = pods.each_ref().map(|pod| pod.capture("eth0", "ip").unwrap());
    let endpoints = pods.each_ref().map(Pod::endpoint);
    for endpoints in [&endpoints[..1], &endpoints[1..], &endpoints[..]] {
        world.endpoints("web", endpoints);
        let mut names = BTreeSet::new();
        for _ in 0..30 {
            let stream =
                crate::client::connect_from(client, (std::net::Ipv4Addr::UNSPECIFIED, 0), at(V, 80), SOON);
            let (seen, own) = ask_nginx(stream.unwrap());
            assert_eq!(seen, own);
            names.insert(http::get(client, at(V, 80), "/", SOON).unwrap());
            names.insert(dns::ask(client, at(V, 53), server::WHO, SOON).unwrap());
            let asker = Asker::new(client, at(V, 5353));
            let answer = asker.ask("x").unwrap();
            assert_eq!(answer.seen_as, at(world.testbed.client_address(), asker.local().port()));
        }
        assert_eq!(names.len(), endpoints.len(), "{names:?}");
    }
    for server in web.iter().chain(&dns) {
        let seen: BTreeSet<_> = server.clients().unwrap().into_iter().collect();
        // Those are the questions that found out whether it runs.
        let outside: Vec<_> = seen.iter().filter(|client| *client != "127.0.0.1").collect();
        assert_eq!(outside, ["198.51.100.10"]);
    }
    drop(echo);

    let at_client = at_client.finish().unwrap();
    assert_eq!(at_client.bad_checksums().unwrap(), [""; 0]);
    let strangers = "ip.dst == 198.51.100.10 && ip.src != 192.0.2.101";
    assert_eq!(at_client.packets(strangers).unwrap(), [""; 0], "the client saw somebody else");
    assert!(at_client.packets("tcp.flags.syn == 1").unwrap().len() >= 180);
    for capture in at_pods {
        let capture = capture.finish().unwrap();
        assert_eq!(capture.bad_checksums().unwrap(), [""; 0]);
        let others = "(tcp.port == 8080 || udp.port == 53 || udp.port == 5353) && ip.addr != 198.51.100.10";
        assert_eq!(capture.packets(others).unwrap(), [""; 0], "the pod saw somebody else");
        // A flow whose answers take one way and whose questions another would look like this.
        assert_eq!(capture.packets("tcp.analysis.retransmission || icmp").unwrap(), [""; 0]);
    }
}

/// The client's `address:port` as nginx has it, and as the client's kernel has it.
fn ask_nginx(mut stream: std::net::TcpStream) -> (String, String) {
    use std::io::{Read as _, Write as _};
    stream.write_all(b"GET /client HTTP/1.0\r\n\r\n").unwrap();
    let own = stream.local_addr().unwrap().to_string();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    (answer.lines().last().unwrap().to_owned(), own)
}

#[test]
fn pods_see_the_client_as_nodes_usually_are() {
    pods_see_the_client(build().br_netfilter(true).rp_filter(0));
}

#[test]
fn pods_see_the_client_without_br_netfilter_and_with_strict_rp_filter() {
    pods_see_the_client(build().br_netfilter(false).rp_filter(1));
}

#[test]
fn pods_see_the_client_with_br_netfilter_and_strict_rp_filter() {
    pods_see_the_client(build().br_netfilter(true).rp_filter(1));
}

#[test]
fn pods_see_the_client_through_the_stack_with_br_netfilter_and_strict_rp_filter() {
    pods_see_the_client(build().agent(&["--forwarding=stack"]).br_netfilter(true).rp_filter(1));
}

#[test]
fn pods_see_the_client_through_the_stack_without_br_netfilter_and_with_loose_rp_filter() {
    pods_see_the_client(build().agent(&["--forwarding=stack"]).br_netfilter(false).rp_filter(2));
}

#[test]
fn pods_see_the_client_with_clsact_filters_and_loose_rp_filter() {
    pods_see_the_client(build().agent(&["--attach=clsact"]).br_netfilter(true).rp_filter(2));
}

/// The plainest question, asked of a world with nothing else in it: every node's pod, from one client port each.
#[test]
fn every_node_s_pod_sees_the_port_that_the_client_has_bound() {
    let world = build().start();
    let pods = [1, 2, 3].map(|node| world.pod(node, &format!("pod-{node}")));
    let echoes = pods.each_ref().map(|pod| Echo::tcp(pod, 8080));
    world.serve("web", Service::new("web", V).tcp(80, 8080), &pods.each_ref().map(Pod::endpoint));
    let ports = 42_000..42_060;
    for port in ports.clone() {
        let talk = Talk::from_port(world.testbed.client(), port, at(V, 80)).unwrap();
        assert_eq!(talk.seen_as, at(world.testbed.client_address(), port));
    }
    let seen = wait::until("all connections in the servers' logs", SOON, || {
        let seen: BTreeSet<_> = echoes.iter().flat_map(Echo::seen).collect();
        anyhow::ensure!(seen.len() == ports.len(), "{seen:?}");
        Ok(seen)
    });
    let expected = ports.map(|port| at(world.testbed.client_address(), port)).collect();
    assert_eq!(seen.unwrap(), expected);
    assert!(echoes.iter().all(|echo| echo.seen().len() > 5), "spread over the pods");
}
