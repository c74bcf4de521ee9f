//! Copies of all map entries that the packets of one connection may look up.

use super::maps::{Maps, MapsError, Table};
use lb_common::addr::{Mac, Port};
use lb_common::backend::Backend;
use lb_common::flow::{Flow, FlowKey, Reply, ReplyKind};
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::interface::Interface;
use lb_common::maglev;
use lb_common::masquerade::{self, Client, Masquerade, MasqueradedKey, Network, Own};
use lb_common::service::{Service, ServiceKey};
use std::collections::{BTreeMap, BTreeSet};

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Copies {
    /// All of them.
    pub interfaces: BTreeMap<u32, Interface>,
    /// All of it.
    pub sieve: Vec<u64>,
    /// The served port that the packet is addressed to.
    pub service: Option<(ServiceKey, Service)>,
    /// Its table.
    pub ring: Option<Vec<u32>>,
    /// Those of the table and of the flows, by slot.
    pub backends: BTreeMap<u32, Backend>,
    /// The connection's, and those that hold a tuple that it may want.
    pub flows: BTreeMap<FlowKey, Flow>,
    /// Likewise.
    pub handshakes: BTreeMap<FlowKey, Flow>,
    /// Likewise, by what the backend sends.
    pub replies: BTreeMap<FlowKey, Reply>,
    /// Likewise.
    pub handshake_replies: BTreeMap<FlowKey, Reply>,
    /// The connection's source port, if its client is inside the cluster.
    pub masquerades: BTreeMap<FlowKey, Masquerade>,
    /// Whose that port is, and those that it may be given.
    pub masqueraded: BTreeMap<MasqueradedKey, Client>,
    /// All of it.
    pub inside: BTreeSet<Network>,
    /// All of it.
    pub own: Own,
    /// All of them.
    pub holders: BTreeMap<Mac, Holder>,
    /// Those at the ends of the tuples above.
    pub endpoints: BTreeMap<EndpointKey, EndpointHolders>,
    /// No connection fits any more.
    pub flows_full: bool,
    /// No reply fits any more.
    pub replies_full: bool,
}

impl Copies {
    /// Reads what packets with the tuple `key`, and those that answer them, may look up.
    ///
    /// # Errors
    /// A map cannot be read.
    pub fn read(maps: &Maps, key: &FlowKey) -> Result<Self, MapsError> {
        let mut copies = Self {
            interfaces: maps.interfaces.all()?,
            sieve: maps.sieve_words()?,
            inside: maps.inside.networks()?,
            own: maps.inside.own()?,
            holders: maps.holders.all()?,
            flows_full: is_full(&maps.flows)?,
            replies_full: is_full(&maps.replies)?,
            ..Self::default()
        };
        let slots = maps.backends()?;
        copies.serve(maps, &slots, key)?;
        copies.flow(maps, &slots, key)?;
        // Backends may know it by another source.
        let tuples: Vec<FlowKey> = [*key].into_iter().chain(copies.masquerade(maps, key)?).collect();
        for tuple in &tuples[1..] {
            copies.flow(maps, &slots, tuple)?;
        }
        // It may be an answer itself, or another holder's forward.
        copies.reply(maps, &slots, key)?;
        copies.reply(maps, &slots, &key.reversed())?;
        // Or one to the Service's address, of a connection that is known by this node's own.
        copies.reply(maps, &slots, &key.with_destination(copies.own.overlay, key.destination_port))?;
        let backends: Vec<Backend> = copies.backends.values().copied().collect();
        for (backend, tuple) in
            backends.iter().flat_map(|backend| tuples.iter().map(move |tuple| (backend, tuple)))
        {
            let answer = tuple.with_destination(backend.address, backend.port).reversed();
            copies.reply(maps, &slots, &answer)?;
        }
        Ok(copies)
    }

    /// The served port and its table.
    fn serve(&mut self, maps: &Maps, slots: &[Backend], key: &FlowKey) -> Result<(), MapsError> {
        let served = ServiceKey::new(key.destination, key.destination_port, key.protocol);
        let Some(service) = maps.services.get(&served)? else { return Ok(()) };
        self.service = Some((served, service));
        self.ring = maps.ring(service.id)?;
        for slot in self.ring.iter().flatten() {
            self.backends.extend(slots.get(*slot as usize).map(|backend| (*slot, *backend)));
        }
        Ok(())
    }

