//! A connection's packets, one after the other, through the program.

use super::packet::{self, Packet, Segment};
use super::route::Question;
use super::{facts, socket};
use crate::datapath::attach::Direction;
use crate::datapath::copies::Copies;
use crate::datapath::sandbox::{Sandbox, SandboxError, Verdict};
use crate::datapath::testrun::Meta;
use lb_common::addr::Protocol;
use lb_common::config::Config;
use lb_common::flow::{FlowKey, State};
use lb_common::interface::Interface;
use lb_common::mark;
use lb_common::reason::{Kind, Reason};
use std::net::{Ipv4Addr, SocketAddrV4};

/// Index of `lo` in every network namespace.
const LOOPBACK: u32 = 1;

/// Which of the node's interfaces a packet comes in on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// Clients are behind it.
    Uplink,
    /// The other nodes are.
    Overlay,
    /// This node's pods are.
    Pods,
    /// This node's own processes are: `lo`.
    Node,
}

impl Via {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uplink => "uplink",
            Self::Overlay => "overlay",
            Self::Pods => "pods",
            Self::Node => "node",
        }
    }

    const fn role(self) -> Interface {
        match self {
            Self::Uplink => Interface::UPLINK,
            Self::Overlay => Interface::OVERLAY,
            Self::Pods => Interface::PODS,
            Self::Node => Interface::NODE,
        }
    }
}

/// One packet on one hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whose packet it is, and which.
    pub what: String,
    /// The hook.
    pub hook: Direction,
    /// Index of the interface.
    pub interface: u32,
    /// As it comes.
    pub before: (SocketAddrV4, SocketAddrV4),
    /// As it goes on, where that is another tuple.
    pub after: Option<(SocketAddrV4, SocketAddrV4)>,
    /// What is counted.
    pub reason: Reason,
    /// What it is answered with, where it is refused.
    pub answer: Option<String>,
    /// Our byte of the mark, where it is set.
    pub mark: Option<u8>,
    /// By redirect: interface and next hop.
    pub way: Option<(u32, Ipv4Addr)>,
    /// What is to be asked of the kernel's routing: where the stack takes it, or why there is no way.
    pub question: Option<Question>,
}

/// What is to be explained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The packet's tuple.
    pub key: FlowKey,
    /// Where it comes in.
    pub via: Via,
    /// Which TCP packet; `None`: the one that the connection's state makes likely.
    pub segment: Option<Segment>,
    /// Bytes from the IP header on.
    pub length: u16,
}

/// Why there is no explanation.
#[derive(Debug, thiserror::Error)]
pub enum StoryError {
    /// The program.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// No interface has the role.
    #[error("no interface of this node is {role}; `--via` names another way in")]
    NoInterface {
        /// The role.
        role: &'static str,
    },
}

/// The interface of a role: the one that is `preferred` if it has it, else the first.
pub fn interface(copies: &Copies, via: Via, preferred: Option<u32>) -> Option<u32> {
    let mut having =
        copies.interfaces.iter().filter(|(_, roles)| roles.is(via.role())).map(|(index, _)| *index);
    having.clone().find(|index| Some(*index) == preferred).or_else(|| having.next())
}

/// Where a packet with this tuple most likely comes in.
pub fn likely_way_in(copies: &Copies, key: &FlowKey) -> Via {
    let is_answer = copies.replies.contains_key(key) || copies.handshake_replies.contains_key(key);
    if copies.service.is_some() {
        Via::Uplink
    } else if facts::endpoint(copies, key).is_some_and(|endpoint| !endpoint.holders.is_empty()) {
        Via::Overlay
    } else if is_answer {
        Via::Pods
    } else {
        Via::Uplink
    }
}

/// Tries a packet, and those that would follow it, in a sandbox that holds `copies`. `uplink` is preferred where there
/// are several.
///
/// # Errors
/// No interface plays the role, or the kernel refuses.
pub fn tell(
    subject: &Subject,
    uplink: Option<u32>,
    copies: &Copies,
    sandbox: &mut Sandbox,
) -> Result<Vec<Step>, StoryError> {
    let config = *sandbox.config();
    let mut teller = Teller { sandbox, subject: *subject, uplink, copies, config, steps: Vec::new() };
    let holders = facts::endpoint(copies, &subject.key).map(|endpoint| endpoint.holders).unwrap_or_default();
    if subject.via != Via::Overlay || holders.is_empty() {
        teller.tell(None)?;
        return Ok(teller.steps);
    }
    for holder in holders {
        teller.sandbox.reset(copies).map_err(SandboxError::from)?;
        teller.tell(Some(&holder))?;
    }
    Ok(teller.steps)
}

