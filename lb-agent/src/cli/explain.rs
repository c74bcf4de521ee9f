//! `lb-agent explain`: what would happen to a packet on this node, and why.

use super::program::{self, Device, Program};
use super::render::{self, Look};
use crate::datapath::attach::Direction;
use crate::datapath::copies::Copies;
use crate::datapath::loaded::{self, Loaded};
use crate::datapath::sandbox::Sandbox;
use crate::datapath::sweep;
use crate::explain::device_name;
use crate::explain::facts::{self, Choice, Endpoint, Known, Served};
use crate::explain::packet::Segment;
use crate::explain::route::{self, Question, Route};
use crate::explain::story::{self, Step, Subject, Via};
use crate::node;
use anyhow::{Context as _, bail};
use clap::ValueEnum;
use lb_common::addr::{Port, Protocol};
use lb_common::config::Config;
use lb_common::flow::FlowKey;
use lb_common::interface::Interface;
use lb_common::mark;
use rtnetlink::Handle;
use serde::Serialize;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};

/// Arguments of `lb-agent explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where the packet comes from: a client
    #[arg(long, value_name = "IP:PORT", value_parser = parse_end)]
    from: SocketAddrV4,
    /// Where it is addressed to: a served port; on a pod's node, the pod
    #[arg(long, value_name = "IP:PORT", value_parser = parse_end)]
    to: SocketAddrV4,
    /// TCP or UDP
    #[arg(long, value_enum, default_value_t = L4::Tcp)]
    protocol: L4,
    /// Which way it comes in. Default: overlay where another holder forwards to --to, pods where --from answers a
    /// connection; to a served port, what leads to --from; else uplink
    #[arg(long, value_enum)]
    via: Option<WayIn>,
    /// Which packet of the connection. Default: the one that is likely to be next
    #[arg(long, value_enum)]
    packet: Option<Which>,
    /// Its length from the IP header on, bytes; it is not to be fragmented. Default: without data
    #[arg(long, value_name = "BYTES", default_value_t = 0, value_parser = clap::value_parser!(u16).range(..=MAX_LENGTH))]
    length: u16,
    #[command(flatten)]
    look: Look,
}

/// What a trial run takes, with some room for an answer.
const MAX_LENGTH: i64 = 3_400;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum L4 {
    Tcp,
    Udp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WayIn {
    /// Clients are behind it
    Uplink,
    /// The other nodes are
    Overlay,
    /// This node's pods are
    Pods,
    /// This node's own processes are
    Node,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// TCP: the first
    Syn,
    /// TCP: a later one
    Ack,
    /// TCP: a reset
    Rst,
}

fn parse_end(text: &str) -> Result<SocketAddrV4, String> {
    let wanted = "an IPv4 address and a port are wanted, as in 192.0.2.101:80";
    let end: SocketAddrV4 = text.parse().map_err(|_| wanted.to_owned())?;
    if end.port() == 0 { Err(format!("port 0 is nobody's; {wanted}")) } else { Ok(end) }
}

/// All that is said.
#[derive(Serialize)]
struct Explanation {
    from: SocketAddrV4,
    to: SocketAddrV4,
    protocol: &'static str,
    via: &'static str,
    /// What backends take the client for, where that is another.
    seen_as: Option<SocketAddrV4>,
    interfaces: Vec<Device>,
    program: Program,
    service: Option<Served>,
    endpoint: Option<Endpoint>,
    known: Vec<Known>,
    choices: Vec<Choice>,
    steps: Vec<Told>,
    /// What makes the answer less certain, or the packet less lucky.
    warnings: Vec<String>,
}

/// What happens on one hook.
#[derive(Serialize)]
struct Told {
    packet: String,
    hook: String,
    interface: String,
    from: SocketAddrV4,
    to: SocketAddrV4,
    reason: &'static str,
    kind: &'static str,
    description: &'static str,
    /// The tuple that it goes on with, where it is another.
    then_from: Option<SocketAddrV4>,
    then_to: Option<SocketAddrV4>,
    answer: Option<String>,
    /// Our byte of the packet mark, where it is set.
    mark: Option<u8>,
    /// By redirect.
    leaves_by: Option<String>,
    next_hop: Option<Ipv4Addr>,
    /// Where the stack takes it.
    route: Option<Route>,
}

/// Prints the explanation; changes nothing.
///
/// # Errors
/// When there is no datapath, or the kernel refuses a trial.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let protocol = args.protocol();
    if args.packet.is_some() && protocol == Protocol::UDP {
        bail!("--packet names a TCP packet; a datagram has no kinds");
    }
    let (from, to) = (args.from, args.to);
    let key = FlowKey::new(
        (*from.ip()).into(),
        Port::new(from.port()),
        (*to.ip()).into(),
        Port::new(to.port()),
        protocol,
    );
    let maps = args.look.maps()?;
    let copies = Copies::read(&maps, &key)?;
    let loaded = loaded::find(&args.look.pins(), Direction::Ingress.program())?;
    let explanation = explain(args, &key, &copies, loaded)?;
    args.look.print(&explanation, || text(&explanation))
}

