//! Clients that keep their connections: idle ones by the thousand, and downloads.

use crate::world::{PATIENCE, WEB};
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use testbed::{Host, wait};

const THREADS: usize = 4;

/// Connections that say nothing until they are asked to, and the pod behind each.
pub(crate) struct Idle {
    connections: Vec<(TcpStream, String)>,
}

impl Idle {
    /// Opens so many from `host`, each answered once.
    pub(crate) fn open(host: &Host, count: usize) -> Self {
        let share = |thread: usize| count / THREADS + usize::from(thread < count % THREADS);
        let opened = thread::scope(|scope| {
            let threads: Vec<_> =
                (0..THREADS).map(|n| scope.spawn(move || host.enter(|| open(share(n))))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect::<Vec<_>>()
        });
        Self { connections: opened.into_iter().flatten().collect() }
    }

    /// Asks over every connection, and fails unless each is answered by its own pod.
    pub(crate) fn check(&mut self) -> Result<()> {
        let total = self.connections.len();
        for (number, (stream, _)) in self.connections.iter_mut().enumerate() {
            ask(stream).with_context(|| format!("connection {number} of {total}, request"))?;
        }
        for (number, (stream, pod)) in self.connections.iter_mut().enumerate() {
            let answered =
                answer(stream).with_context(|| format!("connection {number} of {total} to {pod}"))?;
            ensure!(answered == *pod, "connection {number} of {total} went from {pod} to {answered}");
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.connections.len()
    }
}

fn open(count: usize) -> Result<Vec<(TcpStream, String)>> {
    (0..count)
        .map(|_| {
            let mut stream = TcpStream::connect_timeout(&WEB.into(), PATIENCE)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            ask(&mut stream)?;
            let pod = answer(&mut stream)?;
            Ok((stream, pod))
        })
        .collect()
}

fn ask(stream: &mut TcpStream) -> Result<()> {
    Ok(stream.write_all(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n")?)
}

/// The body of a short answer: the pod's name and a line end.
fn answer(stream: &mut TcpStream) -> Result<String> {
    let mut buffer = [0; 1024];
    let mut length = 0;
    loop {
        let text = std::str::from_utf8(&buffer[..length])?;
        if let Some((_, body)) = text.split_once("\r\n\r\n")
            && let Some(name) = body.strip_suffix('\n')
        {
            return Ok(name.to_owned());
        }
        match stream.read(&mut buffer[length..])? {
            0 => bail!("closed after {length} bytes of an answer"),
            more => length += more,
        }
    }
}

/// Downloads that go on, slowly, until they are finished with.
pub(crate) struct Downloads {
    stop: Arc<AtomicBool>,
    threads: Vec<(Arc<AtomicU64>, JoinHandle<Result<()>>)>,
}

impl Downloads {
    pub(crate) fn start(host: &Host, count: usize) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let threads = (0..count)
            .map(|_| {
                let received = Arc::<AtomicU64>::default();
                let (host, stop, counter) = (host.clone(), Arc::clone(&stop), Arc::clone(&received));
                (received, thread::spawn(move || host.enter(|| download(&stop, &counter))))
            })
            .collect();
        Self { stop, threads }
    }

    /// Waits until every one of them has received something more.
    pub(crate) fn await_progress(&self) {
        let before: Vec<u64> = self.received();
        wait::until("progress of every download", PATIENCE, || {
            let now = self.received();
            ensure!(now.iter().zip(&before).all(|(now, before)| now > before), "{before:?} then {now:?}");
            Ok(())
        })
        .unwrap();
    }

    fn received(&self) -> Vec<u64> {
        self.threads.iter().map(|(received, _)| received.load(Ordering::Relaxed)).collect()
    }

    /// Ends them; none may have failed.
    pub(crate) fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for (_, thread) in self.threads {
            thread.join().unwrap().unwrap();
        }
    }
}

fn download(stop: &AtomicBool, received: &AtomicU64) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&WEB.into(), PATIENCE)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(b"GET /slow HTTP/1.0\r\n\r\n")?;
    let mut buffer = vec![0; 1 << 16];
    while !stop.load(Ordering::Relaxed) {
        let more = stream.read(&mut buffer).context("a download")?;
        ensure!(more > 0, "a download ended after {} bytes", received.load(Ordering::Relaxed));
        received.fetch_add(more as u64, Ordering::Relaxed);
    }
    Ok(())
}
