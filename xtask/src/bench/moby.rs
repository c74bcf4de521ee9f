//! nftables as moby's load balancer has it: a map from address and a random number to an endpoint, which a rule of
//! the nat table asks for every new connection; conntrack remembers the rest. Without its masquerade, since the client's
//! address is to stay.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

const TABLE: &str = "ip docker-lb-nat";
const MAP: &str = "nat-service-vip";
/// The random numbers that endpoints share.
const NUMBERS: usize = 65_536;

/// The table with an empty map, as `nft -f` reads it.
pub(super) fn table() -> String {
    format!(
        "table {TABLE} {{
           map {MAP} {{
             typeof ip daddr . numgen random mod {NUMBERS} : ip daddr
             flags interval
             counter
           }}
           chain prerouting {{
             type nat hook prerouting priority dstnat; policy accept;
             dnat to ip daddr . numgen random mod {NUMBERS} map @{MAP}
           }}
         }}\n"
    )
}

/// Adds a service.
pub(super) fn add(address: Ipv4Addr, endpoints: &[Ipv4Addr]) -> String {
    format!("add element {TABLE} {MAP} {{ {} }}\n", elements(address, endpoints))
}

/// Replaces a service's endpoints.
pub(super) fn replace(address: Ipv4Addr, before: &[Ipv4Addr], after: &[Ipv4Addr]) -> String {
    remove(address, before) + &add(address, after)
}

/// Removes a service.
pub(super) fn remove(address: Ipv4Addr, endpoints: &[Ipv4Addr]) -> String {
    format!("delete element {TABLE} {MAP} {{ {} }}\n", elements(address, endpoints))
}

/// Adds services `first..end` that nobody asks for, with one endpoint each: at ten endpoints each, the kernel's interval
/// sets take some for overlaps and refuse them.
pub(super) fn fill(first: u32, end: u32) -> String {
    let mut text = String::new();
    // In pieces: one long list is refused as too long a message.
    for start in (first..end).step_by(FILL as usize) {
        let _ = write!(text, "add element {TABLE} {MAP} {{");
        for number in start..end.min(start + FILL) {
            let _ = write!(text, " {},", elements(filler(number), &[Ipv4Addr::from(0x0a28_0000 + number)]));
        }
        text.push_str(" }\n");
    }
    text
}

const FILL: u32 = 1_000;

/// The address of the service of that number.
fn filler(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(100, 64, 0, 0)) + number)
}

fn elements(address: Ipv4Addr, endpoints: &[Ipv4Addr]) -> String {
    let bound = |position: usize| NUMBERS * position / endpoints.len();
    let shares = endpoints.iter().enumerate().map(|(position, endpoint)| {
        format!("{address} . {}-{} : {endpoint}", bound(position), bound(position + 1) - 1)
    });
    shares.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_share_all_numbers() {
        let endpoints = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2), Ipv4Addr::new(10, 0, 0, 3)];
        assert_eq!(
            elements(Ipv4Addr::new(192, 0, 2, 1), &endpoints),
            "192.0.2.1 . 0-21844 : 10.0.0.1, 192.0.2.1 . 21845-43689 : 10.0.0.2, 192.0.2.1 . 43690-65535 : 10.0.0.3"
        );
    }
}
