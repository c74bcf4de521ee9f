//! A packet case is data: what is in the maps, then steps, each a packet and all that must come of it.

use crate::frame::{End, Frame};
use crate::lab::{Device, Hook, LIMITS, Lab, diff};
use lb_agent::datapath::attach::Direction;
use lb_agent::datapath::load::Limits;
use lb_agent::datapath::maps::Table;
use lb_agent::datapath::sandbox::Verdict;
use lb_agent::datapath::testrun::Meta;
use lb_common::config::Config;
use lb_common::flow::{Flow, FlowKey, Reply, State};
use lb_common::reason::{Kind, Reason};
use lb_common::service::ServiceStats;

const TC_ACT_UNSPEC: i32 = -1;
const TC_ACT_SHOT: i32 = 2;
const TC_ACT_REDIRECT: i32 = 7;

/// Our byte of the mark for a forward through the stack, and for a finished packet (`lb_common::mark`).
pub(crate) const FORWARDED: u32 = 251 << 24;
pub(crate) const DONE: u32 = 252 << 24;

pub(crate) struct Case {
    pub(crate) config: Config,
    pub(crate) limits: Limits,
    pub(crate) steps: Vec<Step>,
}

impl Case {
    /// With maps filled by `prepare`.
    pub(crate) fn new(prepare: impl Fn(&mut Lab) + 'static) -> Self {
        Self { config: Config::DEFAULT, limits: LIMITS, steps: vec![Step::Then(Box::new(prepare))] }
    }

    pub(crate) fn config(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    pub(crate) fn limits(mut self, change: impl FnOnce(&mut Limits)) -> Self {
        change(&mut self.limits);
        self
    }

    /// A packet.
    pub(crate) fn send(mut self, send: Send) -> Self {
        self.steps.push(Step::Send(Box::new(send)));
        self
    }

    /// Something happens on the node, or is checked.
    pub(crate) fn then(mut self, act: impl Fn(&mut Lab) + 'static) -> Self {
        self.steps.push(Step::Then(Box::new(act)));
        self
    }

    /// The client's flow must be in this table, with this state, and nowhere else; likewise its reply entry.
    pub(crate) fn flow(self, packet: &Frame, backend: End, place: Place) -> Self {
        let flow = packet.key();
        let reply = packet.clone().to(backend).key().reversed();
        self.then(move |lab| {
            let state = |table: &Table<FlowKey, Flow>| table.get(&flow).unwrap().map(|flow| flow.state());
            let has = |table: &Table<FlowKey, Reply>| table.get(&reply).unwrap().is_some();
            let (handshake, established) = (state(&lab.maps.handshakes), state(&lab.maps.flows));
            let expected = match place {
                Place::Nowhere => (None, None),
                Place::Handshakes(state) => (Some(state), None),
                Place::Flows(state) => (None, Some(state)),
            };
            assert_eq!((handshake, established), expected, "flow in (handshakes, flows)");
            let replies = (has(&lab.maps.handshake_replies), has(&lab.maps.replies));
            assert_eq!(
                replies,
                (expected.0.is_some(), expected.1.is_some()),
                "reply in (handshake_replies, replies)"
            );
        })
    }

    /// The other node's entry of the reply tuple, mark and state.
    pub(crate) fn marked(self, forward: &Frame, place: Place, mark: u8) -> Self {
        let key = forward.key().reversed();
        self.then(move |lab| {
            let entry = |table: &Table<FlowKey, Reply>| {
                table.get(&key).unwrap().map(|reply| (reply.state(), reply.mark))
            };
            let found = (entry(&lab.maps.handshake_replies), entry(&lab.maps.replies));
            let expected = match place {
                Place::Nowhere => (None, None),
                Place::Handshakes(state) => (Some((state, mark)), None),
                Place::Flows(state) => (None, Some((state, mark))),
            };
            assert_eq!(found, expected, "reply in (handshake_replies, replies)");
        })
    }
}

/// Where a connection is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Nowhere,
    Handshakes(State),
    Flows(State),
}

pub(crate) enum Step {
    Send(Box<Send>),
    Then(Box<dyn Fn(&mut Lab)>),
}

