//! Metrics for Prometheus: read from the maps and the loop's [`Health`] at each scrape, so that nothing is counted twice.

use crate::api::stats::{Snapshot, Stats};
use crate::datapath::maps::{Maps, MapsError};
use crate::datapath::pins::Pins;
use crate::health::{Health, Subscriber, Sweeps};
use lb_common::backend::BackendState;
use lb_common::service::ServiceStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use std::time::Instant;

/// The registry of one agent; `api` where it talks to one.
pub fn registry(pins: Pins, health: Subscriber, api: Option<Stats>) -> Registry {
    let mut registry = Registry::with_prefix("reweave_lb");
    registry.register_collector(Box::new(Exporter { pins, health, api }));
    registry
}

#[derive(Debug)]
struct Exporter {
    pins: Pins,
    health: Subscriber,
    api: Option<Stats>,
}

impl Collector for Exporter {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let health = self.health.borrow().clone();
        agent(&mut encoder, &health)?;
        if let Some(api) = &self.api {
            talk(&mut encoder, &api.snapshot())?;
        }
        match Scrape::read(&self.pins, &health) {
            Ok(scrape) => scrape.encode(&mut encoder),
            Err(error) => {
                tracing::warn!("metrics: {error}");
                Ok(())
            }
        }
    }
}

