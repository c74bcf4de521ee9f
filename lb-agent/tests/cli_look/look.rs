use crate::datapath::{Datapath, NEVER_IDLE, frame, key};
use crate::{agent, stdout};
use lb_common::addr::{Ipv4, Port, Protocol};
use lb_common::flow::{Flow, Path, State};
use lb_common::masquerade::{Client, MasqueradedKey, Own};
use lb_common::reason::Reason;
use serde_json::{Value, json};
use std::fs;

fn ask(datapath: &Datapath, words: &[&str]) -> String {
    let directory = datapath.directory().to_str().unwrap();
    stdout(agent(&[words, &["--bpffs", directory]].concat()))
}

fn ask_json(datapath: &Datapath, words: &[&str]) -> Value {
    serde_json::from_str(&ask(datapath, &[words, &["-o", "json"]].concat())).unwrap()
}

/// The web port is forwarded to, the others refuse.
fn visit(datapath: &mut Datapath) {
    datapath.receive(&frame(101, 80, Protocol::TCP));
    datapath.receive(&frame(101, 53, Protocol::UDP));
    datapath.receive(&frame(102, 443, Protocol::TCP));
    datapath.receive(&[0xff; 60]);
}

#[test]
fn services_have_their_backends_and_counters() {
    let mut datapath = Datapath::filled();
    visit(&mut datapath);
    let expected = json!([
        {
            "address": "192.0.2.101", "port": 53, "protocol": "UDP", "id": 2,
            "backends_active": 0, "backends_draining": 0, "table_size": 0,
            "packets_in": 0, "bytes_in": 0, "packets_out": 0, "bytes_out": 0, "connections": 0, "refused": 1,
        },
        {
            "address": "192.0.2.101", "port": 80, "protocol": "TCP", "id": 1,
            "backends_active": 1, "backends_draining": 1, "table_size": 251,
            "packets_in": 1, "bytes_in": 40, "packets_out": 0, "bytes_out": 0, "connections": 0, "refused": 0,
        },
        {
            "address": "192.0.2.102", "port": 443, "protocol": "TCP", "id": 3,
            "backends_active": 0, "backends_draining": 0, "table_size": null,
            "packets_in": 0, "bytes_in": 0, "packets_out": 0, "bytes_out": 0, "connections": 0, "refused": 1,
        },
    ]);
    assert_eq!(ask_json(&datapath, &["services"]), expected);
    let table = "\
SERVICE              ID  BACKENDS  DRAINING  TABLE  PACKETS IN  BYTES IN  PACKETS OUT  BYTES OUT  CONNECTIONS  REFUSED
192.0.2.101:53/UDP    2         0         0      0           0       0 B            0        0 B            0        1
192.0.2.101:80/TCP    1         1         1    251           1      40 B            0        0 B            0        0
192.0.2.102:443/TCP   3         0         0      -           0       0 B            0        0 B            0        1
";
    assert_eq!(ask(&datapath, &["services"]), table);
}

#[test]
fn backends_are_the_slots_in_use() {
    let datapath = Datapath::filled();
    let expected = json!([
        {
            "id": 1, "service_id": 1, "service_address": "192.0.2.101", "service_port": 80, "protocol": "TCP",
            "address": "10.32.1.1", "port": 8080, "state": "active", "generation": 1, "local": true,
        },
        {
            "id": 2, "service_id": 1, "service_address": "192.0.2.101", "service_port": 80, "protocol": "TCP",
            "address": "10.32.2.1", "port": 8080, "state": "draining", "generation": 4, "local": false,
        },
        {
            "id": 5, "service_id": 9, "service_address": null, "service_port": null, "protocol": null,
            "address": "10.32.3.1", "port": 8080, "state": "active", "generation": 2, "local": false,
        },
    ]);
    assert_eq!(ask_json(&datapath, &["backends"]), expected);
    let table = "\
ID  SERVICE             ENDPOINT        STATE     GENERATION  PLACE
 1  192.0.2.101:80/TCP  10.32.1.1:8080  active             1  local
 2  192.0.2.101:80/TCP  10.32.2.1:8080  draining           4  remote
 5  -                   10.32.3.1:8080  active             2  remote
";
    assert_eq!(ask(&datapath, &["backends"]), table);
}

