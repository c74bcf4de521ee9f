//! Clients inside the cluster: pods of the holder and of other nodes, processes of both. That they reach every place of backends
//! on every network is the matrix's to show; here is what else can go wrong.

use crate::client::{Asker, Talk, kind};
use crate::echo::Echo;
use crate::world::{HOLDER, SOON, V, V3, World, at, world};
use anyhow::{Context as _, Result, ensure};
use lb_common::reason::Reason;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use testbed::cluster::Service;
use testbed::{Host, Pod, wait};

const AGENT: &str = env!("CARGO_BIN_EXE_lb-agent");
/// Connections at once, of four clients together.
const MANY: usize = 3_000;
/// For one of them, when all come at once.
const PATIENCE: Duration = Duration::from_secs(20);

fn grown(world: &World, reason: Reason) -> u64 {
    let outcomes = world.maps(HOLDER).unwrap().outcomes().unwrap();
    outcomes.get(&reason).map_or(0, |outcome| outcome.packets)
}

/// A pod of the holder, one of another node, and the nodes themselves.
fn clients(world: &World) -> (Vec<Pod>, Vec<Host>) {
    let pods = vec![world.pod(HOLDER, "client-1"), world.pod(2, "client-2")];
    let mut hosts: Vec<Host> = pods.iter().map(|pod| Host::clone(pod)).collect();
    hosts.extend([HOLDER, 2].map(|node| Host::clone(world.testbed.node(node))));
    (pods, hosts)
}

/// A socket of a client whose backend has none: the client's own socket is told, whatever the backend took it for.
#[test]
fn a_closed_port_of_a_pod_is_told_to_the_socket_that_asked() {
    let world = world();
    let backends = [world.pod(HOLDER, "local"), world.pod(2, "remote")];
    let (_pods, hosts) = clients(&world);
    for (number, backend) in backends.iter().enumerate() {
        world.serve("dns", Service::new("dns", V).udp(53, 5353), &[backend.endpoint()]);
        for host in &hosts {
            let asker = Asker::new(host, at(V, 53));
            let told = wait::until(&format!("{} is refused", host.name()), SOON, || {
                // The backend's kernel sends so many errors a second and no more.
                let outcome = asker.ask("anybody?").map_err(anyhow::Error::downcast::<std::io::Error>);
                let refused =
                    matches!(&outcome, Err(Ok(error)) if error.kind() == ErrorKind::ConnectionRefused);
                ensure!(refused, "{outcome:?}");
                Ok(())
            });
            told.unwrap();
        }
        assert!(grown(&world, Reason::ReplyIcmpError) >= 4 * (number as u64 + 1));
    }
}

/// One client port to two Services of one pod: two connections, since each has a source of its own.
#[test]
fn one_client_port_to_two_addresses_of_one_pod_is_two_connections() {
    let world = world();
    let pod = world.pod(2, "pod");
    let _echo = Echo::tcp(&pod, 8080);
    for (name, address) in [("first", V), ("second", V3)] {
        world.serve(name, Service::new(name, address).tcp(80, 8080), &[pod.endpoint()]);
    }
    let (_pods, hosts) = clients(&world);
    for host in &hosts[..1] {
        let mut talks = [V, V3].map(|address| Talk::from_port(host, 40_000, at(address, 80)).unwrap());
        assert_ne!(talks[0].seen_as, talks[1].seen_as);
        for talk in &mut talks {
            talk.check("mine").unwrap();
        }
    }
}

/// `lb-agent flows` names the client and what its backend takes it for; `explain` tells both before and during.
#[test]
fn connections_are_shown_and_explained_with_both_of_their_sources() {
    let world = world();
    let pod = world.pod(2, "pod");
    let _echo = Echo::tcp(&pod, 8080);
    world.serve("web", Service::new("web", V).tcp(80, 8080), &[pod.endpoint()]);
    let (_pods, hosts) = clients(&world);
    let pins = world.testbed.pins(HOLDER);
    let ask = |words: &[&str]| -> Value {
        let words = [&[AGENT], words, &["-o", "json", "--bpffs", pins.to_str().unwrap()]].concat();
        serde_json::from_str(&world.testbed.node(HOLDER).run(&words).unwrap()).unwrap()
    };
    // The holder's own pod, and the holder itself: their way in is known by the kernel's routes.
    for (host, via) in [(&hosts[0], "pods"), (&hosts[2], "node")] {
        let talk = Talk::open(host, at(V, 80)).unwrap();
        let (local, seen_as) = (talk.local().to_string(), talk.seen_as.to_string());
        assert_ne!(local, seen_as);
        let flows = ask(&["flows", "--client", &talk.local().ip().to_string()]);
        let of_talk: Vec<_> =
            flows.as_array().unwrap().iter().filter(|flow| flow["seen_as"] == seen_as).collect();
        assert_eq!(of_talk.len(), 1, "{flows:#}");
        assert_eq!(of_talk[0]["client"], talk.local().ip().to_string());
        assert_eq!(of_talk[0]["client_port"], talk.local().port());

        let told = ask(&["explain", "--from", &local, "--to", &at(V, 80).to_string()]);
        assert_eq!((&told["via"], &told["seen_as"]), (&via.into(), &seen_as.as_str().into()), "{told:#}");
        let reasons: Vec<_> = told["steps"].as_array().unwrap().iter().map(|step| &step["reason"]).collect();
        assert_eq!(reasons, ["forward_redirect", "reply_redirect"]);
        assert_eq!(told["known"][0]["map"], "flows");
        let back = (&told["steps"][1]["then_from"], &told["steps"][1]["then_to"]);
        assert_eq!(back, (&at(V, 80).to_string().into(), &local.into()));
    }
}

