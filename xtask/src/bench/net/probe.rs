//! What is measured between a client and a server in a pod. One thread plays both ends of datagrams, so nothing runs
//! between a datagram and the next but the path itself.

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};
use nix::time::{ClockId, clock_gettime};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};
use testbed::{Host, Pod};

/// The service's ports, which the pods have too.
pub(super) const UDP: u16 = 7000;
pub(super) const TCP: u16 = 7001;
pub(super) const BULK: u16 = 7002;

const PAYLOAD: [u8; 64] = [0x5a; 64];
/// No answer comes later than this.
const SOON: Duration = Duration::from_secs(5);

/// The pod's sockets.
pub(super) struct Server {
    udp: UdpSocket,
    tcp: TcpListener,
    bulk: TcpListener,
}

impl Server {
    pub(super) fn start(pod: &Pod) -> Result<Self> {
        pod.enter(|| {
            let address = |port| (Ipv4Addr::UNSPECIFIED, port);
            let server = Self {
                udp: UdpSocket::bind(address(UDP))?,
                tcp: TcpListener::bind(address(TCP))?,
                bulk: TcpListener::bind(address(BULK))?,
            };
            server.udp.set_read_timeout(Some(SOON))?;
            for listener in [&server.tcp, &server.bulk] {
                // Also bounds accept(2).
                setsockopt(listener, sockopt::ReceiveTimeout, &TimeVal::seconds(5))?;
            }
            Ok(server)
        })
    }

    /// Throws away the datagrams that wait.
    fn drain(&self) -> Result<()> {
        self.udp.set_nonblocking(true)?;
        while self.udp.recv(&mut [0; 128]).is_ok() {}
        Ok(self.udp.set_nonblocking(false)?)
    }
}

/// One datagram there and one back.
pub(super) fn echo(client: &Host, address: Ipv4Addr, server: &Server, limit: Duration) -> Result<UdpSocket> {
    let socket = client.enter(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?))?;
    // Connected: an answer from another address is not received.
    socket.connect((address, UDP))?;
    server.udp.set_read_timeout(Some(limit))?;
    socket.set_read_timeout(Some(limit))?;
    socket.send(&PAYLOAD)?;
    let mut buffer = [0; 128];
    let (_, from) = server.udp.recv_from(&mut buffer).context("the pod has received nothing")?;
    server.udp.send_to(&PAYLOAD, from)?;
    socket.recv(&mut buffer).context("the client has received no answer")?;
    Ok(socket)
}

/// Who sent the last datagram, as the pod sees it.
pub(super) fn seen_client(client: &Host, address: Ipv4Addr, server: &Server) -> Result<(SocketAddr, u16)> {
    server.drain()?;
    let socket = client.enter(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?))?;
    socket.connect((address, UDP))?;
    socket.send(&PAYLOAD)?;
    let (_, from) = server.udp.recv_from(&mut [0; 128])?;
    Ok((from, socket.local_addr()?.port()))
}

/// CPU ns per datagram of one flow that both sides know.
pub(super) fn known(client: &Host, address: Ipv4Addr, server: &Server, count: u32) -> Result<f64> {
    let socket = echo(client, address, server, SOON)?;
    let begin = cpu()?;
    for _ in 0..count {
        socket.send(&PAYLOAD)?;
    }
    let spent = cpu()? - begin;
    server.drain()?;
    Ok(nanoseconds(spent) / f64::from(count))
}

/// CPU ns per datagram, each from another of `ports`. The sockets are made before and closed after the time.
pub(super) fn new(
    client: &Host,
    address: Ipv4Addr,
    server: &Server,
    ports: std::ops::Range<u16>,
) -> Result<f64> {
    let count = u32::try_from(ports.len())?;
    let sockets = client.enter(|| {
        let connected = |port| -> Result<UdpSocket> {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
            socket.connect((address, UDP))?;
            Ok(socket)
        };
        ports.map(connected).collect::<Result<Vec<_>>>()
    })?;
    let begin = cpu()?;
    for socket in &sockets {
        socket.send(&PAYLOAD)?;
    }
    let spent = cpu()? - begin;
    server.drain()?;
    Ok(nanoseconds(spent) / f64::from(count))
}

/// Connections one after the other: connect, a byte each way, close. The time of each, in µs.
pub(super) fn connections(
    client: &Host,
    address: Ipv4Addr,
    server: &Server,
    count: usize,
) -> Result<Vec<f64>> {
    let one = || -> Result<f64> {
        let begin = Instant::now();
        let mut stream = TcpStream::connect_timeout(&SocketAddrV4::new(address, TCP).into(), SOON)?;
        stream.set_read_timeout(Some(SOON))?;
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        drop(stream);
        Ok(begin.elapsed().as_secs_f64() * 1e6)
    };
    let answer = || -> Result<()> {
        let (mut stream, _) = server.tcp.accept()?;
        stream.set_read_timeout(Some(SOON))?;
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        stream.write_all(&byte)?;
        // The client closes first.
        ensure!(stream.read(&mut byte)? == 0, "the client said more than a byte");
        Ok(())
    };
    both(
        || (0..count).try_for_each(|_| answer()),
        || client.enter(|| (0..count).map(|_| one()).collect::<Result<Vec<_>>>()),
    )
}

/// Gbit/s of one connection from the client to the pod.
pub(super) fn bulk(client: &Host, address: Ipv4Addr, server: &Server, bytes: usize) -> Result<f64> {
    const CHUNK: usize = 1 << 16;
    let send = || -> Result<f64> {
        let mut stream = TcpStream::connect_timeout(&SocketAddrV4::new(address, BULK).into(), SOON)?;
        stream.set_read_timeout(Some(SOON))?;
        stream.set_write_timeout(Some(SOON))?;
        let chunk = vec![0x5a; CHUNK];
        let begin = Instant::now();
        for _ in 0..bytes / CHUNK {
            stream.write_all(&chunk)?;
        }
        // The pod has all of it.
        stream.read_exact(&mut [0])?;
        Ok(bytes as f64 * 8e-9 / begin.elapsed().as_secs_f64())
    };
    let receive = || -> Result<()> {
        let (mut stream, _) = server.bulk.accept()?;
        stream.set_read_timeout(Some(SOON))?;
        let mut chunk = vec![0; CHUNK];
        let mut left = bytes;
        while left > 0 {
            let read = stream.read(&mut chunk)?;
            ensure!(read > 0, "the client stopped before the end");
            left = left.saturating_sub(read);
        }
        Ok(stream.write_all(&[1])?)
    };
    both(receive, || client.enter(send))
}

/// Runs the server's side on a thread of its own beside the client's.
fn both<T>(serve: impl FnOnce() -> Result<()> + Send, ask: impl FnOnce() -> Result<T>) -> Result<T> {
    thread::scope(|scope| {
        let serving = scope.spawn(serve);
        let asked = ask();
        let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let asked = asked.context("the client")?;
        served.context("the server")?;
        Ok(asked)
    })
}

/// CPU time of this thread. With veth devices its own softirqs carry each packet to the receiving socket, and the kernel
/// counts those for the thread.
fn cpu() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

fn nanoseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}
