use crate::namespace::Namespace;
use lb_agent::node::connect;
use lb_agent::node::preflight::{Check, Options, Verdict, check};

fn checks(node: &Namespace) -> Vec<Check> {
    node.block_on(|| async {
        check(&connect().unwrap(), &Options { pins: "/sys/fs/bpf/absent".into(), ..Options::default() }).await
    })
}

fn verdicts(checks: &[Check], name: &str) -> Vec<(Verdict, String)> {
    checks.iter().filter(|c| c.name == name).map(|c| (c.verdict, c.found.clone())).collect()
}

#[test]
fn a_node_is_judged_by_what_the_kernel_says() {
    let node = Namespace::weave_node();
    node.sh("echo 1 > /proc/sys/net/ipv4/ip_forward; for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done");
    let before = node.snapshot();
    let healthy = checks(&node);
    // Whether a BPF file system is mounted is the machine's business, not that of the namespace.
    let bad: Vec<&Check> = healthy.iter().filter(|c| c.verdict != Verdict::Ok && c.name != "bpffs").collect();
    assert!(bad.is_empty(), "{bad:#?}");
    assert_eq!(verdicts(&healthy, "devices")[0].1, "bridged; uplink eth0; pods weave; overlay vxlan-6784");
    assert_eq!(node.snapshot(), before, "looking changes nothing");

    node.sh("echo 0 > /proc/sys/net/ipv4/conf/weave/forwarding
         echo 1 > /proc/sys/net/ipv4/conf/weave/rp_filter
         ip rule add from 203.0.113.0/24 lookup 7 priority 100");
    let faulty = checks(&node);
    assert!(verdicts(&faulty, "forwarding of a device").contains(&(Verdict::Fail, "weave: off".to_owned())));
    assert!(
        verdicts(&faulty, "reverse-path filter")
            .iter()
            .any(|(v, f)| *v == Verdict::Warn && f.starts_with("weave"))
    );
    assert_eq!(verdicts(&faulty, "mark, rules and tables")[0].0, Verdict::Warn);

    node.sh("ip link del weave; echo 0 > /proc/sys/net/ipv4/ip_forward");
    let bare = checks(&node);
    assert_eq!(verdicts(&bare, "IP forwarding")[0].0, Verdict::Fail);
    let (verdict, found) = &verdicts(&bare, "devices")[0];
    assert!(
        *verdict == Verdict::Fail && found.contains("no bridge weave") && found.contains("eth0"),
        "{found}"
    );
}
