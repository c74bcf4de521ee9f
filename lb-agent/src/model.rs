//! What the policy sees of Kubernetes objects, and what it answers.
//!
//! Objects are reduced here, once, to comparable values of the parts that matter; everything behind this module
//! is pure and knows no API type. Texts that people must see again (a wrong `loadBalancerIP`) are kept as they are.

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use serde::{Serialize, Serializer};
use std::cmp::Ordering;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// Begins the names of everything of ours in the API.
macro_rules! domain {
    ($name:literal) => {
        concat!("reweave.levk.dev/", $name)
    };
}

/// The `spec.loadBalancerClass` of the Services that this agent serves.
pub const CLASS: &str = domain!("node-address");
/// Node annotation: the IPv4 addresses on the node's host interfaces, comma-separated, sorted.
pub const ADDRESSES: &str = domain!("addresses");
/// Node annotation: `<ip>,<mac>` of the node's overlay device, where replies to its forwards go.
pub const WEAVE: &str = domain!("weave");

const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

/// Reads an IPv4 address as Go's `net.ParseIP(text).To4()` does: IPv4-mapped IPv6 counts, leading zeros, zones,
/// prefixes and ports do not.
pub fn parse_ipv4(text: &str) -> Option<Ipv4Addr> {
    match text.parse().ok()? {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(address) => address.to_ipv4_mapped(),
    }
}

/// What one node publishes about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Node {
    /// The Node's name.
    pub name: String,
    /// The IPv4 addresses on its host interfaces, as published.
    pub addresses: Vec<Ipv4Addr>,
    /// The address of its overlay device: next hop of replies.
    #[serde(rename = "weaveIP")]
    pub weave_ip: Option<Ipv4Addr>,
    /// The hardware address of its overlay device: source of its forwards.
    #[serde(rename = "weaveMAC")]
    pub weave_mac: Option<HardwareAddress>,
    /// The networks that are its own, with the lengths of their prefixes: where its pods get their addresses from
    /// (`spec.podCIDRs`, to which not all CNIs keep), and its own addresses as the kubelet has them (`status.addresses`), which
    /// stay when its interfaces are down for a moment.
    #[serde(skip)]
    pub networks: Vec<(Ipv4Addr, u8)>,
}

/// A hardware address of 6, 8 or 20 bytes, written with colons.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HardwareAddress {
    bytes: Box<[u8]>,
}

impl HardwareAddress {
    /// Reads what Go's `net.ParseMAC` (1.26) does: bytes parted by colons or dashes, pairs of bytes parted by
    /// dots, or no separators.
    pub fn parse(text: &str) -> Option<Self> {
        let separator = text.chars().find(|c| !c.is_ascii_hexdigit());
        let (separator, digits) = match separator {
            Some(separator @ (':' | '-')) => (Some(separator), 2),
            Some('.') => (Some('.'), 4),
            Some(_) => return None,
            None => (None, text.len()),
        };
        let groups: Vec<&str> = match separator {
            Some(separator) => text.split(separator).collect(),
            None => vec![text],
        };
        let mut bytes = Vec::with_capacity(20);
        for group in groups {
            if group.len() != digits || digits % 2 != 0 {
                return None;
            }
            for pair in group.as_bytes().chunks_exact(2) {
                bytes.push(hex_digit(pair[0])? << 4 | hex_digit(pair[1])?);
            }
        }
        matches!(bytes.len(), 6 | 8 | 20).then(|| Self { bytes: bytes.into() })
    }

    /// The bytes, in the order they are sent.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The six bytes of an Ethernet address; none for the longer kinds.
    pub fn ethernet(&self) -> Option<[u8; 6]> {
        self.bytes.as_ref().try_into().ok()
    }
}

impl From<[u8; 6]> for HardwareAddress {
    fn from(bytes: [u8; 6]) -> Self {
        Self { bytes: Box::new(bytes) }
    }
}

