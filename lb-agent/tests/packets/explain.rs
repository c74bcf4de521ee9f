//! What `lb-agent explain` says is what the program does: the sandbox is asked before every packet of every case, and the
//! stories that it tells are those of connections that went before.

use crate::case::{Case, Step};
use crate::cases;
use crate::frame::{End, Frame};
use crate::lab::{CLIENT, Device, HOLDER, HOLDER_2, LIMITS, LOCAL, Lab, OWN, REMOTE, SERVED, now, sh};
use lb_agent::datapath::copies::Copies;
use lb_agent::datapath::load::Limits;
use lb_agent::datapath::sandbox::Sandbox;
use lb_agent::explain::facts;
use lb_agent::explain::packet::{self, Segment};
use lb_agent::explain::story::{self, Subject, Via};
use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::config::Config;
use lb_common::flow::{Flow, FlowKey, Path, Reply, State};
use lb_common::masquerade::{Client, Masquerade, MasqueradedKey};
use lb_common::reason::Reason;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// On a thread of its own, whose network namespace ends with it.
fn on_a_node<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    thread::spawn(act).join().unwrap()
}

fn is_icmp(frame: &[u8]) -> bool {
    frame.get(12..14) == Some(&[8, 0]) && frame.get(23) == Some(&1)
}

/// It has no ports to be asked about.
fn is_later_fragment(frame: &[u8]) -> bool {
    frame.get(12..14) == Some(&[8, 0])
        && frame.get(20..22).is_some_and(|offset| u16::from_be_bytes([offset[0], offset[1]]) & 0x1fff != 0)
}

/// Sandboxes that have been loaded, by what they were loaded with: to check a program takes the kernel a second.
#[derive(Default)]
struct Sandboxes(Vec<(Config, Limits, Sandbox)>);

impl Sandboxes {
    /// One that holds these copies and nothing else.
    fn with(&mut self, case: &Case, copies: &Copies) -> &mut Sandbox {
        let key = (case.config, case.limits);
        let found = self.0.iter().position(|(config, limits, _)| (*config, *limits) == key);
        // A table that has been there stays.
        if let Some(at) = found.filter(|_| copies.service.is_none() || copies.ring.is_some()) {
            self.0[at].2.reset(copies).unwrap();
            return &mut self.0[at].2;
        }
        let fresh = (key.0, key.1, Sandbox::with_limits(&case.limits, copies, &case.config).unwrap());
        match found {
            Some(at) => self.0[at] = fresh,
            None => self.0.push(fresh),
        }
        let at = found.unwrap_or(self.0.len() - 1);
        &mut self.0[at].2
    }
}

/// Asks a sandbox before each packet, which then comes.
fn foresee(case: &Case, sandboxes: &mut Sandboxes) -> Result<usize, String> {
    let mut lab = Lab::new(&case.config, &case.limits);
    let mut packets = 0;
    for (number, step) in case.steps.iter().enumerate() {
        match step {
            Step::Then(act) => act(&mut lab),
            // An error about a packet has no tuple of its own to be asked about.
            Step::Send(send) if is_icmp(send.bytes()) || is_later_fragment(send.bytes()) => {
                send.run(&mut lab).map_err(|wrong| format!("step {number}: {wrong}"))?;
            }
            Step::Send(send) => {
                // The kernel's routes, as they are now, are what the sandbox asks for.
                lab.forget_ways();
                let key = packet::tuple(send.bytes()).unwrap_or_default();
                let copies = Copies::read(&lab.maps, &key).unwrap();
                let sandbox = sandboxes.with(case, &copies);
                let foreseen = sandbox.run(send.direction(), send.bytes(), send.meta()).unwrap();
                send.run(&mut lab).map_err(|wrong| format!("step {number}: {wrong}"))?;
                send.compare(&foreseen).map_err(|wrong| format!("step {number}, foreseen: {wrong}"))?;
                packets += 1;
            }
        }
    }
    Ok(packets)
}

/// A program is loaded for each case, so two threads share the work.
#[test]
fn every_packet_of_every_case_is_foreseen() {
    let next = AtomicUsize::new(0);
    let names = crate::names();
    let work = || {
        let (mut packets, mut wrong, mut sandboxes) = (0, Vec::new(), Sandboxes::default());
        while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
            let case = crate::all().into_iter().zip(&names).find(|(_, other)| *other == name);
            match foresee(&case.unwrap().0, &mut sandboxes) {
                Ok(foreseen) => packets += foreseen,
                Err(problem) => wrong.push(format!("case {name}, {problem}")),
            }
        }
        (packets, wrong)
    };
    let done = thread::scope(|scope| {
        let threads = [scope.spawn(work), scope.spawn(work)];
        threads.map(|thread| thread.join().unwrap())
    });
    let wrong: Vec<String> = done.iter().flat_map(|(_, wrong)| wrong.clone()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let packets: usize = done.iter().map(|(packets, _)| packets).sum();
    assert!(packets > 200, "{packets} packets only");
}

