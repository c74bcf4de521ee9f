//! A small HTTP client, for many requests without a process each.

use crate::host::Host;
use anyhow::{Context as _, Result};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddrV4, TcpStream};
use std::time::Duration;

/// Requests `path` over a new connection and returns the body, its last line end removed. `limit` is for each of connect, send and
/// receive.
///
/// # Errors
/// When no complete answer comes in time, or its status is not 200.
pub fn get(host: &Host, server: SocketAddrV4, path: &str, limit: Duration) -> Result<String> {
    host.enter(|| get_here(server, path, limit)).with_context(|| format!("GET http://{server}{path}"))
}

/// [`get`] from the calling thread's own host: for loops inside [`Host::enter`].
///
/// # Errors
/// As [`get`].
pub fn get_here(server: SocketAddrV4, path: &str, limit: Duration) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&server.into(), limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    // HTTP/1.0: the server closes at the end of its answer.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {server}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer ends within its head")?;
    let status = head.lines().next().unwrap_or_default();
    anyhow::ensure!(status.split(' ').nth(1) == Some("200"), "{status}");
    Ok(body.trim_end().to_owned())
}
