//! What an operator can say about the node itself: shared by every command that looks at it or changes it.

use crate::node::interfaces::Selection;
use crate::node::return_path::{self, MARK_FLAG, PRIORITY_FLAG, PROTOCOL_FLAG, TABLE_FLAG};
use crate::node::roles::{CNI_FLAG, Cni, OVERLAY_FLAG, PODS_FLAG, RoleOptions, UPLINK_FLAG};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use glob::Pattern;
use lb_common::mark::MAX_HOLDERS;

const DEFAULT: return_path::Options = return_path::Options::DEFAULT;

/// Devices, addresses, and the numbers that tell our rules and routes from others'.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Node")]
pub struct NodeArgs {
    /// The network of the pods
    #[arg(long = name(CNI_FLAG), env = "LB_CNI", value_enum, default_value_t)]
    cni: Cni,
    /// Interfaces that clients arrive on, as globs; repeat it, or separate by commas. Default: every interface that
    /// carries an address of the host
    #[arg(long = name(UPLINK_FLAG), env = "LB_UPLINK", value_name = "GLOB", value_delimiter = ',', value_parser = Pattern::new)]
    uplink: Vec<Pattern>,
    /// Devices of this node's pods, as globs: their bridge, or one for each; repeat it, or separate by commas. Default:
    /// weave; or cni0, cbr0, kube-bridge and cali*
    #[arg(long = name(PODS_FLAG), env = "LB_PODS_DEVICE", value_name = "GLOB", value_delimiter = ',', value_parser = Pattern::new)]
    pods_device: Vec<Pattern>,
    /// What leads to the other nodes: ports of the pods' bridge (repeat it, or separate by commas), or a VXLAN device, or
    /// an uplink. Default: ports that are VXLAN tunnels, or named vethwe-bridge or vxlan-*; flannel.*; vxlan.calico; the
    /// uplink with routes to other nodes' pods
    #[arg(long = name(OVERLAY_FLAG), env = "LB_OVERLAY_DEVICE", value_name = "NAME", value_delimiter = ',')]
    overlay_device: Vec<String>,
    /// Interfaces whose addresses this node may hold for Services, as globs. Default: all that no CNI, container
    /// runtime or kube-proxy has made
    #[arg(long, env = "LB_ADDRESS_INCLUDE", value_name = "GLOB", value_delimiter = ',', value_parser = Pattern::new)]
    address_include: Vec<Pattern>,
    /// Interfaces whose addresses it may not hold, as globs; wins over the other. Default: none
    #[arg(long, env = "LB_ADDRESS_EXCLUDE", value_name = "GLOB", value_delimiter = ',', value_parser = Pattern::new)]
    address_exclude: Vec<Pattern>,
    /// Which byte of the packet mark is ours: how far it is shifted left. Choose one that no other program of the
    /// node uses
    #[arg(
        long = name(MARK_FLAG),
        env = "LB_MARK_SHIFT",
        value_name = "BITS",
        default_value_t = DEFAULT.mark_shift,
        value_parser = PossibleValuesParser::new(["0", "8", "16", "24"]).try_map(|bits| bits.parse::<u32>()),
    )]
    mark_shift: u32,
    /// Priority of the routing rules that lead replies back to their holders: before the main table's, 32766. The next
    /// two numbers are used as well, where pods are not on one bridge of all nodes
    #[arg(
        long = name(PRIORITY_FLAG),
        env = "LB_RULE_PRIORITY",
        value_name = "N",
        default_value_t = DEFAULT.priority,
        value_parser = clap::value_parser!(u32).range(1..=32_763),
    )]
    rule_priority: u32,
    /// The routing table for a holder is this plus its mark, 1 to 250
    #[arg(
        long = name(TABLE_FLAG),
        env = "LB_TABLE_BASE",
        value_name = "N",
        default_value_t = DEFAULT.table_base,
        value_parser = parse_table_base,
    )]
    table_base: u32,
    /// Route protocol number on our rules and routes: what carries it is ours to change and to remove, so no other
    /// program may use it
    #[arg(
        long = name(PROTOCOL_FLAG),
        env = "LB_ROUTE_PROTOCOL",
        value_name = "N",
        default_value_t = DEFAULT.protocol,
        // Up to 4 (RTPROT_STATIC) are the kernel's and the administrator's own: we would remove their routes.
        value_parser = clap::value_parser!(u8).range(5..),
    )]
    route_protocol: u8,
}

