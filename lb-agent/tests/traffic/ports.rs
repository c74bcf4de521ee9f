//! Ports and protocols of Services.

use crate::client::{Asker, Talk, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, V3, at, world};
use std::io::ErrorKind;
use testbed::cluster::Service;

/// Several ports of a Service, one number in both protocols, two Services on one address, one Service's port number on
/// another address: each leads where its own Service says.
#[test]
fn every_port_leads_to_its_own_target() {
    let world = world();
    let (one, two) = (world.pod(2, "one"), world.pod(HOLDER, "two"));
    let _servers = [
        Echo::tcp(&one, 8080),
        Echo::tcp(&one, 8443),
        Echo::tcp(&one, 5353),
        Echo::udp(&one, 5353),
        Echo::tcp(&two, 8080),
        Echo::udp(&two, 9),
    ];
    let first = Service::new("first", V).tcp(80, 8080).tcp(443, 8443).tcp(53, 5353).udp(53, 5353);
    world.serve("first", first, &[one.endpoint()]);
    world.serve("second", Service::new("second", V).tcp(8080, 8080).udp(80, 9), &[two.endpoint()]);
    world.serve("third", Service::new("third", V3).tcp(80, 8080), &[two.endpoint()]);
    let client = world.testbed.client();
    for (address, port, pod) in
        [(V, 80, "one"), (V, 443, "one"), (V, 53, "one"), (V, 8080, "two"), (V3, 80, "two")]
    {
        let mut talk = Talk::open(client, at(address, port)).unwrap();
        assert_eq!(talk.pod, pod, "{address}:{port}");
        talk.check("hello").unwrap();
    }
    for (port, pod) in [(53, "one"), (80, "two")] {
        assert_eq!(Asker::new(client, at(V, port)).ask("x").unwrap().pod, pod);
    }
    // One Service goes, its neighbour on the address stays.
    world.testbed.cluster().remove_service("first").unwrap();
    world.settle();
    assert_eq!(kind(Talk::open(client, at(V, 443))), ErrorKind::ConnectionRefused);
    assert_eq!(Talk::open(client, at(V, 8080)).unwrap().pod, "two");
}

/// D1, D8, D9: nobody says where a pod runs, nor that it is ready: it is, and its address leads to it, on the holder too.
#[test]
fn endpoints_without_a_node_are_served_where_they_are() {
    let world = world();
    for node in [HOLDER, 2] {
        let pod = world.pod(node, &format!("pod-{node}"));
        let (_tcp, _udp) = (Echo::tcp(&pod, 8080), Echo::udp(&pod, 5353));
        let name = format!("service-{node}");
        let service = Service::new(&name, V).tcp(80, 8080).udp(53, 5353);
        world.testbed.cluster().set_service(service).unwrap();
        let slice = format!(
            "apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}-1, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
ports: [{{name: tcp-80, port: 8080}}, {{name: udp-53, port: 5353, protocol: UDP}}]
endpoints: [{{addresses: [{}]}}]
",
            pod.ip()
        );
        world.testbed.cluster().write(&format!("endpoints-{name}.yaml"), &slice).unwrap();
        world.settle();
        let client = world.testbed.client();
        let mut talk = Talk::open(client, at(V, 80)).unwrap();
        assert_eq!((talk.pod.as_str(), talk.seen_as), (pod.name(), talk.local()));
        talk.check("hello").unwrap();
        assert_eq!(Asker::new(client, at(V, 53)).ask("x").unwrap().pod, pod.name());
        world.testbed.cluster().remove_service(&name).unwrap();
        world.settle();
    }
}

/// D7, D11: a port without a name meets a slice's port without one; a slice whose ports have other names has no backend.
#[test]
fn ports_without_a_name_meet() {
    let world = world();
    let (one, two) = (world.pod(2, "one"), world.pod(3, "two"));
    let (_one, _two) = (Echo::tcp(&one, 8080), Echo::tcp(&two, 8080));
    let service = "apiVersion: v1
kind: Service
metadata: {name: plain}
spec:
  type: LoadBalancer
  loadBalancerClass: reweave.levk.dev/node-address
  loadBalancerIP: 192.0.2.101
  ports: [{port: 80}]
";
    let slice = |name: &str, pod: &testbed::Pod, ports: &str| {
        format!(
            "apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}, labels: {{kubernetes.io/service-name: plain}}}}
addressType: IPv4
ports: {ports}
endpoints: [{{addresses: [{}], nodeName: n{}}}]
",
            pod.ip(),
            pod.node()
        )
    };
    let cluster = world.testbed.cluster();
    cluster.write("plain.yaml", service).unwrap();
    cluster.write("slice-1.yaml", &slice("plain-1", &one, "[{port: 8080}]")).unwrap();
    cluster.write("slice-2.yaml", &slice("plain-2", &two, "[{name: other, port: 8080}]")).unwrap();
    cluster.write("slice-3.yaml", &slice("plain-3", &two, "[]")).unwrap();
    world.settle();
    for _ in 0..20 {
        assert_eq!(Talk::open(world.testbed.client(), at(V, 80)).unwrap().pod, "one");
    }
}

#[test]
fn ssh_is_not_taken_from_the_node() {
    let mut world = world();
    let pod = world.pod(2, "pod");
    let _servers = (Echo::tcp(&pod, 2222), Echo::tcp(&pod, 8080), Echo::udp(&pod, 2222));
    let _sshd = Echo::tcp(world.testbed.node(HOLDER), 22);
    world.serve("git", Service::new("git", V).tcp(22, 2222).tcp(80, 8080).udp(22, 2222), &[pod.endpoint()]);
    let client = world.testbed.client().clone();
    assert_eq!(Talk::open(&client, at(V, 22)).unwrap().pod, "n1");
    assert_eq!(Talk::open(&client, at(V, 80)).unwrap().pod, "pod");
    assert_eq!(Asker::new(&client, at(V, 22)).ask("x").unwrap().pod, "pod", "only TCP is reserved");
    world.agent(HOLDER).await_log("default/git: port 22/TCP is reserved", SOON).unwrap();
}
