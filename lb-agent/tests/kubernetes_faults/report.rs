//! Writing: only what is ours, only where the decision still holds, and never in a loop.

use crate::api::{Api, Call, OBJECTS, service, status};
use lb_agent::api::stats::{Operation, Stats};
use lb_agent::model::ServiceName;
use lb_agent::report::kubernetes::Reporter;
use lb_agent::report::kubernetes::events::About;
use lb_agent::source::kubernetes::{OwnNode, Seen};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const A_WHILE: Duration = Duration::from_millis(200);

fn web() -> ServiceName {
    ServiceName { namespace: "default".to_owned(), name: "web".to_owned() }
}

fn show(reporter: &Reporter, version: &str, address: Option<Ipv4Addr>) {
    let seen = Seen { uid: "uid-web".to_owned(), version: version.to_owned() };
    reporter.show([(&web(), &seen, address)].into_iter());
}

fn start(api: &Api) -> (Reporter, Stats) {
    let stats = Stats::default();
    (Reporter::start(api.client.clone(), "a", stats.clone()), stats)
}

/// Expects a write of the status of `default/web`, and answers with its patch.
async fn next_status(api: &mut Api) -> (Call, Value) {
    let call = api.next(OBJECTS).await;
    assert_eq!(
        (call.method.as_str(), call.path.as_str()),
        ("PATCH", "/api/v1/namespaces/default/services/web/status")
    );
    let patch = call.body.clone();
    (call, patch)
}

#[tokio::test]
async fn a_status_is_written_for_the_version_that_it_was_decided_from() {
    let mut api = Api::start().await;
    let (reporter, stats) = start(&api);
    show(&reporter, "3", Some(ADDRESS));
    let (call, patch) = next_status(&mut api).await;
    let ingress = json!([{ "ip": "192.0.2.1", "ipMode": "Proxy" }]);
    assert_eq!(patch["metadata"], json!({ "resourceVersion": "3" }));
    assert_eq!(patch["status"], json!({ "loadBalancer": { "ingress": ingress } }));
    call.refuse(409, "the object has been modified");
    api.quiet(OBJECTS, A_WHILE).await;
    assert_eq!(reporter.problems(), [""; 0]);
    show(&reporter, "4", Some(ADDRESS));
    let (call, patch) = next_status(&mut api).await;
    assert_eq!(patch["metadata"]["resourceVersion"], "4");
    call.reply(200, &service("web", 5, "192.0.2.1", &ingress));
    api.quiet(OBJECTS, A_WHILE).await;
    show(&reporter, "5", None);
    let (call, patch) = next_status(&mut api).await;
    assert_eq!(patch["status"], json!({ "loadBalancer": { "ingress": null } }));
    call.reply(200, &service("web", 6, "192.0.2.1", &json!(null)));
    assert_eq!(stats.snapshot().errors, BTreeMap::new(), "a conflict is no error");
}

