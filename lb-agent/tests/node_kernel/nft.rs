use crate::namespace::{Namespace, PATIENCE, Server};
use lb_agent::node::nft::{Operation, Table, ensure, remove};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

fn table(untracked: Option<&str>) -> Table {
    Table::wanted(24, untracked).unwrap()
}

/// One pass; whether anything was written.
fn pass(node: &Namespace, table: &Table) -> bool {
    node.block_on(|| async { matches!(ensure(table).await.unwrap(), Some(Operation::Replace(_))) })
}

#[test]
fn the_table_reads_as_described() {
    let node = Namespace::new();
    assert!(pass(&node, &table(Some("weave"))));
    assert_eq!(
        node.sh("nft list ruleset"),
        "table ip reweave-lb {
\tchain postrouting {
\t\ttype nat hook postrouting priority srcnat - 10; policy accept;
\t\tmeta mark 0xfb000000/8 snat to ip saddr
\t}

\tchain prerouting {
\t\ttype filter hook prerouting priority raw; policy accept;
\t\tiifname \"weave\" meta mark != 0x00000000/8 meta mark != 0xfb000000/8 meta mark != 0xfc000000/6 notrack
\t}
}
"
    );
    // An administrator may save the ruleset and load it again.
    node.sh("nft list ruleset > /dev/shm/$$; nft flush ruleset; nft -f /dev/shm/$$; rm /dev/shm/$$");
    assert!(!pass(&node, &table(Some("weave"))), "what nft makes of it is equal");
}

#[test]
fn replies_to_holders_alone_are_not_tracked() {
    for shift in [0, 8, 16, 24] {
        let (node, pod) = (Namespace::new(), Namespace::new());
        node.link("weave", &pod, "eth0");
        node.sh("ip address add 10.32.0.1/16 dev weave");
        pod.sh("ip address add 10.32.0.2/16 dev eth0");
        node.block_on(|| async { ensure(&Table::wanted(shift, Some("weave")).unwrap()).await.unwrap() });
        // A port for each value of our byte, among bits that are not ours.
        node.sh(&format!(
            "(echo 'table ip judge {{
                map marks {{ type inet_service : mark; }}
                set tracked {{ type inet_service; size 999; flags dynamic; }}
                set untracked {{ type inet_service; size 999; flags dynamic; }}
                chain premark {{ type filter hook prerouting priority -400; meta mark set udp dport map @marks; }}
                chain checks {{ type filter hook input priority 0; udp dport 1000-1255 jump sort; }}
                chain sort {{
                    ct state untracked add @untracked {{ udp dport }}
                    ct state new add @tracked {{ udp dport }}
                }}
            }}'
            for value in $(seq 0 255); do
                echo \"add element ip judge marks {{ $((1000 + value)) : $((value << {shift} | (0x10101010 & ~(0xff << {shift})))) }}\"
            done) | nft -f -"
        ));
        pod.run(|| {
            let socket = std::net::UdpSocket::bind("10.32.0.2:0").unwrap();
            for value in 0..=255_u16 {
                // Nobody listens: the error in answer is for the next call, and none of the test's business.
                while socket.send_to(b"?", ("10.32.0.1", 1000 + value)).is_err() {}
            }
        });
        let values = |set: &str| -> BTreeSet<u16> {
            let listed =
                node.sh(&format!("nft list set ip judge {set} | grep -o '1[0-9][0-9][0-9]' || true"));
            listed.lines().map(|port| port.parse::<u16>().unwrap()).map(|p| p - 1000).collect()
        };
        assert_eq!(values("untracked"), (1..=250).collect(), "shift {shift}");
        assert_eq!(values("tracked"), [0].into_iter().chain(251..=255).collect(), "shift {shift}");
    }
}

#[test]
fn an_equal_table_is_not_written_again() {
    let node = Namespace::new();
    for wanted in [table(None), table(Some("weave")), table(None)] {
        assert!(pass(&node, &wanted));
        let handles = node.sh("nft -a list ruleset");
        assert!(!pass(&node, &wanted));
        assert_eq!(node.sh("nft -a list ruleset"), handles, "a rewritten table has other handles");
    }
}

