//! One write to the API: how it is made so that it changes what is ours, and only where the decision still holds.

use super::events::Said;
use super::queue::Outcome;
use crate::api::error;
use crate::api::stats::{Operation, Stats};
use crate::model::{ADDRESSES, Service, ServiceName, WEAVE};
use k8s_openapi::api::core::v1 as core;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::fmt;
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::time::timeout;
use tracing::info;

/// What the API notes as the author of our fields.
const MANAGER: &str = "reweave-lb-agent";
/// An answer must come within this time.
const ANSWER: Duration = Duration::from_secs(10);

/// The object that is written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    /// The Node of this name.
    Node(String),
    /// A Service's status.
    Service(ServiceName),
    /// The Event of this namespace and name.
    Event(String, String),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(name) => write!(f, "node {name}: cannot write its annotations"),
            Self::Service(name) => write!(f, "{name}: cannot write its status"),
            Self::Event(namespace, name) => write!(f, "cannot write the event {namespace}/{name}"),
        }
    }
}

/// What is written to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Write {
    /// Both annotations of ours, the second empty where the node has no overlay.
    Annotations { uid: String, addresses: String, weave: String },
    /// The address that the Service shows, decided on its object of this version.
    Status { version: String, address: Option<Ipv4Addr> },
    /// What happened.
    Event(Box<Said>),
}

impl Write {
    /// Whether it leaves the object as the other does.
    pub(super) fn says_the_same_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Status { address, .. }, Self::Status { address: other, .. }) => address == other,
            // Saying it again is what repeats an Event.
            (Self::Event(_), _) => false,
            _ => self == other,
        }
    }

    fn operation(&self) -> Operation {
        match self {
            Self::Annotations { .. } => Operation::Annotate,
            Self::Status { .. } => Operation::Status,
            Self::Event(_) => Operation::Event,
        }
    }
}

/// How it went, and whether the server dropped a part of it.
pub(super) struct Done {
    pub(super) outcome: Outcome,
    /// Whether an address that was written kept its `ipMode`; none where no address was written.
    pub(super) kept_ip_mode: Option<bool>,
}

/// Carries it out, once.
pub(super) async fn perform(client: &Client, target: &Target, write: &Write, stats: &Stats) -> Done {
    let failed = |code: String, why: String| {
        stats.failed(write.operation(), code);
        Done { outcome: Outcome::Failed(why), kept_ip_mode: None }
    };
    match timeout(ANSWER, attempt(client, target, write)).await {
        Ok(Ok(kept_ip_mode)) => Done { outcome: Outcome::Written, kept_ip_mode },
        Ok(Err(kube::Error::Api(status))) if status.code == 409 || status.code == 404 => {
            Done { outcome: Outcome::Outdated, kept_ip_mode: None }
        }
        Ok(Err(refused)) => failed(error::code(&refused), error::explain(&refused)),
        Err(_elapsed) => failed("none".to_owned(), format!("no answer within {} s", ANSWER.as_secs())),
    }
}

async fn attempt(client: &Client, target: &Target, write: &Write) -> kube::Result<Option<bool>> {
    match (target, write) {
        (Target::Node(name), Write::Annotations { uid, addresses, weave }) => {
            annotate(client, name, uid, addresses, weave).await.map(|()| None)
        }
        (Target::Service(name), Write::Status { version, address }) => {
            show(client, name, version, *address).await
        }
        (Target::Event(namespace, name), Write::Event(said)) => {
            said.publish(client, namespace, name).await.map(|()| None)
        }
        // The queue keeps each target's own writes only.
        _ => Ok(None),
    }
}

/// By server-side apply, so that nothing else of the Node is touched, whoever writes it meanwhile. The uid keeps the
/// request from making a Node where there is none any more.
async fn annotate(client: &Client, name: &str, uid: &str, addresses: &str, weave: &str) -> kube::Result<()> {
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": name, "uid": uid, "annotations": { ADDRESSES: addresses, WEAVE: weave } },
    });
    let params = PatchParams::apply(MANAGER).force();
    // Its metadata is enough to be sent back: a whole Node is some ten kilobytes.
    Api::<core::Node>::all(client.clone()).patch_metadata(name, &params, &Patch::Apply(node)).await?;
    info!(addresses, weave, "published this node's addresses");
    Ok(())
}

/// By a merge patch with the version that the decision was made from: where the Service has changed since, the server
/// refuses, and the decision is made anew. (Server-side apply would overwrite whatever came between, and it could not
/// clear an entry of another author.)
async fn show(
    client: &Client,
    name: &ServiceName,
    version: &str,
    address: Option<Ipv4Addr>,
) -> kube::Result<Option<bool>> {
    let ServiceName { namespace, name } = name;
    let ingress: Value = match address {
        Some(address) => json!([{ "ip": address, "ipMode": "Proxy" }]),
        None => Value::Null,
    };
    let patch = json!({
        "metadata": { "resourceVersion": version },
        "status": { "loadBalancer": { "ingress": ingress } },
    });
    let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
    let services: Api<core::Service> = Api::namespaced(client.clone(), namespace);
    let shown = services.patch_status(name, &params, &Patch::Merge(patch)).await?;
    info!(namespace, service = name, ?address, "wrote the status");
    Ok(address.map(|_| Service::from(&shown).is_shown_by_proxy))
}