/// Labels of one sample.
type Labels<const N: usize> = [(&'static str, String); N];

/// Metrics of the agent itself.
fn agent(encoder: &mut DescriptorEncoder<'_>, health: &Health) -> fmt::Result {
    let seconds = |since: Instant| since.elapsed().as_secs_f64();
    let info = [("version", env!("CARGO_PKG_VERSION").to_owned())];
    gauges(encoder, "build_info", "The agent's version", None, [(info, 1.0)])?;
    gauge(encoder, "ready", "Whether the node is as wanted", None, f64::from(u8::from(health.is_ready)))?;
    gauge(
        encoder,
        "problems",
        "Problems that an operator should hear about: see the log",
        None,
        count(health.problems.len()),
    )?;
    if let Some(synced) = health.synced {
        gauge(
            encoder,
            "sync_age",
            "Time since the node was last found as wanted",
            Some(&Unit::Seconds),
            seconds(synced),
        )?;
    }
    gauge(
        encoder,
        "sync_duration",
        "How long that pass took",
        Some(&Unit::Seconds),
        health.duration.as_secs_f64(),
    )?;
    single(encoder, ("sync_failures", "Passes that failed", None), &ConstCounter::new(health.failures))?;
    swept(encoder, health)
}

/// What the sweeps of the flow tables found: a scrape does not read a million entries.
fn swept(encoder: &mut DescriptorEncoder<'_>, health: &Health) -> fmt::Result {
    let Sweeps { number, duration, removed_flows, removed_replies, removed_masquerades } = health.sweeps;
    single(encoder, ("sweeps", "Sweeps of the flow tables", None), &ConstCounter::new(number))?;
    gauge(
        encoder,
        "sweep_duration",
        "How long the last sweep took",
        Some(&Unit::Seconds),
        duration.as_secs_f64(),
    )?;
    counters(
        encoder,
        "swept_entries",
        "Entries that sweeps removed, of connections that were over, by table",
        None,
        [("flows", removed_flows), ("replies", removed_replies), ("masquerades", removed_masquerades)]
            .map(|(table, removed)| ([("table", table.to_owned())], removed)),
    )?;
    let states =
        health.swept.flows.iter().map(|(state, flows)| ([("state", (*state).to_owned())], *flows as f64));
    gauges(
        encoder,
        "flows",
        "Established connections of this node's addresses at the last sweep, by state",
        None,
        states,
    )?;
    let marked = health.swept.marked as f64;
    gauge(
        encoder,
        "forwarded_flows",
        "Connections that other holders forward to pods here, at the last sweep",
        None,
        marked,
    )
}

/// How the agent gets on with the Kubernetes API.
fn talk(encoder: &mut DescriptorEncoder<'_>, api: &Snapshot) -> fmt::Result {
    let Snapshot { contact, errors } = api;
    let ages = contact
        .iter()
        .map(|(resource, at)| ([("resource", resource.name().to_owned())], at.elapsed().as_secs_f64()));
    gauges(
        encoder,
        "api_contact_age",
        "Time since the API server last sent anything about these objects",
        Some(&Unit::Seconds),
        ages,
    )?;
    let errors = errors.iter().map(|((operation, code), errors)| {
        ([("operation", operation.label().to_owned()), ("code", code.clone())], *errors)
    });
    counters(
        encoder,
        "api_errors",
        "Requests to the API server that failed, by HTTP status; none where no answer came",
        None,
        errors,
    )
}

/// What the maps hold at one moment.
struct Scrape {
    backends: [(Labels<1>, f64); 2],
    outcomes: Vec<(Labels<2>, u64, u64)>,
    services: Vec<(Labels<5>, ServiceStats)>,
    fill: Vec<(Labels<1>, f64, f64)>,
}

impl Scrape {
    fn read(pins: &Pins, health: &Health) -> Result<Self, MapsError> {
        let maps = Maps::open(pins)?;
        let outcomes = maps.outcomes()?.into_iter().map(|(reason, outcome)| {
            let labels = [("reason", reason.label().to_owned()), ("kind", reason.kind().name().to_owned())];
            (labels, outcome.packets, outcome.bytes)
        });
        let mut services = Vec::new();
        for (key, service) in maps.services.all()? {
            // A port that a former agent served has no name until the first pass.
            let (namespace, name) = health.services.get(&key).cloned().unwrap_or_default();
            let labels = [
                ("namespace", namespace),
                ("service", name),
                ("address", std::net::Ipv4Addr::from(key.address).to_string()),
                ("port", key.port.number().to_string()),
                ("protocol", key.protocol.name().to_owned()),
            ];
            services.push((labels, maps.service_stats(service.id)?));
        }
        let slots = maps.backends()?;
        let in_state = |state| count(slots.iter().filter(|backend| backend.state() == state).count());
        let (active, draining) = (in_state(BackendState::Active), in_state(BackendState::Draining));
        Ok(Self {
            backends: [("active", active), ("draining", draining)]
                .map(|(state, backends)| ([("state", state.to_owned())], backends)),
            outcomes: outcomes.collect(),
            services,
            fill: fill(&maps, active + draining, health)?,
        })
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let outcomes = || self.outcomes.iter();
        counters(
            encoder,
            "packets",
            "Packets that the programs ended, by reason",
            None,
            outcomes().map(|(l, n, _)| (l.clone(), *n)),
        )?;
        counters(
            encoder,
            "packet",
            "Their bytes",
            Some(&Unit::Bytes),
            outcomes().map(|(l, _, n)| (l.clone(), *n)),
        )?;
        let stats = |value: fn(&ServiceStats) -> u64| {
            self.services.iter().map(move |(labels, stats)| (labels.clone(), value(stats)))
        };
        counters(
            encoder,
            "service_received_packets",
            "Packets of clients forwarded to backends",
            None,
            stats(|s| s.packets_in),
        )?;
        counters(
            encoder,
            "service_received",
            "Their bytes, from the IP header on",
            Some(&Unit::Bytes),
            stats(|s| s.bytes_in),
        )?;
        counters(
            encoder,
            "service_sent_packets",
            "Packets of backends translated for clients",
            None,
            stats(|s| s.packets_out),
        )?;
        counters(
            encoder,
            "service_sent",
            "Their bytes, from the IP header on",
            Some(&Unit::Bytes),
            stats(|s| s.bytes_out),
        )?;
        counters(
            encoder,
            "service_connections",
            "Connections that were established",
            None,
            stats(|s| s.connections),
        )?;
        counters(
            encoder,
            "service_refused_packets",
            "Packets refused or dropped",
            None,
            stats(|s| s.refused),
        )?;
        gauges(encoder, "backends", "Endpoints of the served ports, by state", None, self.backends.clone())?;
        let fill = || self.fill.iter();
        gauges(
            encoder,
            "table_entries",
            "Entries in a table",
            None,
            fill().map(|(l, entries, _)| (l.clone(), *entries)),
        )?;
        gauges(
            encoder,
            "table_limit",
            "Entries that fit",
            None,
            fill().map(|(l, _, limit)| (l.clone(), *limit)),
        )
    }
}

/// Entries and limit of each table. The small tables are counted now, the large ones were by the last sweep; those are
/// left out before the first one.
fn fill(maps: &Maps, backends: f64, health: &Health) -> Result<Vec<(Labels<1>, f64, f64)>, MapsError> {
    let counted = [
        ("interfaces", count(maps.interfaces.all()?.len()), maps.interfaces.max_entries()),
        ("services", count(maps.services.list()?.len()), maps.services.max_entries()?),
        // Slot 0 is never used.
        ("backends", backends, maps.backend_slots()?.saturating_sub(1)),
        ("holders", count(maps.holders.list()?.len()), maps.holders.max_entries()?),
    ];
    let swept = [
        ("endpoints", maps.endpoints.max_entries()?),
        ("flows", maps.flows.max_entries()?),
        ("replies", maps.replies.max_entries()?),
        ("handshakes", maps.handshakes.max_entries()?),
        ("handshake_replies", maps.handshake_replies.max_entries()?),
        ("masquerades", maps.masquerades.max_entries()?),
    ];
    let swept = swept
        .into_iter()
        .filter_map(|(table, limit)| Some((table, *health.swept.entries.get(table)? as f64, limit)));
    let labelled = |(table, entries, limit): (&str, f64, u32)| {
        ([("table", table.to_owned())], entries, f64::from(limit))
    };
    Ok(counted.into_iter().chain(swept).map(labelled).collect())
}

fn count(entries: usize) -> f64 {
    entries as f64
}

/// One sample without labels.
fn single(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit): (&str, &str, Option<&Unit>),
    value: &impl EncodeMetric,
) -> fmt::Result {
    value.encode(encoder.encode_descriptor(name, help, unit, value.metric_type())?)
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: f64,
) -> fmt::Result {
    single(encoder, (name, help, unit), &ConstGauge::new(value))
}

fn gauges<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    samples: impl IntoIterator<Item = (Labels<N>, f64)>,
) -> fmt::Result {
    let samples = samples.into_iter().map(|(labels, value)| (labels, ConstGauge::new(value)));
    family(encoder, (name, help, unit), MetricType::Gauge, samples)
}

fn counters<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    samples: impl IntoIterator<Item = (Labels<N>, u64)>,
) -> fmt::Result {
    let samples = samples.into_iter().map(|(labels, value)| (labels, ConstCounter::new(value)));
    family(encoder, (name, help, unit), MetricType::Counter, samples)
}

fn family<L: EncodeLabelSet, M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit): (&str, &str, Option<&Unit>),
    kind: MetricType,
    samples: impl IntoIterator<Item = (L, M)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, unit, kind)?;
    for (labels, value) in samples {
        value.encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}
