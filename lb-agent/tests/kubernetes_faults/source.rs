//! Reading: what the agent knows stays in force whatever the API does, and is right again after it.

use crate::api::{Api, NODES, SERVICES, SLICES, SOON, Stream, node, service, slice, status};
use lb_agent::api::stats::{Operation, Resource, Stats};
use lb_agent::model::ServiceName;
use lb_agent::source::kubernetes::{Kubernetes, Timing};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// For tests of silence itself; others answer when they come to it.
const SILENCE: Duration = Duration::from_millis(400);
const PATIENT: Duration = Duration::from_secs(60);

fn watch(api: &Api, silence: Duration) -> (Kubernetes, Stats) {
    let timing =
        Timing { silence, retry_first: Duration::from_millis(10), retry_most: Duration::from_millis(50) };
    let stats = Stats::default();
    (Kubernetes::start(&api.client, "a", timing, &stats), stats)
}

/// A source that has seen a node, a Service and a slice, and the streams of the watches.
async fn mk_world(api: &mut Api, silence: Duration) -> (Kubernetes, Stats, [Stream; 3]) {
    let (mut source, stats) = watch(api, silence);
    let streams = [
        api.list(NODES, 10, &[node("a", 1, "192.0.2.1"), node("b", 2, "192.0.2.2")]).await,
        api.list(SERVICES, 10, &[service("web", 3, "192.0.2.1", &json!(null))]).await,
        api.list(SLICES, 10, &[slice("web-1", 4, "web", &["10.0.0.1"])]).await,
    ];
    until(&mut source, |source| source.store().is_some()).await;
    (source, stats, streams)
}

/// Takes changes until the condition holds.
async fn until(source: &mut Kubernetes, mut condition: impl FnMut(&mut Kubernetes) -> bool) {
    let deadline = Instant::now() + SOON;
    while !condition(source) {
        let left = deadline.saturating_duration_since(Instant::now());
        if timeout(left, source.changed()).await.is_err() {
            panic!("nothing changed any more: {:?}, {:?}", source.problems(), nodes(source));
        }
    }
}

fn nodes(source: &mut Kubernetes) -> Vec<String> {
    source.store().map_or_else(Vec::new, |store| store.nodes().map(|node| node.name.clone()).collect())
}

fn wanted(source: &mut Kubernetes, name: &str) -> Option<String> {
    let name = ServiceName { namespace: "default".to_owned(), name: name.to_owned() };
    source.store()?.service(&name).map(|service| service.wanted.clone())
}

#[tokio::test]
async fn nothing_is_known_before_every_list_is_complete() {
    let mut api = Api::start().await;
    let (mut source, _) = watch(&api, PATIENT);
    let _nodes = api.list(NODES, 10, &[node("a", 1, "192.0.2.1")]).await;
    let _services = api.list(SERVICES, 10, &[service("web", 3, "192.0.2.1", &json!(null))]).await;
    let slices = api.next(SLICES).await.streamed_list();
    slices.event("ADDED", &slice("web-1", 4, "web", &["10.0.0.1"]));
    until(&mut source, |source| source.problems() == ["the first list of endpointslices is not complete"])
        .await;
    assert!(source.store().is_none());
    slices.list_ends(10);
    until(&mut source, |source| source.store().is_some()).await;
    assert_eq!(source.problems(), [""; 0]);
    let store = source.store().unwrap();
    let web = ServiceName { namespace: "default".to_owned(), name: "web".to_owned() };
    assert_eq!((store.nodes().count(), store.slices(&web).len()), (1, 1));
    let own = source.own_node().unwrap();
    assert_eq!((own.uid.as_str(), own.addresses.as_str(), own.internal.len()), ("uid-a", "192.0.2.1", 1));
    assert_eq!(source.seen(&web).unwrap().version, "3");
}

#[tokio::test]
async fn a_watch_goes_on_where_it_ended_without_a_list() {
    let mut api = Api::start().await;
    let (mut source, _, [nodes_stream, ..]) = mk_world(&mut api, PATIENT).await;
    nodes_stream.event("MODIFIED", &node("a", 11, "192.0.2.7"));
    nodes_stream.bookmark(15);
    until(&mut source, |source| source.own_node().unwrap().addresses == "192.0.2.7").await;
    drop(nodes_stream);
    let again = api.resume(NODES, 15).await;
    again.event("DELETED", &node("b", 16, ""));
    until(&mut source, |source| nodes(source) == ["a"]).await;
    again.breaks();
    let again = api.resume(NODES, 16).await;
    again.event("DELETED", &node("a", 17, ""));
    until(&mut source, |source| source.own_node().is_none()).await;
}