impl Args {
    fn protocol(&self) -> Protocol {
        match self.protocol {
            L4::Tcp => Protocol::TCP,
            L4::Udp => Protocol::UDP,
        }
    }

    async fn subject(&self, netlink: &Handle, key: &FlowKey, copies: &Copies) -> Subject {
        let via = match self.via {
            Some(WayIn::Uplink) => Via::Uplink,
            Some(WayIn::Overlay) => Via::Overlay,
            Some(WayIn::Pods) => Via::Pods,
            Some(WayIn::Node) => Via::Node,
            None => likely_way_in(netlink, copies, key).await,
        };
        let segment = self.packet.map(|packet| match packet {
            Which::Syn => Segment::Syn,
            Which::Ack => Segment::Ack,
            Which::Rst => Segment::Rst,
        });
        Subject { key: *key, via, segment, length: self.length }
    }
}

fn explain(
    args: &Args,
    key: &FlowKey,
    copies: &Copies,
    loaded: Option<Loaded>,
) -> anyhow::Result<Explanation> {
    let config = loaded.and_then(|loaded| loaded.config).unwrap_or(Config::DEFAULT);
    let mut sandbox = Sandbox::new(copies, &config)?;
    let warnings = warnings(copies, loaded, sandbox.tag()?);
    // On this thread alone: another could be in another network namespace.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (subject, steps) = runtime.block_on(async {
        let netlink = node::connect().context("cannot ask the kernel about its network")?;
        let subject = args.subject(&netlink, key, copies).await;
        anyhow::Ok((subject, steps(&netlink, &subject, copies, &mut sandbox).await?))
    })?;
    let (source, goes_to) = steps.first().map(|step| (step.then_from, step.then_to)).unwrap_or_default();
    let is_request = copies.service.is_some();
    Ok(Explanation {
        from: args.from,
        to: args.to,
        protocol: key.protocol.name(),
        via: subject.via.name(),
        seen_as: source.filter(|source| is_request && *source != args.from),
        interfaces: program::devices(&copies.interfaces),
        program: Program::new(loaded),
        service: facts::served(copies),
        endpoint: facts::endpoint(copies, key),
        known: facts::known(copies, key, &config.timeouts, sweep::now()),
        choices: facts::choices(copies, key, source, goes_to),
        steps,
        warnings,
    })
}

/// Where a packet most likely comes in: one to a served port from where the kernel would send the answer to.
async fn likely_way_in(netlink: &Handle, copies: &Copies, key: &FlowKey) -> Via {
    let likely = story::likely_way_in(copies, key);
    if likely != Via::Uplink || copies.service.is_none() {
        return likely;
    }
    let back = route::ask(netlink, &Question::about(key.source)).await;
    let roles = back.device_index.and_then(|index| copies.interfaces.get(&index));
    match roles {
        _ if back.is_local => Via::Node,
        Some(roles) if roles.is(Interface::PODS) && !roles.is(Interface::UPLINK) => Via::Pods,
        _ => likely,
    }
}