impl fmt::Display for HardwareAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.bytes.iter().enumerate() {
            let colon = if i == 0 { "" } else { ":" };
            write!(f, "{colon}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for HardwareAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for HardwareAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// A Service, reduced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Whether its type is LoadBalancer and its class ours.
    pub eligible: bool,
    /// `spec.loadBalancerIP` as it is written, empty if it is not set.
    pub wanted: String,
    /// In the order of the spec.
    pub ports: Vec<ServicePort>,
    /// What its status shows.
    pub shown: Shown,
    /// Whether the one entry of its status says `ipMode: Proxy`, so that kube-proxy leaves the address alone.
    pub is_shown_by_proxy: bool,
    /// Whether its `sessionAffinity` is `ClientIP`.
    pub affinity: bool,
    /// Whether it has a `deletionTimestamp`.
    pub deleting: bool,
}

/// One port of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServicePort {
    /// Empty if it has none.
    pub name: String,
    /// As written, `TCP` if it is not set or empty.
    pub protocol: String,
    /// As written, not checked.
    pub port: i32,
}

/// What `status.loadBalancer` shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shown {
    /// No entry.
    #[default]
    Nothing,
    /// Exactly one entry, with an IPv4 address.
    Address(Ipv4Addr),
    /// Anything else.
    Other,
}

impl Shown {
    /// The single address.
    pub fn address(self) -> Option<Ipv4Addr> {
        match self {
            Self::Address(address) => Some(address),
            Self::Nothing | Self::Other => None,
        }
    }
}

impl Service {
    /// `namespace/name`: how people name it, and the order of Services.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// The same in its parts.
    pub fn full_name(&self) -> ServiceName {
        ServiceName { namespace: self.namespace.clone(), name: self.name.clone() }
    }
}

/// What names a Service in a cluster. Ordered as the text `namespace/name`, so `a-b/x` comes before `a/x`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ServiceName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl Ord for ServiceName {
    fn cmp(&self, other: &Self) -> Ordering {
        // Manifests may name anything: `b/c` in `a`, and `c` in `a/b`.
        self.text().cmp(other.text()).then_with(|| self.namespace.cmp(&other.namespace))
    }
}

impl ServiceName {
    fn text(&self) -> impl Iterator<Item = u8> + '_ {
        self.namespace.bytes().chain([b'/']).chain(self.name.bytes())
    }
}

impl PartialOrd for ServiceName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl From<&core::Service> for Service {
    fn from(service: &core::Service) -> Self {
        let spec = service.spec.as_ref();
        let type_ = spec.and_then(|spec| spec.type_.as_deref());
        let class = spec.and_then(|spec| spec.load_balancer_class.as_deref());
        let ports = spec.and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
        let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let shown = match status.and_then(|status| status.ingress.as_deref()) {
            None | Some([]) => Shown::Nothing,
            Some([only]) => only.ip.as_deref().and_then(parse_ipv4).map_or(Shown::Other, Shown::Address),
            Some(_) => Shown::Other,
        };
        let is_shown_by_proxy = match status.and_then(|status| status.ingress.as_deref()) {
            Some([only]) => only.ip_mode.as_deref() == Some("Proxy"),
            _ => false,
        };
        Self {
            namespace: service.metadata.namespace.clone().unwrap_or_default(),
            name: service.metadata.name.clone().unwrap_or_default(),
            eligible: type_ == Some("LoadBalancer") && class == Some(CLASS),
            wanted: spec.and_then(|spec| spec.load_balancer_ip.clone()).unwrap_or_default(),
            ports: ports.iter().map(ServicePort::from).collect(),
            shown,
            is_shown_by_proxy,
            affinity: spec.and_then(|spec| spec.session_affinity.as_deref()) == Some("ClientIP"),
            deleting: service.metadata.deletion_timestamp.is_some(),
        }
    }
}

impl From<&core::ServicePort> for ServicePort {
    fn from(port: &core::ServicePort) -> Self {
        let protocol = port.protocol.as_deref().filter(|protocol| !protocol.is_empty());
        Self {
            name: port.name.clone().unwrap_or_default(),
            protocol: protocol.unwrap_or("TCP").to_owned(),
            port: port.port,
        }
    }
}

/// An EndpointSlice, reduced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The Service it belongs to, empty without the label.
    pub service: String,
    /// Whether its address type is IPv4; the policy skips the others.
    pub ipv4: bool,
    /// Its ports.
    pub ports: Vec<SlicePort>,
    /// Its endpoints.
    pub endpoints: Vec<SliceEndpoint>,
}