#[tokio::test]
async fn a_version_that_is_gone_is_listed_anew_and_what_is_absent_is_gone() {
    let mut api = Api::start().await;
    let (mut source, _, [nodes_stream, services, slices]) = mk_world(&mut api, PATIENT).await;
    nodes_stream.event("ERROR", &status(410, "too old resource version"));
    let again = api.next(NODES).await.streamed_list();
    again.event("ADDED", &node("b", 20, "192.0.2.2"));
    assert_eq!(nodes(&mut source), ["a", "b"], "the last good state until the list is complete");
    again.list_ends(21);
    until(&mut source, |source| nodes(source) == ["b"]).await;
    assert!(source.own_node().is_none());
    // As an answer to the request, too.
    drop(services);
    api.next(SERVICES).await.reached(30);
    api.next(SERVICES).await.refuse(410, "too old resource version");
    let _services = api.list(SERVICES, 22, &[]).await;
    until(&mut source, |source| wanted(source, "web").is_none()).await;
    slices.event("ERROR", &status(410, "too old resource version"));
    let _slices = api.list(SLICES, 23, &[]).await;
    let web = ServiceName { namespace: "default".to_owned(), name: "web".to_owned() };
    until(&mut source, |source| source.store().unwrap().slices(&web).is_empty()).await;
    assert_eq!(source.problems(), [""; 0], "none of it is a problem");
}

#[tokio::test]
async fn a_version_that_the_server_has_not_reached_is_listed_anew() {
    let mut api = Api::start().await;
    let (mut source, _, [nodes_stream, ..]) = mk_world(&mut api, PATIENT).await;
    drop(nodes_stream);
    // A restored etcd: its past is another than the one we have seen. A watch from 10 would tell of nothing.
    api.next(NODES).await.reached(5);
    let again = api.next(NODES).await.streamed_list();
    again.event("ADDED", &node("a", 3, "192.0.2.9"));
    again.list_ends(5);
    until(&mut source, |source| nodes(source) == ["a"]).await;
    assert_eq!(source.own_node().unwrap().addresses, "192.0.2.9");
}

#[tokio::test]
async fn a_server_without_streamed_lists_is_asked_for_pages() {
    let mut api = Api::start().await;
    let (mut source, _) = watch(&api, PATIENT);
    let _nodes = api.list(NODES, 10, &[]).await;
    let _slices = api.list(SLICES, 10, &[]).await;
    api.next(SERVICES).await.refuse(422, "sendInitialEvents is forbidden for watch");
    let page = |name: &str, token: &str| {
        let metadata = json!({ "resourceVersion": "12", "continue": token });
        let items = [service(name, 3, "192.0.2.1", &json!(null))];
        json!({ "kind": "ServiceList", "apiVersion": "v1", "metadata": metadata, "items": items })
    };
    let first = api.next(SERVICES).await;
    assert_eq!((first.query.get("watch"), first.query.get("limit").map(String::as_str)), (None, Some("100")));
    first.reply(200, &page("web", "next"));
    let second = api.next(SERVICES).await;
    assert_eq!(second.query.get("continue").map(String::as_str), Some("next"));
    assert!(source.store().is_none());
    second.reply(200, &page("dns", ""));
    let services = api.next(SERVICES).await.resumed_at(12);
    services.event("DELETED", &service("dns", 13, "", &json!(null)));
    until(&mut source, |source| wanted(source, "web").is_some() && wanted(source, "dns").is_none()).await;
    assert_eq!(source.problems(), [""; 0]);
}

#[tokio::test]
async fn a_server_that_never_ends_a_streamed_list_is_asked_for_pages() {
    let mut api = Api::start().await;
    let (_source, _) = watch(&api, SILENCE);
    let _open = api.next(NODES).await.streamed_list();
    let pages = api.next(NODES).await;
    assert_eq!(pages.query.get("watch"), None);
}

#[tokio::test]
async fn a_watch_that_is_silent_is_begun_again_and_one_with_bookmarks_is_not() {
    let mut api = Api::start().await;
    let (mut source, stats, [_half_open, services, _slices]) = mk_world(&mut api, SILENCE).await;
    let heard = |resource| stats.snapshot().contact[&resource];
    let begun = heard(Resource::Services);
    // Half open: no end and no error, and nothing comes. Bookmarks keep the other alive.
    let alive = async {
        for version in 11..19 {
            services.bookmark(version);
            tokio::time::sleep(SILENCE / 4).await;
        }
    };
    let begin_again = async {
        let again = api.resume(NODES, 10).await;
        again.event("MODIFIED", &node("a", 11, "192.0.2.7"));
        again
    };
    let (_again, ()) = tokio::join!(begin_again, alive);
    api.quiet(SERVICES, Duration::from_millis(1)).await;
    assert!(heard(Resource::Services) > begun + SILENCE);
    assert!(stats.snapshot().errors[&(Operation::Watch, "none".to_owned())] > 0);
    until(&mut source, |source| source.own_node().unwrap().addresses == "192.0.2.7").await;
}

