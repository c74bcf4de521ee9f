//! `cargo xtask generate`: the documents whose content stands in the code, `docs/reasons.md` and `docs/maps.md`, and the
//! manifests that are drawn from the chart.

use crate::{manifests, sh};
use anyhow::{Context as _, Result, bail};
use lb_common::addr::Mac;
use lb_common::backend::Backend;
use lb_common::clock::Second;
use lb_common::counters::Outcome;
use lb_common::flow::{Flow, FlowKey, Reply};
use lb_common::fragment::{Fragment, FragmentKey};
use lb_common::holder::{EndpointHolders, EndpointKey, Holder};
use lb_common::interface::InterfaceSlot;
use lb_common::limits;
use lb_common::maglev::SIZES;
use lb_common::masquerade::{Client, Masquerade, MasqueradedKey, Network, Own};
use lb_common::reason::{Reason, SLOTS};
use lb_common::service::{Service, ServiceKey, ServiceStats};
use lb_common::sieve::SIEVE_WORDS;
use lb_common::way::BackendWay;
use std::fmt::Write as _;
use std::fs;
use testbed::kubernetes::Binaries;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write nothing; fail where a document does not say what the code says
    #[arg(long)]
    check: bool,
}

impl Args {
    /// `--check`.
    pub(crate) const CHECK: Self = Self { check: true };
}

pub(crate) fn run(args: &Args) -> Result<()> {
    documents(args)?;
    drawn(args, &manifests::programs()?)
}

/// Those out of the code.
pub(crate) fn documents(args: &Args) -> Result<()> {
    settle(args, vec![("docs/reasons.md".to_owned(), reasons()), ("docs/maps.md".to_owned(), maps()?)])
}

/// Those out of the chart.
pub(crate) fn drawn(args: &Args, programs: &Binaries) -> Result<()> {
    settle(args, manifests::all(programs)?)
}

/// Writes the files that are not as they should be, or names them in an error.
fn settle(args: &Args, files: Vec<(String, String)>) -> Result<()> {
    let mut stale = Vec::new();
    for (file, text) in files {
        let path = sh::workspace().join(&file);
        if fs::read_to_string(&path).is_ok_and(|found| found == text) {
            continue;
        }
        if args.check {
            stale.push(file);
        } else {
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            sh::say(&format!("wrote {file}"));
        }
    }
    if !stale.is_empty() {
        bail!("{} not as the code says; run `cargo xtask generate`", stale.join(" and "));
    }
    Ok(())
}

const GENERATED: &str = "<!-- Written by `cargo xtask generate`. Do not edit. -->";

fn reasons() -> String {
    let mut text = format!(
        "# Reasons\n\n{GENERATED}\n\nEvery packet that a program sees adds to exactly one of these counters, so \
         they add up to the packets seen. `lb-agent reasons` shows them. A number is never used again for another \
         reason.\n\n| number | reason | kind | what happened |\n| ---: | --- | --- | --- |\n"
    );
    for reason in Reason::ALL {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| {} | `{}` | {} | {} |",
            reason.number(),
            reason.label(),
            reason.kind().name(),
            reason.describe()
        );
    }
    text
}

/// Of the value of `scratch`, whose type is the programs' own.
const SCRATCH_BYTES: usize = 72;

/// One map, for people.
struct Map {
    name: &'static str,
    kind: &'static str,
    key: &'static str,
    key_bytes: usize,
    value: &'static str,
    value_bytes: usize,
    limit: u32,
    memory: Memory,
    /// What else there is to know.
    more: &'static str,
}

/// Kernel memory. Costs of an entry are those that Linux 6.18 on x86-64 reports (`bytes_memlock`), so are the costs of
/// a map without entries.
enum Memory {
    /// All of it when the map is made.
    Whole { bytes: u64 },
    /// All of it when the map is made, once for each CPU.
    PerCpu { bytes: u64 },
    /// Some when the map is made, then for each entry.
    OnUse { empty: u64, entry: u64 },
}

