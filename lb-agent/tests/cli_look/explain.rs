use crate::agent;
use crate::datapath::{Datapath, NEVER_IDLE, key};
use lb_common::flow::{Flow, Path, State};
use serde_json::{Value, json};

fn ask(datapath: &Datapath, words: &[&str]) -> Value {
    let directory = datapath.directory().to_str().unwrap();
    let output = agent(&[&["explain", "--bpffs", directory, "-o", "json"], words].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn steps(explanation: &Value) -> Vec<&str> {
    let steps = explanation["steps"].as_array().unwrap();
    steps.iter().map(|step| step["reason"].as_str().unwrap()).collect()
}

#[test]
fn a_new_connection_is_told_from_the_first_packet_to_the_third() {
    let datapath = Datapath::filled();
    let told = ask(&datapath, &["--from", "198.51.100.20:50000", "--to", "192.0.2.101:80"]);
    assert_eq!(
        steps(&told),
        ["forward_stack", "pass_reply_to_stack", "reply_translated", "forward_stack"],
        "{told:#}"
    );
    assert_eq!(told["warnings"], json!([]));
    assert_eq!(told["via"], "uplink");
    assert_eq!(told["service"], json!({ "id": 1, "table_size": 251, "backends": 1 }));
    assert_eq!(told["known"], json!([]));
    assert_eq!(
        (&told["program"]["forwarding"], &told["program"]["mark_shift"]),
        (&json!("redirect"), &json!(24))
    );
    let choice = &told["choices"][0];
    assert_eq!((&choice["backend"], &choice["chosen"]), (&json!("10.32.1.1:8080"), &json!(true)));
    assert_eq!(
        (&told["steps"][0]["then_to"], &told["steps"][0]["mark"]),
        (&json!("10.32.1.1:8080"), &json!(251))
    );
    assert!(datapath.maps.outcomes().unwrap().is_empty(), "an explanation counts nothing");
    assert_eq!(datapath.maps.handshakes.list().unwrap().len(), 1, "and begins no connection");
}

#[test]
fn a_known_connection_is_told_by_its_next_packet() {
    let mut datapath = Datapath::filled();
    let known = Flow::new(1, 1, 1, Path::Stack, State::Established, NEVER_IDLE);
    datapath.maps.flows.insert(&key([198, 51, 100, 30], 40_010, [192, 0, 2, 101], 80), &known).unwrap();
    let told = ask(&datapath, &["--from", "198.51.100.30:40010", "--to", "192.0.2.101:80"]);
    assert_eq!(told["steps"][0]["packet"], "the packet, ACK");
    assert_eq!(told["steps"][0]["reason"], "forward_stack");
    let expected = json!([{
        "map": "flows", "state": "established", "backend": "10.32.1.1:8080", "mark": null, "path": "stack",
        "idle_seconds": 0, "timeout_seconds": 8100,
    }]);
    assert_eq!(told["known"], expected);

    // The backend of this one has been given up.
    let told = ask(&datapath, &["--from", "198.51.100.10:40002", "--to", "192.0.2.101:80"]);
    assert_eq!(steps(&told), ["reject_backend_gone"]);
    assert_eq!(
        (&told["known"][0]["backend"], &told["steps"][0]["answer"]),
        (&Value::Null, &json!("a TCP reset"))
    );
}

#[test]
fn what_is_refused_dropped_or_not_ours_is_told_with_its_reason() {
    let datapath = Datapath::filled();
    let from = "198.51.100.20:50000";
    let dns = ask(&datapath, &["--from", from, "--to", "192.0.2.101:53", "--protocol", "udp"]);
    assert_eq!(steps(&dns), ["reject_no_endpoint"]);
    assert_eq!(dns["steps"][0]["answer"], "ICMP port unreachable");
    let no_ring = ask(&datapath, &["--from", from, "--to", "192.0.2.102:443"]);
    assert_eq!(steps(&no_ring), ["drop_no_ring"]);
    let foreign = ask(&datapath, &["--from", from, "--to", "192.0.2.102:9"]);
    assert_eq!((steps(&foreign), &foreign["service"]), (vec!["pass_foreign"], &Value::Null));
}

/// The loopback of this datapath is no overlay, so the packet of a holder has no way in: said, not guessed.
#[test]
fn a_way_in_that_the_node_has_not_is_an_error() {
    let datapath = Datapath::filled();
    let directory = datapath.directory().to_str().unwrap();
    let words = ["explain", "--from", "198.51.100.20:50000", "--to", "10.32.1.1:8080", "--bpffs", directory];
    let output = agent(&words);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &[][..]));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "lb-agent: no interface of this node is overlay; `--via` names another way in\n");
}

#[test]
fn without_a_datapath_that_is_said() {
    let absent = "/sys/fs/bpf/reweave-lb-test-absent";
    let output =
        agent(&["explain", "--from", "198.51.100.20:50000", "--to", "192.0.2.101:80", "--bpffs", absent]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("lb-agent: there is no datapath at "));
}

#[test]
fn bad_ends_are_refused_with_an_example() {
    for (from, to) in [
        ("client", "192.0.2.101:80"),
        ("198.51.100.20", "192.0.2.101:80"),
        ("198.51.100.20:1", "[::1]:80"),
        ("198.51.100.20:0", "192.0.2.101:80"),
    ] {
        let output = agent(&["explain", "--from", from, "--to", to]);
        assert_eq!(output.status.code(), Some(2), "{from} {to}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("as in 192.0.2.101:80"), "{said}");
    }
    let udp =
        ["explain", "--from", "1.2.3.4:5", "--to", "192.0.2.101:53", "--protocol", "udp", "--packet", "syn"];
    assert!(String::from_utf8(agent(&udp).stderr).unwrap().contains("a datagram has no kinds"));
}

#[test]
fn people_read_facts_and_then_steps() {
    let datapath = Datapath::filled();
    let directory = datapath.directory().to_str().unwrap();
    let words = ["explain", "--from", "198.51.100.20:50000", "--to", "192.0.2.101:80", "--bpffs", directory];
    let text = String::from_utf8(agent(&words).stdout).unwrap();
    println!("{text}");
    for line in [
        "Interfaces    lo uplink+pods",
        "Service       192.0.2.101:80/TCP is served here: id 1, a table of 251 places, 1 active backends",
        "Connection    none is known",
        "1. the packet, SYN: 198.51.100.20:50000 > 192.0.2.101:80, ingress of lo",
        "   goes on as 198.51.100.20:50000 > 10.32.1.1:8080",
        "   packet mark: our byte is 251, a forward: kept off the CNI's masquerade",
        "3. the same, routed, SYN-ACK: 10.32.1.1:8080 > 198.51.100.20:50000, egress of lo",
    ] {
        assert!(text.lines().any(|found| found == line), "no line {line:?} in\n{text}");
    }
}
