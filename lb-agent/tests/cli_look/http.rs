//! Probes and metrics over real HTTP.

use crate::datapath::Datapath;
use lb_agent::datapath::pins::Pins;
use lb_agent::health::Health;
use lb_agent::{http, metrics};
use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::service::ServiceKey;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::sync::watch;

/// Status code and body.
async fn get(server: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(server).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Serves what is told of the datapath below `directory`, and asks for `paths`.
fn ask<const N: usize>(directory: &Path, health: Health, paths: [&str; N]) -> [(u16, String); N] {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (_publisher, health) = watch::channel(health);
        let registry = metrics::registry(Pins::new(directory), health.clone(), None);
        let server = http::serve("127.0.0.1:0".parse().unwrap(), registry, health).await.unwrap();
        let mut answers = Vec::new();
        for path in paths {
            answers.push(get(server, path).await);
        }
        answers.try_into().unwrap()
    })
}

#[test]
fn probes_tell_the_truth() {
    let nowhere = Path::new("/nonexistent");
    let starting = Health::default();
    let [alive, ready] = ask(nowhere, starting, ["/healthz", "/readyz"]);
    assert_eq!((alive.0, ready.0), (200, 503));
    assert!(ready.1.contains("first pass"), "{}", ready.1);

    let broken = Health { problems: vec!["no bridge".to_owned()], ..Health::default() };
    let [ready] = ask(nowhere, broken, ["/readyz"]);
    assert_eq!(ready, (503, "no bridge\n".to_owned()));

    let good = Health { is_ready: true, ..Health::default() };
    let [ready, elsewhere] = ask(nowhere, good, ["/readyz", "/elsewhere"]);
    assert_eq!((ready.0, elsewhere.0), (200, 404));

    let long_ago = Instant::now().checked_sub(Duration::from_secs(121)).unwrap();
    let [alive] = ask(nowhere, Health { alive: Some(long_ago), ..Health::default() }, ["/healthz"]);
    assert_eq!(alive.0, 503);
}

#[test]
fn metrics_are_those_of_the_maps() {
    let mut datapath = Datapath::filled();
    datapath.receive(&crate::datapath::frame(101, 9, Protocol::TCP));
    let key = ServiceKey::new(Ipv4::new([192, 0, 2, 101]), Port::new(80), Protocol::TCP);
    let names = [(key, ("shop".to_owned(), "web".to_owned()))].into();
    let health = Health { services: names, is_ready: true, failures: 3, ..Health::default() };
    let [(status, text)] = ask(datapath.directory(), health, ["/metrics"]);
    assert_eq!(status, 200);
    let web = r#"{namespace="shop",service="web",address="192.0.2.101",port="80",protocol="TCP"}"#;
    for line in [
        "reweave_lb_ready 1.0",
        "reweave_lb_sync_failures_total 3",
        r#"reweave_lb_packets_total{reason="pass_foreign",kind="pass"} 1"#,
        &format!("reweave_lb_service_connections_total{web} 0"),
        r#"reweave_lb_table_entries{table="services"} 3.0"#,
        r#"reweave_lb_table_limit{table="services"} 16.0"#,
    ] {
        assert!(text.lines().any(|found| found == line), "no line {line:?} in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
}

/// Without a datapath there is still something to tell.
#[test]
fn metrics_of_an_agent_whose_maps_are_not_there() {
    let [(status, text)] = ask(Path::new("/nonexistent"), Health::default(), ["/metrics"]);
    assert_eq!(status, 200);
    assert!(text.contains("reweave_lb_ready 0.0\n") && !text.contains("reweave_lb_packets"), "{text}");
}

/// The chart's dashboard and alerts ask for nothing that is not there.
#[test]
fn what_the_chart_asks_for_is_among_the_metrics() {
    let mut datapath = Datapath::filled();
    datapath.receive(&crate::datapath::frame(101, 9, Protocol::TCP));
    let mut health = Health { synced: Some(Instant::now()), ..Health::default() };
    health.swept.flows = [("established", 1)].into();
    let [(_, text)] = ask(datapath.directory(), health, ["/metrics"]);
    let names: BTreeSet<&str> = text.lines().filter_map(|line| line.split(['{', ' ']).next()).collect();
    for file in ["dashboard.json", "rules.yaml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/reweave-lb").join(file);
        let chart = std::fs::read_to_string(path).unwrap();
        let words = chart.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let asked: BTreeSet<&str> = words.filter(|word| word.starts_with("reweave_lb_")).collect();
        assert!(asked.len() > 3, "{file} asks for {asked:?} only");
        let missing: Vec<_> = asked.difference(&names).collect();
        assert!(missing.is_empty(), "{file} asks for {missing:?}, which are not in\n{text}");
    }
}
