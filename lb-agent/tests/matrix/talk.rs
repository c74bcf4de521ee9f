//! What client and pod say to each other, by either protocol: the pod says who it is and whom it sees, then they exchange a
//! megabyte each way.

use crate::cells::Protocol;
use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::socket::{Shutdown, shutdown};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use testbed::Host;

/// The pods' port, of both protocols.
pub(crate) const PORT: u16 = 8080;

/// For one packet and its answer.
const SOON: Duration = Duration::from_secs(5);
const MEGABYTE: usize = 1 << 20;
/// Of a datagram: fits the smallest of the overlays.
const DATAGRAM: usize = 1 << 10;
/// The question who somebody is; no piece of the megabyte is as short.
const WHO: &[u8] = b"who";
/// Of the pod's first word: its name and whom it sees, padded with spaces.
const GREETING: usize = 64;

/// A pod's sockets, which answer until this is dropped.
pub(crate) struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    pod: String,
    tcp: TcpListener,
    udp: UdpSocket,
    is_over: AtomicBool,
}

impl Server {
    pub(crate) fn start(pod: &Host) -> Result<Self> {
        let any = (Ipv4Addr::UNSPECIFIED, PORT);
        let (tcp, udp) = pod.enter(|| Ok((TcpListener::bind(any)?, UdpSocket::bind(any)?)))?;
        let is_over = AtomicBool::new(false);
        let shared = Arc::new(Shared { pod: pod.name().to_owned(), tcp, udp, is_over });
        for serve in [Shared::accept, Shared::answer] {
            let shared = Arc::clone(&shared);
            thread::spawn(move || serve(&shared));
        }
        Ok(Self { shared })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        // It wakes the threads; the kernel complains of sockets without a peer all the same.
        let _ = shutdown(self.shared.tcp.as_raw_fd(), Shutdown::Both);
        let _ = shutdown(self.shared.udp.as_raw_fd(), Shutdown::Both);
    }
}

impl Shared {
    fn greeting(&self, client: SocketAddr) -> String {
        format!("{:GREETING$}", format!("{} {client}", self.pod))
    }

    fn accept(self: &Arc<Self>) {
        while let Ok((stream, client)) = self.tcp.accept() {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            let server = Arc::clone(self);
            // How it ends is the client's to judge.
            thread::spawn(move || server.converse(stream, client));
        }
    }

    fn converse(&self, mut stream: TcpStream, client: SocketAddr) -> Result<()> {
        stream.set_read_timeout(Some(SOON))?;
        stream.write_all(self.greeting(client).as_bytes())?;
        let mut received = vec![0; MEGABYTE];
        stream.read_exact(&mut received)?;
        ensure!(received == pattern(), "the megabyte of the client has changed");
        Ok(stream.write_all(&pattern())?)
    }

    /// Each datagram comes back as it is.
    fn answer(self: &Arc<Self>) {
        let mut buffer = [0; 2 * DATAGRAM];
        while !self.is_over.load(Ordering::Relaxed) {
            let Ok((length, client)) = self.udp.recv_from(&mut buffer) else { continue };
            let greeting = self.greeting(client);
            let received = &buffer[..length];
            let answer = if received == WHO { greeting.as_bytes() } else { received };
            let _ = self.udp.send_to(answer, client);
        }
    }
}

/// A client's side. Its kernel takes answers from the Service's address and port alone, since the socket is connected.
pub(crate) struct Talk {
    socket: Socket,
    pod: String,
    seen_as: SocketAddrV4,
}

enum Socket {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

/// Connects from a fresh port, and hears who has answered.
pub(crate) fn open(host: &Host, service: SocketAddrV4, protocol: Protocol) -> Result<Talk> {
    let mut greeting = [0; GREETING];
    let socket = host.enter(|| match protocol {
        Protocol::Tcp => {
            let mut stream = TcpStream::connect_timeout(&service.into(), SOON).context("connect")?;
            stream.set_read_timeout(Some(SOON))?;
            stream.set_write_timeout(Some(SOON))?;
            stream.read_exact(&mut greeting).context("the greeting")?;
            Ok(Socket::Tcp(stream))
        }
        Protocol::Udp => {
            let socket = connected(service)?;
            socket.send(WHO)?;
            socket.recv(&mut greeting).context("the first answer")?;
            Ok(Socket::Udp(socket))
        }
    })?;
    let greeting = str::from_utf8(&greeting)?;
    let (pod, seen_as) = greeting.trim_end().split_once(' ').context("no greeting")?;
    Ok(Talk { socket, pod: pod.to_owned(), seen_as: seen_as.parse()? })
}

fn connected(service: SocketAddrV4) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(service)?;
    socket.set_read_timeout(Some(SOON))?;
    Ok(socket)
}

impl Talk {
    /// Who has answered.
    pub(crate) fn pod(&self) -> &str {
        &self.pod
    }

    /// Whom the pod sees.
    pub(crate) fn seen_as(&self) -> SocketAddrV4 {
        self.seen_as
    }

    /// Our own end, as our kernel has it.
    pub(crate) fn local(&self) -> Result<SocketAddrV4> {
        let local = match &self.socket {
            Socket::Tcp(stream) => stream.local_addr()?,
            Socket::Udp(socket) => socket.local_addr()?,
        };
        let SocketAddr::V4(local) = local else { bail!("{local} is not IPv4") };
        Ok(local)
    }

    /// A megabyte there, and one back.
    pub(crate) fn exchange(&mut self) -> Result<()> {
        let megabyte = pattern();
        match &mut self.socket {
            Socket::Tcp(stream) => {
                stream.write_all(&megabyte).context("sending a megabyte")?;
                let mut received = vec![0; MEGABYTE];
                stream.read_exact(&mut received).context("receiving a megabyte")?;
                ensure!(received == megabyte, "the megabyte of the pod has changed");
            }
            Socket::Udp(socket) => {
                for (number, piece) in megabyte.chunks(DATAGRAM).enumerate() {
                    socket.send(piece)?;
                    let mut received = [0; DATAGRAM];
                    let length = socket.recv(&mut received).with_context(|| format!("datagram {number}"))?;
                    ensure!(received[..length] == *piece, "datagram {number} has changed");
                }
            }
        }
        Ok(())
    }
}

/// A megabyte that repeats nowhere near: a lost, doubled or moved piece shows.
fn pattern() -> Vec<u8> {
    (0_u32..).flat_map(|word| word.wrapping_mul(2_654_435_761).to_be_bytes()).take(MEGABYTE).collect()
}
