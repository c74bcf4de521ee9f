//! Plans of several served ports, done together in real maps.

use lb_agent::datapath::load::{self, Limits};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::plan::{self, Observed, Rest};
use lb_agent::policy::extend::{WantedBackend, WantedService, WantedState};
use lb_common::addr::{Port, Protocol};
use lb_common::backend::BackendState;
use lb_common::config::Config;
use lb_common::service::ServiceKey;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

fn key(port: u16) -> ServiceKey {
    ServiceKey::new(Ipv4Addr::new(192, 0, 2, 1).into(), Port::new(port), Protocol::TCP)
}

/// From 100 on they are not ready.
fn wanted(endpoints: &[u8]) -> WantedService {
    let backend = |last: &u8| WantedBackend {
        address: Ipv4Addr::new(10, 32, 0, *last),
        port: 8080,
        state: if *last < 100 { WantedState::Active } else { WantedState::Draining },
        local: false,
        masqueraded: false,
    };
    WantedService {
        namespace: "default".to_owned(),
        name: "web".to_owned(),
        port_name: String::new(),
        affinity: false,
        backends: endpoints.iter().map(backend).collect(),
    }
}

fn begin(observed: &mut Observed, maps: &mut Maps, rest: &mut Rest, port: u16, endpoints: &[u8]) {
    let plan = plan::service(&key(port), Some(&wanted(endpoints)), observed);
    assert_eq!(plan.problems, [""; 0]);
    observed.begin(maps, plan.operations, rest).unwrap();
}

#[test]
fn plans_that_are_done_together_neither_share_nor_take_what_is_in_use() {
    let limits = Limits { flows: 16, handshakes: 16, services: 4, backends: 8, endpoints: 16 };
    let mut ebpf = load::load_unpinned(&limits, &Config::DEFAULT).unwrap();
    let mut maps = Maps::take(&mut ebpf).unwrap();
    let mut observed = Observed::read(&maps).unwrap();

    let mut rest = Rest::default();
    begin(&mut observed, &mut maps, &mut rest, 80, &[1, 2, 101]);
    begin(&mut observed, &mut maps, &mut rest, 81, &[1, 101]);
    assert!(maps.services.all().unwrap().is_empty(), "no port is served before its table is there");
    observed.finish(&mut maps, rest).unwrap();
    let ids: BTreeSet<u32> = maps.services.all().unwrap().values().map(|service| service.id).collect();
    assert_eq!(ids.len(), 2, "each has an id of its own");
    let used = maps.backends().unwrap().into_iter().filter(|slot| slot.state() != BackendState::Absent);
    let endpoints: BTreeSet<_> = used.map(|slot| (slot.service, slot.address)).collect();
    assert_eq!(endpoints.len(), 5, "each endpoint has a slot of its own");
    assert_eq!(Observed::read(&maps).unwrap(), observed);

    // One port loses an endpoint, another gets one: not that slot, which the former table still names.
    let before = maps.backends().unwrap();
    let id = |port| maps.services.get(&key(port)).unwrap().unwrap().id;
    let (first, second) = (id(80), id(81));
    let mut rest = Rest::default();
    begin(&mut observed, &mut maps, &mut rest, 80, &[1, 101]);
    begin(&mut observed, &mut maps, &mut rest, 81, &[1, 3, 101]);
    let between = maps.backends().unwrap();
    let used = |slot: &usize| before[*slot].state() != BackendState::Absent;
    assert!((1..before.len()).filter(used).all(|slot| between[slot] == before[slot]));
    observed.finish(&mut maps, rest).unwrap();
    let slots = |service| -> usize {
        maps.ring(service).unwrap().unwrap().into_iter().collect::<BTreeSet<_>>().len()
    };
    assert_eq!((slots(first), slots(second)), (1, 2));
    assert_eq!(Observed::read(&maps).unwrap(), observed);
    assert!(plan::service(&key(80), Some(&wanted(&[1, 101])), &observed).operations.is_empty());
}