#[test]
fn whatever_another_program_does_to_the_table_is_put_right() {
    let node = Namespace::new();
    let wanted = table(Some("weave"));
    pass(&node, &wanted);
    let before = node.sh("nft list ruleset");
    for meddling in [
        "flush ruleset",
        "delete table ip reweave-lb",
        "flush chain ip reweave-lb postrouting",
        "delete chain ip reweave-lb prerouting",
        "add rule ip reweave-lb postrouting counter",
        "insert rule ip reweave-lb prerouting accept",
        "add chain ip reweave-lb another",
        "add set ip reweave-lb a_set { type ipv4_addr; }",
        "add chain ip reweave-lb postrouting { policy drop; }",
        "flush chain ip reweave-lb postrouting; add rule ip reweave-lb postrouting meta mark & 0xff000000 == 0xfa000000 snat to ip saddr",
        "flush chain ip reweave-lb postrouting; add rule ip reweave-lb postrouting meta mark & 0xff000000 == 0xfb000000 snat to ip daddr",
        "flush chain ip reweave-lb postrouting; add rule ip reweave-lb postrouting meta mark & 0xff000000 == 0xfb000000 snat to 192.0.2.1",
        "flush chain ip reweave-lb postrouting; add rule ip reweave-lb postrouting meta mark & 0xff000000 == 0xfb000000 masquerade",
    ] {
        node.sh(&format!("nft '{meddling}'"));
        assert_ne!(node.sh("nft list ruleset"), before, "{meddling}");
        assert!(pass(&node, &wanted), "{meddling}");
        assert_eq!(node.sh("nft list ruleset"), before, "{meddling}");
        assert!(!pass(&node, &wanted), "{meddling}");
    }
}

#[test]
fn removal_leaves_the_ruleset_as_it_was() {
    let node = Namespace::new();
    node.sh(
        "nft add table ip theirs; nft add chain ip theirs postrouting '{ type nat hook postrouting priority srcnat; }'
         nft add rule ip theirs postrouting masquerade; nft add table inet reweave-lb",
    );
    let before = node.snapshot();
    assert!(pass(&node, &table(Some("weave"))));
    assert_ne!(node.snapshot(), before);
    assert!(node.block_on(|| async { remove().await.unwrap() }));
    assert_eq!(node.snapshot(), before);
    assert!(!node.block_on(|| async { remove().await.unwrap() }));
    assert_eq!(node.snapshot(), before);
}

/// Client – router with weave's bridge and masquerade rule – pod. The router's mangle chain stands for the packet
/// program, which sets the mark.
#[test]
fn the_masquerade_rule_is_not_asked_for_marked_packets_and_is_for_others() {
    let (client, router, pod) = (Namespace::new(), Namespace::new(), Namespace::new());
    client.link("eth0", &router, "eth0");
    router.link("pod0", &pod, "eth0");
    client.sh("ip address add 192.0.2.2/24 dev eth0; ip route add default via 192.0.2.1");
    router.sh(
        "ip address add 192.0.2.1/24 dev eth0
         ip link add weave type bridge; ip link set pod0 master weave; ip link set weave up
         ip address add 10.32.0.1/16 dev weave
         echo 1 > /proc/sys/net/ipv4/ip_forward
         nft -f - <<'END'
table ip nat {
    chain postrouting { type nat hook postrouting priority srcnat; ip saddr != 10.32.0.0/16 ip daddr 10.32.0.0/16 masquerade; }
}
table ip marker {
    map marks { type inet_service : mark; elements = { 8080 : 0xfb000000, 8081 : 0x05000000 }; }
    chain prerouting { type filter hook prerouting priority mangle; iifname \"eth0\" meta mark set tcp dport map @marks; }
}
END",
    );
    pod.sh("ip address add 10.32.0.2/16 dev eth0; ip route add default via 10.32.0.1");
    let marked = Server::start(&pod, ([10, 32, 0, 2], 8080).into());
    let other = Server::start(&pod, ([10, 32, 0, 2], 8081).into());
    let (us, them) = (Ipv4Addr::new(10, 32, 0, 1), Ipv4Addr::new(192, 0, 2, 2));
    let seen = |server: &Server<'_>| server.seen_from(&client, PATIENCE).unwrap().ip();

    assert_eq!((seen(&marked), seen(&other)), (us.into(), us.into()), "without our table");
    pass(&router, &table(None));
    assert_eq!((seen(&marked), seen(&other)), (them.into(), us.into()), "with our table");
    router.block_on(|| async { remove().await.unwrap() });
    assert_eq!((seen(&marked), seen(&other)), (us.into(), us.into()), "after its removal");
}
