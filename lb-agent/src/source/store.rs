//! What the API shows, reduced, as the sources keep it up to date; and which Services a change may concern.

use super::Objects;
use crate::model::{EndpointSlice, Node, Service, ServiceName};
use crate::policy::node::AnnotationError;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Which answers of the policy may be others than before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Changes {
    /// None.
    #[default]
    Nothing,
    /// Those for these Services, some of which may be gone, or have no Service yet but EndpointSlices.
    Services(BTreeSet<ServiceName>),
    /// All: nodes hold addresses, and that decides who serves what.
    Everything,
}

impl Changes {
    fn add(&mut self, service: &ServiceName) {
        match self {
            Self::Nothing => *self = Self::Services(BTreeSet::from([service.clone()])),
            Self::Services(services) if services.contains(service) => {}
            Self::Services(services) => {
                services.insert(service.clone());
            }
            Self::Everything => {}
        }
    }
}

/// A Node, and what is wrong in its annotations. What stood before the error is in the node.
type KnownNode = (Node, Option<AnnotationError>);

/// Every Node, Service and EndpointSlice. What is set to what it is already is no change, so heartbeats cost nothing.
#[derive(Debug, Default)]
pub struct Store {
    nodes: BTreeMap<String, KnownNode>,
    services: BTreeMap<ServiceName, Service>,
    /// By the Service that they name in their label, and there by name.
    slices: BTreeMap<ServiceName, Vec<EndpointSlice>>,
    /// The Service's name (in the same namespace), by the slice's namespace and name.
    owners: BTreeMap<(String, String), String>,
    /// One text for each node that endpoints run on, however many those are.
    node_names: BTreeSet<Arc<str>>,
    changes: Changes,
}

impl Store {
    /// Sets or removes a Node, as [`crate::policy::node::parse`] reads it.
    pub fn set_node(&mut self, name: &str, node: Option<KnownNode>) {
        if self.nodes.get(name) == node.as_ref() {
            return;
        }
        match node {
            Some(node) => {
                self.nodes.insert(name.to_owned(), node);
            }
            None => {
                self.nodes.remove(name);
                self.node_names.retain(|name| Arc::strong_count(name) > 1);
            }
        }
        self.changes = Changes::Everything;
    }

    /// Sets or removes a Service.
    pub fn set_service(&mut self, name: &ServiceName, service: Option<Service>) {
        if self.services.get(name) == service.as_ref() {
            return;
        }
        match service {
            Some(service) => {
                self.services.insert(name.clone(), service);
            }
            None => {
                self.services.remove(name);
            }
        }
        self.changes.add(name);
    }

    /// Sets or removes the EndpointSlice of this name. One that now names another Service is a change of both.
    pub fn set_slice(&mut self, namespace: &str, name: &str, slice: Option<EndpointSlice>) {
        let key = (namespace.to_owned(), name.to_owned());
        let owner = |service: &str| ServiceName { namespace: namespace.to_owned(), name: service.to_owned() };
        let before = self.owners.get(&key).map(|service| owner(service));
        let after = slice.as_ref().map(|slice| owner(&slice.service));
        if let Some(before) = before.filter(|before| Some(before) != after.as_ref()) {
            self.owners.remove(&key);
            self.remove_slice(&before, name);
        }
        if let (Some(after), Some(slice)) = (after, slice) {
            self.owners.entry(key).or_insert_with(|| slice.service.clone());
            self.put_slice(&after, slice);
        }
    }

    fn remove_slice(&mut self, service: &ServiceName, name: &str) {
        let Some(slices) = self.slices.get_mut(service) else { return };
        slices.retain(|slice| slice.name != name);
        if slices.is_empty() {
            self.slices.remove(service);
        }
        self.changes.add(service);
    }

    fn put_slice(&mut self, service: &ServiceName, mut slice: EndpointSlice) {
        let known = self.slices.get(service).map_or(&[][..], Vec::as_slice);
        let place = known.binary_search_by(|known| known.name.cmp(&slice.name));
        if place.is_ok_and(|place| known[place] == slice) {
            return;
        }
        slice.endpoints.shrink_to_fit();
        for endpoint in &mut slice.endpoints {
            endpoint.node_name = endpoint.node_name.take().map(|name| self.one_text(name));
        }
        let slices = self.slices.entry(service.clone()).or_default();
        match place {
            Ok(place) => slices[place] = slice,
            Err(place) => {
                // Most Services have one slice only.
                slices.reserve_exact(1);
                slices.insert(place, slice);
            }
        }
        self.changes.add(service);
    }

    fn one_text(&mut self, name: Arc<str>) -> Arc<str> {
        if let Some(known) = self.node_names.get(&name) {
            return Arc::clone(known);
        }
        self.node_names.insert(Arc::clone(&name));
        name
    }

    /// Removes the Nodes of other names than these: those that a whole list does not have.
    pub fn retain_nodes(&mut self, keep: impl Fn(&str) -> bool) {
        let gone: Vec<String> = self.nodes.keys().filter(|name| !keep(name)).cloned().collect();
        for name in gone {
            self.set_node(&name, None);
        }
    }