async fn steps(
    netlink: &Handle,
    subject: &Subject,
    copies: &Copies,
    sandbox: &mut Sandbox,
) -> anyhow::Result<Vec<Told>> {
    let outside = match subject.via {
        Via::Uplink | Via::Node => subject.key.source,
        Via::Overlay | Via::Pods => subject.key.destination,
    };
    // Clients behind several uplinks: the one that leads to this one.
    let uplink = route::ask(netlink, &Question::about(outside)).await.device_index;
    let mut told = Vec::new();
    for step in story::tell(subject, uplink, copies, sandbox)? {
        let route = match &step.question {
            Some(question) => Some(route::ask(netlink, question).await),
            None => None,
        };
        told.push(Told::new(step, route));
    }
    Ok(told)
}

/// `tag` is that of the program that gives the answer.
fn warnings(copies: &Copies, loaded: Option<Loaded>, tag: u64) -> Vec<String> {
    let mut warnings = Vec::new();
    match loaded {
        None => warnings.push(
            "no program of the kernel uses these maps, so nothing below happens: packets go to the node itself".to_owned(),
        ),
        Some(loaded) => {
            if loaded.config.is_none() {
                warnings.push("the program's settings cannot be read; the defaults are assumed".to_owned());
            }
            if loaded.tag != tag {
                warnings.push(
                    "the program on this node is another version's than this lb-agent; the answer is by this one's"
                        .to_owned(),
                );
            }
        }
    }
    if copies.interfaces.is_empty() {
        warnings.push("no interface has a role: the agent has not found the node's devices yet".to_owned());
    }
    for index in copies.interfaces.keys().filter(|index| device_name(**index).is_none()) {
        warnings.push(format!(
            "interface {index} has a role but is not in this network namespace: run this where the agent runs"
        ));
    }
    if copies.flows_full || copies.replies_full {
        warnings
            .push("the table of connections is full: no new one can be established (--max-flows)".to_owned());
    }
    warnings
}

/// The name of an interface, or its number.
fn name(index: u32) -> String {
    device_name(index).unwrap_or_else(|| format!("interface {index}"))
}

impl Told {
    fn new(step: Step, route: Option<Route>) -> Self {
        let Step { what, hook, interface, before, after, reason, answer, mark, way, question: _ } = step;
        Self {
            packet: what,
            hook: hook.to_string(),
            interface: name(interface),
            from: before.0,
            to: before.1,
            reason: reason.label(),
            kind: reason.kind().name(),
            description: reason.describe(),
            then_from: after.map(|(from, _)| from),
            then_to: after.map(|(_, to)| to),
            answer,
            mark,
            leaves_by: way.map(|(interface, _)| name(interface)),
            next_hop: way.map(|(_, next_hop)| next_hop),
            route,
        }
    }

    fn lines(&self, number: usize) -> Vec<String> {
        let mut lines = vec![
            format!(
                "{number}. {}: {} > {}, {} of {}",
                self.packet, self.from, self.to, self.hook, self.interface
            ),
            format!("   {}: {}", self.reason, self.description),
        ];
        if let (Some(from), Some(to)) = (self.then_from, self.then_to) {
            lines.push(format!("   goes on as {from} > {to}"));
        }
        match (&self.leaves_by, self.next_hop) {
            (Some(device), Some(Ipv4Addr::UNSPECIFIED)) => {
                lines.push(format!("   handed to {device}: it is for this node itself"));
            }
            (Some(device), Some(next_hop)) => {
                lines.push(format!("   leaves by {device}, next hop {next_hop}"));
            }
            _ => {}
        }
        if let Some(answer) = &self.answer {
            lines.push(format!("   answered with {answer}, out of {}", self.interface));
        }
        if let Some(mark) = self.mark {
            lines.push(format!("   packet mark: our byte is {mark}{}", meaning(mark)));
        }
        lines.extend(self.route.as_ref().map(|route| format!("   the stack: {}", describe(route))));
        lines
    }
}

