//! Objects as they come from the API, reduced while they are read: nothing behind this keeps a whole one.

use crate::api::stats::Resource;
use crate::model::{ADDRESSES, EndpointSlice, Node, Service, WEAVE, parse_ipv4};
use crate::policy::node::{self, AnnotationError};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;
use std::net::Ipv4Addr;

/// An API type that is watched.
pub(super) trait Kind:
    kube::Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static
{
    /// Its name.
    const RESOURCE: Resource;
    /// Only these are asked for.
    const LABELS: Option<&'static str> = None;
    /// What is kept of it.
    type Content: Clone + fmt::Debug + Send + 'static;

    fn reduce(&self) -> Self::Content;
}

/// What is kept of a Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SeenNode {
    pub(super) parsed: (Node, Option<AnnotationError>),
    /// Kept of this agent's own Node only.
    pub(super) own: OwnNode,
}

/// This agent's Node, as the API shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnNode {
    /// Tells it from another that has its name later.
    pub uid: String,
    /// The addresses annotation, empty if it has none.
    pub addresses: String,
    /// The overlay annotation, empty if it has none.
    pub weave: String,
    /// The IPv4 addresses that the kubelet reports as the Node's internal ones.
    pub internal: Vec<Ipv4Addr>,
}

impl Kind for core::Node {
    const RESOURCE: Resource = Resource::Nodes;
    type Content = SeenNode;

    fn reduce(&self) -> SeenNode {
        let annotation = |name: &str| {
            let annotations = self.metadata.annotations.as_ref();
            annotations.and_then(|all| all.get(name)).cloned().unwrap_or_default()
        };
        let addresses = self.status.iter().filter_map(|status| status.addresses.as_ref()).flatten();
        let internal = addresses.filter(|address| address.type_ == "InternalIP");
        let own = OwnNode {
            uid: self.metadata.uid.clone().unwrap_or_default(),
            addresses: annotation(ADDRESSES),
            weave: annotation(WEAVE),
            internal: internal.filter_map(|address| parse_ipv4(&address.address)).collect(),
        };
        SeenNode { parsed: node::parse(self), own }
    }
}

impl Kind for core::Service {
    const RESOURCE: Resource = Resource::Services;
    type Content = Service;

    fn reduce(&self) -> Service {
        Service::from(self)
    }
}

impl Kind for discovery::EndpointSlice {
    const RESOURCE: Resource = Resource::Slices;
    // As kube-proxy: a Service without an address of its own is never served.
    const LABELS: Option<&'static str> = Some("kubernetes.io/service-name,!service.kubernetes.io/headless");
    type Content = EndpointSlice;

    fn reduce(&self) -> EndpointSlice {
        EndpointSlice::from(self)
    }
}

/// One object. That it cannot be decoded is a value and no error, so that a list or a watch with one bad object goes on
/// with the others.
pub(super) struct Reduced<K: Kind> {
    /// Name, namespace, uid and version only.
    metadata: ObjectMeta,
    pub(super) content: Result<K::Content, String>,
}

impl<K: Kind> Reduced<K> {
    pub(super) fn version(&self) -> Option<&str> {
        self.metadata.resource_version.as_deref()
    }

    pub(super) fn uid(&self) -> Option<&str> {
        self.metadata.uid.as_deref()
    }

    /// Namespace (empty for Nodes) and name.
    pub(super) fn key(&self) -> (String, String) {
        let ObjectMeta { namespace, name, .. } = &self.metadata;
        (namespace.clone().unwrap_or_default(), name.clone().unwrap_or_default())
    }
}

impl<'de, K: Kind> Deserialize<'de> for Reduced<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Named {
            metadata: ObjectMeta,
        }
        let text = Box::<RawValue>::deserialize(deserializer)?;
        let (metadata, content) = match serde_json::from_str::<K>(text.get()) {
            Ok(mut object) => {
                let content = object.reduce();
                (std::mem::take(object.meta_mut()), Ok(content))
            }
            Err(error) => {
                let Named { metadata } = serde_json::from_str(text.get()).map_err(D::Error::custom)?;
                (metadata, Err(error.to_string()))
            }
        };
        let ObjectMeta { name, namespace, uid, resource_version, .. } = metadata;
        let metadata = ObjectMeta { name, namespace, uid, resource_version, ..ObjectMeta::default() };
        Ok(Self { metadata, content })
    }
}

impl<K: Kind> Clone for Reduced<K> {
    fn clone(&self) -> Self {
        Self { metadata: self.metadata.clone(), content: self.content.clone() }
    }
}

impl<K: Kind> fmt::Debug for Reduced<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reduced").field("key", &self.key()).field("content", &self.content).finish()
    }
}

impl<K: Kind> kube::Resource for Reduced<K> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        K::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        K::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        K::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