impl Memory {
    fn describe(&self, limit: u32) -> String {
        match self {
            Self::Whole { bytes } => format!("{}, taken at load", size(*bytes)),
            Self::PerCpu { bytes } => format!("{} for each CPU, taken at load", size(*bytes)),
            Self::OnUse { empty, entry } => format!(
                "{} at load, {entry} B for each entry: {} when full",
                size(*empty),
                size(empty + entry * u64::from(limit))
            ),
        }
    }
}

/// Short, as in "6.5 MiB".
fn size(bytes: u64) -> String {
    const KIB: u64 = 1024;
    const MIB: u64 = 1024 * KIB;
    let (unit, name) = match bytes {
        0..KIB => return format!("{bytes} B"),
        KIB..MIB => (KIB, "KiB"),
        _ => (MIB, "MiB"),
    };
    format!("{}.{} {name}", bytes / unit, bytes % unit * 10 / unit)
}

fn maps() -> Result<String> {
    let mut text = format!(
        "# Maps\n\n{GENERATED}\n\nThe maps are pinned in `/sys/fs/bpf/reweave-lb/maps-v3` (another directory with \
         `--bpffs`), and live there whether an agent runs or not. `lb-agent services`, `backends`, `flows`, `holders`, \
         `reasons` and `status` show them in words; `bpftool map dump pinned FILE` shows every field by name.\n\n\
         Addresses (`octets`) and ports (`bytes`) are in network order: port 8080 is `[31,144]`, 31 × 256 + 144. All \
         other numbers are in the machine's order. Instants are seconds since boot (`CLOCK_MONOTONIC`). Fields called \
         `zero` are spare. The types are in `lb-common/src`. Limits are the defaults; a pinned map keeps the limit that \
         it was made with. A full table refuses the new and \
         keeps the old; the LRU tables let the least recently used go.\n\n\
         | map | kind | limit | memory |\n| --- | --- | ---: | --- |\n"
    );
    let maps = all_maps();
    for Map { name, kind, limit, memory, .. } in &maps {
        let _ = writeln!(text, "| [`{name}`](#{name}) | {kind} | {limit} | {} |", memory.describe(*limit));
    }
    for Map { name, key, key_bytes, value, value_bytes, more, .. } in &maps {
        let file = sh::workspace().join(format!("docs/dumps/{name}.txt"));
        let dump = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let _ = write!(
            text,
            "\n## {name}\n\nKey, {key_bytes} bytes: {key}\n\nValue, {value_bytes} bytes: {value}\n\n{more}{}One entry \
             of `bpftool map dump pinned {name}`:\n\n```\n{dump}```\n",
            if more.is_empty() { "" } else { "\n\n" },
        );
    }
    Ok(text)
}

