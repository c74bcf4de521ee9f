//! Pods come and go while clients ask.

use crate::client::Asker;
use crate::shared;
use crate::world::{ASK, PATIENCE, WEB, World, service};
use anyhow::{Result, ensure};
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;
use testbed::{http, wait};

const ROUNDS: usize = 3;
const CLIENTS: usize = 3;

/// What a client got.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Answer(String),
    Refused,
    Other(String),
}

impl Outcome {
    fn of(result: Result<String>) -> Self {
        match result {
            Ok(pod) => Self::Answer(pod),
            Err(error) => match error.downcast_ref::<io::Error>().map(io::Error::kind) {
                Some(ErrorKind::ConnectionRefused) => Self::Refused,
                _ => Self::Other(format!("{error:#}")),
            },
        }
    }
}

/// Sets it when dropped: also on a panic, which would wait for the clients otherwise.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Asks without a pause until it is over, and returns what it got, one after the other.
fn ask(world: &World, address: Ipv4Addr, is_over: &AtomicBool) -> Vec<Outcome> {
    let server = SocketAddrV4::new(address, WEB);
    let requests = || {
        let mut seen = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            seen.push(Outcome::of(http::get_here(server, "/", Duration::from_secs(2))));
        }
        Ok(seen)
    };
    world.testbed.client().enter(requests).unwrap()
}

/// Pods from none to two, on the holder and elsewhere, and back to none, while clients ask without a pause: each is
/// refused while nobody is there, answered by one of them while they are, and nothing else.
#[test]
fn under_load_endpoints_come_and_go_without_a_wrong_answer() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.apply(&service("tide", address, "tide"));
    world.await_shown("tide", Some(address));
    let names = ["tide-1", "tide-2"];
    let pods = [world.add_pod(1, names[0], "tide"), world.add_pod(2, names[1], "tide")];
    world.await_served(address);
    let asker = Asker::new(world.testbed.client(), SocketAddrV4::new(address, ASK));
    let await_refused = |what: &str, ask: &dyn Fn() -> Result<String>| {
        wait::until(&format!("{what} is refused"), PATIENCE, || {
            let outcome = Outcome::of(ask());
            ensure!(outcome == Outcome::Refused, "{outcome:?}");
            Ok(())
        })
        .unwrap();
    };
    let is_over = AtomicBool::new(false);
    let seen: Vec<Vec<Outcome>> = thread::scope(|scope| {
        let world = &*world;
        let is_over = &is_over;
        let clients: Vec<ScopedJoinHandle<'_, _>> =
            (0..CLIENTS).map(|_| scope.spawn(move || ask(world, address, is_over))).collect();
        let end = End(is_over);
        for _ in 0..ROUNDS {
            for pod in &pods {
                world.plane.terminate_pod(pod).unwrap();
            }
            await_refused("a new connection", &|| world.request(address));
            for pod in &pods {
                world.plane.remove_pod(pod).unwrap();
            }
            // The same socket, whose flow its pod could keep until then.
            await_refused("a datagram", &|| Ok(asker.ask("anybody?")?.pod));
            for pod in &pods {
                world.plane.add_pod(pod, "tide").unwrap();
            }
            world.await_served(address);
            assert!(names.contains(&asker.ask("and now?").unwrap().pod.as_str()));
        }
        drop(end);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    for outcomes in seen {
        let strange: Vec<_> = outcomes.iter().filter(|outcome| !is_expected(outcome, &names)).collect();
        assert!(strange.is_empty(), "{strange:?}");
        let mut refused: Vec<bool> = outcomes.iter().map(|outcome| *outcome == Outcome::Refused).collect();
        let requests = refused.len();
        refused.dedup();
        let tides: Vec<bool> = (0..=2 * ROUNDS).map(|turn| turn % 2 == 1).collect();
        assert_eq!(refused, tides, "of {requests} requests, which were refused");
    }
    for pod in &pods {
        world.plane.remove_pod(pod).unwrap();
    }
}

fn is_expected(outcome: &Outcome, names: &[&str]) -> bool {
    match outcome {
        Outcome::Answer(pod) => names.contains(&pod.as_str()),
        Outcome::Refused => true,
        Outcome::Other(_) => false,
    }
}
