//! Entries leave the tables when their time is over, and not before.

use crate::clients::Idle;
use crate::world::{PATIENCE, REQUEST, WEB, World};
use anyhow::{Result, ensure};
use lb_common::flow::State;
use nix::sys::socket::{setsockopt, sockopt};
use std::collections::BTreeMap;
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::thread;
use testbed::cluster::Service;
use testbed::load::Load;
use testbed::{dns, server, wait};

const SHORT: &[&str] = &[
    "--period=1",
    "--timeout-handshake=2",
    "--timeout-half-closed=2",
    "--timeout-closed=1",
    "--timeout-reset=1",
    "--timeout-udp-opening=1",
    "--timeout-udp-established=2",
];
const IDLE: usize = 60;

fn states(world: &World) -> Result<BTreeMap<&'static str, usize>> {
    let mut states = BTreeMap::new();
    for (_, flow) in world.maps(1).flows.list()? {
        *states.entry(flow.state().name()).or_default() += 1;
    }
    Ok(states)
}

/// All tables of established connections, on every node, hold these and nothing else.
fn await_only(world: &World, idle: usize) {
    wait::until("only what is established", PATIENCE, || {
        let states = states(world)?;
        ensure!(states.values().sum::<usize>() == idle, "{states:?}");
        let replies = [1, 2, 3].map(|node| world.maps(node).replies.list().map(|all| all.len()));
        let [n1, n2, n3] = replies;
        let (n1, n2, n3) = (n1?, n2?, n3?);
        // The holder has one for each, and the pod's node has another one.
        ensure!(n1 == idle && n2 + n3 <= idle, "replies: {n1}, {n2}, {n3}");
        Ok(())
    })
    .unwrap();
}

/// Cases C1 and C5.
#[test]
fn short_connections_leave_in_seconds_and_idle_ones_stay() {
    let world = World::serving(SHORT);
    await_only(&world, 0);
    let mut idle = Idle::open(world.testbed.client(), IDLE);
    let load = Load::start(world.testbed.client(), WEB, 4);
    load.await_answers(4_000, PATIENCE).unwrap();
    let counts = load.finish().unwrap();
    assert!(counts.failures.is_empty(), "{:?}", counts.failures);
    await_only(&world, IDLE);
    idle.check().unwrap();
    drop(idle);
    await_only(&world, 0);
}

#[test]
fn half_closed_reset_and_udp_entries_leave() {
    let world = World::serving(SHORT);
    // A server that never closes, so that one side can close alone.
    let (hold, ask) = (SocketAddrV4::new(*WEB.ip(), 81), SocketAddrV4::new(*WEB.ip(), 53));
    let pod = &world.pods[1];
    let listener = pod.enter(|| Ok(TcpListener::bind("0.0.0.0:9000")?)).unwrap();
    let _dns = server::dns(pod).unwrap();
    world.cluster().set_service(Service::new("hold", *WEB.ip()).tcp(81, 9000).udp(53, 53)).unwrap();
    world.cluster().set_endpoints("hold", &[pod.endpoint()]).unwrap();
    let client = world.testbed.client();
    let answered = || dns::ask(client, ask, server::WHO, REQUEST);
    wait::until("both ports served", PATIENCE, || answered().map(drop)).unwrap();
    await_only(&world, 0);

    let opened = |state: State, leave: &dyn Fn(&TcpStream)| {
        let accepted = thread::scope(|scope| {
            let accepting = scope.spawn(|| listener.accept().unwrap().0);
            let stream = client.enter(|| Ok(TcpStream::connect_timeout(&hold.into(), REQUEST)?)).unwrap();
            let accepted = accepting.join().unwrap();
            wait::until("it is established", REQUEST, || {
                ensure!(states(&world)? == BTreeMap::from([("established", 1)]), "{:?}", states(&world)?);
                Ok(())
            })
            .unwrap();
            leave(&stream);
            drop(stream);
            accepted
        });
        wait::until(state.name(), REQUEST, || {
            ensure!(states(&world)? == BTreeMap::from([(state.name(), 1)]), "{:?}", states(&world)?);
            Ok(())
        })
        .unwrap();
        await_only(&world, 0);
        drop(accepted);
    };
    opened(State::ClientClosed, &|_| {});
    opened(State::Reset, &|stream| {
        setsockopt(stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
    });

    answered().unwrap();
    assert_eq!(states(&world).unwrap(), BTreeMap::from([("established", 1)]));
    await_only(&world, 0);
}
