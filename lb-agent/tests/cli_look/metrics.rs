//! `docs/metrics.md` is written from a scrape: every metric, with its help, type and labels.

use crate::datapath::{Datapath, frame};
use lb_agent::api::stats::{Operation, Resource, Stats};
use lb_agent::datapath::pins::Pins;
use lb_agent::datapath::sweep::sweep;
use lb_agent::health::Health;
use lb_agent::metrics;
use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::config::Timeouts;
use lb_common::service::ServiceKey;
use prometheus_client::encoding::text::encode;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A scrape of an agent that has something to say of everything.
fn scrape() -> String {
    let mut datapath = Datapath::filled();
    datapath.receive(&frame(101, 9, Protocol::TCP));
    let key = ServiceKey::new(Ipv4::new([192, 0, 2, 101]), Port::new(80), Protocol::TCP);
    let names = [(key, ("shop".to_owned(), "web".to_owned()))].into();
    let mut health = Health { services: names, synced: Some(Instant::now()), ..Health::default() };
    let swept = sweep(&mut datapath.maps, &Timeouts::DEFAULT, crate::datapath::now()).unwrap();
    health.note_sweep(swept, Duration::from_millis(5));
    let api = Stats::default();
    api.heard(Resource::Services);
    api.failed(Operation::Watch, "403".to_owned());
    let (_publisher, health) = watch::channel(health);
    let registry = metrics::registry(Pins::new(datapath.directory()), health, Some(api));
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    text
}

#[test]
fn the_large_tables_are_as_the_last_sweep_found_them() {
    let text = scrape();
    for line in [
        r#"reweave_lb_table_entries{table="replies"} 2.0"#,
        r#"reweave_lb_table_limit{table="flows"} 64.0"#,
        r#"reweave_lb_table_entries{table="handshakes"} 1.0"#,
        r#"reweave_lb_table_entries{table="endpoints"} 3.0"#,
        r#"reweave_lb_backends{state="active"} 2.0"#,
        r#"reweave_lb_backends{state="draining"} 1.0"#,
        "reweave_lb_sweeps_total 1",
        "reweave_lb_sweep_duration_seconds 0.005",
        r#"reweave_lb_swept_entries_total{table="flows"} 0"#,
        r#"reweave_lb_swept_entries_total{table="masquerades"} 0"#,
        r#"reweave_lb_table_entries{table="masquerades"} 0.0"#,
        r#"reweave_lb_table_limit{table="masquerades"} 262144.0"#,
        r#"reweave_lb_api_errors_total{operation="watch",code="403"} 1"#,
    ] {
        assert!(text.lines().any(|found| found == line), "no line {line:?} in\n{text}");
    }
}

/// No address or port of a client is the value of a label: their number has no limit.
#[test]
fn no_label_tells_clients_apart() {
    let text = scrape();
    assert!(!text.contains("198.51.100."), "{text}");
}

#[test]
fn the_document_has_every_metric() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let document = document(&scrape());
    if std::env::var_os("LB_UPDATE_DUMPS").is_some() {
        std::fs::write(&path, &document).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == document,
        "docs/metrics.md is not as the code says; LB_UPDATE_DUMPS=1 cargo test -p lb-agent --test cli_look writes it anew"
    );
}

fn document(scrape: &str) -> String {
    let mut text = "# Metrics\n\n\
        <!-- Written by `LB_UPDATE_DUMPS=1 cargo test -p lb-agent --test cli_look`. Do not edit. -->\n\n\
        `lb-agent run` answers on `/metrics` (`--listen`), in the OpenMetrics format. Counters of packets live in the maps: \
        they go on counting while no agent runs, and an agent's restart does not reset them. Labels have values from closed \
        lists, or names of Services; none tells clients apart. A scrape does not read the tables of connections: their figures \
        are those of the last sweep, at most `--period` old. Ages and what a table holds are left out until they are known.\n\n\
        The values of `reason` and `kind` are in [reasons.md](reasons.md).\n\n\
        | metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"
        .to_owned();
    let words = |line: &'_ str, mark: &str| {
        line.strip_prefix(mark)?.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()))
    };
    let helps = scrape.lines().filter_map(|line| words(line, "# HELP "));
    let types = scrape.lines().filter_map(|line| words(line, "# TYPE "));
    for (name, kind) in types {
        let (_, help) = helps.clone().find(|(other, _)| *other == name).unwrap();
        let name = if kind == "counter" { name + "_total" } else { name };
        let samples = scrape.lines().filter(|line| line.split(['{', ' ']).next() == Some(&name));
        let labels: BTreeSet<&str> = samples.clone().flat_map(labels).collect();
        assert!(samples.count() > 0, "{name} has no sample here, so its labels are not known");
        let labels: Vec<String> = labels.into_iter().map(|label| format!("`{label}`")).collect();
        writeln!(text, "| `{name}` | {kind} | {} | {help} |", labels.join(", ")).unwrap();
    }
    text
}

/// The names of a sample's labels.
fn labels(line: &str) -> impl Iterator<Item = &str> {
    let inside =
        line.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(inside, _)| inside);
    inside.split(',').filter_map(|label| Some(label.split_once('=')?.0))
}