/// A packet, and all that must come of it.
pub(crate) struct Send {
    hook: Hook,
    device: Device,
    bytes: Vec<u8>,
    mark: u32,
    gso_size: u32,
    expected: Option<Expected>,
    stats: Option<(u32, ServiceStats)>,
}

struct Expected {
    verdict: i32,
    reason: Reason,
    /// `None`: the packet is dropped, nobody sees its bytes.
    bytes: Option<Vec<u8>>,
    mark: u32,
}

/// Comes in.
pub(crate) fn ingress(device: Device, bytes: impl Into<Vec<u8>>) -> Send {
    Send::new(Hook::Ingress, device, bytes.into())
}

/// Goes out.
pub(crate) fn egress(device: Device, bytes: impl Into<Vec<u8>>) -> Send {
    Send::new(Hook::Egress, device, bytes.into())
}

impl From<&Frame> for Vec<u8> {
    fn from(frame: &Frame) -> Self {
        frame.bytes()
    }
}

impl From<Frame> for Vec<u8> {
    fn from(frame: Frame) -> Self {
        frame.bytes()
    }
}

impl Send {
    fn new(hook: Hook, device: Device, bytes: Vec<u8>) -> Self {
        Self { hook, device, bytes, mark: 0, gso_size: 0, expected: None, stats: None }
    }

    /// The mark that it has already.
    pub(crate) fn marked(mut self, mark: u32) -> Self {
        self.mark = mark;
        self
    }

    pub(crate) fn gso_size(mut self, gso_size: u32) -> Self {
        self.gso_size = gso_size;
        self
    }

    fn expect(mut self, verdict: i32, reason: Reason, bytes: Option<Vec<u8>>, mark: u32) -> Self {
        self.expected = Some(Expected { verdict, reason, bytes, mark });
        self
    }

    /// Leaves by a redirect, with these bytes, finished.
    pub(crate) fn redirected(self, reason: Reason, bytes: impl Into<Vec<u8>>) -> Self {
        let mark = self.mark & 0x00ff_ffff | DONE;
        self.expect(TC_ACT_REDIRECT, reason, Some(bytes.into()), mark)
    }

    /// Comes in once more with these bytes, for the stack to forward it.
    pub(crate) fn comes_again(self, reason: Reason, bytes: impl Into<Vec<u8>>) -> Self {
        let mark = self.mark & 0x00ff_ffff | FORWARDED;
        self.expect(TC_ACT_REDIRECT, reason, Some(bytes.into()), mark)
    }

    /// Goes on to the stack with these bytes and this mark.
    pub(crate) fn stack(self, reason: Reason, bytes: impl Into<Vec<u8>>, mark: u32) -> Self {
        self.expect(TC_ACT_UNSPEC, reason, Some(bytes.into()), mark)
    }

    /// Goes on as it came, with this mark.
    pub(crate) fn marks(self, reason: Reason, mark: u32) -> Self {
        let bytes = self.bytes.clone();
        self.expect(TC_ACT_UNSPEC, reason, Some(bytes), mark)
    }

    /// Goes on as it came.
    pub(crate) fn passes(self, reason: Reason) -> Self {
        let mark = self.mark;
        self.marks(reason, mark)
    }

    /// Is thrown away.
    pub(crate) fn dropped(self, reason: Reason) -> Self {
        self.expect(TC_ACT_SHOT, reason, None, 0)
    }

    /// What it adds to a service's counters.
    pub(crate) fn counts(mut self, service: u32, change: impl FnOnce(&mut ServiceStats)) -> Self {
        let mut stats = ServiceStats::default();
        change(&mut stats);
        self.stats = Some((service, stats));
        self
    }