#[test]
fn flows_name_their_backend_while_it_serves_them() {
    let datapath = Datapath::filled();
    let mut flows = ask_json(&datapath, &["flows"]);
    let idle = flows[0]["idle_seconds"].take().as_u64().unwrap();
    assert!((100..160).contains(&idle), "{idle}");
    let expected = json!([
        {
            "client": "198.51.100.10", "client_port": 40001, "seen_as": null, "address": "192.0.2.101", "port": 80,
            "protocol": "TCP", "backend_id": 2, "backend": "10.32.2.1", "backend_port": 8080,
            "state": "established", "path": "redirect", "idle_seconds": null, "table": "established",
        },
        {
            "client": "198.51.100.10", "client_port": 40002, "seen_as": null, "address": "192.0.2.101", "port": 80,
            "protocol": "TCP", "backend_id": 2, "backend": null, "backend_port": null,
            "state": "client_closed", "path": "stack", "idle_seconds": 0, "table": "established",
        },
        {
            "client": "198.51.100.11", "client_port": 40003, "seen_as": null, "address": "192.0.2.101", "port": 80,
            "protocol": "TCP", "backend_id": 1, "backend": "10.32.1.1", "backend_port": 8080,
            "state": "opening", "path": "stack", "idle_seconds": 0, "table": "handshake",
        },
    ]);
    assert_eq!(flows, expected);
    let table = "\
CLIENT               SEEN AS  SERVICE             BACKEND         STATE    PATH   IDLE  TABLE
198.51.100.11:40003  -        192.0.2.101:80/TCP  10.32.1.1:8080  opening  stack   0 s  handshake
";
    assert_eq!(ask(&datapath, &["flows", "--client", "198.51.100.11"]), table);
    assert!(ask(&datapath, &["flows", "--client", "198.51.100.10"]).contains("192.0.2.101:80/TCP  gone "));
}

/// A client inside the cluster, whose connection is known by this node's own address: the client is shown and asked for.
#[test]
fn flows_have_the_client_beside_the_source_that_its_backend_sees() {
    let mut datapath = Datapath::filled();
    let (overlay, address) = (Ipv4::new([10, 32, 0, 1]), Ipv4::new([192, 0, 2, 101]));
    datapath.maps.inside.set_own(Own { overlay, ..Own::default() }).unwrap();
    let given = MasqueradedKey::new(address, Port::new(80), Port::new(20_000), Protocol::TCP);
    let client = Client::new(Ipv4::new([10, 32, 1, 9]), Port::new(40_006));
    datapath.maps.masqueraded.insert(&given, &client).unwrap();
    let flow = Flow::new(1, 1, 1, Path::Redirect, State::Established, NEVER_IDLE);
    for source in [overlay.octets(), [198, 51, 100, 13]] {
        datapath.maps.flows.insert(&key(source, 20_000, address.octets(), 80), &flow).unwrap();
    }
    let table = "\
CLIENT           SEEN AS          SERVICE             BACKEND         STATE        PATH      IDLE  TABLE
10.32.1.9:40006  10.32.0.1:20000  192.0.2.101:80/TCP  10.32.1.1:8080  established  redirect   0 s  established
";
    assert_eq!(ask(&datapath, &["flows", "--client", "10.32.1.9"]), table);
    let other = ask_json(&datapath, &["flows", "--client", "198.51.100.13"]);
    assert_eq!((&other[0]["client_port"], &other[0]["seen_as"]), (&json!(20_000), &Value::Null));
    assert_eq!(ask(&datapath, &["flows", "--client", "10.32.0.1"]), "none\n");
}

