//! Clusters of any size, for benches and tests.

use crate::model::{Conditions, EndpointSlice, HardwareAddress, Node, Service, ServicePort, Shown};
use crate::model::{SliceEndpoint, SlicePort};
use std::net::Ipv4Addr;

/// The policy's whole input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Every Node.
    pub nodes: Vec<Node>,
    /// Every Service.
    pub services: Vec<Service>,
    /// Every EndpointSlice.
    pub slices: Vec<EndpointSlice>,
}

/// Three nodes `node-1` to `node-3`, of which the first holds an address for each of `services` Services, each
/// with one port and one slice of `endpoints` ready endpoints. The same every time.
pub fn cluster(services: u32, endpoints: u32) -> Cluster {
    let first_address = u32::from(Ipv4Addr::new(100, 64, 0, 0));
    let first_pod = u32::from(Ipv4Addr::new(10, 0, 0, 0));
    let node = |i: u8| Node {
        networks: Vec::new(),
        name: format!("node-{i}"),
        addresses: match i {
            1 => (0..services).map(|s| Ipv4Addr::from(first_address + s)).collect(),
            _ => vec![Ipv4Addr::new(192, 0, 2, i)],
        },
        weave_ip: Some(Ipv4Addr::new(10, 255, 0, i)),
        weave_mac: Some(HardwareAddress::from([0xfe, 0, 0, 0, 0, i])),
    };
    let service = |s: u32| Service {
        namespace: format!("team-{}", s % 50),
        name: format!("service-{s}"),
        eligible: true,
        wanted: Ipv4Addr::from(first_address + s).to_string(),
        ports: vec![ServicePort { name: String::new(), protocol: "TCP".to_owned(), port: 80 }],
        shown: Shown::Nothing,
        is_shown_by_proxy: false,
        affinity: false,
        deleting: false,
    };
    let endpoint = |s: u32, e: u32| SliceEndpoint {
        addresses: vec![Ipv4Addr::from(first_pod + s * endpoints + e)],
        conditions: Conditions { ready: Some(true), serving: Some(true), terminating: Some(false) },
        node_name: Some(format!("node-{}", e % 3 + 1).into()),
    };
    let slice = |s: u32| EndpointSlice {
        namespace: format!("team-{}", s % 50),
        name: format!("service-{s}-1"),
        service: format!("service-{s}"),
        ipv4: true,
        ports: vec![SlicePort { name: String::new(), protocol: "TCP".to_owned(), port: Some(8080) }],
        endpoints: (0..endpoints).map(|e| endpoint(s, e)).collect(),
    };
    Cluster {
        nodes: (1..=3).map(node).collect(),
        services: (0..services).map(service).collect(),
        slices: (0..services).map(slice).collect(),
    }
}
