//! The scripted API server: each request waits until the test answers it.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode};
use futures::channel::mpsc::{UnboundedSender, unbounded};
use kube::{Client, Config};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// What must happen happens within this time.
pub(crate) const SOON: Duration = Duration::from_secs(5);

pub(crate) const LISTS: [&str; 3] =
    ["/api/v1/nodes", "/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"];
pub(crate) const NODES: &str = LISTS[0];
pub(crate) const SERVICES: &str = LISTS[1];
pub(crate) const SLICES: &str = LISTS[2];
/// Every request for one object.
pub(crate) const OBJECTS: &str = "objects";

pub(crate) struct Api {
    pub(crate) client: Client,
    calls: BTreeMap<&'static str, mpsc::UnboundedReceiver<Call>>,
    server: JoinHandle<()>,
}

/// A request that waits.
pub(crate) struct Call {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: BTreeMap<String, String>,
    pub(crate) body: Value,
    answer: oneshot::Sender<Response<Body>>,
}

/// An answer that goes on.
pub(crate) struct Stream(UnboundedSender<std::io::Result<Bytes>>);

type Inboxes = Arc<BTreeMap<&'static str, mpsc::UnboundedSender<Call>>>;

impl Api {
    pub(crate) async fn start() -> Self {
        let mut inboxes = BTreeMap::new();
        let mut calls = BTreeMap::new();
        for name in LISTS.into_iter().chain([OBJECTS]) {
            let (sender, receiver) = mpsc::unbounded_channel();
            inboxes.insert(name, sender);
            calls.insert(name, receiver);
        }
        let router = Router::new().fallback(take).with_state(Arc::new(inboxes));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let mut config = Config::new(format!("http://{address}").parse().unwrap());
        config.default_retry = false;
        Self { client: Client::try_from(config).unwrap(), calls, server }
    }

    /// The next request of this kind.
    pub(crate) async fn next(&mut self, what: &str) -> Call {
        let call = timeout(SOON, self.calls.get_mut(what).unwrap().recv()).await;
        call.unwrap_or_else(|_| panic!("no request for {what}")).unwrap()
    }

    /// That no request of this kind comes for a while.
    pub(crate) async fn quiet(&mut self, what: &str, time: Duration) {
        if let Ok(Some(call)) = timeout(time, self.calls.get_mut(what).unwrap().recv()).await {
            panic!("{} {} {:?}", call.method, call.path, call.query);
        }
    }

    /// Answers the question how far the server is, and expects a watch that goes on from `version`.
    pub(crate) async fn resume(&mut self, what: &str, version: u64) -> Stream {
        self.next(what).await.reached(version);
        self.next(what).await.resumed_at(version)
    }

    /// Answers the first request for these objects with a whole list, and goes on with the stream.
    pub(crate) async fn list(&mut self, what: &str, version: u64, objects: &[Value]) -> Stream {
        let stream = self.next(what).await.streamed_list();
        for object in objects {
            stream.event("ADDED", object);
        }
        stream.list_ends(version);
        stream
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn take(State(inboxes): State<Inboxes>, request: Request) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let pairs = parts.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    let query = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() };
    let name = LISTS.into_iter().find(|list| *list == path).unwrap_or(OBJECTS);
    let (answer, answered) = oneshot::channel();
    let method = parts.method.to_string();
    inboxes[name].send(Call { method, path, query, body, answer }).ok();
    match answered.await {
        Ok(response) => response,
        // The test dropped the call: it hangs.
        Err(_) => std::future::pending().await,
    }
}

impl Call {
    pub(crate) fn reply(self, code: u16, body: &Value) {
        let response = Response::builder().status(code).body(Body::from(body.to_string())).unwrap();
        self.answer.send(response).ok();
    }

    /// An error as the API writes it.
    pub(crate) fn refuse(self, code: u16, message: &str) {
        self.reply(code, &status(code, message));
    }