/// One port of an EndpointSlice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlicePort {
    /// Empty if it has none.
    pub name: String,
    /// As written, `TCP` if it is not set (an empty one stays empty).
    pub protocol: String,
    /// None stands for all ports; the policy skips it.
    pub port: Option<i32>,
}

/// One entry of an EndpointSlice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// Its IPv4 addresses; others are left out.
    pub addresses: Vec<Ipv4Addr>,
    /// Its conditions.
    pub conditions: Conditions,
    /// The node it runs on, if that is known; one text may serve many endpoints.
    pub node_name: Option<Arc<str>>,
}

/// An endpoint's conditions, each of which may be missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// Missing means ready. True also for a terminating endpoint with `publishNotReadyAddresses`.
    pub ready: Option<bool>,
    /// Missing means as ready.
    pub serving: Option<bool>,
    /// Missing means not terminating.
    pub terminating: Option<bool>,
}

impl Conditions {
    /// Whether it takes new flows.
    pub fn is_ready(self) -> bool {
        self.ready.unwrap_or(true)
    }

    /// Whether it still answers although it terminates.
    pub fn is_serving_out(self) -> bool {
        self.serving.unwrap_or(self.is_ready()) && self.terminating.unwrap_or(false)
    }
}

impl From<&discovery::EndpointSlice> for EndpointSlice {
    fn from(slice: &discovery::EndpointSlice) -> Self {
        let labels = slice.metadata.labels.as_ref();
        Self {
            namespace: slice.metadata.namespace.clone().unwrap_or_default(),
            name: slice.metadata.name.clone().unwrap_or_default(),
            service: labels.and_then(|labels| labels.get(SERVICE_NAME_LABEL).cloned()).unwrap_or_default(),
            ipv4: slice.address_type == "IPv4",
            ports: slice.ports.iter().flatten().map(SlicePort::from).collect(),
            endpoints: slice.endpoints.iter().flatten().map(SliceEndpoint::from).collect(),
        }
    }
}

impl From<&discovery::EndpointPort> for SlicePort {
    fn from(port: &discovery::EndpointPort) -> Self {
        Self {
            name: port.name.clone().unwrap_or_default(),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            port: port.port,
        }
    }
}

impl From<&discovery::Endpoint> for SliceEndpoint {
    fn from(endpoint: &discovery::Endpoint) -> Self {
        let conditions = endpoint.conditions.as_ref();
        Self {
            addresses: endpoint.addresses.iter().filter_map(|address| parse_ipv4(address)).collect(),
            conditions: Conditions {
                ready: conditions.and_then(|conditions| conditions.ready),
                serving: conditions.and_then(|conditions| conditions.serving),
                terminating: conditions.and_then(|conditions| conditions.terminating),
            },
            node_name: endpoint.node_name.as_deref().map(Arc::from),
        }
    }
}

/// What one node must do. Serialises to the shape of the golden vectors; the order of each list counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Desired {
    /// Services whose address this node holds, by `namespace/name`.
    pub forwards: Vec<Forward>,
    /// Other nodes that forward something, by name.
    pub holders: Vec<Holder>,
    /// Writes to Services' statuses, by `namespace/name`.
    pub status: Vec<Status>,
    /// What an operator should hear about: Services first, then nodes.
    pub problems: Vec<String>,
}

/// A Service whose address this node holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Forward {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// The held address.
    pub address: Ipv4Addr,
    /// In the order of the Service's spec.
    pub ports: Vec<Port>,
}

/// One Service port at the held address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Port {
    /// As in the Service.
    pub protocol: String,
    /// As in the Service.
    pub port: i32,
    /// The ready ones, sorted by their text, each once.
    pub endpoints: Vec<Endpoint>,
}

/// One ready backend of one Service port; its text is `address:port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// The pod's address.
    pub address: Ipv4Addr,
    /// As in the EndpointSlice, not checked.
    pub port: i32,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.address, self.port)
    }
}

impl Serialize for Endpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Another node that forwards to pods; its mark names it on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// What it published.
    pub node: Node,
    /// 1..=250.
    pub mark: u8,
}

/// A write to a Service's `status.loadBalancer`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// The address to show; none clears the status.
    pub address: Option<Ipv4Addr>,
}
