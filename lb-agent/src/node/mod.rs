//! Everything that the agent does to a node apart from BPF: interfaces, rules, routes, nftables, sysctls.
//!
//! All of it is level-triggered: read what the kernel holds, compare it with what is wanted (a pure function), do
//! the difference, add before remove. Nothing remembers what was written last, so whatever another program
//! changes is put right at the next pass, and a pass over a node that is as it should be writes nothing.
//! What we put there is recognisably ours (a route protocol number, a table name), so that it can be removed
//! without a list. Sysctls are the exception: see [`sysctl`].
//!
//! Everything acts on the network namespace of the calling thread.

pub mod interfaces;
mod netfilter;
pub mod nft;
pub mod preflight;
pub mod return_path;
pub mod roles;
pub mod routes;
#[cfg(test)]
mod sample;
pub mod sysctl;
pub mod watch;

use std::io;

/// Opens a route socket in the network namespace of this thread; a task drives it until the last clone of the
/// handle is dropped.
///
/// # Errors
/// The kernel refuses the socket, or does not know strict checking (before 4.20).
pub fn connect() -> io::Result<rtnetlink::Handle> {
    // Strict: the kernel filters dumps by what is asked, and refuses what it does not understand.
    let (connection, handle, _) = rtnetlink::new_connection_with_strict_check()?;
    tokio::spawn(connection);
    Ok(handle)
}
