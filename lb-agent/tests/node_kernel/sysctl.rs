use crate::namespace::Namespace;
use lb_agent::node::sysctl::{Error, LOOSE, Record, STRICT, rp_filter};
use nix::sched::{CloneFlags, unshare};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A state directory of the test's own, gone afterwards.
struct Directory(PathBuf);

impl Directory {
    fn new(test: &str) -> Self {
        Self(std::env::temp_dir().join(format!("reweave-lb-{test}-{}", std::process::id())))
    }

    fn record(&self) -> Record {
        Record::new(&self.0)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn set(node: &Namespace, device: &str, value: u8) {
    node.sh(&format!("echo {value} > /proc/sys/net/ipv4/conf/{device}/rp_filter"));
}

fn own_value(node: &Namespace, device: &str) -> String {
    node.sh(&format!("cat /proc/sys/net/ipv4/conf/{device}/rp_filter")).trim().to_owned()
}

#[test]
fn strict_becomes_loose_whichever_value_makes_it_strict_and_is_restored_by_the_next_agent() {
    let node = Namespace::weave_node();
    for (all, own) in [(0, 1), (1, 0), (1, 1)] {
        let directory = Directory::new(&format!("restore-{all}-{own}"));
        set(&node, "all", all);
        set(&node, "weave", own);
        let before = node.snapshot();
        node.run(|| {
            assert_eq!(rp_filter("weave").unwrap(), STRICT);
            assert_eq!(directory.record().loosen(&["weave"]).unwrap().len(), 1);
            assert_eq!(rp_filter("weave").unwrap(), LOOSE);
            assert_eq!(directory.record().loosen(&["weave"]).unwrap(), [], "the second time");
        });
        assert_eq!(own_value(&node, "all"), all.to_string(), "other devices keep theirs");
        node.run(|| assert_eq!(directory.record().restore().unwrap().len(), 1));
        assert_eq!(node.snapshot(), before);
        assert!(!directory.0.exists(), "nothing of the record stays");
        node.run(|| assert_eq!(directory.record().restore().unwrap(), []));
    }
}

#[test]
fn what_is_off_or_loose_is_left_alone() {
    let node = Namespace::weave_node();
    let directory = Directory::new("alone");
    for value in [0, LOOSE] {
        set(&node, "weave", value);
        node.run(|| assert_eq!(directory.record().loosen(&["weave"]).unwrap(), []));
        assert_eq!(own_value(&node, "weave"), value.to_string());
    }
    assert!(!directory.0.exists());
}

#[test]
fn a_value_that_someone_else_has_changed_since_is_theirs() {
    let node = Namespace::weave_node();
    let directory = Directory::new("theirs");
    set(&node, "weave", STRICT);
    set(&node, "eth0", STRICT);
    node.run(|| assert_eq!(directory.record().loosen(&["weave", "eth0"]).unwrap().len(), 2));
    set(&node, "weave", 0);
    node.sh("ip link del eth0");
    node.run(|| assert_eq!(directory.record().restore().unwrap(), []));
    assert_eq!(own_value(&node, "weave"), "0");
}

#[test]
fn without_a_record_nothing_is_changed() {
    let node = Namespace::weave_node();
    let directory = Directory::new("broken");
    set(&node, "weave", STRICT);
    std::fs::create_dir_all(&directory.0).unwrap();
    std::fs::write(directory.0.join("sysctls.json"), "{ not json").unwrap();
    let error = node.run(|| directory.record().loosen(&["weave"]).unwrap_err());
    assert!(matches!(error, Error::Broken { .. }), "{error}");
    let error = node.run(|| Record::new(Path::new("/proc/nowhere")).loosen(&["weave"]).unwrap_err());
    assert!(matches!(error, Error::Record { .. }), "{error}");
    assert_eq!(own_value(&node, "weave"), "1");
    let error = node.run(|| directory.record().loosen(&["gone"]).unwrap_err().to_string());
    assert!(error.contains("net/ipv4/conf/gone/rp_filter"), "{error}");
}

#[test]
fn a_container_writes_where_the_nodes_tree_is_mounted() {
    let node = Namespace::weave_node();
    let directory = Directory::new("container");
    let (state, proc_sys) = (directory.0.join("state"), directory.0.join("sys"));
    set(&node, "weave", STRICT);
    std::fs::create_dir_all(proc_sys.join("net")).unwrap();
    node.run(|| {
        // As in a container without privileges: its own tree is read-only, the node's is mounted elsewhere.
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let mount = |words: &[&str]| assert!(Command::new("mount").args(words).status().unwrap().success());
        mount(&["--make-rprivate", "/"]);
        mount(&["--bind", "/proc/sys/net", proc_sys.join("net").to_str().unwrap()]);
        mount(&["--bind", "/proc/sys", "/proc/sys"]);
        mount(&["-o", "remount,ro,bind", "/proc/sys"]);
        let error = Record::new(&state).loosen(&["weave"]).unwrap_err().to_string();
        assert!(error.contains("below /proc/sys: Read-only") && error.contains("--proc-sys"), "{error}");
        let record = Record::new(&state).written_below(&proc_sys);
        assert_eq!(record.loosen(&["weave"]).unwrap().len(), 1);
        assert_eq!(rp_filter("weave").unwrap(), LOOSE);
        assert_eq!(record.restore().unwrap().len(), 1);
        assert_eq!(rp_filter("weave").unwrap(), STRICT);
    });
}

fn lo(node: &Namespace) -> (String, String) {
    let read = |key: &str| node.sh(&format!("cat /proc/sys/net/ipv4/conf/lo/{key}")).trim().to_owned();
    (read("rp_filter"), read("accept_local"))
}

/// Answers to the node's own processes come in on `lo` from its own addresses: both of what keeps them off.
#[test]
fn the_loopback_is_opened_and_closed_again() {
    for (all, own) in [(0, 0), (0, 1), (1, 0)] {
        let node = Namespace::weave_node();
        let directory = Directory::new(&format!("loopback-{all}-{own}"));
        set(&node, "all", all);
        set(&node, "lo", own);
        let (before, was_strict) = (node.snapshot(), usize::from(all + own != 0));
        node.run(|| {
            assert_eq!(directory.record().open_loopback().unwrap().len(), 1 + was_strict);
            assert_eq!(directory.record().open_loopback().unwrap(), [], "the second time");
        });
        let filter = if was_strict == 1 { LOOSE } else { 0 };
        assert_eq!(lo(&node), (filter.to_string(), "1".to_owned()));
        node.run(|| assert_eq!(directory.record().restore().unwrap().len(), 1 + was_strict));
        assert_eq!(node.snapshot(), before);
        assert!(!directory.0.exists());
    }
}

#[test]
fn a_loopback_that_is_open_is_left_alone() {
    for device in ["all", "lo"] {
        let node = Namespace::weave_node();
        let directory = Directory::new(&format!("open-{device}"));
        node.sh(&format!("echo 1 > /proc/sys/net/ipv4/conf/{device}/accept_local"));
        set(&node, "all", 0);
        set(&node, "lo", 0);
        node.run(|| assert_eq!(directory.record().open_loopback().unwrap(), []));
        assert!(!directory.0.exists());
    }
}
