//! The way back to a holder: replies of this node's pods to another node's forwards.
//!
//! ```text
//! 100:  from all fwmark 0x2a000000/0xff000000 iif weave lookup 25042 proto 213
//! 25042: default via 10.40.0.1 dev weave onlink proto 213
//! ```
//!
//! One rule and one table for each holder. `iif` is needed, and not only narrower: VXLAN looks up the way of its
//! outer packet with the mark of the inner one, so a rule on the mark alone would lead the tunnel into itself.
//! Packets that the node sends have no input interface, and forwards arrive on the overlay.
//!
//! Where pods have a device each, that would be a rule for each of them and each holder. There, packets that the node
//! sends are led past the rules, which are then on the mark alone:
//!
//! ```text
//! 100:  from all iif lo goto 102 proto 213
//! 101:  from all fwmark 0x2a000000/0xff000000 lookup 25042 proto 213
//! 102:  from all nop proto 213
//! 25042: default via 10.244.1.0 dev flannel.1 onlink proto 213
//! ```
//!
//! Seen on kernel 6.18, a pod behind a veth, VXLAN, and a chain that marks what comes from the veth: with the rule on the
//! mark alone the VXLAN device counts a collision (its outer packet was led into itself) for each answer, and none
//! arrives; behind the guard all arrive. Without rule 102, `goto` is `[unresolved]` and does nothing. Our egress program
//! clears the mark before the tunnel sees it; the guard is for the moment in which a tunnel is new and has none yet.

use futures::TryStreamExt as _;
use lb_common::mark;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{Handle, IpVersion};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::Ipv4Addr;

/// Flags of the command line that the messages of this module name.
pub const PRIORITY_FLAG: &str = "--rule-priority";
/// See [`PRIORITY_FLAG`].
pub const TABLE_FLAG: &str = "--table-base";
/// See [`PRIORITY_FLAG`].
pub const MARK_FLAG: &str = "--mark-shift";
/// See [`PRIORITY_FLAG`].
pub const PROTOCOL_FLAG: &str = "--route-protocol";

/// What tells our rules and routes from others'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Priority of the first of our rules; the next two numbers may be ours as well.
    pub priority: u32,
    /// The table for a holder's mark is this plus the mark.
    pub table_base: u32,
    /// Route protocol number (`rt_protos`) on our rules and routes. What carries it is ours to change and remove.
    pub protocol: u8,
    /// [`lb_common::config::Config::mark_shift`].
    pub mark_shift: u32,
}

impl Options {
    /// The defaults. 213 is in no `rt_protos` of iproute2, and not among the numbers that FRR (11, 186–197),
    /// BIRD (12), keepalived (18), babel (42), Calico (80) or openr (99) use. Tables 25,001–25,250 are above those of
    /// cloud agents (2–400), systemd (1,000s), Cilium (2,000s), and below wg-quick's (51,820).
    pub const DEFAULT: Self = Self { priority: 100, table_base: 25_000, protocol: 213, mark_shift: 24 };

    /// The priority of the rules that are behind the guard.
    const fn guarded(&self) -> u32 {
        self.priority.saturating_add(1)
    }

    /// The priority of the rule that the guard leads to.
    const fn end(&self) -> u32 {
        self.priority.saturating_add(2)
    }

    const fn mask(&self) -> u32 {
        0xff << self.mark_shift
    }

    fn is_ours(&self, protocol: RouteProtocol) -> bool {
        u8::from(protocol) == self.protocol
    }

    fn is_our_table(&self, table: u32) -> bool {
        table
            .checked_sub(self.table_base)
            .is_some_and(|mark| (1..=u32::from(mark::MAX_HOLDERS)).contains(&mark))
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A routing rule of ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    priority: u32,
    mark: u32,
    mask: u32,
    input: Option<String>,
    target: Target,
}

/// What a rule does with what it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    /// Looks for a route in this table.
    Table(u32),
    /// Goes on with the rule of this priority.
    Goto(u32),
    /// Goes on with the next rule; or something that we never ask for.
    Next,
}