    pub(crate) fn stream(self) -> Stream {
        let (sender, receiver) = unbounded();
        let body = Body::from_stream(receiver);
        self.answer.send(Response::builder().status(StatusCode::OK).body(body).unwrap()).ok();
        Stream(sender)
    }

    /// Expects a request for a list as a stream.
    pub(crate) fn streamed_list(self) -> Stream {
        assert_eq!(self.query.get("sendInitialEvents").map(String::as_str), Some("true"), "{:?}", self.query);
        self.stream()
    }

    /// Expects the question how far the server is, and answers it.
    pub(crate) fn reached(self, version: u64) {
        assert_eq!(self.query.get("limit").map(String::as_str), Some("1"), "{:?}", self.query);
        let metadata = json!({ "resourceVersion": version.to_string() });
        let kind = "PartialObjectMetadataList";
        self.reply(
            200,
            &json!({ "kind": kind, "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "items": [] }),
        );
    }

    /// Expects a watch that goes on from this version.
    pub(crate) fn resumed_at(self, version: u64) -> Stream {
        assert_eq!(self.query.get("resourceVersion"), Some(&version.to_string()), "{:?}", self.query);
        assert_eq!(self.query.get("sendInitialEvents"), None);
        self.stream()
    }
}

impl Stream {
    pub(crate) fn event(&self, kind: &str, object: &Value) {
        let line = json!({ "type": kind, "object": object }).to_string();
        // Go writes the type first, and so must we: the object is read as it comes.
        let line = line.replacen(&format!(r#","type":"{kind}"}}"#), "}", 1);
        let line = line.replacen('{', &format!(r#"{{"type":"{kind}","#), 1) + "\n";
        self.0.unbounded_send(Ok(line.into())).ok();
    }

    pub(crate) fn bookmark(&self, version: u64) {
        self.event("BOOKMARK", &bookmark(version, &json!({})));
    }

    pub(crate) fn list_ends(&self, version: u64) {
        self.event("BOOKMARK", &bookmark(version, &json!({ "k8s.io/initial-events-end": "true" })));
    }

    /// The connection breaks.
    pub(crate) fn breaks(&self) {
        self.0.unbounded_send(Err(std::io::ErrorKind::ConnectionReset.into())).ok();
    }
}

pub(crate) fn status(code: u16, message: &str) -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, "reason": "" })
}

fn bookmark(version: u64, annotations: &Value) -> Value {
    let metadata = json!({ "resourceVersion": version.to_string(), "annotations": annotations });
    json!({ "kind": "Node", "apiVersion": "v1", "metadata": metadata })
}

pub(crate) fn node(name: &str, version: u64, addresses: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": name, "uid": format!("uid-{name}"), "resourceVersion": version.to_string(),
            "annotations": { "reweave.levk.dev/addresses": addresses },
            "managedFields": [{ "manager": "kubelet", "fieldsV1": { "f:status": {} } }],
        },
        "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": name }] },
    })
}

pub(crate) fn service(name: &str, version: u64, wanted: &str, ingress: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "namespace": "default", "name": name, "uid": format!("uid-{name}"), "resourceVersion": version.to_string() },
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "reweave.levk.dev/node-address", "loadBalancerIP": wanted,
            "ports": [{ "port": 80, "protocol": "TCP" }],
        },
        "status": { "loadBalancer": { "ingress": ingress } },
    })
}

pub(crate) fn slice(name: &str, version: u64, service: &str, pods: &[&str]) -> Value {
    let endpoints: Vec<Value> =
        pods.iter().map(|pod| json!({ "addresses": [pod], "conditions": { "ready": true } })).collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "namespace": "default", "name": name, "resourceVersion": version.to_string(),
            "labels": { "kubernetes.io/service-name": service },
        },
        "ports": [{ "name": "", "port": 8080, "protocol": "TCP" }],
        "endpoints": endpoints,
    })
}
