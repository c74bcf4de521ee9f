//! The examples in `docs/maps.md` are what bpftool prints: `docs/dumps` holds one entry of each map, and this test
//! compares it with the entry of a real one. `LB_UPDATE_DUMPS=1` writes the files anew.

use crate::datapath::{Datapath, frame, key};
use lb_agent::datapath::maps::NAMES;
use lb_common::addr::{Ipv4, Mac, Port, Protocol};
use lb_common::backend::{Backend, BackendState};
use lb_common::flow::{Flow, Path, Reply, State};
use lb_common::fragment::{Fragment, FragmentKey, Hook};
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::interface::{Interface, InterfaceSlot};
use lb_common::masquerade::{Client, Masquerade, MasqueradedKey, Network, Own};
use lb_common::reason::Reason;
use lb_common::service::{Service, ServiceKey};
use lb_common::sieve::Bit;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use std::fs;
use std::path::Path as FilePath;
use std::process::Command;

/// The examples' seconds since boot: a day.
const LAST_SEEN: u32 = 86_400;

/// A datapath with one entry of everything that the examples show.
fn example() -> Datapath {
    let mut datapath = Datapath::new();
    let maps = &mut datapath.maps;
    let (client, address) = ([198, 51, 100, 10], [192, 0, 2, 101]);
    let pod = Port::new(8080);
    maps.interfaces.insert(&1, &Interface::UPLINK).unwrap();
    maps.services.insert(&web(), &Service::new(1, false)).unwrap();
    let backend = Backend::new(1, 1, Ipv4::new([10, 32, 1, 1]), pod, BackendState::Active, true);
    maps.set_backend(1, &backend).unwrap();
    maps.set_ring(1, &[1, 1, 1]).unwrap();
    let flow = |state| Flow::new(1, 1, 1, Path::Stack, state, LAST_SEEN);
    maps.flows.insert(&key(client, 40_001, address, 80), &flow(State::Established)).unwrap();
    maps.handshakes.insert(&key(client, 40_002, address, 80), &flow(State::Opening)).unwrap();
    let reply = Reply::translate(Ipv4::new(address), web().port, 1, Path::Stack, LAST_SEEN);
    maps.replies.insert(&key([10, 32, 1, 1], 8080, client, 40_001), &reply).unwrap();
    let marked = Reply::mark(7, State::Opening, LAST_SEEN);
    maps.handshake_replies.insert(&key([10, 32, 1, 1], 8080, client, 40_003), &marked).unwrap();
    let fragments = FragmentKey::new(
        (Ipv4::new(client), Ipv4::new(address)),
        Protocol::UDP,
        [0x12, 0x34],
        Hook::ingress(Interface::UPLINK),
    );
    let (ports, left) = ((Port::new(40_004), Port::new(53)), (Ipv4::new(client), Ipv4::new([10, 32, 1, 1])));
    let first = Fragment::new(ports, left, 251, Reason::ForwardStack, LAST_SEEN, 1_480);
    maps.fragments.insert(&fragments, &first).unwrap();
    let (pod_client, source_port) = ([10, 32, 1, 9], Port::new(20_000));
    let overlay = Own { overlay: Ipv4::new([10, 32, 0, 1]), ..Own::default() };
    maps.masquerades.insert(&key(pod_client, 40_005, address, 80), &Masquerade::new(source_port)).unwrap();
    let owned = MasqueradedKey::new(Ipv4::new(address), web().port, source_port, Protocol::TCP);
    maps.masqueraded.insert(&owned, &Client::new(Ipv4::new(pod_client), Port::new(40_005))).unwrap();
    maps.inside.insert(Network { prefix: 12, address: Ipv4::new([10, 32, 0, 0]) }).unwrap();
    maps.inside.set_own(overlay).unwrap();
    maps.holders.insert(&Mac::new([2, 10, 32, 0, 0, 2]), &Holder::new(Ipv4::new([10, 32, 0, 2]), 7)).unwrap();
    let mut holders = EndpointHolders::default();
    holders.insert(EndpointHolders::SELF);
    holders.insert(7);
    maps.endpoints
        .insert(&EndpointKey::new(Ipv4::new([10, 32, 1, 1]), pod, Protocol::TCP), &holders)
        .unwrap();
    datapath
}

