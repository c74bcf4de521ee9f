//! Manifests, annotations, maps and command lines that are not as they should be.

use crate::world::{AGENT, PATIENCE, SOON, WEB, World};
use anyhow::ensure;
use lb_common::addr::{Ipv4, Mac, Port, Protocol};
use lb_common::backend::{Backend, BackendState};
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::service::{Service, ServiceKey};
use std::fs;
use std::process::Command;
use testbed::wait;

const BROKEN: &str = "apiVersion: v1\nkind: Service\nmetadata:\n  name: [web\n";

#[test]
fn a_broken_file_is_named_once_and_the_last_good_state_stays() {
    let mut world = World::serving(&["--period=1"]);
    let active = |world: &World| {
        world.maps(1).backends().unwrap().iter().filter(|slot| slot.takes_new_flows()).count()
    };
    world.cluster().write("bad.yaml", BROKEN).unwrap();
    world.agent(1).await_said("the last good state stays in force");
    world.await_served();
    // While it is broken, nothing else changes either: half a state would be worse than an old one.
    world.cluster().set_endpoints("web", &[world.pods[0].endpoint()]).unwrap();
    // A restart in this state leaves alone what a former agent did.
    world.kill(1);
    world.start(1, &["--period=1"]);
    world.agent(1).await_said("bad.yaml: line");
    world.await_served();
    // Passes come and go, as this shows: each begins with the node itself.
    for _ in 0..3 {
        world.node(1).feed(&["nft", "-f", "-"], "delete table ip reweave-lb").unwrap();
        wait::until("the table is back", SOON, || world.check_nodes("tcx")).unwrap();
    }
    assert_eq!(active(&world), 3);
    let said = world.agent(1).said();
    assert_eq!(said.matches("bad.yaml").count(), 1, "{said}");
    fs::remove_file(world.cluster().directory().join("bad.yaml")).unwrap();
    world.agent(1).await_said("no longer: ");
    wait::until("one backend", SOON, || {
        ensure!(active(&world) == 1, "{}", active(&world));
        Ok(())
    })
    .unwrap();
}

#[test]
fn manifests_that_disappear_and_a_directory_that_is_replaced_are_followed() {
    let mut world = World::serving(&[]);
    let directory = world.cluster().directory().to_owned();
    let slices = directory.join("endpoints-web.yaml");
    let text = fs::read(&slices).unwrap();
    fs::remove_file(&slices).unwrap();
    wait::until("refusal without endpoints", SOON, || {
        let error = format!("{:#}", world.get().err().ok_or_else(|| anyhow::anyhow!("still answered"))?);
        ensure!(error.contains("refused"), "{error}");
        Ok(())
    })
    .unwrap();
    fs::write(&slices, text).unwrap();
    world.await_served();

    let (old, new) = (directory.with_file_name("old"), directory.with_file_name("new"));
    assert!(
        Command::new("cp")
            .args(["-r".as_ref(), directory.as_os_str(), new.as_os_str()])
            .status()
            .unwrap()
            .success()
    );
    // The first change comes with the new directory, the second is made in it later.
    fs::remove_file(new.join("service-web.yaml")).unwrap();
    fs::rename(&directory, &old).unwrap();
    fs::rename(&new, &directory).unwrap();
    wait::until("the new directory's content", SOON, || {
        ensure!(world.maps(1).services.all()?.is_empty(), "still served");
        Ok(())
    })
    .unwrap();
    world
        .cluster()
        .set_service(testbed::cluster::Service::new("web", *WEB.ip()).tcp(WEB.port(), 8080))
        .unwrap();
    wait::until("a change in the new directory", SOON, || {
        ensure!(!world.maps(1).services.all()?.is_empty(), "not served");
        Ok(())
    })
    .unwrap();
    world.await_served();
    assert!(world.process(1).is_running().unwrap());
}

#[test]
fn annotations_of_another_node_that_make_no_sense_are_said_and_harm_nobody() {
    let world = World::serving(&[]);
    let node = "apiVersion: v1\nkind: Node\nmetadata:\n  name: n4\n  annotations:\n    \
                reweave.levk.dev/addresses: \"192.0.2.101x,300.1.1.1\"\n    reweave.levk.dev/weave: \"10.32.0.9,zz\"\n";
    world.cluster().write("node-n4.yaml", node).unwrap();
    for number in 1..=3 {
        world.agent(number).await_said("n4");
    }
    world.check_nodes("tcx").unwrap();
    world.await_served();
}