impl NodeArgs {
    /// How the devices of each role are found.
    pub fn role_options(&self) -> RoleOptions {
        RoleOptions {
            cni: self.cni,
            uplinks: self.uplink.clone(),
            pods: self.pods_device.clone(),
            overlay: self.overlay_device.clone(),
            selection: Selection {
                include: self.address_include.clone(),
                exclude: self.address_exclude.clone(),
            },
        }
    }

    /// What tells our rules and routes from others'.
    pub fn return_path(&self) -> return_path::Options {
        return_path::Options {
            priority: self.rule_priority,
            table_base: self.table_base,
            protocol: self.route_protocol,
            mark_shift: self.mark_shift,
        }
    }
}

/// A flag without its dashes, as clap wants it.
fn name(flag: &'static str) -> &'static str {
    flag.trim_start_matches('-')
}

/// Our tables must exist as numbers, and must not be those that every node has.
fn parse_table_base(text: &str) -> Result<u32, String> {
    let base: u32 = text.parse().map_err(|error| format!("{error}"))?;
    let last = base.checked_add(u32::from(MAX_HOLDERS)).ok_or("there are no 250 tables above it")?;
    // RT_TABLE_DEFAULT, _MAIN and _LOCAL of the kernel's include/uapi/linux/rtnetlink.h.
    if base < 255 && last >= 253 {
        return Err(format!(
            "tables {} to {last} would be ours, and 253 to 255 are the kernel's own",
            base + 1
        ));
    }
    Ok(base)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        node: NodeArgs,
    }

    fn parse(words: &[&str]) -> Result<NodeArgs, String> {
        let words = std::iter::once("test").chain(words.iter().copied());
        Cli::try_parse_from(words).map(|cli| cli.node).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_those_of_the_node_modules() {
        let node = parse(&[]).unwrap();
        assert_eq!(node.return_path(), return_path::Options::DEFAULT);
        let RoleOptions { cni, uplinks, pods, overlay, selection } = node.role_options();
        assert_eq!(cni, Cni::Auto);
        assert!(uplinks.is_empty() && pods.is_empty() && overlay.is_empty());
        assert!(selection.include.is_empty() && selection.exclude.is_empty());
    }

    #[test]
    fn every_flag_arrives_where_it_belongs() {
        let node = parse(&[
            "--cni=host-gw",
            "--uplink=eth*,bond0",
            "--uplink=wan?",
            "--pods-device=cni0,cali*",
            "--overlay-device=vx1,vx2",
            "--address-include=eth0",
            "--address-exclude=eth1",
            "--mark-shift=8",
            "--rule-priority=77",
            "--table-base=500",
            "--route-protocol=99",
        ])
        .unwrap();
        let RoleOptions { cni, uplinks, pods, overlay, selection } = node.role_options();
        assert_eq!(cni, Cni::HostGw);
        let names = |patterns: &[Pattern]| patterns.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names(&uplinks), ["eth*", "bond0", "wan?"]);
        assert_eq!(names(&pods), ["cni0", "cali*"]);
        assert_eq!(overlay, ["vx1", "vx2"]);
        assert_eq!(names(&selection.include), ["eth0"]);
        assert_eq!(names(&selection.exclude), ["eth1"]);
        let expected = return_path::Options { priority: 77, table_base: 500, protocol: 99, mark_shift: 8 };
        assert_eq!(node.return_path(), expected);
    }

    #[test]
    fn numbers_that_would_break_the_node_are_refused() {
        for (flag, lowest, highest) in [("--rule-priority", "1", "32763"), ("--route-protocol", "5", "255")] {
            assert!(parse(&[flag, lowest]).is_ok() && parse(&[flag, highest]).is_ok(), "{flag}");
        }
        for (words, says) in [
            (["--mark-shift", "4"], "possible values: 0, 8, 16, 24"),
            (["--rule-priority", "0"], "not in 1..=32763"),
            (["--rule-priority", "32764"], "not in 1..=32763"),
            (["--route-protocol", "4"], "not in 5"),
            (["--route-protocol", "256"], "not in 5"),
            (["--table-base", "4294967295"], "no 250 tables"),
            (["--table-base", "-1"], "unexpected argument"),
            (["--uplink", "eth[0"], "Pattern syntax error"),
        ] {
            let error = parse(&words).unwrap_err();
            assert!(error.contains(says), "{words:?}: {error}");
        }
        for (base, is_allowed) in [("0", true), ("2", true), ("3", false), ("254", false), ("255", true)] {
            assert_eq!(parse(&["--table-base", base]).is_ok(), is_allowed, "{base}");
        }
    }
}