/// The way to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Its overlay address.
    pub via: Ipv4Addr,
    /// Index of the device that it is a neighbour on.
    pub device: u32,
}

/// A route of ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    place: Place,
    via: Option<Ipv4Addr>,
    /// Index of the device.
    device: Option<u32>,
    onlink: bool,
}

/// Where a route stands: there is one of ours at most for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    table: u32,
    destination: Ipv4Addr,
    prefix: u8,
    metric: u32,
}

/// Rules and routes: those of ours that the kernel holds, or those that it should.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    rules: Vec<Rule>,
    routes: Vec<Route>,
}

impl State {
    /// What the node should hold: a way back to each holder, by its mark, for packets that come in on `input`, or on any
    /// device.
    ///
    /// # Errors
    /// A mark that does not name a holder.
    pub fn wanted(
        holders: &BTreeMap<u8, Way>,
        input: Option<&str>,
        options: &Options,
    ) -> Result<Self, Error> {
        let mut state = Self::default();
        let priority = if input.is_some() { options.priority } else { options.guarded() };
        if input.is_none() && !holders.is_empty() {
            state.guard(options);
        }
        for (&mark, &Way { via, device }) in holders {
            // Mark 0 would be a rule for every packet of every pod.
            if mark == 0 || mark > mark::MAX_HOLDERS {
                return Err(Error::Mark { mark });
            }
            let table = options.table_base.saturating_add(u32::from(mark));
            state.rules.push(Rule {
                priority,
                mark: u32::from(mark) << options.mark_shift,
                mask: options.mask(),
                input: input.map(str::to_owned),
                target: Target::Table(table),
            });
            let place = Place { table, destination: Ipv4Addr::UNSPECIFIED, prefix: 0, metric: 0 };
            state.routes.push(Route { place, via: Some(via), device: Some(device), onlink: true });
        }
        Ok(state)
    }

    /// Leads the node's own packets past the rules. In the order in which they are to be added.
    fn guard(&mut self, options: &Options) {
        let rule = |priority, input, target| Rule { priority, mark: 0, mask: 0, input, target };
        self.rules.push(rule(options.end(), None, Target::Next));
        self.rules.push(rule(options.priority, Some("lo".to_owned()), Target::Goto(options.end())));
    }

    /// Number of rules.
    pub fn rules(&self) -> usize {
        self.rules.len()
    }

    /// Number of routes.
    pub fn routes(&self) -> usize {
        self.routes.len()
    }
}

/// A change of one rule or route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Where there is none of ours.
    AddRoute(Route),
    /// In place of one of ours, without a moment between.
    ReplaceRoute(Route),
    /// A packet that it matches finds its route already there.
    AddRule(Rule),
    /// Before its route goes.
    DeleteRule(Rule),
    /// The last.
    DeleteRoute(Route),
}

/// Work on the return path failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a holder's mark.
    #[error("mark {mark} does not name a holder (1 to {})", mark::MAX_HOLDERS)]
    Mark {
        /// The number.
        mark: u8,
    },
    /// The kernel refused a dump.
    #[error("cannot read the node's {what}: {source}")]
    Read {
        /// Rules or routes.
        what: &'static str,
        /// The kernel's answer.
        source: rtnetlink::Error,
    },
    /// Some operations failed; the others were done.
    #[error("{} of the return path's changes failed; the first: {}", .0.len(), .0.first().map(ToString::to_string).unwrap_or_default())]
    Apply(Vec<Failure>),
}

/// An operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation}: {source}{}", advice(.operation, .source))]
pub struct Failure {
    /// What was tried.
    pub operation: Operation,
    /// The kernel's answer.
    pub source: io::Error,
}