    /// The reason that must be counted.
    pub(crate) fn reason(&self) -> Reason {
        self.expected.as_ref().unwrap().reason
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn direction(&self) -> Direction {
        match self.hook {
            Hook::Ingress => Direction::Ingress,
            Hook::Egress => Direction::Egress,
        }
    }

    /// What the kernel says of it, in the calling thread's namespace.
    pub(crate) fn meta(&self) -> Meta {
        Meta { interface: self.device.index(), mark: self.mark, gso_size: self.gso_size }
    }

    /// Compares what the program did elsewhere with what it must do.
    pub(crate) fn compare(&self, found: &Verdict) -> Result<(), String> {
        let Expected { verdict, reason, bytes, mark } = self.expected.as_ref().unwrap();
        let is_visible = bytes.is_some();
        let frame = is_visible.then_some(&found.frame);
        let same = (found.action, found.reason, frame) == (*verdict, *reason, bytes.as_ref())
            && (!is_visible || found.mark == *mark);
        if same {
            Ok(())
        } else {
            Err(format!("{found:x?}, not {verdict}, {reason:?}, {bytes:x?}, {mark:#x}"))
        }
    }

    /// Runs it and compares everything.
    pub(crate) fn run(&self, lab: &mut Lab) -> Result<(), String> {
        let expected = self.expected.as_ref().unwrap();
        let before = lab.maps.outcomes().unwrap();
        let stats_before = self.stats.map(|(service, _)| lab.maps.service_stats(service).unwrap());
        let (verdict, bytes, mark) = lab.run(self.hook, &self.bytes, self.meta());
        let (bytes, mut wrong) = (bytes.to_vec(), String::new());

        let mut counted = Vec::new();
        for (reason, outcome) in lab.maps.outcomes().unwrap() {
            let old = before.get(&reason).copied().unwrap_or_default();
            let delta = (outcome.packets - old.packets, outcome.bytes - old.bytes);
            if delta != (0, 0) {
                counted.push((reason.label(), delta.0, delta.1));
            }
        }
        let due = vec![(expected.reason.label(), 1, self.bytes.len() as u64)];
        if counted != due {
            wrong += &format!("outcomes grew by {counted:?}, not {due:?}\n");
        }
        if verdict != expected.verdict {
            wrong += &format!("verdict {verdict}, not {}\n", expected.verdict);
        }
        if let Some(due) = &expected.bytes {
            if bytes != *due {
                wrong += &format!("bytes (- expected, + found):\n{}", diff(due, &bytes));
            }
            if mark != expected.mark {
                wrong += &format!("mark {mark:#x}, not {:#x}\n", expected.mark);
            }
        }
        if let Some(((service, due), before)) = self.stats.zip(stats_before) {
            let after = lab.maps.service_stats(service).unwrap();
            let delta = ServiceStats {
                packets_in: after.packets_in - before.packets_in,
                bytes_in: after.bytes_in - before.bytes_in,
                packets_out: after.packets_out - before.packets_out,
                bytes_out: after.bytes_out - before.bytes_out,
                connections: after.connections - before.connections,
                refused: after.refused - before.refused,
            };
            if delta != due {
                wrong += &format!("service {service} counted {delta:?}, not {due:?}\n");
            }
        }
        let kind = expected.reason.kind();
        let agrees = match verdict {
            TC_ACT_UNSPEC => matches!(kind, Kind::Pass | Kind::Forward),
            TC_ACT_REDIRECT => matches!(kind, Kind::Reject | Kind::Forward),
            // A reset is refused without an answer.
            _ => matches!(kind, Kind::Reject | Kind::Drop),
        };
        if !agrees {
            wrong += &format!("verdict {verdict} does not go with a reason of kind {kind:?}\n");
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }
}

/// Runs a case on a fresh node with fresh maps.
pub(crate) fn run(name: &str, case: &Case) {
    let mut lab = Lab::new(&case.config, &case.limits);
    for (number, step) in case.steps.iter().enumerate() {
        match step {
            Step::Then(act) => {
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| act(&mut lab)));
                if outcome.is_err() {
                    panic!("case {name}, step {number}: the check above failed");
                }
            }
            Step::Send(send) => {
                if let Err(wrong) = send.run(&mut lab) {
                    panic!(
                        "case {name}, step {number}: {:?} on {:?}\n{wrong}sent:\n{}",
                        send.hook,
                        send.device,
                        diff(&send.bytes, &send.bytes)
                    );
                }
            }
        }
    }
}
