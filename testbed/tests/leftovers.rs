//! Nothing that a testbed made is there afterwards, however it ended.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use anyhow::ensure;
use nix::sys::signal::Signal;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use testbed::{Options, Testbed, Topology, server, wait};

/// All that there is of a run: namespaces, files, pins, and the processes that have its directory in their command line.
fn traces(run: &str) -> Vec<String> {
    let mut found: Vec<_> = ["/run/netns", "/run/reweave-lb-test", "/sys/fs/bpf/reweave-lb-test"]
        .iter()
        .filter_map(|directory| fs::read_dir(directory).ok())
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(run))
        .map(|path| path.display().to_string())
        .collect();
    found.extend(processes(run));
    found
}

/// The command lines of its processes.
fn processes(run: &str) -> Vec<String> {
    let lines = fs::read_dir("/proc").unwrap().map(|entry| {
        let line = fs::read(entry.unwrap().path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).replace('\0', " ")
    });
    lines.filter(|line| line.contains(&format!("/{run}/"))).collect()
}

fn name(directory: &Path) -> String {
    directory.file_name().unwrap().to_str().unwrap().to_owned()
}

fn with_server() -> (Testbed, server::Server) {
    with_server_on(Topology::Weave)
}

fn with_server_on(topology: Topology) -> (Testbed, server::Server) {
    let testbed = Testbed::new(Options { topology, ..Options::default() }).unwrap();
    let pod = testbed.add_pod(1, "web").unwrap();
    let server = server::http(&pod, 8080).unwrap();
    (testbed, server)
}

#[test]
fn a_dropped_testbed_leaves_nothing() {
    for topology in Topology::ALL {
        let (testbed, server) = with_server_on(topology);
        let run = name(&testbed.directory());
        let before = traces(&run);
        // Six hosts and a pod, files, a lock, pins, nginx: else this test would look in the wrong place.
        assert_eq!(before.iter().filter(|trace| trace.starts_with("/run/netns")).count(), 7, "{before:?}");
        assert_eq!(before.len(), 11, "{before:?}");
        drop(testbed);
        assert_eq!(traces(&run), [""; 0], "{topology}");
        drop(server);
    }
}

#[test]
fn a_panic_leaves_nothing() {
    let mut run = String::new();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let (testbed, _server) = with_server();
        run = name(&testbed.directory());
        panic!("as a failed test does");
    }));
    assert!(outcome.is_err());
    assert_eq!(traces(&run), [""; 0]);
}

/// The example `up` in a process of its own, and the name of its run.
fn another_process() -> (Child, String) {
    let test = std::env::current_exe().unwrap();
    // target/debug/deps/leftovers-… and target/debug/examples/up
    let up: PathBuf = test.ancestors().nth(2).unwrap().join("examples/up");
    let mut child = Command::new(up).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let directory =
        lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("files: ")?.to_owned()));
    (child, name(Path::new(&directory.unwrap())))
}

fn send(child: &Child, signal: Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id().cast_signed()), signal).unwrap();
}

#[test]
fn signals_leave_nothing() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let (mut child, run) = another_process();
        assert!(!traces(&run).is_empty());
        send(&child, signal);
        let status = child.wait().unwrap();
        assert!(!status.success());
        assert_eq!(traces(&run), [""; 0], "{signal}");
    }
}

#[test]
fn what_a_killed_process_leaves_the_next_one_removes() {
    let (mut child, run) = another_process();
    let (other, _server) = with_server();
    assert!(!traces(&run).is_empty(), "a living run was taken for a dead one");
    assert!(!processes(&run).is_empty());
    send(&child, Signal::SIGKILL);
    child.wait().unwrap();
    // Programs end with their parent, by themselves; all else waits for the next run.
    wait::until("the end of its programs", Duration::from_secs(5), || {
        let left = processes(&run);
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })
    .unwrap();
    assert!(!traces(&run).is_empty());
    let _next = Testbed::weave(Options::default()).unwrap();
    wait::until("the sweep", Duration::from_secs(1), || {
        let left = traces(&run);
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })
    .unwrap();
    assert!(!traces(&name(&other.directory())).is_empty());
}
