//! Pods come and go while clients ask.

use crate::client::Asker;
use crate::shared;
use crate::world::{ASK, PATIENCE, WEB, World, service};
use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use testbed::{http, wait};

const ROUNDS: usize = 3;
const CLIENTS: usize = 3;

/// What a client got.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Answer(String),
    Refused,
    /// No answer in time.
    Lost,
    Other(String),
}

impl Outcome {
    fn of(result: Result<String>) -> Self {
        match result {
            Ok(pod) => Self::Answer(pod),
            Err(error) => match error.downcast_ref::<io::Error>().map(io::Error::kind) {
                Some(ErrorKind::ConnectionRefused) => Self::Refused,
                Some(ErrorKind::TimedOut) => Self::Lost,
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

/// What a client has got so far, one after the other.
type Seen = Mutex<Vec<Outcome>>;

/// Asks without a pause until it is over.
fn ask(world: &World, address: Ipv4Addr, seen: &Seen, is_over: &AtomicBool) {
    let server = SocketAddrV4::new(address, WEB);
    let requests = || {
        while !is_over.load(Ordering::Relaxed) {
            let outcome = Outcome::of(http::get_here(server, "/", Duration::from_secs(1)));
            seen.lock().unwrap().push(outcome);
        }
        Ok(())
    };
    world.testbed.client().enter(requests).unwrap();
}

/// Waits until every client has just been refused, or has not.
fn await_all(clients: &[Seen], what: &str, is_it: fn(&Outcome) -> bool) {
    wait::until(&format!("every client is {what}"), PATIENCE, || {
        let last: Vec<_> = clients.iter().map(|seen| seen.lock().unwrap().last().cloned()).collect();
        ensure!(last.iter().all(|outcome| outcome.as_ref().is_some_and(is_it)), "{last:?}");
        Ok(())
    })
    .unwrap();
}

/// Pods from none to two, on the holder and elsewhere, and back to none, while clients ask without a pause: each is
/// refused while nobody is there, answered by one of them while they are, and nothing else. One request of each client may
/// be lost at each turn: see [`a_pod_is_reached_as_soon_as_its_node_has_heard_of_it`].
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
    let clients: [Seen; CLIENTS] = Default::default();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let end = End(&is_over);
        for seen in &clients {
            let (world, is_over) = (&*world, &is_over);
            scope.spawn(move || ask(world, address, seen, is_over));
        }
        for _ in 0..ROUNDS {
            await_all(&clients, "answered", |outcome| matches!(outcome, Outcome::Answer(_)));
            for pod in &pods {
                world.plane.terminate_pod(pod).unwrap();
            }
            await_all(&clients, "refused", |outcome| *outcome == Outcome::Refused);
            for pod in &pods {
                world.plane.remove_pod(pod).unwrap();
            }
            // The same socket, whose flow its pod could keep until then.
            wait::until("a datagram is refused", PATIENCE, || {
                let outcome = Outcome::of(asker.ask("anybody?").map(|answer| answer.pod));
                ensure!(outcome == Outcome::Refused, "{outcome:?}");
                Ok(())
            })
            .unwrap();
            for pod in &pods {
                world.plane.add_pod(pod, "tide").unwrap();
            }
            world.await_backends(1, address, pods.len());
            world.await_recognised(address, &pods);
            assert!(names.contains(&asker.ask("and now?").unwrap().pod.as_str()));
        }
        await_all(&clients, "answered", |outcome| matches!(outcome, Outcome::Answer(_)));
        drop(end);
    });
    for seen in clients {
        let outcomes = seen.into_inner().unwrap();
        let mut turns = Vec::new();
        let mut lost = 0;
        for outcome in &outcomes {
            match outcome {
                Outcome::Answer(pod) if names.contains(&pod.as_str()) => turns.push("answered"),
                Outcome::Refused => turns.push("refused"),
                Outcome::Lost => lost += 1,
                strange => panic!("{strange:?}"),
            }
        }
        assert!(lost <= ROUNDS, "{lost} of {} requests are lost", outcomes.len());
        turns.dedup();
        let tides: Vec<&str> = ["answered", "refused"].into_iter().cycle().take(2 * ROUNDS + 1).collect();
        assert_eq!(turns, tides, "of {} requests", outcomes.len());
    }
    for pod in &pods {
        world.plane.remove_pod(pod).unwrap();
    }
}

/// The holder hears of a new pod before the pod's node does: what it forwards until then is lost, and answered by nobody
/// else. Afterwards the same socket is answered too: the CNI's masquerade has not taken its datagrams for its own.
#[test]
fn a_pod_is_reached_as_soon_as_its_node_has_heard_of_it() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    world.apply(&service("late", address, "slow"));
    world.await_shown("late", Some(address));
    world.signal_agent(2, Signal::SIGSTOP);
    let pod = world.add_pod(2, "slow-1", "slow");
    world.await_backends(1, address, 1);
    let asker = Asker::new(world.testbed.client(), SocketAddrV4::new(address, ASK));
    for _ in 0..2 {
        assert_eq!(Outcome::of(world.request(address)), Outcome::Lost);
        asker.tell("hello?").unwrap();
    }
    world.signal_agent(2, Signal::SIGCONT);
    world.await_served(address);
    assert_eq!(asker.ask("and now?").unwrap().pod, pod.name());
    world.plane.remove_pod(&pod).unwrap();
}

#[test]
fn a_service_that_publishes_pods_that_are_not_ready_has_them() {
    let Some(mut world) = shared::world() else { return };
    let address = world.held_by(1);
    let pod = world.add_pod(2, "unready-1", "unready");
    world.plane.set_ready(&pod, "unready", false).unwrap();
    world.apply(&service("unready", address, "unready"));
    world.await_shown("unready", Some(address));
    wait::until("clients are refused", PATIENCE, || {
        let outcome = Outcome::of(world.request(address));
        ensure!(outcome == Outcome::Refused, "{outcome:?}");
        Ok(())
    })
    .unwrap();
    world.patch("unready", &json!({ "spec": { "publishNotReadyAddresses": true } }));
    world.await_served(address);
    world.plane.remove_pod(&pod).unwrap();
}