#[tokio::test]
async fn a_server_that_drops_ip_mode_is_told_of_and_not_written_to_in_a_loop() {
    let mut api = Api::start().await;
    let (reporter, _) = start(&api);
    show(&reporter, "3", Some(ADDRESS));
    let (call, _) = next_status(&mut api).await;
    call.reply(200, &service("web", 4, "192.0.2.1", &json!([{ "ip": "192.0.2.1" }])));
    while reporter.corrects_ip_mode() {
        tokio::task::yield_now().await;
    }
    let told = reporter.problems();
    assert!(told.len() == 1 && told[0].starts_with("node a: the API server drops ipMode"), "{told:?}");
    // It was upgraded meanwhile.
    show(&reporter, "9", None);
    next_status(&mut api).await.0.reply(200, &service("web", 10, "192.0.2.1", &json!(null)));
    show(&reporter, "10", Some(ADDRESS));
    let ingress = json!([{ "ip": "192.0.2.1", "ipMode": "Proxy" }]);
    next_status(&mut api).await.0.reply(200, &service("web", 11, "192.0.2.1", &ingress));
    while !reporter.corrects_ip_mode() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_write_that_fails_is_told_and_tried_again() {
    let mut api = Api::start().await;
    let (reporter, stats) = start(&api);
    show(&reporter, "3", Some(ADDRESS));
    next_status(&mut api)
        .await
        .0
        .refuse(403, r#"services "web" is forbidden: cannot patch resource "services/status""#);
    let (call, _) = next_status(&mut api).await;
    let told = reporter.problems();
    assert!(
        told[0].starts_with("default/web: cannot write its status: ") && told[0].contains("services/status"),
        "{told:?}"
    );
    assert_eq!(stats.snapshot().errors, BTreeMap::from([((Operation::Status, "403".to_owned()), 1)]));
    let ingress = json!([{ "ip": "192.0.2.1", "ipMode": "Proxy" }]);
    call.reply(200, &service("web", 4, "192.0.2.1", &ingress));
    while !reporter.problems().is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_object_that_hangs_does_not_hold_up_another() {
    let mut api = Api::start().await;
    let (reporter, _) = start(&api);
    show(&reporter, "3", Some(ADDRESS));
    let (_hangs, _) = next_status(&mut api).await;
    reporter.annotate(&OwnNode { uid: "uid-a".to_owned(), ..OwnNode::default() }, "192.0.2.1", "");
    assert_eq!(api.next(OBJECTS).await.path, "/api/v1/nodes/a");
}

#[tokio::test]
async fn annotations_are_applied_when_they_differ_and_never_make_a_node() {
    let mut api = Api::start().await;
    let (reporter, _) = start(&api);
    let overlay = "10.32.0.1,fe:00:00:00:00:01";
    let shown = |addresses: &str, weave: &str| OwnNode {
        uid: "uid-a".to_owned(),
        addresses: addresses.to_owned(),
        weave: weave.to_owned(),
        internal: Vec::new(),
    };
    reporter.annotate(&shown("192.0.2.1", overlay), "192.0.2.1", overlay);
    api.quiet(OBJECTS, A_WHILE).await;
    reporter.annotate(&shown("192.0.2.1", ""), "192.0.2.1", overlay);
    let call = api.next(OBJECTS).await;
    assert_eq!((call.method.as_str(), call.path.as_str()), ("PATCH", "/api/v1/nodes/a"));
    assert_eq!(call.query["fieldManager"], "reweave-lb-agent");
    assert_eq!(call.query["force"], "true");
    // With the uid, the server refuses to make a Node that is not there.
    let annotations = json!({ "reweave.levk.dev/addresses": "192.0.2.1", "reweave.levk.dev/weave": overlay });
    assert_eq!(call.body["metadata"], json!({ "name": "a", "uid": "uid-a", "annotations": annotations }));
    let metadata = json!({ "name": "a" });
    call.reply(
        200,
        &json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata }),
    );
}

#[tokio::test]
async fn an_event_that_is_there_is_counted_up_and_not_written_twice() {
    let mut api = Api::start().await;
    let (mut reporter, _) = start(&api);
    let problem = BTreeMap::from([(
        (About::Service(web()), "no node holds 192.0.2.1".to_owned()),
        "uid-web".to_owned(),
    )]);
    reporter.say(problem.clone());
    let call = api.next(OBJECTS).await;
    assert_eq!(
        (call.method.as_str(), call.path.as_str()),
        ("POST", "/apis/events.k8s.io/v1/namespaces/default/events")
    );
    let event = call.body.clone();
    let name = event["metadata"]["name"].as_str().unwrap().to_owned();
    assert!(name.starts_with("web."), "{name}");
    assert_eq!((&event["type"], &event["note"]), (&json!("Warning"), &json!("no node holds 192.0.2.1")));
    assert_eq!(
        (&event["regarding"]["kind"], &event["regarding"]["uid"]),
        (&json!("Service"), &json!("uid-web"))
    );
    assert_eq!(event["reportingInstance"], "a");
    // An agent before this one has said it.
    call.reply(409, &{
        let mut exists = status(409, "already exists");
        exists["reason"] = json!("AlreadyExists");
        exists
    });
    let call = api.next(OBJECTS).await;
    assert_eq!((call.method.as_str(), call.path.ends_with(&name)), ("GET", true));
    let mut there = event.clone();
    there["series"] = json!({ "count": 3, "lastObservedTime": "2026-01-01T00:00:00.000000Z" });
    call.reply(200, &there);
    let call = api.next(OBJECTS).await;
    assert_eq!((call.method.as_str(), &call.body["series"]["count"]), ("PATCH", &json!(4)));
    call.reply(200, &there);
    reporter.say(problem);
    api.quiet(OBJECTS, A_WHILE).await;
    reporter.say(BTreeMap::new());
    let call = api.next(OBJECTS).await;
    assert_eq!(
        (&call.body["type"], &call.body["reason"]),
        (&json!("Normal"), &json!("LoadBalancerProblemOver"))
    );
    assert_ne!(call.body["metadata"]["name"], json!(name));
}
