use crate::agent;
use nix::sched::{CloneFlags, unshare};
use serde_json::Value;
use std::process::{Command, Output};
use std::thread;

/// Runs the agent's binary in a fresh network namespace, where `script` has been run before.
fn preflight(script: &'static str, words: &'static [&'static str]) -> Output {
    assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
    // The namespace lives as long as the thread and what it starts.
    let inside = move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let set_up = Command::new("sh").args(["-ec", script]).output().unwrap();
        assert!(set_up.status.success(), "{}", String::from_utf8_lossy(&set_up.stderr));
        agent(&[&["preflight", "--bpffs", "/sys/fs/bpf/reweave-lb-test-absent"], words].concat())
    };
    thread::spawn(inside).join().unwrap()
}

/// A node with devices that carry no usual names.
const NODE: &str = "
    ip link add wan0 type veth peer name outside
    ip address add 192.0.2.1/24 dev wan0
    ip link add pods0 type bridge
    ip address add 10.32.0.1/16 dev pods0
    ip link add tunnel0 type veth peer name far
    ip link set tunnel0 master pods0
    for device in wan0 outside pods0 tunnel0 far; do ip link set $device up; done
    echo 1 > /proc/sys/net/ipv4/ip_forward
    ip rule add fwmark 0x01000000/0xff000000 lookup 9 priority 50";

fn verdicts(output: &Output, name: &str) -> Vec<String> {
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let named = checks.iter().filter(|check| check["name"] == name);
    named.map(|check| check["verdict"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_node_that_lacks_something_fails_with_advice() {
    let output = preflight("true", &[]);
    assert_eq!(output.status.code(), Some(1));
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.starts_with("VERDICT  CHECK  "), "{table}");
    assert!(table.contains("fail     devices  "), "{table}");
    assert!(
        table.contains("\n    see above, or name them with --cni, --uplink, --pods-device and"),
        "{table}"
    );
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("checks failed: the agent would not work on this node"), "{said}");
}

#[test]
fn flags_reach_the_checks() {
    let flags = &["-o", "json", "--uplink=wan*", "--pods-device=pods0", "--overlay-device=tunnel0"];
    let output = preflight(NODE, flags);
    assert_eq!(verdicts(&output, "devices"), ["ok"], "{output:?}");
    assert_eq!(verdicts(&output, "mark, rules and tables"), ["warn"], "another program's rule on our byte");

    let flags = &["-o", "json", "--uplink=lan*", "--pods-device=pods0", "--mark-shift=8"];
    let output = preflight(NODE, flags);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(verdicts(&output, "devices"), ["fail"]);
    assert_eq!(verdicts(&output, "mark, rules and tables"), ["ok"], "it looks at another byte");
}

#[test]
fn devices_of_a_cni_that_has_not_started_yet_can_be_allowed_to_come() {
    const FORWARDS: &str = "echo 1 > /proc/sys/net/ipv4/ip_forward";
    let output = preflight(FORWARDS, &["-o", "json"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let output = preflight(FORWARDS, &["-o", "json", "--allow-pending"]);
    assert_eq!(verdicts(&output, "devices"), ["fail"], "it says so all the same");
    assert_eq!(output.status.code(), Some(0), "{output:?}");

    let output = preflight("true", &["-o", "json", "--allow-pending"]);
    assert_eq!(verdicts(&output, "IP forwarding"), ["fail"]);
    assert_eq!(output.status.code(), Some(1), "forwarding does not come by itself");
}