fn key(from: End, to: End) -> FlowKey {
    Frame::tcp(from, to).key()
}

fn ask(lab: &Lab, key: FlowKey, via: Via, segment: Option<Segment>) -> Vec<story::Step> {
    let copies = Copies::read(&lab.maps, &key).unwrap();
    let subject = Subject { key, via, segment, length: 0 };
    let mut sandbox = Sandbox::new(&copies, &Config::DEFAULT).unwrap();
    story::tell(&subject, None, &copies, &mut sandbox).unwrap()
}

fn reasons(steps: &[story::Step]) -> Vec<Reason> {
    steps.iter().map(|step| step.reason).collect()
}

/// Nothing that can be read of the maps.
fn is_untouched(lab: &Lab) -> bool {
    let connections = lab.maps.flows.list().unwrap().len()
        + lab.maps.handshakes.list().unwrap().len()
        + lab.maps.replies.list().unwrap().len()
        + lab.maps.handshake_replies.list().unwrap().len();
    connections == 0 && lab.maps.outcomes().unwrap().is_empty()
}

#[test]
fn a_connection_to_a_remote_backend_is_told_to_its_third_packet() {
    on_a_node(|| {
        let mut lab = Lab::new(&Config::DEFAULT, &LIMITS);
        cases::remote(&mut lab);
        sh("ip neighbour add 10.40.0.2 lladdr 02:00:00:00:00:42 dev weave nud permanent");
        let steps = ask(&lab, key(CLIENT, SERVED), Via::Uplink, None);
        let expected = [Reason::ForwardRedirect, Reason::ReplyRedirect, Reason::ForwardRedirect];
        assert_eq!(reasons(&steps), expected);
        let (from, to) = steps[0].after.unwrap();
        assert_eq!(
            (from.to_string(), to.to_string()),
            ("198.51.100.7:40000".into(), "10.40.0.2:8080".into())
        );
        assert_eq!(steps[0].way, Some((Device::Pods.index(), REMOTE.0.into())));
        assert_eq!(steps[1].way, Some((Device::Uplink.index(), [192, 0, 2, 1].into())));
        assert!(is_untouched(&lab), "an explanation must leave no trace");
    });
}

#[test]
fn a_connection_to_a_local_backend_goes_through_the_stack_both_ways() {
    on_a_node(|| {
        let mut lab = Lab::new(&Config::DEFAULT, &LIMITS);
        cases::route::local(&mut lab);
        let steps = ask(&lab, key(CLIENT, SERVED), Via::Uplink, None);
        let expected =
            [Reason::ForwardStack, Reason::PassReplyToStack, Reason::ReplyTranslated, Reason::ForwardStack];
        assert_eq!(reasons(&steps), expected);
        assert_eq!((steps[0].mark, steps[0].question.is_some()), (Some(251), true));
        assert!(is_untouched(&lab));
    });
}

#[test]
fn a_refusal_is_told_with_its_answer() {
    on_a_node(|| {
        let mut lab = Lab::new(&Config::DEFAULT, &LIMITS);
        lab.serve(SERVED, Protocol::TCP, crate::lab::TCP_80, &[]);
        let steps = ask(&lab, key(CLIENT, SERVED), Via::Uplink, None);
        assert_eq!(reasons(&steps), [Reason::RejectNoEndpoint]);
        assert_eq!(steps[0].answer.as_deref(), Some("a TCP reset"));
    });
}

/// A pod of the holder: the backend sees the holder, the answer goes to the pod.
#[test]
fn a_connection_from_inside_is_told_with_the_source_that_it_gets() {
    on_a_node(|| {
        let mut lab = Lab::new(&Config::DEFAULT, &LIMITS);
        cases::inside::node(&mut lab);
        let pod = cases::inside::POD;
        let steps = ask(&lab, key(pod, SERVED), Via::Pods, None);
        let expected = [Reason::ForwardRedirect, Reason::ReplyRedirect, Reason::ForwardRedirect];
        assert_eq!(reasons(&steps), expected);
        let (from, to) = steps[0].after.unwrap();
        assert_eq!((from.ip().octets(), to.to_string()), (OWN, "10.40.0.2:8080".into()));
        assert_eq!(steps[1].before, (to, from));
        let (from, to) = steps[1].after.unwrap();
        assert_eq!((from.to_string(), to.to_string()), ("192.0.2.10:80".into(), "10.32.0.5:40000".into()));
        assert_eq!(steps[0].way, Some((Device::Pods.index(), REMOTE.0.into())));
        assert_eq!(steps[1].way, Some((Device::Pods.index(), pod.0.into())));
        assert!(is_untouched(&lab));
        assert!(lab.maps.masquerades.list().unwrap().is_empty(), "nor give a port out");
    });
}