/// A server that holds every connection, and who they say they are.
struct Crowd {
    is_over: Arc<AtomicBool>,
    listener: TcpListener,
}

impl Crowd {
    /// Sends each client what it sees of it, and keeps the socket until it is over.
    fn start(host: &Host) -> Self {
        let listener = host.enter(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 8080))?)).unwrap();
        // A longer queue than that of the standard library.
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(4_000).unwrap()).unwrap();
        let (is_over, accepting) = (Arc::new(AtomicBool::new(false)), listener.try_clone().unwrap());
        let over = Arc::clone(&is_over);
        thread::spawn(move || {
            let mut held = Vec::new();
            while let Ok((mut stream, client)) = accepting.accept() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let _ = writeln!(stream, "{client:<24}");
                held.push(stream);
            }
        });
        Self { is_over, listener }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = nix::sys::socket::shutdown(self.listener.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

/// Connects, and hears what the server sees.
fn join(service: SocketAddrV4) -> Result<(TcpStream, SocketAddrV4)> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::V4(service), PATIENCE).context("connect")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = [0; 25];
    stream.read_exact(&mut line).context("the greeting")?;
    Ok((stream, str::from_utf8(&line)?.trim_end().parse()?))
}

/// Three thousand connections at once, from pods and nodes to one port: no source is given to two, and none is lost. When they
/// are over, all ports come back.
#[test]
fn no_source_is_given_to_two_of_three_thousand() {
    let world = world();
    let backends = [world.pod(HOLDER, "local"), world.pod(2, "remote")];
    let crowds = backends.each_ref().map(|pod| Crowd::start(pod));
    world.serve("web", Service::new("web", V).tcp(80, 8080), &backends.each_ref().map(Pod::endpoint));
    let (_pods, hosts) = clients(&world);
    let share = MANY / hosts.len();
    let joined = thread::scope(|scope| {
        let joining: Vec<_> = hosts
            .iter()
            .map(|host| {
                scope.spawn(move || {
                    host.enter(|| (0..share).map(|_| join(at(V, 80))).collect::<Result<Vec<_>>>())
                })
            })
            .collect();
        joining.into_iter().flat_map(|thread| thread.join().unwrap().unwrap()).collect::<Vec<_>>()
    });
    let sources: BTreeSet<SocketAddrV4> = joined.iter().map(|(_, source)| *source).collect();
    assert_eq!((joined.len(), sources.len()), (MANY, MANY), "a source was given twice");
    let refused = [Reason::RejectNoPort, Reason::RejectCollision, Reason::RejectUnknownSource]
        .map(|reason| grown(&world, reason));
    assert_eq!(refused, [0; 3]);
    let ports = || world.maps(HOLDER).unwrap().masquerades.list().unwrap().len();
    assert_eq!(ports(), MANY);
    drop(crowds);
    drop(joined);
    wait::until("the ports come back", 4 * SOON, || {
        ensure!(ports() == 0, "{} are not back", ports());
        Ok(())
    })
    .unwrap();
    assert!(world.maps(HOLDER).unwrap().masqueraded.list().unwrap().is_empty());
}

/// In the middle of a connection that the holder knows nothing of, the client is told at once, and connects anew.
#[test]
fn a_connection_that_is_forgotten_is_reset_and_the_next_one_works() {
    let world = world();
    let pod = world.pod(2, "pod");
    let _echo = Echo::tcp(&pod, 8080);
    world.serve("web", Service::new("web", V).tcp(80, 8080), &[pod.endpoint()]);
    let (_pods, hosts) = clients(&world);
    for host in &hosts {
        let mut talk = Talk::open(host, at(V, 80)).unwrap();
        talk.check("before").unwrap();
        let mut maps = world.maps(HOLDER).unwrap();
        for (key, _) in maps.masquerades.list().unwrap() {
            maps.masquerades.remove(&key).unwrap();
        }
        assert_eq!(kind(talk.check("after")), ErrorKind::ConnectionReset, "{}", host.name());
        Talk::open(host, at(V, 80)).unwrap().check("anew").unwrap();
    }
}