#[test]
fn flows_can_be_chosen_and_limited() {
    let datapath = Datapath::filled();
    let count = |words: &[&str]| ask_json(&datapath, words).as_array().unwrap().len();
    assert_eq!(count(&["flows", "--service", "192.0.2.101:80"]), 3);
    assert_eq!(count(&["flows", "--service", "192.0.2.101:80", "--client", "198.51.100.11"]), 1);
    assert_eq!(count(&["flows", "--service", "192.0.2.101:81"]), 0);
    assert_eq!(count(&["flows", "--limit", "3"]), 3);
    assert_eq!(count(&["flows", "--limit", "0"]), 3);
    assert_eq!(ask(&datapath, &["flows", "--service", "192.0.2.102:80"]), "none\n");

    let directory = datapath.directory().to_str().unwrap();
    let output = agent(&["flows", "--limit", "2", "-o", "json", "--bpffs", directory]);
    assert!(output.status.success());
    let rows: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 2);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("lb-agent: 2 of 3 connections;"), "{said}");
}

#[test]
fn a_node_that_holds_nothing_points_at_what_others_forward_to_it() {
    let mut datapath = Datapath::filled();
    for (key, _) in datapath.maps.flows.list().unwrap() {
        datapath.maps.flows.remove(&key).unwrap();
    }
    for (key, _) in datapath.maps.handshakes.list().unwrap() {
        datapath.maps.handshakes.remove(&key).unwrap();
    }
    let output = agent(&["flows", "--bpffs", datapath.directory().to_str().unwrap()]);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "none\n");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("--replies shows 1 that others forward to pods here"), "{said}");
}

#[test]
fn replies_are_the_connections_that_others_forward_here() {
    let datapath = Datapath::filled();
    let mut replies = ask_json(&datapath, &["flows", "--replies"]);
    let idle = replies[0]["idle_seconds"].take().as_u64().unwrap();
    assert!((5..60).contains(&idle), "{idle}");
    let expected = json!([
        {
            "client": "198.51.100.10", "client_port": 40005, "backend": "10.32.1.1", "backend_port": 8080,
            "protocol": "TCP", "mark": 9, "holder": null, "state": "answered", "idle_seconds": null,
            "table": "handshake",
        },
        {
            "client": "198.51.100.12", "client_port": 40004, "backend": "10.32.1.1", "backend_port": 8080,
            "protocol": "TCP", "mark": 7, "holder": "10.32.0.2", "state": "established", "idle_seconds": 0,
            "table": "established",
        },
    ]);
    assert_eq!(replies, expected);
    let table = "\
CLIENT               BACKEND             MARK  HOLDER     STATE        IDLE  TABLE
198.51.100.12:40004  10.32.1.1:8080/TCP     7  10.32.0.2  established   0 s  established
";
    assert_eq!(ask(&datapath, &["flows", "--replies", "--client", "198.51.100.12"]), table);
}

#[test]
fn holders_have_the_endpoints_that_they_forward_to() {
    let datapath = Datapath::filled();
    let expected =
        json!([{ "mark": 7, "mac": "02:0a:20:00:00:02", "overlay_address": "10.32.0.2", "endpoints": 2 }]);
    assert_eq!(ask_json(&datapath, &["holders"]), expected);
    let table = "\
MARK  MAC                OVERLAY ADDRESS  ENDPOINTS
   7  02:0a:20:00:00:02  10.32.0.2                2
";
    assert_eq!(ask(&datapath, &["holders"]), table);
}

#[test]
fn reasons_are_those_that_packets_had_and_with_all_every_one() {
    let mut datapath = Datapath::filled();
    visit(&mut datapath);
    let outcomes = datapath.maps.outcomes().unwrap();
    let row = |reason: Reason| {
        let outcome = outcomes.get(&reason).copied().unwrap_or_default();
        json!({
            "number": reason.number(), "reason": reason.label(), "kind": reason.kind().name(),
            "packets": outcome.packets, "bytes": outcome.bytes, "description": reason.describe(),
        })
    };
    let seen = [Reason::ForwardStack, Reason::PassNotIpv4, Reason::RejectNoEndpoint, Reason::DropNoRing];
    assert_eq!(ask_json(&datapath, &["reasons"]), seen.map(row).into_iter().collect::<Value>());
    assert_eq!(outcomes.values().map(|outcome| outcome.packets).sum::<u64>(), 4, "one for each frame");
    assert_eq!(
        ask_json(&datapath, &["reasons", "--all"]),
        Reason::ALL.iter().map(|reason| row(*reason)).collect::<Value>()
    );
    let table = ask(&datapath, &["reasons"]);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "REASON              KIND     PACKETS  BYTES  DESCRIPTION");
    assert_eq!(lines[2], "pass_not_ipv4       pass           1   60 B  Not an IPv4 packet.");
    assert_eq!(ask(&Datapath::filled(), &["reasons"]), "none\n");
}

