use crate::namespace::{FUTILE, Namespace, PATIENCE, Server};
use lb_agent::node::interfaces::list;
use lb_agent::node::return_path::{Options, State, Way, check_overlap, ensure, remove};
use lb_agent::node::{connect, nft};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

const OPTIONS: Options = Options::DEFAULT;

fn holders(marks: impl IntoIterator<Item = u8>) -> BTreeMap<u8, Ipv4Addr> {
    marks.into_iter().map(|mark| (mark, Ipv4Addr::new(10, 32, 1, mark))).collect()
}

/// Over a device of this name, for what comes in on `input`.
async fn wanted(holders: &BTreeMap<u8, Ipv4Addr>, device: &str, input: Option<&str>) -> State {
    let interfaces = list(&connect().unwrap()).await.unwrap();
    let device = interfaces.iter().find(|i| i.name == device).unwrap().index;
    let ways = holders.iter().map(|(mark, via)| (*mark, Way { via: *via, device })).collect();
    State::wanted(&ways, input, &OPTIONS).unwrap()
}

/// One pass for these holders; what it did.
fn pass(node: &Namespace, holders: &BTreeMap<u8, Ipv4Addr>) -> Vec<String> {
    node.block_on(|| async {
        let wanted = wanted(holders, "weave", Some("weave")).await;
        let operations = ensure(&connect().unwrap(), &OPTIONS, &wanted).await.unwrap();
        operations.iter().map(ToString::to_string).collect()
    })
}

fn clean(node: &Namespace) {
    node.block_on(|| async { remove(&connect().unwrap(), &OPTIONS).await.unwrap() });
}

#[test]
fn rules_and_routes_are_as_described_and_the_second_pass_does_nothing() {
    let node = Namespace::weave_node();
    assert_eq!(pass(&node, &holders([42])).len(), 2);
    assert_eq!(
        node.sh("ip rule list priority 100").trim(),
        "100:\tfrom all fwmark 0x2a000000/0xff000000 iif weave lookup 25042 proto 213"
    );
    assert_eq!(
        node.sh("ip route show table 25042").trim(),
        "default via 10.32.1.42 dev weave proto 213 onlink"
    );
    assert_eq!(pass(&node, &holders([42])), [""; 0]);
}

/// As on flannel, where the tunnel looks up its own packets with the marks of those inside: see [`Way`]'s module.
#[test]
fn where_pods_have_any_devices_the_nodes_own_packets_are_led_past_the_rules() {
    let node = Namespace::weave_node();
    node.sh("echo 1 > /proc/sys/net/ipv4/ip_forward");
    let before = node.snapshot();
    let pass = |marks: &[u8]| {
        node.block_on(|| async {
            let wanted = wanted(&holders(marks.iter().copied()), "weave", None).await;
            ensure(&connect().unwrap(), &OPTIONS, &wanted).await.unwrap().len()
        })
    };
    assert_eq!(pass(&[42]), 4);
    assert_eq!(
        node.sh("ip -details rule | grep proto.213"),
        "100:\tfrom all iif lo goto 102 proto 213\n\
         101:\tfrom all fwmark 0x2a000000/0xff000000 lookup 25042 proto 213\n\
         102:\tfrom all nop proto 213\n"
    );
    assert_eq!(pass(&[42]), 0, "once more");
    node.sh("ip rule del priority 102");
    assert_eq!(pass(&[42]), 1);
    assert!(!node.sh("ip rule").contains("unresolved"));

    node.sh("ip route add 198.51.100.0/24 via 192.0.2.9");
    let way = |more| node.sh(&format!("ip route get 198.51.100.1 mark 0x2a000000 {more}"));
    assert!(way("from 10.32.0.9 iif weave").contains("via 10.32.1.42"), "of a pod");
    assert!(way("").contains("via 192.0.2.9"), "of the node itself");
    node.sh("ip rule del priority 100");
    assert!(way("").contains("via 10.32.1.42"), "which is what the guard is for");

    node.sh("ip route del 198.51.100.0/24");
    clean(&node);
    assert_eq!(node.snapshot(), before);
}