fn advice(operation: &Operation, source: &io::Error) -> String {
    let exists = source.raw_os_error() == Some(libc::EEXIST);
    match operation {
        Operation::AddRoute(_) if exists => {
            format!(" (another program's route is in that table: choose other tables with {TABLE_FLAG})")
        }
        Operation::AddRule(_) if exists => {
            format!(" (another program has the same rule: choose another priority with {PRIORITY_FLAG})")
        }
        _ => String::new(),
    }
}

/// What leads from the observed state to the wanted one, in the order in which it is to be done.
pub fn plan(wanted: &State, observed: &State) -> Vec<Operation> {
    let mut operations = Vec::new();
    let observed_routes: BTreeMap<Place, &Route> = observed.routes.iter().map(|r| (r.place, r)).collect();
    for route in &wanted.routes {
        match observed_routes.get(&route.place) {
            Some(found) if *found == route => {}
            Some(_) => operations.push(Operation::ReplaceRoute(route.clone())),
            None => operations.push(Operation::AddRoute(route.clone())),
        }
    }
    let observed_rules: BTreeSet<&Rule> = observed.rules.iter().collect();
    let missing = wanted.rules.iter().filter(|rule| !observed_rules.contains(rule));
    operations.extend(missing.cloned().map(Operation::AddRule));

    let mut wanted_rules: BTreeSet<&Rule> = wanted.rules.iter().collect();
    // Taken out when met, so that a second copy of a rule goes.
    let mut surplus: Vec<&Rule> = observed.rules.iter().filter(|rule| !wanted_rules.remove(rule)).collect();
    // What guards the others goes last.
    surplus.sort_by_key(|rule| !matches!(rule.target, Target::Table(_)));
    operations.extend(surplus.into_iter().cloned().map(Operation::DeleteRule));

    let wanted_places: BTreeSet<Place> = wanted.routes.iter().map(|route| route.place).collect();
    let stale = observed.routes.iter().filter(|route| !wanted_places.contains(&route.place));
    operations.extend(stale.cloned().map(Operation::DeleteRoute));
    operations
}

/// Reads the rules and routes of ours that the kernel holds.
///
/// # Errors
/// The kernel refuses a dump.
pub async fn observe(handle: &Handle, options: &Options) -> Result<State, Error> {
    let rules = read_rules(handle).await?;
    let routes = read_routes(handle, RouteProtocol::from(options.protocol)).await?;
    Ok(State {
        rules: rules.iter().filter(|rule| options.is_ours(rule_protocol(rule))).map(Rule::from).collect(),
        routes: routes.iter().filter(|r| options.is_ours(r.header.protocol)).map(Route::from).collect(),
    })
}

/// Does the operations in their order. One that fails does not keep the others from being done, except that a
/// rule is not added where its route could not be: its packets would go somewhere else.
///
/// # Errors
/// Those that failed.
pub async fn apply(handle: &Handle, options: &Options, operations: &[Operation]) -> Result<(), Error> {
    let mut failures = Vec::new();
    let mut without_route = BTreeSet::new();
    for operation in operations {
        if matches!(operation, Operation::AddRule(rule) if rule.table().is_some_and(|t| without_route.contains(&t)))
        {
            continue;
        }
        if let Err(source) = do_one(handle, options, operation).await {
            if let Operation::AddRoute(route) | Operation::ReplaceRoute(route) = operation {
                without_route.insert(route.place.table);
            }
            failures.push(Failure { operation: operation.clone(), source });
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(Error::Apply(failures)) }
}

/// Brings rules and routes to what is wanted; says what was done.
///
/// # Errors
/// The kernel refuses a dump or some of the operations.
pub async fn ensure(handle: &Handle, options: &Options, wanted: &State) -> Result<Vec<Operation>, Error> {
    let operations = plan(wanted, &observe(handle, options).await?);
    apply(handle, options, &operations).await?;
    Ok(operations)
}

/// Removes every rule and route of ours; says what was done.
///
/// # Errors
/// The kernel refuses a dump or some of the operations.
pub async fn remove(handle: &Handle, options: &Options) -> Result<Vec<Operation>, Error> {
    ensure(handle, options, &State::default()).await
}

async fn do_one(handle: &Handle, options: &Options, operation: &Operation) -> io::Result<()> {
    let result = match operation {
        Operation::AddRoute(route) => handle.route().add(route.message(options)).execute().await,
        Operation::ReplaceRoute(route) => {
            handle.route().add(route.message(options)).replace().execute().await
        }
        Operation::AddRule(rule) => {
            let mut request = handle.rule().add();
            *request.message_mut() = rule.message(options);
            request.execute().await
        }
        Operation::DeleteRule(rule) => gone_is_done(handle.rule().del(rule.message(options)).execute().await),
        Operation::DeleteRoute(route) => {
            let mut message = route.message(options);
            // Whatever its type and scope: place and protocol name it.
            message.header.kind = RouteType::Unspec;
            message.header.scope = RouteScope::NoWhere;
            gone_is_done(handle.route().del(message).execute().await)
        }
    };
    result.map_err(into_io)
}

fn gone_is_done(result: Result<(), rtnetlink::Error>) -> Result<(), rtnetlink::Error> {
    match result {
        Err(rtnetlink::Error::NetlinkError(error))
            if matches!(error.to_io().raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) =>
        {
            Ok(())
        }
        other => other,
    }
}

fn into_io(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(error) => error.to_io(),
        other => io::Error::other(other),
    }
}

