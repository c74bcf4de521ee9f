//! `lb-agent backends`: the endpoints behind the served ports, by slot.

use super::render::{self, Column, Look, Row, numbers, plain, words};
use lb_common::backend::{Backend, BackendState};
use lb_common::service::ServiceKey;
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// Arguments of `lb-agent backends`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    look: Look,
}

#[derive(Serialize)]
struct Slot {
    id: usize,
    service_id: u32,
    /// None for a slot whose service is not served any more; so for the next two.
    service_address: Option<Ipv4Addr>,
    service_port: Option<u16>,
    protocol: Option<&'static str>,
    address: Ipv4Addr,
    port: u16,
    state: &'static str,
    generation: u32,
    local: bool,
}

impl Row for Slot {
    const COLUMNS: &'static [Column] = &[
        numbers("ID"),
        words("SERVICE"),
        words("ENDPOINT"),
        words("STATE"),
        numbers("GENERATION"),
        words("PLACE"),
    ];

    fn cells(&self) -> Vec<String> {
        let service = match (self.service_address, self.service_port, self.protocol) {
            (Some(address), Some(port), Some(protocol)) => Some(render::served(address, port, protocol)),
            _ => None,
        };
        vec![
            self.id.to_string(),
            render::or_dash(service),
            render::socket(self.address, self.port),
            self.state.to_owned(),
            self.generation.to_string(),
            if self.local { "local" } else { "remote" }.to_owned(),
        ]
    }
}

/// Prints the backends in use.
///
/// # Errors
/// When there is no datapath, or its maps cannot be read.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let maps = args.look.maps()?;
    let services: BTreeMap<u32, ServiceKey> =
        maps.services.list()?.into_iter().map(|(key, service)| (service.id, key)).collect();
    let rows: Vec<Slot> = maps
        .backends()?
        .iter()
        .enumerate()
        .filter_map(|(id, backend)| slot(id, backend, services.get(&backend.service)))
        .collect();
    args.look.print_rows(&rows)
}

/// None for a free slot.
fn slot(id: usize, backend: &Backend, service: Option<&ServiceKey>) -> Option<Slot> {
    let state = match backend.state() {
        BackendState::Active => "active",
        BackendState::Draining => "draining",
        BackendState::Absent => return None,
    };
    let served = service.map(|key| plain(key.address, key.port, key.protocol));
    Some(Slot {
        id,
        service_id: backend.service,
        service_address: served.map(|(address, ..)| address),
        service_port: served.map(|(_, port, _)| port),
        protocol: served.map(|(.., protocol)| protocol),
        address: backend.address.into(),
        port: backend.port.number(),
        state,
        generation: backend.generation,
        local: backend.is_local(),
    })
}