    /// The source ports that the connection has or may be given; the tuples that they make of it.
    fn masquerade(&mut self, maps: &Maps, key: &FlowKey) -> Result<Vec<FlowKey>, MapsError> {
        let has = maps.masquerades.get(key)?;
        self.masquerades.extend(has.map(|masquerade| (*key, masquerade)));
        let first = masquerade::first_port(maglev::hash(key));
        let tried = std::iter::successors(Some(first), |port| Some(masquerade::next_port(*port)));
        let tried = tried.take(masquerade::TRIES as usize).map(Port::new);
        let mut tuples = Vec::new();
        for port in has.map(|masquerade| masquerade.port).into_iter().chain(tried) {
            let owned = MasqueradedKey::new(key.destination, key.destination_port, port, key.protocol);
            let owner = maps.masqueraded.get(&owned)?;
            self.masqueraded.extend(owner.map(|client| (owned, client)));
            tuples.push(FlowKey::new(
                self.own.overlay,
                port,
                key.destination,
                key.destination_port,
                key.protocol,
            ));
            // One that is free is taken.
            if owner.is_none() {
                break;
            }
        }
        Ok(tuples)
    }

    /// Whose the port is that an answer goes to.
    fn masqueraded(&mut self, maps: &Maps, key: &FlowKey, reply: &Reply) -> Result<(), MapsError> {
        let owned = MasqueradedKey::new(reply.address, reply.port, key.destination_port, key.protocol);
        self.masqueraded.extend(maps.masqueraded.get(&owned)?.map(|client| (owned, client)));
        Ok(())
    }

    /// What is known of the connection that begins with a client's tuple.
    fn flow(&mut self, maps: &Maps, slots: &[Backend], key: &FlowKey) -> Result<(), MapsError> {
        let (flow, handshake) = (maps.flows.get(key)?, maps.handshakes.get(key)?);
        self.flows.extend(flow.map(|flow| (*key, flow)));
        self.handshakes.extend(handshake.map(|flow| (*key, flow)));
        for flow in flow.into_iter().chain(handshake) {
            self.backends.extend(slots.get(flow.backend as usize).map(|backend| (flow.backend, *backend)));
        }
        Ok(())
    }

    /// What is known of the tuple that a backend sends, and whose it is.
    fn reply(&mut self, maps: &Maps, slots: &[Backend], key: &FlowKey) -> Result<(), MapsError> {
        let (reply, handshake) = (maps.replies.get(key)?, maps.handshake_replies.get(key)?);
        self.replies.extend(reply.map(|reply| (*key, reply)));
        self.handshake_replies.extend(handshake.map(|reply| (*key, reply)));
        for reply in reply.into_iter().chain(handshake) {
            if reply.kind() == ReplyKind::Translate {
                self.masqueraded(maps, key, &reply)?;
                self.flow(maps, slots, &key.reversed().with_destination(reply.address, reply.port))?;
            }
        }
        let endpoint = EndpointKey::new(key.source, key.source_port, key.protocol);
        self.endpoints.extend(maps.endpoints.get(&endpoint)?.map(|holders| (endpoint, holders)));
        Ok(())
    }

    /// The tuple by which a client's connection is known: its own, or that with the source port that it was given.
    pub fn known_as(&self, key: &FlowKey) -> FlowKey {
        match self.masquerades.get(key) {
            Some(given) => {
                let (address, port) = (key.destination, key.destination_port);
                FlowKey::new(self.own.overlay, given.port, address, port, key.protocol)
            }
            None => *key,
        }
    }

    /// The slot of an endpoint, the one in use before others.
    pub fn slot_of(&self, address: lb_common::addr::Ipv4, port: Port) -> Option<(u32, Backend)> {
        let mut found = self.backends.iter().filter(|(_, b)| b.address == address && b.port == port);
        let ours = |b: &Backend| self.service.is_some_and(|(_, service)| service.id == b.service);
        let first = found.clone().find(|(_, backend)| ours(backend)).or_else(|| found.next());
        first.map(|(slot, backend)| (*slot, *backend))
    }
}

/// Counted entry by entry: the kernel does not say how many there are.
fn is_full<V: aya::Pod + Default>(table: &Table<FlowKey, V>) -> Result<bool, MapsError> {
    Ok(table.list()?.len() >= table.max_entries()? as usize)
}
