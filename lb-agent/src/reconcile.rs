//! Makes the node as it is wanted: what the kernel holds is read, compared and brought up to date, in an order in which
//! an address is served only once everything it needs is in place.

use crate::datapath::attach::{AttachError, Hooks, InFront};
use crate::datapath::maps::{Maps, MapsError};
use crate::datapath::plan::{self, Comparison, Observed, Operation, Rest};
use crate::node::interfaces::Kind;
use crate::node::return_path::Way;
use crate::node::roles::{LOOPBACK, Network, Roles};
use crate::node::{nft, return_path, sysctl};
use crate::policy::extend::HolderWanted;
use crate::policy::marks;
use crate::policy::state::{Delta, Expected, State};
use aya::Ebpf;
use lb_common::addr::Mac;
use lb_common::backend::BackendState;
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::interface::Interface;
use lb_common::mark::MAX_HOLDERS;
use lb_common::masquerade::{self, Own};
use lb_common::service::ServiceKey;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use tracing::{debug, info, warn};

/// Why the node is not as wanted.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// A map.
    #[error(transparent)]
    Maps(#[from] MapsError),
    /// A hook.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Rules and routes.
    #[error(transparent)]
    ReturnPath(#[from] return_path::Error),
    /// nftables.
    #[error(transparent)]
    Nft(#[from] nft::Error),
    /// sysctls.
    #[error(transparent)]
    Sysctl(#[from] sysctl::Error),
}

/// The marks that connections carry.
#[derive(Debug, Default)]
pub struct Busy {
    /// As the last sweep found them.
    pub marks: BTreeSet<u8>,
    /// How many sweeps there were.
    pub sweeps: u64,
}

/// A holder that leaves stays known for so many sweeps at least: the next one to end may have begun before its last
/// connection did.
const SWEEPS: u64 = 2;

/// What is to be compared with what is wanted.
#[derive(Debug, Default)]
struct Due {
    services: BTreeSet<ServiceKey>,
    endpoints: BTreeSet<EndpointKey>,
}

/// The parts of the node that are looked after.
pub struct Reconciler {
    /// The loaded programs.
    pub ebpf: Ebpf,
    /// Their maps.
    pub maps: Maps,
    /// Where they are attached.
    pub hooks: Hooks,
    /// Routing rules and routes.
    pub netlink: rtnetlink::Handle,
    /// What tells ours from others'.
    pub return_path: return_path::Options,
    /// What sysctls were before us.
    pub sysctls: sysctl::Record,
    /// What the maps hold; `None` until they are read, and again after an error.
    observed: Option<Observed>,
    /// What may not be as wanted, so that a change costs work for itself alone. `None` is everything: the maps' content
    /// is not known, or was not a moment ago.
    due: Option<Due>,
    /// What is left out of served ports, for people.
    left_out: BTreeMap<ServiceKey, Vec<String>>,
    /// The holders, as their endpoints were last recognised.
    marked: BTreeMap<String, (Mac, Holder)>,
    /// The holders to which the way back is in place; `None` until it is, and again when something on the node changed.
    way_back: Option<BTreeMap<Mac, Holder>>,
    /// Who is inside the cluster, as the maps have it; `None` until it is looked at, and again when something on the node
    /// changed.
    inside: Option<BTreeSet<masquerade::Network>>,
    /// Of what is noted with what the maps hold.
    comparison: Comparison,
    /// The marks of holders that left, and the number of sweeps when that was noticed.
    leaving: BTreeMap<u8, u64>,
    /// Whether slots that nothing names were looked for since the maps were read.
    is_tidy: bool,
    /// Programs of others before ours, which people have been told of.
    in_front: BTreeSet<InFront>,
}

impl Reconciler {
    /// Looks after these parts from now on.
    pub fn new(
        ebpf: Ebpf,
        maps: Maps,
        hooks: Hooks,
        netlink: rtnetlink::Handle,
        return_path: return_path::Options,
        sysctls: sysctl::Record,
    ) -> Self {
        Self {
            ebpf,
            maps,
            hooks,
            netlink,
            return_path,
            sysctls,
            observed: None,
            due: None,
            left_out: BTreeMap::new(),
            marked: BTreeMap::new(),
            way_back: None,
            inside: None,
            comparison: Comparison::default(),
            leaving: BTreeMap::new(),
            is_tidy: false,
            in_front: BTreeSet::new(),
        }
    }

    /// Begins to compare what the maps hold with what is noted of them, for [`Reconciler::compare`] to go on with. One
    /// that is under way goes on as it is.
    pub fn look_again(&mut self) {
        self.comparison.begin();
    }

    /// Whether there is something to compare.
    pub fn is_comparing(&self) -> bool {
        self.comparison.is_under_way()
    }

    /// Compares a part, in some milliseconds. False if the maps were changed by others: the next pass reads all of them
    /// and puts everything right.
    ///
    /// # Errors
    /// A map that cannot be read. The next pass reads all of them.
    pub fn compare(&mut self) -> Result<bool, ReconcileError> {
        let Some(observed) = &self.observed else {
            // They are about to be read.
            self.comparison = Comparison::default();
            return Ok(true);
        };
        let compared = self.comparison.go_on(observed, &self.maps);
        if matches!(compared, Ok(false)) {
            info!("the maps do not hold what was written; reading all of them");
        }
        if !matches!(compared, Ok(true)) {
            self.forget();
        }
        Ok(compared?)
    }

    /// Nobody knows what the maps hold: the next pass reads and compares them in full.
    fn forget(&mut self) {
        self.observed = None;
        self.comparison = Comparison::default();
        self.due = None;
        self.is_tidy = false;
    }

    /// Whether the end of a sweep matters, although it found no other marks than the one before.
    pub fn awaits_sweep(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Devices, programs, sysctls and nftables: what does not depend on any Service.
    ///
    /// # Errors
    /// The first part that could not be brought up to date.
    pub async fn node(&mut self, roles: &Roles) -> Result<(), ReconcileError> {
        self.way_back = None;
        for change in self.sysctls.loosen(&roles.with_foreign_sources())? {
            info!(%change, "changed a sysctl, since forwards and replies must pass; cleanup restores it");
        }
        // Where forwards are routed, connection tracking sees them.
        let untracked = match roles.bridge() {
            Some(bridge) if !sysctl::bridges_call_iptables(bridge)? => Some(bridge.name.as_str()),
            _ => None,
        };
        if nft::ensure(&nft::Table::wanted(self.return_path.mark_shift, untracked)?).await?.is_some() {
            info!("wrote the nftables table {}", nft::TABLE.to_string_lossy());
        }
        for change in self.sysctls.open_loopback()? {
            info!(%change, "changed a sysctl, since answers to the node's own processes must pass; cleanup restores it");
        }
        let own = Own {
            overlay: roles.overlay_address.into(),
            is_outside: (roles.network == Network::Routed).into(),
        };
        if self.maps.inside.own()? != own {
            self.maps.inside.set_own(own)?;
        }
        self.inside = None;
        // Roles before programs: a packet on an interface without a role is nobody's.
        let operations = plan::interfaces(&wanted_interfaces(roles), self.observed()?);
        self.apply(&operations)?;
        for (device, direction) in self.hooks.ensure(&mut self.ebpf, &roles.devices()).await? {
            info!(device, %direction, hook = %self.hooks.hook(), "attached the packet program");
        }
        self.look_in_front(roles);
        Ok(())
    }

    /// Says which programs of others run before ours: once for each.
    fn look_in_front(&mut self, roles: &Roles) {
        let found = self.hooks.in_front(&roles.devices());
        for InFront { device, direction, program } in found.difference(&self.in_front) {
            warn!(
                device,
                %direction,
                program,
                "another program runs before ours: what it accepts, drops or redirects is not load balanced. Attach it \
                 after ours, or have it end with TCX_NEXT"
            );
        }
        self.in_front = found;
    }

    /// Services, endpoints and holders, where they may differ: by `delta`, or because something was not reached before.
    /// `busy` are the marks that connections still carry. Whether [`Reconciler::problems`] changed.
    ///
    /// # Errors
    /// The first part that could not be brought up to date. What was not reached stays due.
    pub async fn services(
        &mut self,
        policy: &State,
        delta: Delta,
        roles: &Roles,
        busy: &Busy,
    ) -> Result<bool, ReconcileError> {
        self.note_inside(policy.inside())?;
        self.take_up(policy, delta)?;
        let holders = self.mark(policy.holders(), busy)?;
        let known = self.known(&holders, busy)?;
        // A holder's way back comes before its forwards are recognised. That of one that goes may go a moment before,
        // since no connection carries its mark.
        if self.way_back.as_ref() != Some(&known) {
            self.ensure_way_back(&known, roles).await?;
        }
        self.recognise(policy, holders, &known)?;
        self.way_back = Some(known);
        self.serve(policy)
    }

    /// What is left out of what is wanted, for people.
    pub fn problems(&self) -> impl Iterator<Item = &str> {
        self.left_out.values().flatten().map(String::as_str)
    }

    /// Who is inside the cluster, before a port is served to them.
    fn note_inside(&mut self, wanted: &BTreeSet<masquerade::Network>) -> Result<(), MapsError> {
        if self.inside.as_ref() == Some(wanted) {
            return Ok(());
        }
        let known = self.maps.inside.networks()?;
        for network in wanted.difference(&known) {
            self.maps.inside.insert(*network)?;
        }
        for network in known.difference(wanted) {
            self.maps.inside.remove(*network)?;
        }
        self.inside = Some(wanted.clone());
        Ok(())
    }

    /// Adds to what is due.
    fn take_up(&mut self, policy: &State, delta: Delta) -> Result<(), MapsError> {
        if let Some(due) = &mut self.due {
            due.services.extend(delta.services);
            due.endpoints.extend(delta.endpoints);
            return Ok(());
        }
        let observed = self.observed()?;
        self.due = Some(Due {
            services: observed.served().chain(policy.served().keys()).copied().collect(),
            endpoints: observed.endpoints().keys().chain(policy.endpoints().keys()).copied().collect(),
        });
        Ok(())
    }

    /// The mark of each holder: the one it has in the maps, or a new one.
    fn mark(
        &mut self,
        wanted: &[HolderWanted],
        busy: &Busy,
    ) -> Result<BTreeMap<String, (Mac, Holder)>, ReconcileError> {
        let observed = self.observed()?;
        let already: BTreeMap<String, u8> = wanted
            .iter()
            .filter_map(|holder| {
                let by_mac = observed.holders().get(&Mac::new(holder.mac));
                // An overlay device that was made anew has another link-layer address, but is the same holder.
                let by_address = || observed.holders().values().find(|h| h.address == holder.address.into());
                Some((holder.name.clone(), by_mac.or_else(by_address)?.mark))
            })
            .collect();
        let names: Vec<&str> = wanted.iter().map(|holder| holder.name.as_str()).collect();
        let taken = observed.holders().values().map(|holder| holder.mark).chain(busy.marks.iter().copied());
        let taken: BTreeSet<u8> = taken.collect();
        let marks: BTreeMap<&str, u8> = marks::assign_keeping(&names, &already, &taken).into_iter().collect();
        Ok(wanted
            .iter()
            .filter_map(|holder| {
                let mark = *marks.get(holder.name.as_str())?;
                let value = Holder::new(holder.address.into(), mark);
                Some((holder.name.clone(), (Mac::new(holder.mac), value)))
            })
            .collect())
    }

    /// The holders, and those that left while connections carry their marks. These have no endpoint any more, so nothing
    /// new of theirs is recognised; but their way back stays, and their mark is known, also to the next agent.
    fn known(
        &mut self,
        holders: &BTreeMap<String, (Mac, Holder)>,
        busy: &Busy,
    ) -> Result<BTreeMap<Mac, Holder>, ReconcileError> {
        let mut known: BTreeMap<Mac, Holder> = holders.values().copied().collect();
        let marks: BTreeSet<u8> = known.values().map(|holder| holder.mark).collect();
        let mut leaving = BTreeMap::new();
        let before: Vec<(Mac, Holder)> = self.observed()?.holders().iter().map(|(m, h)| (*m, *h)).collect();
        for (mac, holder) in before {
            // What is read back from a map may be anything.
            if marks.contains(&holder.mark) || !(1..=MAX_HOLDERS).contains(&holder.mark) {
                continue;
            }
            let since = self.leaving.get(&holder.mark).copied().unwrap_or(busy.sweeps);
            if busy.marks.contains(&holder.mark) || busy.sweeps < since + SWEEPS {
                known.entry(mac).or_insert(holder);
                leaving.insert(holder.mark, since);
            }
        }
        self.leaving = leaving;
        Ok(known)
    }

    /// Rules and routes.
    async fn ensure_way_back(
        &mut self,
        holders: &BTreeMap<Mac, Holder>,
        roles: &Roles,
    ) -> Result<(), ReconcileError> {
        let way = |holder: &Holder| {
            let via = Ipv4Addr::from(holder.address);
            Some(Way { via, device: roles.way_back(via)?.index })
        };
        let by_mark: BTreeMap<u8, Way> =
            holders.values().filter_map(|holder| Some((holder.mark, way(holder)?))).collect();
        let input = roles.bridge().map(|bridge| bridge.name.as_str());
        let wanted = return_path::State::wanted(&by_mark, input, &self.return_path)?;
        for operation in return_path::ensure(&self.netlink, &self.return_path, &wanted).await? {
            info!(?operation, "changed the way back to a holder");
        }
        Ok(())
    }

    /// Holders, and the endpoints that are due.
    fn recognise(
        &mut self,
        policy: &State,
        holders: BTreeMap<String, (Mac, Holder)>,
        known: &BTreeMap<Mac, Holder>,
    ) -> Result<(), ReconcileError> {
        let mut due = self.due.as_mut().map(|due| std::mem::take(&mut due.endpoints)).unwrap_or_default();
        let is_marked_anew = self.marked != holders;
        let observed = self.observed()?;
        // Another holder with this mark, or another mark for this holder.
        if is_marked_anew {
            due.extend(observed.endpoints().keys().chain(policy.endpoints().keys()));
        }
        let wanted = due.into_iter().map(|key| {
            let expected = policy.endpoints().get(&key);
            (key, expected.and_then(|expected| wanted_endpoint(expected, &holders)))
        });
        let operations = plan::recognition(known, &wanted.collect(), observed);
        self.apply(&operations)?;
        self.marked = holders;
        Ok(())
    }

    /// The ports that this node serves, and no longer serves, as far as they are due. Whether what is left out changed.
    fn serve(&mut self, policy: &State) -> Result<bool, ReconcileError> {
        let due = self.due.as_mut().map(|due| std::mem::take(&mut due.services)).unwrap_or_default();
        // Gone ones first: they make room.
        let (wanted, gone): (Vec<_>, Vec<_>) =
            due.into_iter().partition(|key| policy.served().contains_key(key));
        let mut done = Done::default();
        for keys in [gone, wanted] {
            done.add(self.bring_up_to_date(&keys, policy)?);
        }
        if done.made_room {
            let keys: Vec<ServiceKey> = self.left_out.keys().copied().collect();
            done.add(self.bring_up_to_date(&keys, policy)?);
        }
        if !self.is_tidy {
            let orphans = plan::orphans(self.observed()?);
            self.apply(&orphans)?;
            done.operations += orphans.len();
            self.is_tidy = true;
        }
        if done.operations > 0 {
            info!(
                changes = done.operations,
                ports = policy.served().len(),
                "brought the served ports up to date"
            );
        }
        Ok(done.left_out_changed)
    }

    fn bring_up_to_date(&mut self, keys: &[ServiceKey], policy: &State) -> Result<Done, ReconcileError> {
        let mut done = Done::default();
        let mut rest = Rest::default();
        for key in keys {
            let plan =
                plan::service(key, policy.served().get(key).map(|service| &**service), self.observed()?);
            done.add(Done::of(&plan.operations));
            // An error on the way makes all of it due again.
            self.begin(plan.operations, &mut rest)?;
            if rest.is_full() {
                self.finish(std::mem::take(&mut rest))?;
            }
            let before = self.left_out.remove(key).unwrap_or_default();
            done.left_out_changed |= before != plan.problems;
            if !plan.problems.is_empty() {
                self.left_out.insert(*key, plan.problems);
            }
        }
        self.finish(rest)?;
        Ok(done)
    }

    fn observed(&mut self) -> Result<&Observed, MapsError> {
        if self.observed.is_none() {
            self.observed = Some(Observed::read(&self.maps)?);
        }
        self.observed.as_ref().ok_or(MapsError::Missing { name: "services" })
    }

    fn apply(&mut self, operations: &[Operation]) -> Result<(), ReconcileError> {
        say(operations);
        self.change(|observed, maps| observed.apply(maps, operations))
    }

    fn begin(&mut self, operations: Vec<Operation>, rest: &mut Rest) -> Result<(), ReconcileError> {
        say(&operations);
        self.change(|observed, maps| observed.begin(maps, operations, rest))
    }

    fn finish(&mut self, rest: Rest) -> Result<(), ReconcileError> {
        self.change(|observed, maps| observed.finish(maps, rest))
    }

    /// After an error nobody knows what the maps hold.
    fn change(
        &mut self,
        change: impl FnOnce(&mut Observed, &mut Maps) -> Result<(), MapsError>,
    ) -> Result<(), ReconcileError> {
        let Some(observed) = self.observed.as_mut() else { return Ok(()) };
        let result = change(observed, &mut self.maps);
        if result.is_err() {
            self.forget();
        }
        Ok(result?)
    }
}

fn say(operations: &[Operation]) {
    for operation in operations {
        debug!(?operation, "map");
    }
}

fn wanted_interfaces(roles: &Roles) -> BTreeMap<u32, Interface> {
    let mut interfaces: BTreeMap<u32, Interface> = BTreeMap::new();
    let roles_of = [
        (roles.uplink.as_slice(), Interface::UPLINK),
        (roles.pods.as_slice(), Interface::PODS),
        (roles.overlay.as_slice(), Interface::OVERLAY),
    ];
    for (devices, role) in roles_of {
        for device in devices {
            let entry = interfaces.entry(device.index).or_default();
            *entry = entry.and(role);
            if role == Interface::UPLINK && device.kind == Kind::Bridge {
                *entry = entry.and(Interface::BRIDGE);
            }
        }
    }
    interfaces.insert(LOOPBACK, Interface::NODE);
    interfaces
}

/// The marks of those who forward to an endpoint. None where no holder has one.
fn wanted_endpoint(
    expected: &Expected,
    holders: &BTreeMap<String, (Mac, Holder)>,
) -> Option<EndpointHolders> {
    let own = expected.is_own().then_some(EndpointHolders::SELF);
    let others = expected.of_others().filter_map(|name| Some(holders.get(name)?.1.mark));
    let mut marks: Option<EndpointHolders> = None;
    for mark in own.into_iter().chain(others) {
        marks.get_or_insert_default().insert(mark);
    }
    marks
}

/// What plans came to.
#[derive(Clone, Copy, Default)]
struct Done {
    operations: usize,
    /// Whether something that is scarce came free.
    made_room: bool,
    left_out_changed: bool,
}

impl Done {
    fn of(operations: &[Operation]) -> Self {
        let makes_room = |operation: &Operation| match operation {
            Operation::RemoveService(_) => true,
            Operation::SetBackend(_, backend) => backend.state() == BackendState::Absent,
            _ => false,
        };
        let made_room = operations.iter().any(makes_room);
        Self { operations: operations.len(), made_room, left_out_changed: false }
    }

    fn add(&mut self, other: Self) {
        self.operations += other.operations;
        self.made_room |= other.made_room;
        self.left_out_changed |= other.left_out_changed;
    }
}
