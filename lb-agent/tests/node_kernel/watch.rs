use crate::namespace::{Namespace, PATIENCE, sh};
use lb_agent::node::watch::{Ticks, start};
use std::time::Duration;
use tokio::time::timeout;

/// Nothing came for so long: several times what changes are gathered for.
const QUIET: Duration = Duration::from_millis(300);

async fn settle(ticks: &mut Ticks) {
    while timeout(QUIET, ticks.changed()).await.is_ok() {}
}

#[test]
fn every_kind_of_change_is_a_tick_within_a_second_and_silence_is_none() {
    Namespace::weave_node().block_on(|| async {
        let mut ticks = start().unwrap();
        settle(&mut ticks).await;
        for change in [
            "ip link set eth0 mtu 1400",
            "ip address add 192.0.2.9/24 dev eth0",
            "ip address del 192.0.2.9/24 dev eth0",
            "ip route add 198.51.100.0/24 via 192.0.2.254",
            "ip route del 198.51.100.0/24",
            "ip rule add fwmark 1 lookup 7",
            "ip rule del fwmark 1 lookup 7",
            "nft add table ip reweave-lb",
            "nft flush ruleset",
            "echo 1 > /proc/sys/net/ipv4/conf/weave/rp_filter",
            "echo 1 > /proc/sys/net/ipv4/conf/weave/forwarding",
        ] {
            sh(change);
            timeout(Duration::from_secs(1), ticks.changed()).await.expect(change).unwrap();
            settle(&mut ticks).await;
        }
        assert!(timeout(QUIET, ticks.changed()).await.is_err(), "a tick without a change");
    });
}

#[test]
fn many_changes_at_once_are_few_ticks() {
    Namespace::weave_node().block_on(|| async {
        let mut ticks = start().unwrap();
        settle(&mut ticks).await;
        let before = *ticks.borrow();
        sh("seq 1 200 | sed 's/.*/route add 198.51.100.&\\/32 via 192.0.2.254/' | head -n 200 | ip -batch -");
        settle(&mut ticks).await;
        let count = *ticks.borrow() - before;
        assert!((1..=5).contains(&count), "{count}");
    });
}

#[test]
fn changes_that_the_kernel_could_not_tell_are_a_tick_and_later_ones_still_are() {
    Namespace::weave_node().block_on(|| async {
        let mut ticks = start().unwrap();
        settle(&mut ticks).await;
        // This thread does nothing else meanwhile, so nobody reads the socket.
        sh("for i in $(seq 0 15); do seq 1 250 | sed \"s/.*/route add 10.99.$i.&\\/32 via 192.0.2.254/\"; done | ip -batch -");
        let dropped = sh("awk '$2 == 0 && $4 != \"00000000\" { sum += $9 } END { print sum + 0 }' /proc/net/netlink");
        assert_ne!(dropped.trim(), "0", "the socket was to overflow");
        timeout(PATIENCE, ticks.changed()).await.unwrap().unwrap();
        settle(&mut ticks).await;
        sh("ip rule add fwmark 1 lookup 7");
        timeout(Duration::from_secs(1), ticks.changed()).await.unwrap().unwrap();
    });
}

#[test]
fn watching_ends_with_the_last_receiver() {
    Namespace::new().block_on(|| async {
        let sockets = || sh("awk '$4 != \"00000000\"' /proc/net/netlink | wc -l").trim().to_owned();
        let before = sockets();
        let ticks = start().unwrap();
        assert_ne!(sockets(), before);
        drop(ticks);
        let ended = async {
            while sockets() != before {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, ended).await.unwrap();
    });
}
