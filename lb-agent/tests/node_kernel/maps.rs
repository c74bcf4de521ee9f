//! The comparison of what is noted with what the maps hold.

use lb_agent::datapath::load::{self, Limits};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::pins::Pins;
use lb_agent::datapath::plan::{self, Comparison, Observed};
use lb_agent::policy::extend::{Options, Wanted};
use lb_agent::policy::{sample, wanted};
use lb_common::addr::{Ipv4, Mac, Port, Protocol};
use lb_common::backend::Backend;
use lb_common::config::Config;
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::interface::Interface;
use lb_common::service::ServiceKey;
use std::fs;
use std::path::Path;

/// More than one comparison looks at the tables of.
const SERVICES: u32 = 300;

struct Directory(Pins);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.0.root());
    }
}

/// Whether so many comparisons in turn find nothing.
fn is_same(observed: &Observed, maps: &Maps, comparisons: usize) -> bool {
    let mut comparison = Comparison::default();
    (0..comparisons).all(|_| {
        comparison.begin();
        while comparison.is_under_way() {
            if !comparison.go_on(observed, maps).unwrap() {
                return false;
            }
        }
        true
    })
}

#[test]
fn whatever_others_change_in_a_map_is_noticed() {
    let directory = format!("/sys/fs/bpf/reweave-lb-test-compare-{}", std::process::id());
    let pins = Directory(Pins::new(Path::new(&directory)));
    let limits = Limits { flows: 100, handshakes: 100, ..Limits::default() };
    let _ebpf = load::load(&pins.0, &limits, &Config::DEFAULT).unwrap();
    let mut maps = Maps::open(&pins.0).unwrap();
    let sample::Cluster { nodes, services, slices } = sample::cluster(SERVICES, 2);
    let Wanted { services: served, .. } = wanted("node-1", &nodes, &services, &slices, &Options::default());
    let mut observed = Observed::read(&maps).unwrap();
    for (key, service) in &served {
        let plan = plan::service(key, Some(service), &observed);
        observed.apply(&mut maps, &plan.operations).unwrap();
    }
    let key = |last| EndpointKey::new(Ipv4::new([10, 0, 0, last]), Port::new(8080), Protocol::TCP);
    maps.endpoints.insert(&key(1), &EndpointHolders::default()).unwrap();
    maps.endpoints.insert(&key(2), &EndpointHolders::default()).unwrap();
    observed = Observed::read(&maps).unwrap();
    assert!(is_same(&observed, &maps, 2));

    let first = *served.keys().next().unwrap();
    let last_slot = maps.backend_slots().unwrap() - 1;
    let stranger = ServiceKey::new(Ipv4::new([192, 0, 2, 1]), Port::new(1), Protocol::UDP);
    let mut holders = EndpointHolders::default();
    holders.insert(7);
    let mut other = Backend::default();
    other.generation = 9;
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Maps));
    let changes: [Change<'_>; 10] = [
        ("a service more", &|maps| {
            let service = maps.services.get(&first).unwrap().unwrap();
            maps.services.insert(&stranger, &service).unwrap();
        }),
        ("a service less", &|maps| maps.services.remove(&stranger).unwrap()),
        ("the first slot", &|maps| maps.set_backend(0, &other).unwrap()),
        ("the last slot", &|maps| maps.set_backend(last_slot, &other).unwrap()),
        ("another table", &|maps| maps.set_ring(0, &[1, 2, 3]).unwrap()),
        ("the last table", &|maps| maps.set_ring(SERVICES - 1, &[]).unwrap()),
        ("a holder more", &|maps| {
            maps.holders.insert(&Mac::new([2; 6]), &Holder::new(Ipv4::new([10, 32, 0, 9]), 7)).unwrap();
        }),
        ("an endpoint's holders", &|maps| maps.endpoints.insert(&key(1), &holders).unwrap()),
        ("another endpoint", &|maps| {
            maps.endpoints.remove(&key(2)).unwrap();
            maps.endpoints.insert(&key(3), &holders).unwrap();
        }),
        ("an interface more", &|maps| maps.interfaces.insert(&9, &Interface::UPLINK).unwrap()),
    ];
    for (what, change) in changes {
        change(&mut maps);
        assert!(!is_same(&observed, &maps, 2), "{what} is not noticed");
        observed = Observed::read(&maps).unwrap();
        // A service with another's id is never as it should be; it goes with the next change.
        assert!(what == "a service more" || is_same(&observed, &maps, 2), "{what}");
    }
}