fn meaning(mark: u8) -> String {
    match mark {
        1..=mark::MAX_HOLDERS => ", the mark of its holder".to_owned(),
        mark::FORWARDED => ", a forward: kept off the CNI's masquerade".to_owned(),
        _ => String::new(),
    }
}

fn describe(route: &Route) -> String {
    let Route { device, gateway, table, is_local, refused, device_index: _ } = route;
    if let Some(refused) = refused {
        return refused.clone();
    }
    if *is_local {
        return "to this node itself".to_owned();
    }
    let device = device.as_deref().unwrap_or("?");
    let gateway = gateway.map(|gateway| format!(" to {gateway}")).unwrap_or_default();
    let table = table.map(|table| format!(", by routing table {table}")).unwrap_or_default();
    format!("out of {device}{gateway}{table}")
}

fn text(explanation: &Explanation) -> String {
    let mut text = String::new();
    let mut line = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    for warning in &explanation.warnings {
        line(&format!("! {warning}"));
    }
    for fact in render::aligned(&facts_of(explanation)) {
        line(&fact);
    }
    line("");
    for (number, told) in explanation.steps.iter().enumerate() {
        for said in told.lines(number + 1) {
            line(&said);
        }
    }
    text
}

/// Headings with what stands behind them.
fn facts_of(explanation: &Explanation) -> Vec<Vec<String>> {
    let Explanation { to, protocol, seen_as, interfaces, program, service, endpoint, known, choices, .. } =
        explanation;
    let mut rows = Vec::new();
    let mut row = |heading: &str, words: String| rows.push(vec![heading.to_owned(), words]);
    row("Interfaces", program::name_all(interfaces));
    row("Program", program.text());
    row(
        "Service",
        format!("{to}/{protocol} {}", service.as_ref().map_or("is not served here".to_owned(), of_service)),
    );
    if let Some(endpoint) = endpoint {
        row("Endpoint", of_endpoint(endpoint));
    }
    if let Some(source) = seen_as {
        row("Seen as", format!("{source} by the backend, whose answers would not come back here otherwise"));
    }
    for known in known {
        row("Connection", of_known(known));
    }
    if known.is_empty() {
        row("Connection", "none is known".to_owned());
    }
    for (number, choice) in choices.iter().enumerate() {
        row(if number == 0 { "New ones get" } else { "else" }, of_choice(choice));
    }
    rows
}

fn of_service(Served { id, table_size, backends }: &Served) -> String {
    let table = table_size.map_or("no table yet".to_owned(), |size| format!("a table of {size} places"));
    format!("is served here: id {id}, {table}, {backends} active backends")
}

fn of_endpoint(Endpoint { own, holders }: &Endpoint) -> String {
    let others = holders.iter().map(|holder| format!("{} (mark {})", holder.overlay_address, holder.mark));
    let own = own.then(|| "this node".to_owned());
    format!("forwarded to by {}", own.into_iter().chain(others).collect::<Vec<_>>().join(", "))
}

fn of_known(known: &Known) -> String {
    let Known { map, state, backend, mark, path, idle_seconds, timeout_seconds } = known;
    let mut text = format!("in {map}: {state}");
    // Writing to a String cannot fail.
    let _ = match (mark, backend) {
        (Some(mark), _) => write!(text, ", of the holder with mark {mark}"),
        (None, Some(backend)) => write!(text, ", backend {backend}, by {path}"),
        (None, None) => write!(text, ", its backend is gone"),
    };
    let _ = write!(text, ", idle {idle_seconds} s of {timeout_seconds} s");
    if known.is_expired() {
        text.push_str(": expired");
    }
    text
}

fn of_choice(choice: &Choice) -> String {
    let Choice { place, slot, backend, state, local, tuple_of, chosen } = choice;
    let backend = backend.map_or("nobody".to_owned(), |backend| backend.to_string());
    let where_to = if *local { "local" } else { "remote" };
    let taken = tuple_of.as_ref().map(|owner| format!(", tuple of {owner}")).unwrap_or_default();
    let chosen = if *chosen { " <- this packet" } else { "" };
    format!("{backend}, {state}, {where_to} (place {place}, slot {slot}){taken}{chosen}")
}
