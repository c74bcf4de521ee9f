//! Tables that are full: what is in them stays, what is new is refused, and somebody says so.

use crate::clients::Idle;
use crate::world::{PATIENCE, WEB, World};
use anyhow::ensure;
use lb_common::reason::Reason;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;
use testbed::cluster::Service;
use testbed::{http, wait};

/// Case C7.
#[test]
fn a_full_flow_table_refuses_the_new_and_keeps_the_old() {
    const FLOWS: usize = 20;
    let world = World::serving(&["--max-flows=20", "--timeout-closed=1", "--period=1"]);
    let flows = || world.maps(1).flows.list().unwrap().len();
    wait::until("an empty table", PATIENCE, || {
        ensure!(flows() == 0 && world.maps(1).replies.list()?.is_empty(), "{} flows", flows());
        Ok(())
    })
    .unwrap();
    let mut idle = Idle::open(world.testbed.client(), FLOWS);
    assert_eq!(flows(), FLOWS);
    for _ in 0..3 {
        let refused = world.testbed.client().enter(|| {
            let mut stream = TcpStream::connect_timeout(&WEB.into(), Duration::from_secs(2))?;
            stream.set_read_timeout(Some(Duration::from_secs(2)))?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
            Ok(stream.read(&mut [0; 10])?)
        });
        let error = refused.unwrap_err();
        let kind = error.downcast_ref::<std::io::Error>().unwrap().kind();
        let is_reset =
            [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe, ErrorKind::ConnectionRefused].contains(&kind);
        assert!(is_reset, "{error:#}");
    }
    let counted = world.maps(1).outcomes().unwrap().get(&Reason::RejectTableFull).map_or(0, |o| o.packets);
    assert!(counted >= 3, "{counted} counted");
    idle.check().unwrap();
    assert_eq!(flows(), FLOWS);
    // Room again for the next.
    drop(idle);
    world.await_served();
}

#[test]
fn too_many_services_and_backends_are_said_once_and_the_rest_is_served() {
    let mut world = World::new();
    let web2 = Service::new("web-2", *WEB.ip()).tcp(82, 8080);
    let args = ["--max-services=1", "--max-backends=2", "--period=1"];
    world.start(1, &args);
    world.start(2, &[]);
    world.start(3, &[]);
    world.agent(1).await_said("--max-backends");
    // As in `World::serving`; n1 has a problem, so it never says that it is ready.
    world.await_nodes("tcx");
    for node in [2, 3] {
        world.agent(node).await_said(" ready");
    }
    wait::until("two backends", PATIENCE, || world.get().map(drop)).unwrap();
    world.cluster().set_service(web2).unwrap();
    world.cluster().set_endpoints("web-2", &[world.pods[0].endpoint()]).unwrap();
    world.agent(1).await_said("--max-services");
    let counted = world.maps(1).backends().unwrap().iter().filter(|slot| slot.takes_new_flows()).count();
    assert_eq!(counted, 2);
    world.get().unwrap();
    // Each pass plans it again, and finds no room again.
    world.cluster().set_endpoints("web-2", &[world.pods[1].endpoint()]).unwrap();
    world.agent(1).await_said("port 82 is not served");
    let passes = world.agent(1).said();
    for once in ["1 endpoints are left out", "port 82 is not served"] {
        assert_eq!(passes.matches(once).count(), 1, "{once}: {passes}");
    }
    // Room for it once the other goes.
    world.cluster().remove_service("web").unwrap();
    let other = std::net::SocketAddrV4::new(*WEB.ip(), 82);
    wait::until("the other one", PATIENCE, || {
        http::get(world.testbed.client(), other, "/", Duration::from_secs(1))
    })
    .unwrap();
    world.agent(1).await_said("no longer: default/web-2: port 82 is not served");
}

/// Case K3.
#[test]
fn a_changed_limit_is_refused_with_advice_and_the_datapath_goes_on() {
    let mut world = World::serving(&[]);
    let mut idle = Idle::open(world.testbed.client(), 20);
    for args in [["--max-flows=500"], ["--max-backends=7"]] {
        world.terminate(1);
        world.start(1, &args);
        let status = world.process(1).wait(PATIENCE).unwrap();
        assert!(!status.success());
        let said = world.agent(1).said();
        assert!(said.contains("has room for") && said.contains("lb-agent cleanup"), "{said}");
        idle.check().unwrap();
        world.await_served();
        world.start(1, &[]);
        world.agent(1).await_said(" ready");
    }
    idle.check().unwrap();
}
