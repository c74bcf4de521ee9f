//! Interfaces for unit tests.

use super::interfaces::{Interface, Kind};

pub(super) fn mk(index: u32, name: &str, kind: Kind, addresses: &[&str]) -> Interface {
    Interface {
        index,
        name: name.to_owned(),
        mac: Some([2, 0, 0, 0, 0, u8::try_from(index).unwrap()]),
        kind,
        master: None,
        mtu: 1500,
        up: true,
        calls_iptables: false,
        addresses: addresses.iter().map(|a| (a.parse().unwrap(), 24)).collect(),
    }
}

pub(super) fn port(of: u32, interface: Interface) -> Interface {
    Interface { master: Some(of), ..interface }
}

fn down(interface: Interface) -> Interface {
    Interface { up: false, ..interface }
}

/// A node as weave leaves it, with docker beside it; the uplink is a veth, as in a container.
pub(super) fn node() -> Vec<Interface> {
    vec![
        mk(1, "lo", Kind::Device, &["127.0.0.1", "192.0.2.99"]),
        mk(2, "eth0", Kind::Veth, &["192.0.2.11", "192.0.2.10"]),
        down(mk(3, "eth1", Kind::Device, &["198.51.100.1"])),
        mk(4, "weave", Kind::Bridge, &["10.32.0.1"]),
        port(4, mk(5, "vethwe-bridge", Kind::Veth, &[])),
        port(4, mk(6, "vethwepl1", Kind::Veth, &[])),
        mk(7, "docker0", Kind::Bridge, &["172.17.0.1"]),
        mk(8, "eth2", Kind::Device, &["169.254.7.7"]),
        mk(9, "kube-ipvs0", Kind::Other("dummy".to_owned()), &["10.96.0.1"]),
    ]
}