#[test]
fn what_another_program_removes_is_restored_and_nothing_else_is_touched() {
    let node = Namespace::weave_node();
    let all = holders([1, 2, 3]);
    pass(&node, &all);
    let before = node.snapshot();

    node.sh("ip rule del fwmark 0x02000000/0xff000000 iif weave");
    assert_eq!(pass(&node, &all), ["add rule 100: fwmark 0x2000000/0xff000000 iif weave lookup 25002"]);
    node.sh("ip route flush table 25003");
    assert_eq!(pass(&node, &all), ["add route 0.0.0.0/0 in table 25003 via 10.32.1.3"]);
    node.sh("ip route replace default via 10.32.9.9 dev weave onlink proto 213 table 25001");
    assert_eq!(pass(&node, &all), ["replace route 0.0.0.0/0 in table 25001 via 10.32.1.1"]);
    // The kernel lists a rule that came back behind its equals, so the order is no longer that of before.
    let sorted = |text: String| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(node.snapshot()), sorted(before));

    // A bridge that goes takes its routes with it, and comes back under another number.
    node.sh("ip link del weave; ip link add weave type bridge; ip address add 10.32.0.1/16 dev weave; ip link set weave up");
    assert_eq!(pass(&node, &all).len(), 3);
    assert_eq!(pass(&node, &all), [""; 0]);
}

#[test]
fn a_holder_that_leaves_or_moves_changes_its_own_rule_and_route_only() {
    let node = Namespace::weave_node();
    pass(&node, &holders([1, 2]));
    assert_eq!(
        pass(&node, &holders([2])),
        [
            "delete rule 100: fwmark 0x1000000/0xff000000 iif weave lookup 25001",
            "delete route 0.0.0.0/0 in table 25001 via 10.32.1.1"
        ]
    );
    let moved = BTreeMap::from([(2, Ipv4Addr::new(10, 32, 7, 7))]);
    assert_eq!(pass(&node, &moved), ["replace route 0.0.0.0/0 in table 25002 via 10.32.7.7"]);
    assert_eq!(
        node.sh("ip route show table 25002").trim(),
        "default via 10.32.7.7 dev weave proto 213 onlink"
    );
}

#[test]
fn removal_leaves_the_node_as_it_was_with_what_others_put() {
    let node = Namespace::weave_node();
    node.sh("ip rule add fwmark 0x1 lookup 77 priority 50
         ip rule add fwmark 0x01000000/0xff000000 iif weave lookup 78 priority 101
         ip route add default via 192.0.2.254 table 77
         ip route add 198.51.100.0/24 via 10.32.1.1 dev weave proto static
         nft add table ip theirs");
    let before = node.snapshot();
    pass(&node, &holders(1..=5));
    assert_ne!(node.snapshot(), before);
    clean(&node);
    assert_eq!(node.snapshot(), before);
    // And once more, where there is nothing to remove.
    clean(&node);
    assert_eq!(node.snapshot(), before);
}

#[test]
fn as_many_holders_as_there_can_be_take_well_under_a_second() {
    let node = Namespace::weave_node();
    let before = node.snapshot();
    let all = holders(1..=250);
    let start = Instant::now();
    assert_eq!(pass(&node, &all).len(), 500);
    let took = start.elapsed();
    assert_eq!(pass(&node, &all).len(), 0);
    assert!(took < Duration::from_secs(1), "{took:?}");
    eprintln!("250 holders: {took:?}");
    clean(&node);
    assert_eq!(node.snapshot(), before);
}

#[test]
fn a_table_that_another_program_uses_is_reported_and_left_alone() {
    let node = Namespace::weave_node();
    node.sh("ip route add default via 192.0.2.254 table 25001 proto static");
    let before = node.snapshot();
    let overlaps = node.block_on(|| async { check_overlap(&connect().unwrap(), &OPTIONS).await.unwrap() });
    assert!(matches!(overlaps.as_slice(), [one] if one.fatal && one.found.contains("25001")), "{overlaps:?}");

    // The other holder is served all the same, and no rule leads into the foreign table.
    let error = node.block_on(|| async {
        let wanted = wanted(&holders([1, 2]), "weave", Some("weave")).await;
        ensure(&connect().unwrap(), &OPTIONS, &wanted).await.unwrap_err().to_string()
    });
    assert!(error.contains("--table-base"), "{error}");
    assert_eq!(node.sh("ip route show table 25001").trim(), "default via 192.0.2.254 dev eth0 proto static");
    let rules = node.sh("ip rule");
    assert!(rules.contains("lookup 25002") && !rules.contains("lookup 25001"), "{rules}");
    clean(&node);
    assert_eq!(node.snapshot(), before);
}

#[test]
fn rules_at_our_priority_and_on_our_mark_are_reported() {
    let node = Namespace::weave_node();
    node.sh("ip rule add from 203.0.113.0/24 lookup 7 priority 100; ip rule add fwmark 0x10000000/0xf0000000 lookup 8");
    pass(&node, &holders([1]));
    let overlaps = node.block_on(|| async { check_overlap(&connect().unwrap(), &OPTIONS).await.unwrap() });
    let advice: Vec<&str> = overlaps.iter().map(|o| o.advice.as_str()).collect();
    assert_eq!(overlaps.iter().filter(|o| o.fatal).count(), 0);
    assert!(
        matches!(advice.as_slice(), [mark, priority] if mark.contains("--mark-shift") && priority.contains("--rule-priority"))
            || matches!(advice.as_slice(), [priority, mark] if mark.contains("--mark-shift") && priority.contains("--rule-priority")),
        "{overlaps:?}"
    );
}

/// The other node with a pod and a holder at its bridge; the client is an address of the holder's, as the holder
/// would leave it in the packet. A chain stands for the packet program, which marks before netfilter looks.
fn other_node(bridges_call_iptables: u8) -> (Namespace, Namespace, Namespace) {
    let (node, pod, holder) = (Namespace::new(), Namespace::new(), Namespace::new());
    node.link("pod0", &pod, "eth0");
    node.link("overlay0", &holder, "eth0");
    node.sh(&format!(
        "ip link add weave type bridge
         ip address add 10.32.0.1/16 dev weave
         for port in pod0 overlay0; do ip link set $port master weave; done
         ip link set weave up
         echo {bridges_call_iptables} > /proc/sys/net/bridge/bridge-nf-call-iptables
         echo 1 > /proc/sys/net/ipv4/ip_forward
         nft -f - <<'END'
table ip program {{
    chain premark {{
        type filter hook prerouting priority -310
        ip saddr 10.32.0.2 meta mark set 0x01000000
        ip daddr 10.32.0.2 meta mark set 0xfb000000
    }}
}}
table ip cni {{
    chain checks {{ type filter hook forward priority filter; ct state invalid counter drop; }}
    chain postrouting {{
        type nat hook postrouting priority srcnat
        ip saddr != 10.32.0.0/16 ip daddr 10.32.0.0/16 masquerade
    }}
}}
END"
    ));
    pod.sh("ip address add 10.32.0.2/16 dev eth0; ip route add default via 10.32.0.1");
    holder.sh("ip address add 10.32.1.1/16 dev eth0
         ip address add 192.0.2.2/32 dev lo
         ip route replace 10.32.0.0/16 dev eth0 src 192.0.2.2");
    (node, pod, holder)
}

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));