#[tokio::test]
async fn an_outage_is_told_with_its_beginning_and_changes_nothing() {
    let mut api = Api::start().await;
    let (mut source, stats, [nodes_stream, ..]) = mk_world(&mut api, PATIENT).await;
    drop(nodes_stream);
    api.next(NODES).await.refuse(503, "etcd is away");
    until(&mut source, |source| !source.problems().is_empty()).await;
    let told = source.problems();
    assert!(
        told[0].contains("cannot list nodes: the API server says 503: etcd is away; since 20")
            && told[0].contains("last good state stays in force"),
        "{told:?}"
    );
    for _ in 0..3 {
        api.next(NODES).await.refuse(503, "etcd is away");
    }
    assert_eq!(nodes(&mut source), ["a", "b"]);
    // The reason may change, the beginning of the outage not.
    api.next(NODES).await.refuse(500, "something else");
    until(&mut source, |source| source.problems()[0].contains("something else")).await;
    assert_eq!(since(&source.problems()[0]), since(&told[0]));
    let _again = api.list(NODES, 20, &[node("a", 1, "192.0.2.1")]).await;
    until(&mut source, |source| source.problems().is_empty()).await;
    assert_eq!(nodes(&mut source), ["a"]);
    let errors = stats.snapshot().errors;
    let of = |operation, code: &str| errors[&(operation, code.to_owned())];
    assert_eq!(
        (of(Operation::List, "503"), of(Operation::Watch, "503"), of(Operation::Watch, "500")),
        (1, 3, 1)
    );
}

fn since(problem: &str) -> &str {
    problem.split("since ").nth(1).unwrap().split(',').next().unwrap()
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_given_up_and_asked_again() {
    let mut api = Api::start().await;
    let (mut source, _) = watch(&api, SILENCE);
    drop(api.next(NODES).await);
    until(&mut source, |source| source.problems().concat().contains("cannot watch nodes: no answer within"))
        .await;
    let _nodes = api.list(NODES, 10, &[]).await;
    until(&mut source, |source| !source.problems().concat().contains("cannot watch nodes")).await;
}

#[tokio::test]
async fn what_the_agent_may_not_read_is_named() {
    let mut api = Api::start().await;
    let (mut source, _) = watch(&api, PATIENT);
    let message =
        r#"endpointslices.discovery.k8s.io is forbidden: User "x" cannot watch resource "endpointslices""#;
    api.next(SLICES).await.refuse(403, message);
    until(&mut source, |source| source.problems().concat().contains("cannot watch resource")).await;
    api.next(NODES).await.refuse(401, "Unauthorized");
    until(&mut source, |source| source.problems().concat().contains("token has expired")).await;
}

#[tokio::test]
async fn an_object_that_cannot_be_read_is_named_and_the_others_go_on() {
    let mut api = Api::start().await;
    let (mut source, _, [_, services, _slices]) = mk_world(&mut api, PATIENT).await;
    let mut broken = service("web", 11, "192.0.2.7", &json!(null));
    broken["spec"]["ports"] = Value::from("none");
    services.event("MODIFIED", &broken);
    services.event("ADDED", &service("dns", 12, "192.0.2.2", &json!(null)));
    until(&mut source, |source| wanted(source, "dns").is_some()).await;
    assert_eq!(wanted(&mut source, "web").as_deref(), Some("192.0.2.1"), "its last good state");
    let told = source.problems();
    assert!(told.len() == 1 && told[0].starts_with("Service default/web cannot be read"), "{told:?}");
    services.event("MODIFIED", &service("web", 13, "192.0.2.7", &json!(null)));
    until(&mut source, |source| source.problems().is_empty()).await;
    assert_eq!(wanted(&mut source, "web").as_deref(), Some("192.0.2.7"));
}

#[tokio::test]
async fn what_does_not_count_wakes_nobody() {
    let mut api = Api::start().await;
    let (mut source, _, [nodes_stream, _, slices]) = mk_world(&mut api, PATIENT).await;
    while timeout(SILENCE / 8, source.changed()).await.is_ok() {}
    source.store().unwrap().take_changes();
    // Heartbeats.
    for version in 11..15 {
        nodes_stream.event("MODIFIED", &node("b", version, "192.0.2.2"));
        nodes_stream.event("MODIFIED", &node("a", version, "192.0.2.1"));
        slices.event("MODIFIED", &slice("web-1", version, "web", &["10.0.0.1"]));
    }
    assert!(timeout(SILENCE / 4, source.changed()).await.is_err());
    slices.event("MODIFIED", &slice("web-1", 16, "web", &["10.0.0.2"]));
    timeout(SOON, source.changed()).await.unwrap();
}
