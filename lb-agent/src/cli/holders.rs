//! `lb-agent holders`: the other nodes that forward to pods of this one.

use super::render::{Column, Look, Row, numbers, words};
use lb_common::addr::Mac;
use serde::Serialize;
use std::net::Ipv4Addr;

/// Arguments of `lb-agent holders`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    look: Look,
}

#[derive(Serialize)]
struct Other {
    mark: u8,
    mac: String,
    overlay_address: Ipv4Addr,
    endpoints: usize,
}

impl Row for Other {
    const COLUMNS: &'static [Column] =
        &[numbers("MARK"), words("MAC"), words("OVERLAY ADDRESS"), numbers("ENDPOINTS")];

    fn cells(&self) -> Vec<String> {
        vec![
            self.mark.to_string(),
            self.mac.clone(),
            self.overlay_address.to_string(),
            self.endpoints.to_string(),
        ]
    }
}

/// Prints the other holders by mark, each with the number of endpoints of this node that it forwards to.
///
/// # Errors
/// When there is no datapath, or its maps cannot be read.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let maps = args.look.maps()?;
    let endpoints = maps.endpoints.list()?;
    let mut rows: Vec<Other> = maps
        .holders
        .all()?
        .iter()
        .map(|(mac, holder)| Other {
            mark: holder.mark,
            mac: text(*mac),
            overlay_address: holder.address.into(),
            endpoints: endpoints.iter().filter(|(_, holders)| holders.contains(holder.mark)).count(),
        })
        .collect();
    rows.sort_by_key(|row| row.mark);
    args.look.print_rows(&rows)
}

fn text(mac: Mac) -> String {
    mac.octets().map(|octet| format!("{octet:02x}")).join(":")
}