async fn read_rules(handle: &Handle) -> Result<Vec<RuleMessage>, Error> {
    let rules = handle.rule().get(IpVersion::V4).execute();
    rules.try_collect().await.map_err(|source| Error::Read { what: "routing rules", source })
}

/// The routes of every table with a protocol; `Unspec` stands for all.
async fn read_routes(handle: &Handle, protocol: RouteProtocol) -> Result<Vec<RouteMessage>, Error> {
    let mut filter = RouteMessage::default();
    filter.header.address_family = AddressFamily::Inet;
    // The socket checks strictly, so the kernel does the filtering: a node may have a full table of the internet.
    filter.header.protocol = protocol;
    let routes = handle.route().get(filter).execute();
    routes.try_collect().await.map_err(|source| Error::Read { what: "routes", source })
}

impl Rule {
    fn table(&self) -> Option<u32> {
        match self.target {
            Target::Table(table) => Some(table),
            Target::Goto(_) | Target::Next => None,
        }
    }

    fn message(&self, options: &Options) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = AddressFamily::Inet;
        message.attributes = vec![
            RuleAttribute::Priority(self.priority),
            RuleAttribute::Protocol(RouteProtocol::from(options.protocol)),
        ];
        message.header.action = match self.target {
            Target::Table(table) => {
                message.attributes.push(RuleAttribute::Table(table));
                RuleAction::ToTable
            }
            Target::Goto(priority) => {
                message.attributes.push(RuleAttribute::Goto(priority));
                RuleAction::Goto
            }
            Target::Next => RuleAction::Nop,
        };
        if self.mask != 0 {
            message.attributes.push(RuleAttribute::FwMark(self.mark));
            message.attributes.push(RuleAttribute::FwMask(self.mask));
        }
        message.attributes.extend(self.input.clone().map(RuleAttribute::Iifname));
        message
    }
}

impl From<&RuleMessage> for Rule {
    fn from(message: &RuleMessage) -> Self {
        let target = match message.header.action {
            RuleAction::ToTable => Target::Table(u32::from(message.header.table)),
            _ => Target::Next,
        };
        let mut rule = Self { priority: 0, mark: 0, mask: 0, input: None, target };
        for attribute in &message.attributes {
            match attribute {
                RuleAttribute::Priority(priority) => rule.priority = *priority,
                RuleAttribute::FwMark(mark) => rule.mark = *mark,
                RuleAttribute::FwMask(mask) => rule.mask = *mask,
                RuleAttribute::Iifname(name) => rule.input = Some(name.clone()),
                // The header's field is too small for ours. On rules of another kind it is there too, and says nothing.
                RuleAttribute::Table(table) if matches!(target, Target::Table(_)) => {
                    rule.target = Target::Table(*table);
                }
                RuleAttribute::Goto(priority) => rule.target = Target::Goto(*priority),
                _ => {}
            }
        }
        rule
    }
}