#[test]
fn status_is_the_whole_datapath_on_one_screen() {
    let mut datapath = Datapath::filled();
    visit(&mut datapath);
    let status = ask_json(&datapath, &["status"]);
    let fill = |table: &str| {
        let found = status["tables"].as_array().unwrap().iter().find(|fill| fill["table"] == table).unwrap();
        (found["entries"].as_u64().unwrap(), found["limit"].as_u64().unwrap())
    };
    assert_eq!(status["layout"], 3);
    assert_eq!(fill("services"), (3, 16));
    assert_eq!(fill("backends"), (3, 7), "slot 0 is never used");
    assert_eq!(fill("endpoints"), (3, 16));
    assert_eq!(fill("holders"), (1, 250));
    assert_eq!(fill("flows"), (2, 64));
    assert_eq!(fill("replies"), (2, 64));
    assert_eq!(fill("handshakes"), (2, 64), "the visit began one");
    assert_eq!(fill("handshake_replies"), (2, 64), "the visit began one");
    assert_eq!(fill("masquerades"), (0, 262_144));
    assert_eq!((&status["backends_active"], &status["backends_draining"]), (&json!(2), &json!(1)));
    let state = |name: &str| {
        let found = status["flows"].as_array().unwrap().iter().find(|row| row["state"] == name).unwrap();
        (found["own"].as_u64().unwrap(), found["forwarded_here"].as_u64().unwrap())
    };
    assert_eq!(state("opening"), (2, 0));
    assert_eq!(state("answered"), (0, 1));
    assert_eq!(state("established"), (1, 1));
    assert_eq!(state("client_closed"), (1, 0));
    let packets: Vec<(&str, u64)> = status["outcomes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["kind"].as_str().unwrap(), row["packets"].as_u64().unwrap()))
        .collect();
    assert_eq!(packets, [("forward", 1), ("pass", 1), ("reject", 1), ("drop", 1)]);

    let text = ask(&datapath, &["status"]);
    let beginning = format!(
        "Maps in {}/maps-v3, layout 3\nProgram: id {}, forwarding by redirect, mark shift 24\n\
         Interfaces: lo uplink+pods\nBackends: 2 active, 1 draining\n\n\
         TABLE              ENTRIES   LIMIT    FULL\n",
        datapath.directory().display(),
        status["program"]["id"]
    );
    assert!(text.starts_with(&beginning), "{text}");
    assert!(text.contains("\nservices                 3      16  18.8 %\n"), "{text}");
    assert!(text.contains("\nestablished      1               1\n"), "{text}");
}

const COMMANDS: [&str; 6] = ["status", "services", "backends", "flows", "holders", "reasons"];

#[test]
fn without_a_datapath_every_command_says_so() {
    for command in COMMANDS {
        let output = agent(&[command, "--bpffs", "/sys/fs/bpf/reweave-lb-test-absent", "-o", "json"]);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &[][..]), "{command}");
        assert_eq!(
            String::from_utf8(output.stderr).unwrap(),
            "lb-agent: there is no datapath at /sys/fs/bpf/reweave-lb-test-absent: is the agent running on this \
             node, and --bpffs right?\n"
        );
    }
}

#[test]
fn a_datapath_with_a_missing_map_is_an_error_that_names_it() {
    let datapath = Datapath::filled();
    fs::remove_file(datapath.pin("holders")).unwrap();
    for command in COMMANDS {
        let output = agent(&[command, "--bpffs", datapath.directory().to_str().unwrap()]);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &[][..]), "{command}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.starts_with("lb-agent: map holders: open: "), "{said}");
    }
}

#[test]
fn the_directory_can_come_from_the_environment() {
    let datapath = Datapath::filled();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lb-agent"));
    let output = command.arg("holders").env("LB_BPFFS", datapath.directory()).output().unwrap();
    assert!(stdout(output).contains("10.32.0.2"));
}