fn table(node: &Namespace, untracked: Option<&str>) {
    let table = nft::Table::wanted(OPTIONS.mark_shift, untracked).unwrap();
    node.block_on(|| async { nft::ensure(&table).await.unwrap() });
}

/// With bridged frames out of netfilter's sight, conntrack meets the connection with its second packet.
#[test]
fn a_marked_reply_reaches_the_holder_and_passes_rules_on_connection_state() {
    let (node, pod, holder) = other_node(0);
    let server = Server::start(&pod, ([10, 32, 0, 2], 8080).into());
    assert_eq!(server.seen_from(&holder, FUTILE), None, "without a way back");

    pass(&node, &holders([1]));
    assert_eq!(
        server.seen_from(&holder, FUTILE),
        None,
        "the reply is dropped as invalid while it is tracked"
    );
    assert!(!node.sh("nft list chain ip cni checks").contains("packets 0"), "the drop was by that rule");

    table(&node, Some("weave"));
    assert_eq!(server.seen_from(&holder, PATIENCE).unwrap().ip(), CLIENT);
    assert_eq!(pass(&node, &holders([1])), [""; 0]);
}

/// Where netfilter sees bridged frames, the CNI's masquerade would change those that are only bridged, too.
#[test]
fn a_bridged_forward_keeps_its_source_and_its_reply_reaches_the_holder() {
    let (node, pod, holder) = other_node(1);
    let server = Server::start(&pod, ([10, 32, 0, 2], 8080).into());
    pass(&node, &holders([1]));
    let seen = server.seen_from(&holder, FUTILE).map(|from| from.ip());
    assert_ne!(seen, Some(CLIENT), "without our table");

    table(&node, None);
    assert_eq!(server.seen_from(&holder, PATIENCE).unwrap().ip(), CLIENT);
    node.sh("ip rule del priority 100");
    assert_eq!(server.seen_from(&holder, FUTILE), None, "without the rule");
}