fn rule_protocol(message: &RuleMessage) -> RouteProtocol {
    let protocol = message.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Protocol(protocol) => Some(*protocol),
        _ => None,
    });
    protocol.unwrap_or_default()
}

impl Route {
    fn message(&self, options: &Options) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.protocol = RouteProtocol::from(options.protocol);
        message.header.kind = RouteType::Unicast;
        message.header.destination_prefix_length = self.place.prefix;
        if self.onlink {
            // The kernel need not find the holder's address on a network of the device.
            message.header.flags = RouteFlags::Onlink;
        }
        message.attributes.push(RouteAttribute::Table(self.place.table));
        if self.place.prefix != 0 {
            message.attributes.push(RouteAttribute::Destination(RouteAddress::Inet(self.place.destination)));
        }
        if self.place.metric != 0 {
            message.attributes.push(RouteAttribute::Priority(self.place.metric));
        }
        message.attributes.extend(self.via.map(|via| RouteAttribute::Gateway(RouteAddress::Inet(via))));
        message.attributes.extend(self.device.map(RouteAttribute::Oif));
        message
    }
}

impl From<&RouteMessage> for Route {
    fn from(message: &RouteMessage) -> Self {
        let mut place = Place {
            table: u32::from(message.header.table),
            destination: Ipv4Addr::UNSPECIFIED,
            prefix: message.header.destination_prefix_length,
            metric: 0,
        };
        let (mut via, mut device) = (None, None);
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Table(table) => place.table = *table,
                RouteAttribute::Destination(RouteAddress::Inet(address)) => place.destination = *address,
                RouteAttribute::Priority(metric) => place.metric = *metric,
                RouteAttribute::Gateway(RouteAddress::Inet(address)) => via = Some(*address),
                RouteAttribute::Oif(index) => device = Some(*index),
                _ => {}
            }
        }
        Self { place, via, device, onlink: message.header.flags.contains(RouteFlags::Onlink) }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddRoute(route) => write!(f, "add {route}"),
            Self::ReplaceRoute(route) => write!(f, "replace {route}"),
            Self::AddRule(rule) => write!(f, "add {rule}"),
            Self::DeleteRule(rule) => write!(f, "delete {rule}"),
            Self::DeleteRoute(route) => write!(f, "delete {route}"),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { priority, mark, mask, input, target } = self;
        write!(f, "rule {priority}:")?;
        if *mask != 0 {
            write!(f, " fwmark {mark:#x}/{mask:#x}")?;
        }
        if let Some(input) = input {
            write!(f, " iif {input}")?;
        }
        match target {
            Target::Table(table) => write!(f, " lookup {table}"),
            Target::Goto(priority) => write!(f, " goto {priority}"),
            Target::Next => write!(f, " nop"),
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { table, destination, prefix, .. } = self.place;
        write!(f, "route {destination}/{prefix} in table {table}")?;
        if let Some(via) = self.via {
            write!(f, " via {via}")?;
        }
        Ok(())
    }
}

/// Something of another program that meets what is ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Whether we cannot work beside it; otherwise it may be harmless.
    pub fatal: bool,
    /// What was found.
    pub found: String,
    /// What to do.
    pub advice: String,
}

/// Looks for other programs' rules on our mark or at our priority, and for their routes in our tables.
///
/// # Errors
/// The kernel refuses a dump.
pub async fn check_overlap(handle: &Handle, options: &Options) -> Result<Vec<Overlap>, Error> {
    let rules = read_rules(handle).await?;
    let routes = read_routes(handle, RouteProtocol::Unspec).await?;
    Ok(overlaps(&rules, &routes, options))
}

