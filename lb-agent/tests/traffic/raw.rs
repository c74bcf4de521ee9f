//! Packets by hand.

use anyhow::ensure;
use nix::libc;
use std::net::SocketAddrV4;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use testbed::Host;

/// A socket that sends IP packets as they are given.
pub(crate) fn socket(host: &Host) -> OwnedFd {
    host.enter(|| {
        // SAFETY: no pointer is passed.
        let fd =
            unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_RAW) };
        ensure!(fd >= 0, std::io::Error::last_os_error());
        // SAFETY: it was just made, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    })
    .unwrap()
}

/// Sends a packet, which begins with its IP header.
pub(crate) fn send(socket: &OwnedFd, to: SocketAddrV4, packet: &[u8]) {
    let address = nix::sys::socket::SockaddrIn::from(to);
    let flags = nix::sys::socket::MsgFlags::empty();
    let sent = nix::sys::socket::sendto(socket.as_raw_fd(), packet, &address, flags).unwrap();
    assert_eq!(sent, packet.len());
}
