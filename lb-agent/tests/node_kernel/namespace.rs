//! A network namespace that lives as long as the value.

use std::fs::File;
use std::future::Future;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::thread;
use std::time::Duration;

/// How long a connection may take that should come about.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection is tried that should not: longer than the first retransmission of a SYN.
pub(crate) const FUTILE: Duration = Duration::from_millis(1500);

pub(crate) struct Namespace {
    file: File,
}

impl Namespace {
    /// A new namespace with nothing but a loopback in it. Nothing of it has a name, and the kernel removes it when
    /// the file is closed, also when the test is killed.
    pub(crate) fn new() -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
        let make = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            File::open("/proc/thread-self/ns/net").unwrap()
        };
        let namespace = Self { file: thread::spawn(make).join().unwrap() };
        namespace.sh("ip link set lo up");
        namespace
    }

    /// Runs on a thread of its own inside.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                nix::sched::setns(&self.file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
                work()
            });
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs asynchronous work inside, on a runtime of its own that has no other threads.
    pub(crate) fn block_on<T: Send, F: Future<Output = T>>(&self, work: impl FnOnce() -> F + Send) -> T {
        self.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async { work().await })
        })
    }

    /// Runs shell commands inside; they must succeed. Returns what they print.
    pub(crate) fn sh(&self, script: &str) -> String {
        self.run(|| sh(script))
    }

    /// Where `ip link set … netns` finds it.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// Joins two namespaces by a veth pair, and sets both ends up.
    pub(crate) fn link(&self, name: &str, other: &Self, other_name: &str) {
        let path = other.path();
        self.sh(&format!(
            "ip link add {name} type veth peer name {other_name} netns {path}; ip link set {name} up"
        ));
        other.sh(&format!("ip link set {other_name} up"));
    }

    /// Everything that the agent could leave behind.
    pub(crate) fn snapshot(&self) -> String {
        self.sh(
            "ip rule; ip route show table all; nft list ruleset; grep . /proc/sys/net/ipv4/conf/*/rp_filter",
        )
    }

    /// A node as weave leaves it, in small: `eth0` with 192.0.2.1, the bridge `weave` with 10.32.0.1 and a VXLAN port.
    pub(crate) fn weave_node() -> Self {
        let node = Self::new();
        node.sh("ip link add eth0 type veth peer name outside
             ip address add 192.0.2.1/24 dev eth0
             ip link add weave type bridge
             ip address add 10.32.0.1/16 dev weave
             ip link add vxlan-6784 type vxlan id 1 dstport 6784 dev eth0
             ip link set vxlan-6784 master weave
             for device in eth0 outside weave vxlan-6784; do ip link set $device up; done");
        // The kernel hears of the bridge's carrier up to a second later, and its routes say so.
        node.sh("timeout 5 sh -c 'while ip route show table all | grep -q linkdown; do sleep 0.02; done'");
        node
    }
}

/// In the network namespace of this thread.
pub(crate) fn sh(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A TCP server inside a namespace, and whom it has seen.
pub(crate) struct Server<'a> {
    namespace: &'a Namespace,
    listener: TcpListener,
}

impl<'a> Server<'a> {
    pub(crate) fn start(namespace: &'a Namespace, address: SocketAddr) -> Self {
        let listener = namespace.run(|| TcpListener::bind(address)).unwrap();
        listener.set_nonblocking(true).unwrap();
        Self { namespace, listener }
    }

    /// Connects from `client` within a time; the source that the server saw, if the connection came about.
    pub(crate) fn seen_from(&self, client: &Namespace, within: Duration) -> Option<SocketAddr> {
        let address = self.listener.local_addr().unwrap();
        let connection = client.run(|| TcpStream::connect_timeout(&address, within)).ok()?;
        // The handshake is complete on this side; the last step is already on its way to the other.
        let seen = self.namespace.block_on(|| async {
            let accepted = async {
                loop {
                    if let Ok((_, from)) = self.listener.accept() {
                        break from;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(PATIENCE, accepted).await.unwrap()
        });
        drop(connection);
        Some(seen)
    }
}
