//! How TCP connections end, and how soon they are forgotten.

use crate::client::{Talk, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, World, at, build};
use std::io::ErrorKind;
use std::time::{Duration, Instant};
use testbed::cluster::Service;
use testbed::{Pod, wait};

const PORT: u16 = 45_000;

/// Ends a connection in some way.
type End = fn(&mut Talk);

/// A pod on another node and one on the holder behind two Services, timeouts of a second after the end.
fn start() -> (World, [(u16, Pod, Echo); 2]) {
    let world = build().agent(&["--timeout-closed=1", "--timeout-reset=1"]).start();
    let pods = [(80, 2, "remote"), (81, HOLDER, "local")].map(|(port, node, name)| {
        let pod = world.pod(node, name);
        let echo = Echo::tcp(&pod, 8080);
        world.serve(name, Service::new(name, V).tcp(port, 8080), &[pod.endpoint()]);
        (port, pod, echo)
    });
    // TIME_WAIT at the client is the client's own affair, and would keep it from using a port again.
    world.testbed.client().sysctls(&[("ipv4/tcp_max_tw_buckets", "0")]).unwrap();
    (world, pods)
}

/// Entries of established connections on all nodes.
fn entries(world: &World) -> usize {
    let of = |node: u8| {
        let maps = world.maps(node).unwrap();
        maps.flows.list().unwrap().len() + maps.replies.list().unwrap().len()
    };
    (1..=3).map(of).sum()
}

fn await_entries(world: &World, expected: usize) {
    wait::until(&format!("{expected} entries"), SOON, || {
        let found = entries(world);
        anyhow::ensure!(found == expected, "{found} entries");
        Ok(())
    })
    .unwrap();
}

#[test]
fn either_side_may_close_first_and_still_receive() {
    let (world, pods) = start();
    for (port, pod, echo) in &pods {
        let client = world.testbed.client();
        // The client has nothing more to say, the pod has.
        let mut talk = Talk::open(client, at(V, *port)).unwrap();
        talk.check("hello").unwrap();
        talk.stream().shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(talk.hear().unwrap(), format!("{} farewell", pod.name()));
        assert_eq!(kind(talk.hear()), ErrorKind::UnexpectedEof);

        // The pod has nothing more to say, the client has.
        let mut talk = Talk::open(client, at(V, *port)).unwrap();
        talk.tell("half").unwrap();
        assert_eq!(kind(talk.hear()), ErrorKind::UnexpectedEof);
        talk.tell("into the open half").unwrap();
        wait::until("the line after the pod's FIN", SOON, || {
            let received = echo.received();
            anyhow::ensure!(received.iter().any(|line| line == "into the open half"), "{received:?}");
            Ok(())
        })
        .unwrap();
    }
    // C5: what is closed leaves soon.
    await_entries(&world, 0);
}

/// C5: the tables are empty soon after the last connection, however that ended; until then they hold it.
#[test]
fn connections_that_end_leave_the_tables_soon() {
    let (world, pods) = start();
    for (port, _, _) in &pods {
        // Both nodes remember a connection to the other node, the holder alone one to itself.
        let held = if *port == 80 { 3 } else { 2 };
        let ends: [fn(Talk); 3] = [
            |talk| drop(talk),
            Talk::reset,
            |mut talk| {
                talk.tell("reset").unwrap();
                talk.hear().unwrap_err();
            },
        ];
        for end in ends {
            let mut talk = Talk::open(world.testbed.client(), at(V, *port)).unwrap();
            talk.check("hello").unwrap();
            assert_eq!(entries(&world), held);
            end(talk);
            await_entries(&world, 0);
        }
    }
}

/// A6: the same client port again, at once, however the last connection ended. Not even one SYN is lost: the second try
/// would come after a second.
#[test]
fn a_client_port_can_be_used_again_at_once() {
    let (world, pods) = start();
    let client = world.testbed.client();
    for (port, pod, _) in &pods {
        let ends: [(&str, End); 4] = [
            ("the client's FIN", |talk| {
                talk.stream().shutdown(std::net::Shutdown::Write).unwrap();
                talk.hear().unwrap();
                talk.hear().unwrap_err();
            }),
            ("the pod's FIN", |talk| {
                talk.tell("close").unwrap();
                talk.hear().unwrap_err();
            }),
            ("the pod's RST", |talk| {
                talk.tell("reset").unwrap();
                talk.hear().unwrap_err();
            }),
            ("the client's RST", |talk| crate::echo::abandon(talk.stream()).unwrap()),
        ];
        for (how, end) in ends {
            for _ in 0..5 {
                let begun = Instant::now();
                let mut talk = Talk::from_port(client, PORT, at(V, *port)).unwrap();
                let took = begun.elapsed();
                assert!(took < Duration::from_millis(900), "after {how}, to {}: {took:?}", pod.name());
                talk.check("again").unwrap();
                end(&mut talk);
                drop(talk);
                world.await_over(PORT);
            }
        }
    }
}