fn all_maps() -> Vec<Map> {
    let connection = "a connection's 5-tuple, as the client sends it.";
    let answer = "a connection's 5-tuple, as the backend sends it.";
    let flow = "slot, generation and service of the backend, the last packet's time, the connection's state (1 \
                opening, 2 answered, 3 picked up, 4 established, 5 client closed, 6 backend closed, 7 closed, 8 \
                reset) and path (0 redirect, 1 stack; both directions go the same way).";
    let reply = "`kind` 1: the address and port that the client connected to, which become the source again. `kind` \
                 2: the mark of the other holder that the packet must be led back to.";
    vec![
        Map {
            name: "interfaces",
            kind: "array",
            key: "the highest 12 bits of the interface's index times 0x9e3779b1 (modulo 2^32), or up to seven more where \
                  that is taken.",
            key_bytes: size_of::<u32>(),
            value: "the interface's index, 0 where the entry is free, and its roles: 1 uplink, 2 overlay, 4 pods, \
                    8 this node itself (`lo`), added up.",
            value_bytes: size_of::<InterfaceSlot>(),
            limit: limits::INTERFACES,
            memory: Memory::Whole { bytes: 33_080 },
            more: "A program on an interface that is not here passes everything on.",
        },
        Map {
            name: "sieve",
            kind: "array",
            key: "a word of 64 bits.",
            key_bytes: size_of::<u32>(),
            value: "a bit for each of 64 hashes of served ports, from word 4,096 on for each of 64 port numbers of \
                    backends, from word 5,120 on for each of 64 hashes of other holders' Ethernet addresses, from word 6,144 \
                    on of the first 24 bits of addresses inside the cluster, from word 7,168 on of served ports with backends \
                    that are masqueraded.",
            value_bytes: size_of::<u64>(),
            limit: SIEVE_WORDS,
            memory: Memory::Whole { bytes: 65_848 },
            more: "Tells most packets that are not for us with one load. A bit says \"perhaps\" and is never taken \
                   back: `services` and `replies` decide.",
        },
        Map {
            name: "services",
            kind: "hash",
            key: "address, port and protocol (6 TCP, 17 UDP) that this node serves.",
            key_bytes: size_of::<ServiceKey>(),
            value: "the id, an index into `rings` and `service_stats`; `flags` 1: all connections of a client's address get one \
                    backend; 2: some backends have flag 2.",
            value_bytes: size_of::<Service>(),
            limit: limits::SERVICES,
            memory: Memory::Whole { bytes: 903_184 },
            more: "What is not here is not touched: it goes to the node itself.",
        },
        Map {
            name: "rings",
            kind: "array of arrays",
            key: "a service's id.",
            key_bytes: size_of::<u32>(),
            value: "the service's Maglev table, a map of its own. At index 0 stand the size of the table and which of \
                    the two words of each place is in use, then the slot of a backend at each place.",
            value_bytes: size_of::<u32>(),
            limit: limits::SERVICES,
            memory: Memory::OnUse { empty: 80_312, entry: 8 * (SIZES[2] as u64 + 1) },
            more: "A table is replaced as a whole: the words that are not in use are written first, then index 0. \
                   So a packet sees the old set of backends or the new one. Size 0 \
                   refuses every new connection. The costs in the table above are those of up to ten backends for each \
                   service (1,021 places of 8 bytes); the largest table, 65,537 places, costs 512 KiB. \
                   The outer map shows an id for each table; the example is `bpftool map dump id ID`, a table of \
                   three places shortened for the eye (real ones begin at 251).",
        },
        Map {
            name: "backends",
            kind: "array",
            key: "slot; 0 is never used.",
            key_bytes: size_of::<u32>(),
            value: "the endpoint, the service's id, `state` (0 free, 1 active, 2 draining: existing connections only), \
                    `flags` (1: runs on this node; 2: answers would not come back by themselves, so every connection gets a source \
                    of this node's).",
            value_bytes: size_of::<Backend>(),
            limit: limits::BACKENDS,
            memory: Memory::Whole { bytes: 1_600_312 },
            more: "`generation` counts up when the slot is given to another endpoint. A connection remembers slot and \
                   generation, so those of the old endpoint are dead at their next packet.",
        },
        Map {
            name: "ways",
            kind: "array",
            key: "a backend's slot.",
            key_bytes: size_of::<u32>(),
            value: "the device and the next hop to the backend, as the kernel's routing named them in `second`, and up \
                    to which length an IP packet passes there.",
            value_bytes: size_of::<BackendWay>(),
            limit: limits::BACKENDS,
            memory: Memory::Whole { bytes: 2_400_312 },
            more: "Holds for that second, so that a changed route is followed.",
        },
        Map {
            name: "flows",
            kind: "hash",
            key: connection,
            key_bytes: size_of::<FlowKey>(),
            value: flow,
            value_bytes: size_of::<Flow>(),
            limit: limits::FLOWS,
            memory: Memory::OnUse { empty: 16_778_112, entry: 96 },
            more: "Connections whose handshake is complete (UDP: that have been answered). Nothing is evicted.",
        },
        Map {
            name: "handshakes",
            kind: "LRU hash",
            key: connection,
            key_bytes: size_of::<FlowKey>(),
            value: "as in `flows`; `expected_ack` is the number that the client's third packet must acknowledge.",
            value_bytes: size_of::<Flow>(),
            limit: limits::HANDSHAKES,
            memory: Memory::Whole { bytes: 6_816_640 },
            more: "Connections that are not established yet. When it is full the least recently used goes, and finds \
                   its backend again by the hash.",
        },
        Map {
            name: "replies",
            kind: "hash",
            key: answer,
            key_bytes: size_of::<FlowKey>(),
            value: reply,
            value_bytes: size_of::<Reply>(),
            limit: limits::FLOWS,
            memory: Memory::OnUse { empty: 16_778_112, entry: 96 },
            more: "The other half of `flows`, and the connections that other holders forward to pods of this node.",
        },
        Map {
            name: "handshake_replies",
            kind: "LRU hash",
            key: answer,
            key_bytes: size_of::<FlowKey>(),
            value: "as in `replies`.",
            value_bytes: size_of::<Reply>(),
            limit: limits::HANDSHAKES,
            memory: Memory::Whole { bytes: 6_816_640 },
            more: "The other half of `handshakes`.",
        },
        Map {
            name: "fragments",
            kind: "LRU hash",
            key: "what the fragments of one datagram have in common: addresses, identification, protocol, and where they are \
                  seen: `hook` is 0 where they leave, else the roles of the interface that they come in by.",
            key_bytes: size_of::<FragmentKey>(),
            value: "of the first fragment: the addresses and our byte of the mark that it left with, the ports that it came with, \
                    the reason's number, when, and how many bytes have not come yet (modulo 2^16, and counted from 0 until the last part has come).",
            value_bytes: size_of::<Fragment>(),
            limit: limits::FRAGMENTS,
            memory: Memory::Whole { bytes: 1_704_832 },
            more: "The later fragments, which have no ports, go after the first one for up to two seconds. When it is full the \
                   least recently used goes, and what follows is left to the stack, which never gets the first fragment of \
                   what is ours.",
        },
        Map {
            name: "masquerades",
            kind: "hash",
            key: connection,
            key_bytes: size_of::<FlowKey>(),
            value: "the source port that the connection was given: backends, and `flows` and `replies`, know it by this port and \
                    the node's overlay address.",
            value_bytes: size_of::<Masquerade>(),
            limit: limits::MASQUERADES,
            memory: Memory::OnUse { empty: 4_195_200, entry: 80 },
            more: "Connections whose answers would not come back to the holder by themselves: of clients inside the cluster. \
                   Ports are 16,384 to 32,767.",
        },
        Map {
            name: "masqueraded",
            kind: "hash",
            key: "the address and port that the client connected to, the source port that the connection was given, protocol.",
            key_bytes: size_of::<MasqueradedKey>(),
            value: "the client itself, which owns the port.",
            value_bytes: size_of::<Client>(),
            limit: limits::MASQUERADES,
            memory: Memory::OnUse { empty: 4_195_200, entry: 80 },
            more: "The other half of `masquerades`. Two Services may have given out the same port. A port comes free when its \
                   connection is over: at the sweep, or before where none of those that are tried is free.",
        },
        Map {
            name: "inside",
            kind: "LPM trie",
            key: "a network: how many leading bits count, and the address.",
            key_bytes: size_of::<Network>(),
            value: "always 0.",
            value_bytes: size_of::<u32>(),
            limit: limits::INSIDE,
            memory: Memory::OnUse { empty: 0, entry: 32 },
            more: "Clients on an uplink with such an address are inside the cluster. On other interfaces all are.",
        },
        Map {
            name: "own",
            kind: "array",
            key: "always 0.",
            key_bytes: size_of::<u32>(),
            value: "the node's overlay address, 0.0.0.0 where it is not known yet, and whether it is on the network that the nodes \
                    are on.",
            value_bytes: size_of::<Own>(),
            limit: 1,
            memory: Memory::Whole { bytes: 320 },
            more: "",
        },
        Map {
            name: "scratch",
            kind: "per-CPU array",
            key: "always 0.",
            key_bytes: size_of::<u32>(),
            value: "what the programs know of the packet at hand. Nobody else reads it.",
            value_bytes: SCRATCH_BYTES,
            limit: 1,
            memory: Memory::PerCpu { bytes: SCRATCH_BYTES as u64 },
            more: "The example shows the first CPU's. In it no packet has come yet.",
        },
        Map {
            name: "holders",
            kind: "hash",
            key: "the Ethernet address of another node's overlay device.",
            key_bytes: size_of::<Mac>(),
            value: "its overlay address, where replies to its forwards go, and its mark on this node, 1 to 250.",
            value_bytes: size_of::<Holder>(),
            limit: limits::HOLDERS,
            memory: Memory::Whole { bytes: 21_136 },
            more: "",
        },
        Map {
            name: "endpoints",
            kind: "hash",
            key: "address, port and protocol of an endpoint.",
            key_bytes: size_of::<EndpointKey>(),
            value: "which holders forward to it: one bit for each mark, lowest first. Bit 0 is this node itself.",
            value_bytes: size_of::<EndpointHolders>(),
            limit: limits::ENDPOINTS,
            memory: Memory::OnUse { empty: 4_195_200, entry: 96 },
            more: "In the example, 129 = 1 + 128: this node and the holder with mark 7.",
        },
        Map {
            name: "outcomes",
            kind: "per-CPU array",
            key: "a reason's number, see [reasons.md](reasons.md).",
            key_bytes: size_of::<u32>(),
            value: "packets that ended so, and their bytes.",
            value_bytes: size_of::<Outcome>(),
            limit: SLOTS,
            memory: Memory::PerCpu { bytes: u64::from(SLOTS) * size_of::<Outcome>() as u64 },
            more: "The example shows the first CPU's counters only; so does the next.",
        },
        Map {
            name: "service_stats",
            kind: "per-CPU array",
            key: "a service's id.",
            key_bytes: size_of::<u32>(),
            value: "packets and bytes (from the IP header on) of clients and of backends, connections established, \
                    packets refused.",
            value_bytes: size_of::<ServiceStats>(),
            limit: limits::SERVICES,
            memory: Memory::PerCpu { bytes: limits::SERVICES as u64 * size_of::<ServiceStats>() as u64 },
            more: "",
        },
        Map {
            name: "clock",
            kind: "per-CPU array",
            key: "always 0.",
            key_bytes: size_of::<u32>(),
            value: "the second that the CPU's clock showed at a tick of the kernel.",
            value_bytes: size_of::<Second>(),
            limit: 1,
            memory: Memory::PerCpu { bytes: size_of::<Second>() as u64 },
            more: "The clock is asked once in a tick. In the example no packet has come yet.",
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_and_every_map_with_an_example_is_documented() {
        let reasons = reasons();
        for reason in Reason::ALL {
            assert!(reasons.contains(&format!("| {} | `{}` |", reason.number(), reason.label())));
        }
        let mut documented: Vec<String> = all_maps().iter().map(|map| format!("{}.txt", map.name)).collect();
        documented.sort_unstable();
        // The agent's tests write one example for each map of the program.
        let mut examples: Vec<String> = fs::read_dir(sh::workspace().join("docs/dumps"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        examples.sort_unstable();
        assert_eq!(documented, examples);
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(21_136), "20.6 KiB");
        assert_eq!(size(16_778_112), "16.0 MiB");
    }
}