struct Teller<'a> {
    sandbox: &'a mut Sandbox,
    subject: Subject,
    uplink: Option<u32>,
    copies: &'a Copies,
    config: Config,
    steps: Vec<Step>,
}

impl Teller<'_> {
    fn tell(&mut self, holder: Option<&facts::HolderOf>) -> Result<(), StoryError> {
        let Subject { key, via, length, .. } = self.subject;
        let (segment, acknowledgement) = self.first();
        let mut first = Packet { length, acknowledgement, ..Packet::new(key, segment) };
        let mut who = "the packet".to_owned();
        if let Some(holder) = holder {
            first.source_mac = holder.mac;
            who = format!("as forwarded by {}", holder.overlay_address);
        }
        let verdict = self.send(&who, via, Direction::Ingress, &first)?;
        let after = packet::tuple(&verdict.frame).unwrap_or(key);
        match verdict.reason {
            Reason::ForwardRedirect | Reason::ForwardStack => self.answer_to(&first, &after, &verdict)?,
            Reason::HolderForward => self.answer_of_pod(&first)?,
            Reason::PassReplyToStack => {
                self.send("the same, routed", Via::Uplink, Direction::Egress, &first)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// The client's packet that is likely to be next.
    fn first(&self) -> (Segment, u32) {
        let key = &self.copies.known_as(&self.subject.key);
        if key.protocol == Protocol::UDP {
            return (Segment::Datagram, 0);
        }
        let awaited = self.copies.handshakes.get(key).filter(|flow| flow.state() == State::Answered);
        let reversed = key.reversed();
        let awaited_here =
            self.copies.handshake_replies.get(&reversed).filter(|reply| reply.state() == State::Answered);
        let number = awaited.map(|flow| flow.expected_ack).or(awaited_here.map(|reply| reply.expected_ack));
        let is_established = self.copies.flows.contains_key(key)
            || self.copies.replies.contains_key(&reversed)
            || self.copies.replies.contains_key(key);
        let likely = if is_established || number.is_some() { Segment::Ack } else { Segment::Syn };
        (self.subject.segment.unwrap_or(likely), number.unwrap_or(0))
    }

    /// What the backend sends back to the holder, and the third packet of a handshake.
    fn answer_to(
        &mut self,
        first: &Packet,
        forwarded: &FlowKey,
        forward: &Verdict,
    ) -> Result<(), StoryError> {
        if first.segment == Segment::Rst {
            return Ok(());
        }
        let answer = answer_of(first, forwarded);
        let slot = self.copies.slot_of(forwarded.destination, forwarded.destination_port);
        let way_in = match slot {
            _ if is_to_self(forward) => Via::Node,
            Some((_, backend)) if backend.is_local() => Via::Pods,
            // It answers the address itself, over the network that the nodes are on.
            _ if forwarded.source == first.key.destination => Via::Uplink,
            _ => Via::Overlay,
        };
        let verdict = self.send("the backend's answer", way_in, Direction::Ingress, &answer)?;
        if verdict.reason == Reason::PassReplyToStack {
            self.send("the same, routed", Via::Uplink, Direction::Egress, &answer)?;
        }
        self.third(first, &answer)
    }

    /// What the pod sends back to another holder's forward.
    fn answer_of_pod(&mut self, first: &Packet) -> Result<(), StoryError> {
        if first.segment == Segment::Rst {
            return Ok(());
        }
        let answer = answer_of(first, &first.key);
        self.send("the pod's answer", Via::Pods, Direction::Ingress, &answer)?;
        self.third(first, &answer)
    }

    fn third(&mut self, first: &Packet, answer: &Packet) -> Result<(), StoryError> {
        if first.segment != Segment::Syn {
            return Ok(());
        }
        let third = Packet {
            segment: Segment::Ack,
            sequence: first.sequence + 1,
            acknowledgement: answer.sequence + 1,
            ..*first
        };
        self.send("the client's next packet", self.subject.via, Direction::Ingress, &third)?;
        Ok(())
    }

    fn send(
        &mut self,
        what: &str,
        via: Via,
        hook: Direction,
        packet: &Packet,
    ) -> Result<Verdict, StoryError> {
        let role = via.name();
        let interface = interface(self.copies, via, self.uplink).ok_or(StoryError::NoInterface { role })?;
        let verdict = self.sandbox.run(hook, &packet.frame(), Meta { interface, ..Meta::default() })?;
        let step =
            self.step(format!("{what}, {}", packet.segment.name()), hook, interface, packet, &verdict)?;
        self.steps.push(step);
        Ok(verdict)
    }

    fn step(
        &self,
        what: String,
        hook: Direction,
        interface: u32,
        packet: &Packet,
        verdict: &Verdict,
    ) -> Result<Step, SandboxError> {
        let ends = |key: &FlowKey| {
            (socket(key.source, key.source_port), socket(key.destination, key.destination_port))
        };
        let kind = verdict.reason.kind();
        let after = packet::tuple(&verdict.frame).unwrap_or(packet.key);
        #[expect(clippy::cast_possible_truncation, reason = "the byte is what is wanted")]
        let byte = (verdict.mark >> self.config.mark_shift) as u8;
        Ok(Step {
            what,
            hook,
            interface,
            before: ends(&packet.key),
            after: (kind == Kind::Forward && after != packet.key).then(|| ends(&after)),
            reason: verdict.reason,
            answer: (kind == Kind::Reject).then(|| packet::answer(&verdict.frame)).flatten(),
            mark: (byte != 0 && byte != mark::DONE).then_some(byte),
            way: self.way(verdict, packet, &after)?,
            question: self.question(verdict, interface, packet, &after)?,
        })
    }

    /// Where a redirected packet leaves.
    fn way(
        &self,
        verdict: &Verdict,
        packet: &Packet,
        after: &FlowKey,
    ) -> Result<Option<(u32, Ipv4Addr)>, SandboxError> {
        if is_to_self(verdict) {
            return Ok(Some((LOOPBACK, Ipv4Addr::UNSPECIFIED)));
        }
        let maps = self.sandbox.maps();
        let way = match verdict.reason {
            Reason::ForwardRedirect => match self.copies.slot_of(after.destination, after.destination_port) {
                Some((slot, _)) => self.sandbox.way(slot)?,
                None => None,
            },
            Reason::ReplyRedirect => match maps.replies.get(&packet.key)? {
                Some(reply) => reply.way(0),
                None => maps.handshake_replies.get(&packet.key)?.and_then(|reply| reply.way(0)),
            },
            _ => None,
        };
        Ok(way.map(|way| (way.interface, way.next_hop.into())))
    }

    /// What to ask of the kernel's routing: where the stack takes what is left to it, or why there is no way.
    fn question(
        &self,
        verdict: &Verdict,
        input: u32,
        packet: &Packet,
        after: &FlowKey,
    ) -> Result<Option<Question>, SandboxError> {
        let asked = |key: &FlowKey, mark| Question {
            destination: key.destination.into(),
            source: Some(key.source.into()),
            input: Some(input),
            mark,
        };
        Ok(match verdict.reason {
            Reason::ForwardStack | Reason::HolderForward | Reason::HolderReply => {
                Some(asked(after, verdict.mark))
            }
            Reason::PassReplyToStack => {
                Some(asked(&packet.key, verdict.mark & !(0xff << self.config.mark_shift)))
            }
            Reason::DropNoRoute => Some(asked(&self.no_way_to(packet)?, 0)),
            _ => None,
        })
    }

    /// The tuple that there was no way for: a client's packet has its backend by then.
    fn no_way_to(&self, packet: &Packet) -> Result<FlowKey, SandboxError> {
        let maps = self.sandbox.maps();
        let mut key = packet.key;
        if let Some(given) = maps.masquerades.get(&key)? {
            (key.source, key.source_port) = (self.copies.own.overlay, given.port);
        }
        let flow = match maps.flows.get(&key)? {
            None => maps.handshakes.get(&key)?,
            found => found,
        };
        let backend = flow.and_then(|flow| self.copies.backends.get(&flow.backend));
        Ok(backend.map_or(packet.key, |backend| key.with_destination(backend.address, backend.port)))
    }
}

/// Whether the node hands it to itself: with the link-layer address of `lo`, which is zero.
fn is_to_self(verdict: &Verdict) -> bool {
    matches!(verdict.reason, Reason::ForwardRedirect | Reason::ReplyRedirect)
        && verdict.frame.starts_with(&[0; 6])
}

/// What the other side answers `first` with, which reached it with the tuple `reached`.
fn answer_of(first: &Packet, reached: &FlowKey) -> Packet {
    let segment = match first.segment {
        Segment::Syn => Segment::SynAck,
        other => other,
    };
    Packet {
        acknowledgement: first.sequence + 1,
        sequence: 5_000,
        ..Packet::new(reached.reversed(), segment)
    }
}
