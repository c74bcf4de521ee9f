//! Notices when anything that the agent looks after changes on the node.
//!
//! Subscribes to the kernel's notifications and turns them into ticks, without looking inside: what to do is found
//! out by comparing, so a tick need only say "look again". That also makes a lost notification harmless, since
//! the loss itself is a tick.

use futures::future::select_all;
use rtnetlink::MulticastGroup;
use rtnetlink::sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use rtnetlink::sys::{AsyncSocket as _, AsyncSocketExt as _, TokioSocket};
use std::io;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, warn};

/// Changes within this time of the first become one tick: a CNI that sets up a pod makes dozens.
const COALESCE: Duration = Duration::from_millis(50);
/// Between attempts to open the sockets again.
const REOPEN: Duration = Duration::from_secs(1);

/// Rules, routes and links are notified as such; netconf is the one that tells of `rp_filter` and `forwarding`.
const ROUTE_GROUPS: [MulticastGroup; 5] = [
    MulticastGroup::Link,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv4Route,
    MulticastGroup::Ipv4Rule,
    MulticastGroup::Ipv4Netconf,
];

/// The number of ticks so far; `changed()` waits for the next one and can be used in `select!`. Ticks that nobody
/// waited for are one tick.
pub type Ticks = watch::Receiver<u64>;

/// Starts watching the network namespace of this thread; ends when the last receiver is dropped.
///
/// Everything that changes after this returns gives a tick, so start before the first look.
///
/// # Errors
/// The kernel refuses a socket or a subscription.
pub fn start() -> io::Result<Ticks> {
    let sockets = subscribe()?;
    let (sender, receiver) = watch::channel(0);
    tokio::spawn(async move {
        tokio::select! {
            () = sender.closed() => {}
            () = run(sockets, &sender) => {}
        }
    });
    Ok(receiver)
}

fn subscribe() -> io::Result<[TokioSocket; 2]> {
    let route = open(NETLINK_ROUTE, ROUTE_GROUPS.iter().map(|group| *group as u32))?;
    let netfilter = open(NETLINK_NETFILTER, [libc::NFNLGRP_NFTABLES.unsigned_abs()])?;
    Ok([route, netfilter])
}

fn open(protocol: isize, groups: impl IntoIterator<Item = u32>) -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(protocol)?;
    socket.socket_mut().bind_auto()?;
    for group in groups {
        socket.socket_ref().add_membership(group)?;
    }
    Ok(socket)
}

async fn run(mut sockets: [TokioSocket; 2], sender: &watch::Sender<u64>) {
    loop {
        let mut outcome = notification(&sockets).await;
        let end = Instant::now() + COALESCE;
        while outcome.is_ok() {
            match timeout_at(end, notification(&sockets)).await {
                Ok(next) => outcome = next,
                Err(_elapsed) => break,
            }
        }
        match outcome {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                debug!("more changes on the node than the kernel could tell; looking at everything");
            }
            Err(error) => {
                warn!(%error, "lost the kernel's notifications; subscribing again");
                sockets = resubscribe().await;
            }
        }
        sender.send_modify(|ticks| *ticks = ticks.wrapping_add(1));
    }
}

async fn notification(sockets: &[TokioSocket; 2]) -> io::Result<()> {
    let (received, ..) = select_all(sockets.iter().map(TokioSocket::recv_from_full)).await;
    received.map(|_| ())
}

async fn resubscribe() -> [TokioSocket; 2] {
    loop {
        match subscribe() {
            Ok(sockets) => return sockets,
            Err(error) => {
                warn!(%error, "cannot subscribe to the kernel's notifications; trying again");
                sleep(REOPEN).await;
            }
        }
    }
}
