//! `lb-agent services`: the ports that this node serves, with their counters.

use super::render::{self, Column, Look, Row, numbers, plain, short_bytes, words};
use crate::datapath::maps::{Maps, MapsError};
use lb_common::backend::{Backend, BackendState};
use lb_common::service::{Service, ServiceKey, ServiceStats};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// Arguments of `lb-agent services`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    look: Look,
}

#[derive(Serialize)]
struct Served {
    address: Ipv4Addr,
    port: u16,
    protocol: &'static str,
    id: u32,
    backends_active: u32,
    backends_draining: u32,
    /// None before the agent has written a table; 0 where no endpoint is ready.
    table_size: Option<u32>,
    packets_in: u64,
    bytes_in: u64,
    packets_out: u64,
    bytes_out: u64,
    connections: u64,
    refused: u64,
}

impl Row for Served {
    const COLUMNS: &'static [Column] = &[
        words("SERVICE"),
        numbers("ID"),
        numbers("BACKENDS"),
        numbers("DRAINING"),
        numbers("TABLE"),
        numbers("PACKETS IN"),
        numbers("BYTES IN"),
        numbers("PACKETS OUT"),
        numbers("BYTES OUT"),
        numbers("CONNECTIONS"),
        numbers("REFUSED"),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            render::served(self.address, self.port, self.protocol),
            self.id.to_string(),
            self.backends_active.to_string(),
            self.backends_draining.to_string(),
            render::or_dash(self.table_size.map(|size| size.to_string())),
            self.packets_in.to_string(),
            short_bytes(self.bytes_in),
            self.packets_out.to_string(),
            short_bytes(self.bytes_out),
            self.connections.to_string(),
            self.refused.to_string(),
        ]
    }
}

/// Prints the served ports.
///
/// # Errors
/// When there is no datapath, or its maps cannot be read.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let maps = args.look.maps()?;
    let counts = count_backends(&maps.backends()?);
    let rows: Vec<Served> = maps
        .services
        .all()?
        .iter()
        .map(|(key, service)| read(&maps, key, *service, &counts))
        .collect::<Result<_, _>>()?;
    args.look.print_rows(&rows)
}

/// Active and draining backends by the id of their service.
fn count_backends(backends: &[Backend]) -> BTreeMap<u32, (u32, u32)> {
    let mut counts: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
    for backend in backends {
        let (active, draining) = counts.entry(backend.service).or_default();
        match backend.state() {
            BackendState::Active => *active += 1,
            BackendState::Draining => *draining += 1,
            BackendState::Absent => {}
        }
    }
    counts
}

fn read(
    maps: &Maps,
    key: &ServiceKey,
    Service { id, .. }: Service,
    counts: &BTreeMap<u32, (u32, u32)>,
) -> Result<Served, MapsError> {
    let (address, port, protocol) = plain(key.address, key.port, key.protocol);
    let (backends_active, backends_draining) = counts.get(&id).copied().unwrap_or_default();
    let table_size = maps.ring_size(id)?;
    let ServiceStats { packets_in, bytes_in, packets_out, bytes_out, connections, refused } =
        maps.service_stats(id)?;
    Ok(Served {
        address,
        port,
        protocol,
        id,
        backends_active,
        backends_draining,
        table_size,
        packets_in,
        bytes_in,
        packets_out,
        bytes_out,
        connections,
        refused,
    })
}