#[test]
fn garbage_in_the_maps_is_put_right_and_crashes_nobody() {
    let mut world = World::serving(&["--period=1"]);
    // Slots may have other numbers afterwards; what they name may not differ.
    let everything = |world: &World, node: u8| {
        let maps = world.maps(node);
        let (services, slots) = (maps.services.all().unwrap(), maps.backends().unwrap());
        let named = |slot: u32| slots.get(slot as usize).map(|backend| (backend.address, backend.port));
        let ring = |service: &Service| maps.ring(service.id).ok().flatten().unwrap_or_default();
        let rings: Vec<Vec<_>> =
            services.values().map(|s| ring(s).into_iter().map(named).collect()).collect();
        let used = slots.iter().skip(1).filter(|slot| slot.state() != BackendState::Absent).count();
        let (holders, endpoints) = (maps.holders.all().unwrap(), maps.endpoints.all().unwrap());
        let keys: Vec<ServiceKey> = services.into_keys().collect();
        (keys, rings, used, holders, endpoints, maps.interfaces.all().unwrap())
    };
    let before = [everything(&world, 1), everything(&world, 2)];
    let web = *world.maps(1).services.all().unwrap().keys().next().unwrap();
    for (round, id) in [(1, u32::MAX), (2, 0), (3, 77)] {
        for node in [1, 2] {
            let mut maps = world.maps(node);
            let stranger = ServiceKey::new(Ipv4::new([192, 0, 2, 101]), Port::new(9_999), Protocol::new(99));
            maps.services.insert(&stranger, &Service::new(id, true)).unwrap();
            if node == 1 {
                maps.services.insert(&web, &Service::new(id, true)).unwrap();
            }
            for slot in [0, 1, 2, 500] {
                let address = Ipv4::new([255, 0, round, 1]);
                let garbage =
                    Backend::new(u32::MAX - slot, 9, address, Port::new(0), BackendState::Active, slot == 2);
                maps.set_backend(slot, &garbage).unwrap();
            }
            maps.set_ring(0, &[u32::MAX, 0, 4_000_000]).unwrap();
            maps.holders.insert(&Mac::new([0xff; 6]), &Holder::new(Ipv4::new([0; 4]), 255)).unwrap();
            let endpoint = EndpointKey::new(Ipv4::new([10, 32, 2, 1]), Port::new(8080), Protocol::TCP);
            maps.endpoints.insert(&endpoint, &EndpointHolders::default()).unwrap();
            maps.interfaces.insert(&1, &lb_common::interface::Interface::UPLINK).unwrap();
        }
        // Packets meet it meanwhile: whatever becomes of them, it is counted, and the kernel lives.
        let _ = world.get();
        wait::until(&format!("the maps as before, round {round}"), PATIENCE, || {
            for node in [1, 2] {
                let now = everything(&world, node);
                let before = &before[usize::from(node) - 1];
                ensure!(now.1 == before.1, "n{node}: the rings differ");
                ensure!(
                    now == *before,
                    "n{node}: {} slots, {:?} {:?} {:?} {:?}",
                    now.2,
                    now.0,
                    now.3,
                    now.4,
                    now.5
                );
            }
            Ok(())
        })
        .unwrap();
        world.await_served();
    }
    for node in 1..=3 {
        assert!(world.process(node).is_running().unwrap());
    }
}

#[test]
fn what_cannot_start_says_why() {
    let mut world = World::serving(&[]);
    let (n1, pins, state) = (world.node(1).clone(), world.testbed.pins(1), world.state(1));
    let (pins, state) = (pins.to_str().unwrap(), state.to_str().unwrap());
    let manifests = world.cluster().directory().to_str().unwrap().to_owned();
    let run = [AGENT, "run", "--node=n1", "--manifests", &manifests, "--bpffs", pins, "--state-dir"];
    // An agent that starts after all would run for ever.
    let fails = |words: &[&str]| {
        let words = [&["timeout", "20"], words].concat();
        format!("{:#}", n1.run(&words).unwrap_err())
    };

    let second = fails(&[&run[..], &[state]].concat());
    assert!(second.contains("another agent runs this datapath (process "), "{second}");

    let elsewhere = format!("{state}-other");
    let hidden = "mount --make-rprivate / && umount -l /sys/fs/bpf && exec \"$@\"";
    let without =
        fails(&[&["unshare", "--mount", "sh", "-c", hidden, "sh"], &run[..], &[&elsewhere]].concat());
    assert!(without.contains("bpffs") && without.contains("mount -t bpf"), "{without}");

    let wrong =
        [AGENT, "run", "--node=n1", "--manifests", "/nowhere", "--bpffs", pins, "--state-dir", &elsewhere];
    assert!(fails(&wrong).contains("--manifests /nowhere: not a directory"), "{}", fails(&wrong));
    world.await_served();

    assert!(world.process(1).is_running().unwrap());
}
