//! An address moves to another node in the middle of connections. All nodes choose by the same table, so the new holder
//! finds the same pod.

use crate::client::Talk;
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, World, at, world};
use anyhow::{Context as _, ensure};
use std::io::{Read as _, Write as _};
use std::net::Ipv4Addr;
use testbed::cluster::{Endpoint, Service};
use testbed::{Pod, wait};

/// Moves [`V`] to n2 and waits until it serves there. What the client sends meanwhile is lost on the way, as it is
/// while no switch knows where the address has gone.
fn move_in_the_dark(world: &World, meanwhile: impl FnOnce()) {
    let router = world.testbed.router();
    let rules = format!(
        "table ip dark {{ chain c {{ type filter hook forward priority 0; ip daddr {V} counter drop; }}; }}"
    );
    router.feed(&["nft", "-f", "-"], &rules).unwrap();
    world.testbed.move_address(V, HOLDER, 2).unwrap();
    await_serving(world);
    meanwhile();
    router.run(&["nft", "delete", "table", "ip", "dark"]).unwrap();
}

fn await_serving(world: &World) {
    wait::until("n2 serves the address", SOON, || {
        let at_1 = world.maps(HOLDER)?.services.all()?.len();
        let at_2 = world.maps(2)?.services.all()?.len();
        ensure!((at_1, at_2) == (0, 1), "{at_1} ports on n1, {at_2} on n2");
        Ok(())
    })
    .unwrap();
    world.settle();
}

/// F17: connections to pods on the old holder, on the new one and on a third node go on. Those that nobody has said a
/// word on meanwhile do as well.
#[test]
fn connections_go_on_with_their_pods_when_the_address_moves() {
    let world = world();
    let pods = [1, 2, 3].map(|node| world.pod(node, &format!("pod-{node}")));
    let _echoes = pods.each_ref().map(|pod| Echo::tcp(pod, 8080));
    let endpoints: Vec<Endpoint> = pods.iter().map(Pod::endpoint).collect();
    world.serve("web", Service::new("web", V).tcp(80, 8080), &endpoints);
    let client = world.testbed.client();
    let mut talks: Vec<_> = (0..24).map(|_| Talk::open(client, at(V, 80)).unwrap()).collect();
    for pod in &pods {
        assert!(talks.iter().any(|talk| talk.pod == pod.name()), "no connection to {}", pod.name());
    }
    move_in_the_dark(&world, || {});
    for talk in &mut talks {
        talk.check("after the move").unwrap_or_else(|error| panic!("to {}: {error:#}", talk.pod));
    }
    // The new holder knows them now: they outlive a change of the endpoints.
    world.endpoints("web", &endpoints[..1]);
    for talk in talks.iter_mut().filter(|talk| talk.pod == "pod-1") {
        talk.check("after the change").unwrap();
    }
    assert_eq!(Talk::open(client, at(V, 80)).unwrap().pod, "pod-1");
}

/// A download that runs while the address moves.
#[test]
fn a_transfer_goes_on_when_the_address_moves() {
    const ALL: usize = 6 << 20;
    let world = world();
    let pod = world.pod(3, "pod");
    let _nginx = testbed::server::http(&pod, 8080).unwrap();
    world.serve("web", Service::new("web", V).tcp(80, 8080), &[pod.endpoint()]);
    let any = (Ipv4Addr::UNSPECIFIED, 0);
    let mut stream = crate::client::connect_from(world.testbed.client(), any, at(V, 80), SOON).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    // nginx sends a MB a second.
    stream.write_all(b"GET /slow HTTP/1.0\r\n\r\n").unwrap();
    let mut bytes = vec![0; ALL];
    stream.read_exact(&mut bytes[..ALL / 4]).unwrap();
    let last_seen = || {
        let flows = world.maps(HOLDER)?.flows.list()?;
        Ok(flows.first().context("n1 has forgotten the connection")?.1.last_seen)
    };
    let before = wait::until("the connection", SOON, last_seen).unwrap();
    // The client only listens. The pod, which misses its acknowledgements, repeats itself: n1 must pass that on, or else
    // the client never says another word, and n2 never hears of it.
    move_in_the_dark(&world, || {
        wait::until("n1 passes answers on", SOON, || {
            let seen = last_seen()?;
            ensure!(seen >= before + 2, "the last at {seen}, {before} before");
            Ok(())
        })
        .unwrap();
    });
    stream.read_exact(&mut bytes[ALL / 4..]).unwrap();
    let head = bytes.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
    assert!(bytes.starts_with(b"HTTP/1.1 200") && bytes[head..].iter().all(|byte| *byte == 0));
    let (flows, replies) = (world.maps(2).unwrap().flows, world.maps(2).unwrap().replies);
    assert_eq!((flows.list().unwrap().len(), replies.list().unwrap().len()), (1, 1), "n2 has picked it up");
}