/// A process of the holder, whose connection is established: its answers are handed to `lo`.
#[test]
fn a_known_connection_from_inside_is_told_by_the_port_that_it_has() {
    on_a_node(|| {
        let mut lab = Lab::new(&Config::DEFAULT, &LIMITS);
        cases::inside::node(&mut lab);
        let client = key(cases::inside::PROCESS, SERVED);
        let port = Port::new(20_000);
        let address = Ipv4::new(SERVED.0);
        let owned = MasqueradedKey::new(address, Port::new(SERVED.1), port, Protocol::TCP);
        lab.maps.masquerades.insert(&client, &Masquerade::new(port)).unwrap();
        lab.maps.masqueraded.insert(&owned, &Client::new(client.source, client.source_port)).unwrap();
        let known = key((OWN, 20_000), SERVED);
        let flow = Flow::new(0, 1, 1, Path::Redirect, State::Established, now());
        lab.maps.flows.insert(&known, &flow).unwrap();
        let reply =
            Reply::translate(address, Port::new(SERVED.1), 0, Path::Redirect, now()).masqueraded(true);
        lab.maps.replies.insert(&key((OWN, 20_000), REMOTE).reversed(), &reply).unwrap();

        let steps = ask(&lab, client, Via::Node, None);
        assert_eq!(steps[0].what, "the packet, ACK");
        assert_eq!(reasons(&steps), [Reason::ForwardRedirect, Reason::ReplyRedirect]);
        assert_eq!(steps[0].after.unwrap().0.to_string(), "10.32.0.1:20000");
        assert_eq!(steps[1].after.unwrap().1.to_string(), "192.0.2.10:40000");
        assert_eq!(steps[1].way, Some((Device::Node.index(), [0; 4].into())));
        let copies = Copies::read(&lab.maps, &client).unwrap();
        let facts = facts::known(&copies, &client, &Config::DEFAULT.timeouts, now());
        assert_eq!(facts.iter().map(|known| known.map).collect::<Vec<_>>(), ["flows"]);
    });
}

/// The kernel is asked about the backend, not about the address.
#[test]
fn where_there_is_no_way_it_is_the_backend_that_is_asked_about() {
    on_a_node(|| {
        let mut lab = Lab::new(&Config::DEFAULT, &LIMITS);
        cases::remote(&mut lab);
        sh("ip route add unreachable 10.40.0.2");
        let steps = ask(&lab, key(CLIENT, SERVED), Via::Uplink, None);
        assert_eq!(reasons(&steps), [Reason::DropNoRoute]);
        assert_eq!(steps[0].question.unwrap().destination.octets(), REMOTE.0);
    });
}

/// Each holder's forward by itself: the first one's connection is no obstacle to the second one's story.
#[test]
fn another_node_recognises_each_holder() {
    on_a_node(|| {
        let mut lab = Lab::new(&Config::DEFAULT, &LIMITS);
        lab.holder(HOLDER);
        lab.holder(HOLDER_2);
        lab.endpoint(LOCAL, Protocol::TCP, &[HOLDER.1, HOLDER_2.1]);
        let asked = key(CLIENT, LOCAL);
        let copies = Copies::read(&lab.maps, &asked).unwrap();
        assert_eq!(story::likely_way_in(&copies, &asked), Via::Overlay);
        let once = [Reason::HolderForward, Reason::HolderReply, Reason::HolderForward];
        let steps = ask(&lab, asked, Via::Overlay, None);
        assert_eq!(reasons(&steps), [once, once].concat());
        assert_eq!((steps[1].mark, steps[4].mark), (Some(HOLDER.1), Some(HOLDER_2.1)));
        assert!(is_untouched(&lab));

        // While the first one has a connection, the second one's would be the same to the pod.
        let live = Reply::mark(HOLDER.1, State::Established, now());
        lab.maps.replies.insert(&asked.reversed(), &live).unwrap();
        let steps = ask(&lab, asked, Via::Overlay, Some(Segment::Syn));
        assert_eq!(reasons(&steps), [&once[..], &[Reason::DropHolderConflict]].concat());
    });
}

#[test]
fn what_is_not_ours_is_left_to_the_node() {
    on_a_node(|| {
        let mut lab = Lab::new(&Config::DEFAULT, &LIMITS);
        cases::remote(&mut lab);
        let steps = ask(&lab, key(CLIENT, (SERVED.0, 9)), Via::Uplink, None);
        assert_eq!(reasons(&steps), [Reason::PassForeign]);
        assert!(steps[0].after.is_none() && steps[0].way.is_none());
    });
}