fn bpftool(words: &[&str]) -> String {
    let output = Command::new("bpftool").args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// `docs/debugging.md` asks bpftool for keys, byte by byte.
#[test]
fn the_keys_of_the_walk_through_are_those_of_the_maps() {
    let mut datapath = example();
    let flow = Flow::new(1, 1, 1, Path::Redirect, State::Established, LAST_SEEN);
    datapath.maps.flows.insert(&key([198, 51, 100, 10], 20_003, [192, 0, 2, 101], 80), &flow).unwrap();
    let text =
        fs::read_to_string(FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../docs/debugging.md")).unwrap();
    let mut asked = Vec::new();
    for line in text.lines() {
        let Some(words) = line.strip_prefix("$ bpftool map lookup pinned ") else { continue };
        let words: Vec<&str> = words.split_whitespace().take_while(|word| *word != "#").collect();
        let pin = datapath.pin(words[0]);
        bpftool(&[&["map", "lookup", "pinned", pin.to_str().unwrap()], &words[1..]].concat());
        asked.push(words[0]);
    }
    assert_eq!(asked, ["services", "backends", "flows"]);
}

/// The served port of the examples.
fn web() -> ServiceKey {
    ServiceKey::new(Ipv4::new([192, 0, 2, 101]), Port::new(80), Protocol::TCP)
}

/// One entry of a map's dump: of an array the one that is used; of counters the first CPU's.
fn entry(datapath: &Datapath, map: &str) -> String {
    let index = match map {
        "rings" => return ring(datapath),
        "interfaces" => InterfaceSlot::places(1).next().unwrap() as usize,
        "backends" | "service_stats" => 1,
        "sieve" => Bit::of_service(&web()).word as usize,
        "outcomes" => Reason::ForwardStack.number() as usize,
        _ => 0,
    };
    let dump = bpftool(&["map", "dump", "pinned", datapath.pin(map).to_str().unwrap()]);
    let body = dump.trim().trim_start_matches("[{").trim_end_matches(']').trim_end().trim_end_matches('}');
    // Entries are indented by four blanks, the values of CPUs by twelve.
    let entry = body.split("\n    },{").nth(index).unwrap();
    let first_cpu = entry.split("\n            },{").next().unwrap();
    // bpftool breaks lines before the end of an array of numbers, and indents all of it by eight.
    let joined = first_cpu.lines().fold(String::new(), |text, line| match line.trim_start() {
        end if end.starts_with(']') => text + end,
        _ => text + "\n" + line.strip_prefix("        ").unwrap_or(line),
    });
    joined.trim_end().to_owned()
}

/// The outer map names the inner maps by id; the example is the inner one.
fn ring(datapath: &Datapath) -> String {
    let outer = bpftool(&["-j", "map", "dump", "pinned", datapath.pin("rings").to_str().unwrap()]);
    let outer: serde_json::Value = serde_json::from_str(&outer).unwrap();
    let bytes: Vec<u8> = outer[0]["value"]
        .as_array()
        .unwrap()
        .iter()
        .map(|byte| u8::from_str_radix(byte.as_str().unwrap().trim_start_matches("0x"), 16).unwrap())
        .collect();
    let id = u32::from_ne_bytes(bytes.try_into().unwrap());
    bpftool(&["map", "dump", "id", &id.to_string()])
}

#[test]
fn the_documented_examples_are_what_bpftool_prints() {
    // One CPU counts, so that it is always the first.
    let mut first = CpuSet::new();
    first.set(0).unwrap();
    sched_setaffinity(Pid::from_raw(0), &first).unwrap();
    let mut datapath = example();
    let mut dumps: Vec<(&str, String)> = Vec::new();
    let (counters, tables): (Vec<&str>, Vec<&str>) =
        NAMES.iter().partition(|map| matches!(**map, "outcomes" | "service_stats"));
    dumps.extend(tables.iter().map(|map| (*map, entry(&datapath, map))));
    // Last, since it begins a connection at a time that nobody knows.
    datapath.receive(&frame(101, 80, Protocol::TCP));
    dumps.extend(counters.iter().map(|map| (*map, entry(&datapath, map))));

    let directory = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../docs/dumps");
    let update = std::env::var_os("LB_UPDATE_DUMPS").is_some();
    for (map, dump) in dumps {
        let file = directory.join(format!("{map}.txt"));
        let dump = format!("{}\n", dump.trim_matches('\n'));
        if update {
            fs::create_dir_all(&directory).unwrap();
            fs::write(&file, &dump).unwrap();
        }
        let documented = fs::read_to_string(&file).unwrap_or_default();
        // Blanks differ between versions of bpftool.
        let plain = |text: &str| text.split_whitespace().collect::<String>();
        assert_eq!(plain(&documented), plain(&dump), "{}: LB_UPDATE_DUMPS=1 writes it anew", file.display());
    }
}
