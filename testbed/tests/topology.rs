//! What the testbed is without a load balancer: the nodes, the overlay, and the masquerade that hides clients.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;
use testbed::load::Load;
use testbed::{Options, Pod, Testbed, dns, http, server, wait};

const SOON: Duration = Duration::from_secs(5);
const HELD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 101);

fn web(pod: &Pod) -> SocketAddrV4 {
    SocketAddrV4::new(pod.ip(), 8080)
}

/// The addresses that a server has seen, once it has seen as many.
fn clients(server: &server::Server, count: usize) -> Vec<String> {
    wait::until("requests in the log", SOON, || {
        let clients = server.clients()?;
        anyhow::ensure!(clients.len() == count, "{clients:?}");
        Ok(clients)
    })
    .unwrap()
}

#[test]
fn pods_reach_each_other_through_the_overlay_under_their_own_addresses() {
    let testbed = Testbed::weave(Options::default()).unwrap();
    let pods: Vec<_> = (1..=3).map(|n| testbed.add_pod(n, &format!("web-{n}")).unwrap()).collect();
    for pod in &pods {
        let server = server::http(pod, 8080).unwrap();
        for other in &pods {
            assert_eq!(http::get(other, web(pod), "/", SOON).unwrap(), pod.name());
        }
        assert_eq!(clients(&server, 3), pods.iter().map(|pod| pod.ip().to_string()).collect::<Vec<_>>());
    }
    // It did take the tunnel, not some other way.
    let links = testbed.node(1).run(&["ip", "-s", "link", "show", "vxlan-6784"]).unwrap();
    let received: u64 = links.lines().nth(3).unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(received > 0, "{links}");
}

#[test]
fn udp_and_iperf3_servers_answer() {
    let testbed = Testbed::weave(Options::default()).unwrap();
    let (first, second) = (testbed.add_pod(1, "first").unwrap(), testbed.add_pod(2, "second").unwrap());
    let server = server::dns(&first).unwrap();
    let address = SocketAddrV4::new(first.ip(), 53);
    assert_eq!(dns::ask(&second, address, server::WHO, SOON).unwrap(), "first");
    let seen = server.clients().unwrap();
    assert!(seen.contains(&second.ip().to_string()), "{seen:?}");
    assert!(dns::ask(&second, address, "nobody.testbed", SOON).is_err());

    let _iperf3 = server::iperf3(&second, 5201).unwrap();
    let report = first.run(&["iperf3", "-c", &second.ip().to_string(), "-n", "1M", "--json"]).unwrap();
    assert!(report.contains("\"sum_received\""), "{report}");
}

#[test]
fn the_client_reaches_the_addresses_of_nodes_and_is_seen_as_itself() {
    let testbed = Testbed::weave(Options::default()).unwrap();
    let node = testbed.node(1);
    let server = server::http(node, 8080).unwrap();
    for address in [node.address(), HELD] {
        let seen = http::get(testbed.client(), SocketAddrV4::new(address, 8080), "/client", SOON).unwrap();
        assert_eq!(seen.split(':').next(), Some("198.51.100.10"), "{seen}");
    }
    assert_eq!(clients(&server, 2), ["198.51.100.10", "198.51.100.10"]);

    testbed.move_address(HELD, 1, 3).unwrap();
    let _other = server::http(testbed.node(3), 8080).unwrap();
    assert_eq!(http::get(testbed.client(), SocketAddrV4::new(HELD, 8080), "/", SOON).unwrap(), "n3");
}

/// The CNI's plain behaviour, which the load balancer exists to change: a forward into the overlay loses its client.
#[test]
fn plain_dnat_shows_pods_the_masqueraded_source() {
    let testbed = Testbed::weave(Options::default()).unwrap();
    let node = testbed.node(1);
    for (number, holder) in [(1, "local"), (2, "remote")] {
        let pod = testbed.add_pod(number, holder).unwrap();
        let server = server::http(&pod, 8080).unwrap();
        node.feed(
            &["nft", "-f", "-"],
            &format!(
                "table ip plain
                 delete table ip plain
                 table ip plain {{
                     chain in {{
                         type nat hook prerouting priority dstnat;
                         ip daddr {HELD} tcp dport 80 dnat to {}
                     }}
                 }}",
                web(&pod)
            ),
        )
        .unwrap();
        assert_eq!(http::get(testbed.client(), SocketAddrV4::new(HELD, 80), "/", SOON).unwrap(), holder);
        assert_eq!(clients(&server, 1), [node.overlay().to_string()], "{holder}");
    }
}

#[test]
fn a_removed_pod_is_gone_and_its_name_can_be_used_again() {
    let testbed = Testbed::weave(Options::default()).unwrap();
    let (asker, pod) = (testbed.add_pod(2, "asker").unwrap(), testbed.add_pod(1, "web").unwrap());
    let mut server = server::http(&pod, 8080).unwrap();
    let address = web(&pod);
    assert_eq!(http::get(&asker, address, "/", SOON).unwrap(), "web");
    testbed.remove_pod(pod).unwrap();
    assert!(!server.process().is_running().unwrap());
    assert!(http::get(&asker, address, "/", Duration::from_millis(200)).is_err());
    let again = testbed.add_pod(3, "web").unwrap();
    let _server = server::http(&again, 8080).unwrap();
    assert_eq!(http::get(&asker, web(&again), "/", SOON).unwrap(), "web");
}

#[test]
fn load_counts_the_answers_and_the_failures() {
    let testbed = Testbed::weave(Options::default()).unwrap();
    let (asker, pod) = (testbed.add_pod(2, "asker").unwrap(), testbed.add_pod(1, "web").unwrap());
    let server = server::http(&pod, 8080).unwrap();
    let load = Load::start(&asker, web(&pod), 2);
    load.await_answers(50, SOON).unwrap();
    assert_eq!(load.counts().failures, [""; 0]);
    drop(server);
    wait::until("a failure", SOON, || {
        anyhow::ensure!(!load.counts().failures.is_empty(), "none");
        Ok(())
    })
    .unwrap();
    assert!(load.finish().unwrap().answered >= 50);
}

#[test]
fn tshark_finds_the_checksums_that_offload_leaves_open_and_no_others() {
    for offload in [true, false] {
        let testbed = Testbed::weave(Options { checksum_offload: offload, ..Options::default() }).unwrap();
        let pod = testbed.add_pod(1, "web").unwrap();
        let asker = testbed.add_pod(1, "asker").unwrap();
        let _server = server::http(&pod, 8080).unwrap();
        let capture = pod.capture("eth0", "tcp port 8080").unwrap();
        http::get(&asker, web(&pod), "/", SOON).unwrap();
        let captured = capture.finish().unwrap();
        // Handshake, request, answer, two ends.
        assert!(captured.packets("tcp").unwrap().len() >= 7);
        assert_eq!(captured.packets("tcp.flags.syn == 1").unwrap().len(), 2);
        assert_eq!(captured.bad_checksums().unwrap().is_empty(), !offload);
    }
}
