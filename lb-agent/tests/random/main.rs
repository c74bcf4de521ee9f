//! Random sequences of what happens to a cluster, under traffic that does not stop.
//!
//! Always: the client outside is answered by the address and port that it asked, and by nobody else; a pod sees a client
//! outside as it is, and one inside as the holder's overlay address. At the end, when nothing happens any more: every client
//! is answered, by all pods that are ready.
//!
//! A sequence is data that a seed gives ([`script`]), the network too. `LB_RANDOM_SEED=SEED` plays one again,
//! `LB_RANDOM_COUNT=N` as many as that, the next ones with it. Without them always the same few: `LB_RANDOM_COUNT=200` takes five
//! minutes or more, and `LB_RANDOM_SEED=$RANDOM` beside it plays others.
//!
//! Needs root, and the programs that `cargo xtask setup` installs.

mod bed;
mod judge;
mod script;
mod traffic;

use bed::Bed;
use script::Script;
use std::collections::BTreeMap;
use std::env;
use std::io::Write as _;
use std::thread;
use testbed::Topology;

const COUNT: u64 = 40;
const SEED: u64 = 1;
/// On one network: whoever reads of more reads nothing new.
const FAILURES: usize = 3;

#[test]
fn random_sequences_confuse_nobody_and_everything_works_after_them() {
    let mut by_topology = BTreeMap::<Topology, Vec<Script>>::new();
    for script in scripts() {
        by_topology.entry(script.topology).or_default().push(script);
    }
    let failures: Vec<String> = thread::scope(|scope| {
        let play = |(topology, scripts): (&Topology, &Vec<Script>)| {
            let (topology, scripts) = (*topology, scripts.clone());
            scope.spawn(move || play_all(topology, &scripts))
        };
        let threads: Vec<_> = by_topology.iter().map(play).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The one that is asked for, or many. Says which.
fn scripts() -> Vec<Script> {
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let seed = number("LB_RANDOM_SEED");
    let first = seed.unwrap_or(SEED);
    let count = number("LB_RANDOM_COUNT").unwrap_or(if seed.is_some() { 1 } else { COUNT });
    say(&format!("random sequences: seeds {first} to {}", first + count - 1));
    (first..first + count).map(Script::new).collect()
}

/// All of one network, on one testbed while it lasts.
fn play_all(topology: Topology, scripts: &[Script]) -> Vec<String> {
    let mut failures = Vec::new();
    let mut bed = None;
    for script in scripts {
        if failures.len() >= FAILURES {
            break;
        }
        let played = bed.take().map_or_else(|| Bed::start(topology), Ok).and_then(|mut fresh: Bed| {
            let wrong = fresh.play(script)?;
            Ok((fresh, wrong))
        });
        match played {
            Ok((used, wrong)) if wrong.is_empty() => bed = Some(used),
            // The next one gets a testbed that nobody has broken.
            Ok((used, wrong)) => {
                failures.push(describe(script, &wrong));
                failures.extend(finish(used));
            }
            Err(error) => failures.push(describe(script, &[format!("{error:#}")])),
        }
    }
    failures.extend(bed.into_iter().flat_map(finish));
    failures
}

fn finish(bed: Bed) -> Vec<String> {
    match bed.finish() {
        Ok(strange) => {
            let mut of_script = BTreeMap::<u64, (Script, Vec<String>)>::new();
            for (script, text) in strange {
                of_script.entry(script.seed).or_insert_with(|| (script, Vec::new())).1.push(text);
            }
            of_script.values().map(|(script, texts)| describe(script, texts)).collect()
        }
        Err(error) => vec![format!("the capture: {error:#}")],
    }
}

/// For the person who repairs it.
fn describe(script: &Script, wrong: &[String]) -> String {
    let Script { seed, topology, steps } = script;
    let steps: String =
        steps.iter().map(|step| format!("\n    {:?}, {} questions", step.event, step.questions)).collect();
    let shown: String = wrong.iter().take(5).map(|text| format!("\n  {text}")).collect();
    format!("LB_RANDOM_SEED={seed}, {topology}:{steps}{shown}\n  {} faults\n", wrong.len())
}

/// Not println: the harness would keep the output of a test that passes.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "\n{text}");
}