    /// Removes the Services of other names than these.
    pub fn retain_services(&mut self, keep: impl Fn(&ServiceName) -> bool) {
        let gone: Vec<ServiceName> = self.services.keys().filter(|name| !keep(name)).cloned().collect();
        for name in gone {
            self.set_service(&name, None);
        }
    }

    /// Removes the EndpointSlices of other namespaces and names than these.
    pub fn retain_slices(&mut self, keep: impl Fn(&str, &str) -> bool) {
        let is_gone = |(namespace, name): &&(String, String)| !keep(namespace, name);
        let gone: Vec<(String, String)> = self.owners.keys().filter(is_gone).cloned().collect();
        for (namespace, name) in gone {
            self.set_slice(&namespace, &name, None);
        }
    }

    /// Makes these objects all that there are.
    pub fn replace(&mut self, objects: Objects) {
        let Objects { nodes, services, slices, ignored: _ } = objects;
        let names: BTreeSet<String> = nodes.iter().map(|(node, _)| node.name.clone()).collect();
        self.retain_nodes(|name| names.contains(name));
        for node in nodes {
            self.set_node(&node.0.name.clone(), Some(node));
        }
        let names: BTreeSet<ServiceName> = services.iter().map(Service::full_name).collect();
        self.retain_services(|name| names.contains(name));
        for service in services {
            self.set_service(&service.full_name(), Some(service));
        }
        let names: BTreeSet<(&str, &str)> =
            slices.iter().map(|slice| (slice.namespace.as_str(), slice.name.as_str())).collect();
        self.retain_slices(|namespace, name| names.contains(&(namespace, name)));
        for slice in slices {
            let (namespace, name) = (slice.namespace.clone(), slice.name.clone());
            self.set_slice(&namespace, &name, Some(slice));
        }
    }

    /// Whether anything has changed since the changes were last taken.
    pub fn is_changed(&self) -> bool {
        self.changes != Changes::Nothing
    }

