use crate::namespace::{Namespace, PATIENCE, Server};
use lb_agent::node::nft::{Operation, Table, ensure, remove};
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
\t\tiifname \"weave\" meta mark & 0xff000000 >= 0x01000000 meta mark & 0xff000000 <= 0xfa000000 notrack
\t}
}
"
    );
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
