//! Requests without a pause, counted: what a change in the cluster costs its users.

use crate::host::Host;
use crate::{http, wait};
use anyhow::{Result, ensure};
use std::net::SocketAddrV4;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A request that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(2);

/// Requests that go on until [`Load::finish`]; each is a new connection.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Result<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    answered: AtomicU64,
    failures: Mutex<Vec<String>>,
}

/// What became of the requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Answered in time, with status 200.
    pub answered: u64,
    /// Why each of the others failed.
    pub failures: Vec<String>,
}

impl Load {
    /// Begins to request `/` from `server`, `clients` requests at a time.
    pub fn start(host: &Host, server: SocketAddrV4, clients: usize) -> Self {
        let shared = Arc::<Shared>::default();
        let threads = (0..clients)
            .map(|_| {
                let (host, shared) = (host.clone(), Arc::clone(&shared));
                thread::spawn(move || {
                    host.enter(|| {
                        shared.request(server);
                        Ok(())
                    })
                })
            })
            .collect();
        Self { shared, threads }
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        let failures = self.shared.failures.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Counts { answered: self.shared.answered.load(Ordering::Relaxed), failures }
    }

    /// Waits until `more` requests were answered from now on.
    ///
    /// # Errors
    /// When it takes longer than `limit`.
    pub fn await_answers(&self, more: u64, limit: Duration) -> Result<()> {
        let before = self.counts().answered;
        wait::until(&format!("{more} answers"), limit, || {
            let counts = self.counts();
            let answered = counts.answered - before;
            ensure!(
                answered >= more,
                "{answered} answered, {} failed {:?}",
                counts.failures.len(),
                counts.failures.last()
            );
            Ok(())
        })
    }

    /// Lets the requests under way end, and counts.
    ///
    /// # Errors
    /// When the host could not be entered: then there were no requests.
    pub fn finish(mut self) -> Result<Counts> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(self.counts())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Not waited for: they end after the request that they are at.
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn request(&self, server: SocketAddrV4) {
        while !self.stop.load(Ordering::Relaxed) {
            match http::get_here(server, "/", LIMIT) {
                Ok(_) => {
                    self.answered.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => {
                    self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{error:#}"));
                }
            }
        }
    }
}