fn overlaps(rules: &[RuleMessage], routes: &[RouteMessage], options: &Options) -> Vec<Overlap> {
    let mut overlaps = Vec::new();
    for rule in rules.iter().filter(|rule| !options.is_ours(rule_protocol(rule))).map(Rule::from) {
        if rule.mask & options.mask() != 0 {
            overlaps.push(Overlap {
                fatal: false,
                found: format!(
                    "another program's {rule} looks at our byte of the mark ({:#x})",
                    options.mask()
                ),
                advice: format!("choose another byte with {MARK_FLAG} (0, 8, 16 or 24)"),
            });
        }
        if rule.table().is_some_and(|table| options.is_our_table(table)) {
            overlaps.push(Overlap {
                fatal: true,
                found: format!("another program's {rule} uses one of our tables"),
                advice: format!("choose other tables with {TABLE_FLAG}"),
            });
        }
        if (options.priority..=options.end()).contains(&rule.priority) {
            overlaps.push(Overlap {
                fatal: false,
                found: format!(
                    "another program's {rule} has one of our priorities, so which comes first is left to chance"
                ),
                advice: format!("choose a free priority with {PRIORITY_FLAG}"),
            });
        }
    }
    let foreign = routes.iter().filter(|route| !options.is_ours(route.header.protocol)).map(Route::from);
    for route in foreign.filter(|route| options.is_our_table(route.place.table)) {
        overlaps.push(Overlap {
            fatal: true,
            found: format!("another program's {route} is in one of our tables"),
            advice: format!("choose other tables with {TABLE_FLAG}, or another number with {PROTOCOL_FLAG} if it is an old one of ours"),
        });
    }
    overlaps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ways(holders: &[(u8, [u8; 4])], device: u32) -> BTreeMap<u8, Way> {
        holders.iter().map(|(mark, via)| (*mark, Way { via: Ipv4Addr::from(*via), device })).collect()
    }

    fn wanted(holders: &[(u8, [u8; 4])]) -> State {
        State::wanted(&ways(holders, 7), Some("weave"), &Options::DEFAULT).unwrap()
    }

    /// From any device.
    fn guarded(holders: &[(u8, [u8; 4])]) -> State {
        State::wanted(&ways(holders, 7), None, &Options::DEFAULT).unwrap()
    }

    fn say(operations: &[Operation]) -> Vec<String> {
        operations.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_new_holder_gets_its_route_before_its_rule() {
        assert_eq!(
            say(&plan(&wanted(&[(42, [10, 40, 0, 1])]), &State::default())),
            [
                "add route 0.0.0.0/0 in table 25042 via 10.40.0.1",
                "add rule 100: fwmark 0x2a000000/0xff000000 iif weave lookup 25042",
            ]
        );
    }

    #[test]
    fn a_holder_that_leaves_loses_its_rule_before_its_route() {
        let (both, one) = (wanted(&[(1, [10, 0, 0, 1]), (2, [10, 0, 0, 2])]), wanted(&[(2, [10, 0, 0, 2])]));
        assert_eq!(
            say(&plan(&one, &both)),
            [
                "delete rule 100: fwmark 0x1000000/0xff000000 iif weave lookup 25001",
                "delete route 0.0.0.0/0 in table 25001 via 10.0.0.1",
            ]
        );
        assert!(plan(&one, &one).is_empty());
    }

    #[test]
    fn a_holder_with_a_new_address_or_a_bridge_made_anew_has_its_route_replaced() {
        let (old, new) = (wanted(&[(1, [10, 0, 0, 1])]), wanted(&[(1, [10, 0, 0, 9])]));
        assert_eq!(say(&plan(&new, &old)), ["replace route 0.0.0.0/0 in table 25001 via 10.0.0.9"]);
        let other_index =
            State::wanted(&ways(&[(1, [10, 0, 0, 1])], 8), Some("weave"), &Options::DEFAULT).unwrap();
        assert_eq!(say(&plan(&other_index, &old)), ["replace route 0.0.0.0/0 in table 25001 via 10.0.0.1"]);
    }

    #[test]
    fn a_second_copy_of_a_rule_goes() {
        let one = wanted(&[(1, [10, 0, 0, 1])]);
        let mut twice = one.clone();
        twice.rules.extend(one.rules.clone());
        assert!(matches!(plan(&one, &twice).as_slice(), [Operation::DeleteRule(_)]));
    }

    #[test]
    fn a_mark_that_names_no_holder_is_refused() {
        for mark in [0, 251, 255] {
            let holders = ways(&[(mark, [127, 0, 0, 1])], 1);
            assert!(
                matches!(State::wanted(&holders, Some("weave"), &Options::DEFAULT), Err(Error::Mark { .. })),
                "{mark}"
            );
        }
    }

    #[test]
    fn the_nodes_own_packets_are_led_past_rules_for_every_device() {
        let (one, none) = (guarded(&[(42, [10, 244, 1, 0])]), guarded(&[]));
        assert_eq!(
            say(&plan(&one, &none)),
            [
                "add route 0.0.0.0/0 in table 25042 via 10.244.1.0",
                "add rule 102: nop",
                "add rule 100: iif lo goto 102",
                "add rule 101: fwmark 0x2a000000/0xff000000 lookup 25042",
            ]
        );
        let mut as_the_kernel_lists_them = one.clone();
        as_the_kernel_lists_them.rules.sort();
        assert_eq!(
            say(&plan(&none, &as_the_kernel_lists_them)),
            [
                "delete rule 101: fwmark 0x2a000000/0xff000000 lookup 25042",
                "delete rule 100: iif lo goto 102",
                "delete rule 102: nop",
                "delete route 0.0.0.0/0 in table 25042 via 10.244.1.0",
            ]
        );
        assert_eq!(none, State::default(), "nothing without holders");
    }

    #[test]
    fn messages_are_read_back_as_they_were_written() {
        let mut state = wanted(&[(250, [10, 40, 0, 1])]);
        state.rules.extend(guarded(&[(250, [10, 40, 0, 1])]).rules);
        let options = Options::DEFAULT;
        assert_eq!(
            state.rules,
            state.rules.iter().map(|r| Rule::from(&r.message(&options))).collect::<Vec<_>>()
        );
        assert_eq!(
            state.routes,
            state.routes.iter().map(|r| Route::from(&r.message(&options))).collect::<Vec<_>>()
        );
    }

    #[test]
    fn others_rules_and_routes_are_reported_and_ours_are_not() {
        let options = Options::DEFAULT;
        let theirs = Options { protocol: 4, ..options };
        let rule = |priority, mask, table| {
            let target = Target::Table(table);
            Rule { priority, mark: mask, mask, input: None, target }
        };
        let state = wanted(&[(1, [10, 0, 0, 1])]);
        let own = (state.rules[0].message(&options), state.routes[0].message(&options));
        assert_eq!(overlaps(&[own.0], &[own.1], &options), []);
        let harmless = rule(5, 0x00ff_ffff, 25_251).message(&theirs);
        assert_eq!(overlaps(&[harmless], &[], &options), []);

        let fatal = |rules: &[Rule], routes: &[Route]| {
            let rules: Vec<_> = rules.iter().map(|r| r.message(&theirs)).collect();
            let routes: Vec<_> = routes.iter().map(|r| r.message(&theirs)).collect();
            overlaps(&rules, &routes, &options).iter().map(|o| o.fatal).collect::<Vec<_>>()
        };
        assert_eq!(fatal(&[rule(5, 0xffff_ffff, 7)], &[]), [false], "the mark");
        assert_eq!(fatal(&[rule(100, 0, 7)], &[]), [false], "the priority");
        assert_eq!(fatal(&[rule(5, 0, 25_001)], &[]), [true], "the table");
        assert_eq!(fatal(&[], &state.routes), [true], "a route");
    }
}
