//! Serves ports of an address beside those that are served already, in the pinned maps of a node whose agent does not
//! run: `fill_services BPFFS ADDRESS FIRST END` for the ports from FIRST up to, without, END, with ten remote endpoints
//! each.

use anyhow::{Context as _, Result, ensure};
use lb_agent::datapath::maps::Maps;
use lb_agent::datapath::pins::Pins;
use lb_agent::datapath::plan::{self, Observed, Rest};
use lb_agent::policy::extend::{WantedBackend, WantedService, WantedState};
use lb_common::addr::{Port, Protocol};
use lb_common::service::ServiceKey;
use std::net::Ipv4Addr;
use std::path::Path;

const ENDPOINTS: u32 = 10;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [bpffs, address, first, end] = arguments.as_slice() else {
        anyhow::bail!("usage: fill_services BPFFS ADDRESS FIRST END");
    };
    let address: Ipv4Addr = address.parse().context("ADDRESS is no IPv4 address")?;
    let ports = first.parse().context("FIRST is no port")?..end.parse().context("END is no port")?;
    let mut maps = Maps::open(&Pins::new(Path::new(bpffs)))?;
    let mut observed = Observed::read(&maps)?;
    let mut rest = Rest::default();
    for port in ports {
        let key = ServiceKey::new(address.into(), Port::new(port), Protocol::TCP);
        let plan = plan::service(&key, Some(&service(port)), &observed);
        ensure!(plan.problems.is_empty(), "{:?}", plan.problems);
        observed.begin(&mut maps, plan.operations, &mut rest)?;
        if rest.is_full() {
            observed.finish(&mut maps, std::mem::take(&mut rest))?;
        }
    }
    Ok(observed.finish(&mut maps, rest)?)
}

fn service(port: u16) -> WantedService {
    let first = u32::from(Ipv4Addr::new(10, 40, 0, 0)) + u32::from(port) * ENDPOINTS;
    let backend = |address| WantedBackend {
        address: Ipv4Addr::from(address),
        port: 8080,
        state: WantedState::Active,
        local: false,
        masqueraded: false,
    };
    WantedService {
        namespace: "default".to_owned(),
        name: format!("fill-{port}"),
        port_name: String::new(),
        affinity: false,
        backends: (first..first + ENDPOINTS).map(backend).collect(),
    }
}