    /// What has changed since this was last asked, or since the store was made.
    pub fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }

    /// The Nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values().map(|(node, _)| node)
    }

    /// One Node.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(name).map(|(node, _)| node)
    }

    /// Annotations that cannot be read, in the order of the nodes.
    pub fn annotation_errors(&self) -> impl Iterator<Item = &AnnotationError> {
        self.nodes.values().filter_map(|(_, error)| error.as_ref())
    }

    /// The Services, in the order of the policy.
    pub fn services(&self) -> impl Iterator<Item = (&ServiceName, &Service)> {
        self.services.iter()
    }

    /// One Service.
    pub fn service(&self, name: &ServiceName) -> Option<&Service> {
        self.services.get(name)
    }

    /// The EndpointSlices of one Service, by name.
    pub fn slices(&self, service: &ServiceName) -> &[EndpointSlice] {
        self.slices.get(service).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Conditions, SliceEndpoint};
    use std::net::Ipv4Addr;

    fn name(name: &str) -> ServiceName {
        ServiceName { namespace: "default".to_owned(), name: name.to_owned() }
    }

    fn mk_node(name: &str, last: u8) -> KnownNode {
        let addresses = vec![Ipv4Addr::new(192, 0, 2, last)];
        (Node { name: name.to_owned(), addresses, ..Node::default() }, None)
    }

    fn mk_service(name: &str, wanted: &str) -> Service {
        Service {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            wanted: wanted.to_owned(),
            ..Service::default()
        }
    }

    fn mk_slice(name: &str, service: &str, last: u8) -> EndpointSlice {
        let endpoint = SliceEndpoint {
            addresses: vec![Ipv4Addr::new(10, 0, 0, last)],
            conditions: Conditions::default(),
            node_name: Some("node-1".into()),
        };
        EndpointSlice {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            service: service.to_owned(),
            ipv4: true,
            endpoints: vec![endpoint],
            ..EndpointSlice::default()
        }
    }

    fn services(names: &[&str]) -> Changes {
        Changes::Services(names.iter().map(|each| name(each)).collect())
    }

    fn slice_names(store: &Store, service: &str) -> Vec<String> {
        store.slices(&name(service)).iter().map(|slice| slice.name.clone()).collect()
    }

    #[test]
    fn what_is_set_again_is_no_change() {
        let mut store = Store::default();
        assert_eq!(store.take_changes(), Changes::Nothing);
        let set = |store: &mut Store| {
            store.set_node("a", Some(mk_node("a", 1)));
            store.set_service(&name("web"), Some(mk_service("web", "192.0.2.1")));
            store.set_slice("default", "web-1", Some(mk_slice("web-1", "web", 1)));
        };
        set(&mut store);
        assert_eq!(store.take_changes(), Changes::Everything);
        set(&mut store);
        store.set_node("b", None);
        store.set_service(&name("other"), None);
        store.set_slice("default", "other", None);
        assert_eq!(store.take_changes(), Changes::Nothing);
    }

    #[test]
    fn a_change_of_a_service_or_of_its_slices_is_a_change_of_that_service() {
        let mut store = Store::default();
        store.set_service(&name("web"), Some(mk_service("web", "")));
        store.set_slice("default", "x-1", Some(mk_slice("x-1", "x", 1)));
        assert_eq!(store.take_changes(), services(&["web", "x"]));
        store.set_slice("default", "x-1", Some(mk_slice("x-1", "x", 2)));
        assert_eq!(store.take_changes(), services(&["x"]));
        store.set_slice("default", "x-1", None);
        assert_eq!(store.take_changes(), services(&["x"]));
        assert_eq!(store.slices(&name("x")), []);
        store.set_service(&name("web"), None);
        assert_eq!(store.take_changes(), services(&["web"]));
        assert_eq!(store.service(&name("web")), None);
    }

    #[test]
    fn a_slice_that_is_given_to_another_service_leaves_the_first() {
        let mut store = Store::default();
        store.set_slice("default", "b", Some(mk_slice("b", "web", 1)));
        store.set_slice("default", "a", Some(mk_slice("a", "web", 2)));
        assert_eq!(slice_names(&store, "web"), ["a", "b"]);
        store.take_changes();
        store.set_slice("default", "a", Some(mk_slice("a", "dns", 2)));
        assert_eq!(store.take_changes(), services(&["dns", "web"]));
        assert_eq!(
            (slice_names(&store, "web"), slice_names(&store, "dns")),
            (vec!["b".into()], vec!["a".into()])
        );
        store.set_slice("default", "a", None);
        assert_eq!(store.take_changes(), services(&["dns"]));
    }

    #[test]
    fn a_change_of_a_node_is_one_of_everything_whatever_else_changes() {
        let mut store = Store::default();
        store.set_service(&name("web"), Some(mk_service("web", "")));
        store.set_node("a", Some(mk_node("a", 1)));
        store.set_service(&name("dns"), Some(mk_service("dns", "")));
        assert_eq!(store.take_changes(), Changes::Everything);
        let error = AnnotationError::Weave { node: "a".to_owned(), value: "x".to_owned() };
        store.set_node("a", Some((mk_node("a", 1).0, Some(error.clone()))));
        assert_eq!(store.take_changes(), Changes::Everything);
        assert_eq!(store.annotation_errors().collect::<Vec<_>>(), [&error]);
        store.set_node("a", None);
        assert_eq!(store.take_changes(), Changes::Everything);
        assert_eq!(store.node("a"), None);
    }

    #[test]
    fn what_a_whole_list_does_not_have_is_gone() {
        let objects = |services: &[&str], slices: &[(&str, &str)]| Objects {
            nodes: vec![mk_node("a", 1)],
            services: services.iter().map(|name| mk_service(name, "")).collect(),
            slices: slices.iter().map(|(name, service)| mk_slice(name, service, 1)).collect(),
            ignored: 0,
        };
        let mut store = Store::default();
        store.replace(objects(&["web", "dns"], &[("web-1", "web"), ("dns-1", "dns")]));
        assert_eq!(store.take_changes(), Changes::Everything);
        store.replace(objects(&["web", "dns"], &[("web-1", "web"), ("dns-1", "dns")]));
        assert_eq!(store.take_changes(), Changes::Nothing);
        store.replace(objects(&["web", "new"], &[("web-1", "web"), ("dns-1", "other")]));
        assert_eq!(store.take_changes(), services(&["dns", "new", "other"]));
        assert_eq!(store.services().map(|(name, _)| name.name.as_str()).collect::<Vec<_>>(), ["new", "web"]);
        assert_eq!(slice_names(&store, "dns"), [""; 0]);
        store.replace(Objects::default());
        assert_eq!(store.take_changes(), Changes::Everything);
        assert_eq!((store.nodes().count(), store.services().count()), (0, 0));
        assert_eq!(slice_names(&store, "web"), [""; 0]);
    }

    #[test]
    fn services_come_in_the_order_of_their_texts() {
        let parts = ["", "a", "a-", "a.b", "a/b", "b", "ab", "c"];
        let of = |namespace: &str| {
            parts.map(|name| ServiceName { namespace: namespace.into(), name: name.into() })
        };
        let names: Vec<ServiceName> = parts.iter().flat_map(|namespace| of(namespace)).collect();
        for (a, b) in names.iter().flat_map(|a| names.iter().map(move |b| (a, b))) {
            let by_text = a.to_string().cmp(&b.to_string()).then_with(|| a.namespace.cmp(&b.namespace));
            assert_eq!(a.cmp(b), by_text, "{a} {b}");
        }
    }

    #[test]
    fn endpoints_share_the_names_of_their_nodes() {
        let mut store = Store::default();
        store.set_node("node-1", Some(mk_node("node-1", 1)));
        for service in ["a", "b"] {
            store.set_slice("default", service, Some(mk_slice(service, service, 1)));
        }
        let text = |store: &Store, service| {
            store.slices(&name(service))[0].endpoints[0].node_name.clone().map(|name| name.as_ptr())
        };
        assert_eq!(text(&store, "a"), text(&store, "b"));
        for service in ["a", "b"] {
            store.set_slice("default", service, None);
        }
        store.set_node("node-1", None);
        assert_eq!(store.node_names.len(), 0);
    }
}
