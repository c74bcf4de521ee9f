//! Makes the node as it is wanted: what the kernel holds is read, compared and brought up to date, in an order in which
//! an address is served only once everything it needs is in place.

use crate::datapath::attach::{AttachError, Hooks};
use crate::datapath::maps::{Maps, MapsError};
use crate::datapath::plan::{self, Observed, Operation, Rest};
use crate::node::interfaces::Roles;
use crate::node::{nft, return_path, sysctl};
use crate::policy::extend::{HolderWanted, Wanted, WantedService};
use crate::policy::marks;
use aya::Ebpf;
use lb_common::addr::{Mac, Port};
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::interface::Interface;
use lb_common::mark::MAX_HOLDERS;
use lb_common::service::ServiceKey;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use tracing::{debug, info};

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
    /// What was last reached, so that a change costs work for itself alone.
    reached: BTreeMap<ServiceKey, WantedService>,
    /// The marks of holders that left, and the number of sweeps when that was noticed.
    leaving: BTreeMap<u8, u64>,
    /// Whether slots that nothing names were looked for since the maps were read.
    is_tidy: bool,
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
            reached: BTreeMap::new(),
            leaving: BTreeMap::new(),
            is_tidy: false,
        }
    }

    /// Forgets what the maps held, so that the next pass reads and compares them in full.
    pub fn look_again(&mut self) {
        self.observed = None;
        self.reached.clear();
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
        for change in self.sysctls.loosen(&[roles.pods.name.as_str()])? {
            info!(%change, "changed a sysctl, since replies must pass; cleanup restores it");
        }
        let untracked = (!sysctl::bridges_call_iptables(&roles.pods)?).then_some(roles.pods.name.as_str());
        if nft::ensure(&nft::Table::wanted(self.return_path.mark_shift, untracked)?).await?.is_some() {
            info!("wrote the nftables table {}", nft::TABLE.to_string_lossy());
        }
        // Roles before programs: a packet on an interface without a role is nobody's.
        let operations = plan::interfaces(&wanted_interfaces(roles), self.observed()?);
        self.apply(&operations)?;
        for (device, direction) in self.hooks.ensure(&mut self.ebpf, &roles.devices()).await? {
            info!(device, %direction, hook = %self.hooks.hook(), "attached the packet program");
        }
        Ok(())
    }

    /// Services, endpoints and holders. `busy` are the marks that connections still carry. Answers what could not be
    /// done, for people.
    ///
    /// # Errors
    /// The first part that could not be brought up to date.
    pub async fn services(
        &mut self,
        wanted: &Wanted,
        roles: &Roles,
        busy: &Busy,
    ) -> Result<Vec<String>, ReconcileError> {
        let holders = self.mark(&wanted.holders, busy)?;
        let known = self.known(&holders, busy)?;
        // A holder's way back comes before its forwards are recognised. That of one that goes may go a moment before,
        // since no connection carries its mark.
        self.ensure_way_back(&known, roles).await?;
        let operations = plan::recognition(&known, &wanted_endpoints(wanted, &holders), self.observed()?);
        self.apply(&operations)?;
        self.serve(&wanted.services)
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
        let by_mark: BTreeMap<u8, Ipv4Addr> =
            holders.values().map(|holder| (holder.mark, holder.address.into())).collect();
        let wanted = return_path::State::wanted(&by_mark, &roles.pods, &self.return_path)?;
        for operation in return_path::ensure(&self.netlink, &self.return_path, &wanted).await? {
            info!(?operation, "changed the way back to a holder");
        }
        Ok(())
    }

    /// The ports that this node serves.
    fn serve(&mut self, wanted: &BTreeMap<ServiceKey, WantedService>) -> Result<Vec<String>, ReconcileError> {
        let mut problems = Vec::new();
        let mut done = 0;
        let mut rest = Rest::default();
        for key in self.changed(wanted)? {
            let plan = plan::service(&key, wanted.get(&key), self.observed()?);
            done += plan.operations.len();
            // A plan that left something out is made again in every pass: room may have come free.
            let is_whole = plan.problems.is_empty();
            problems.extend(plan.problems);
            self.begin(plan.operations, &mut rest)?;
            if rest.is_full() {
                self.finish(std::mem::take(&mut rest))?;
            }
            // An error on the way makes all of it forgotten.
            match wanted.get(&key) {
                Some(service) if is_whole => {
                    self.reached.insert(key, service.clone());
                }
                _ => {
                    self.reached.remove(&key);
                }
            }
        }
        self.finish(rest)?;
        if !self.is_tidy {
            let orphans = plan::orphans(self.observed()?);
            self.apply(&orphans)?;
            done += orphans.len();
            self.is_tidy = true;
        }
        if done > 0 {
            info!(changes = done, ports = wanted.len(), "brought the served ports up to date");
        }
        Ok(problems)
    }

    /// Gone ones first: they make room.
    fn changed(
        &mut self,
        wanted: &BTreeMap<ServiceKey, WantedService>,
    ) -> Result<Vec<ServiceKey>, MapsError> {
        let known: Vec<ServiceKey> = self.observed()?.served().copied().collect();
        let gone = known.into_iter().filter(|key| !wanted.contains_key(key));
        let new = wanted.iter().filter(|(key, service)| self.reached.get(*key) != Some(service));
        Ok(gone.chain(new.map(|(key, _)| *key)).collect())
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
            self.look_again();
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
        (std::slice::from_ref(&roles.pods), Interface::PODS),
        (roles.overlay.as_slice(), Interface::OVERLAY),
    ];
    for (devices, role) in roles_of {
        for device in devices {
            let entry = interfaces.entry(device.index).or_default();
            *entry = entry.and(role);
        }
    }
    interfaces
}

/// Other holders' endpoints on this node, and all of our own.
fn wanted_endpoints(
    wanted: &Wanted,
    holders: &BTreeMap<String, (Mac, Holder)>,
) -> BTreeMap<EndpointKey, EndpointHolders> {
    let mut endpoints: BTreeMap<EndpointKey, EndpointHolders> = BTreeMap::new();
    for (key, names) in &wanted.endpoints {
        let mut marks = EndpointHolders::default();
        let mut any = false;
        for (_, holder) in names.iter().filter_map(|name| holders.get(name)) {
            marks.insert(holder.mark);
            any = true;
        }
        if any {
            endpoints.insert(*key, marks);
        }
    }
    for (key, service) in &wanted.services {
        for backend in &service.backends {
            let endpoint = EndpointKey::new(backend.address.into(), Port::new(backend.port), key.protocol);
            endpoints.entry(endpoint).or_default().insert(EndpointHolders::SELF);
        }
    }
    endpoints
}
