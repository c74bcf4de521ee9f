//! Servers that say who they are and whom they see, and do what a line of the client tells them.
//!
//! TCP: greets with `NAME CLIENT`, then answers `LINE` with `NAME LINE`; the other orders are in [`converse`].
//! UDP: answers `TEXT` with `NAME CLIENT TEXT`.

use anyhow::{Result, bail};
use nix::sys::socket::{Shutdown, setsockopt, shutdown, sockopt};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use testbed::Host;

/// A running server. Its sockets close when it is dropped, with a FIN to whoever is connected.
pub(crate) struct Echo {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    socket: Socket,
    is_over: AtomicBool,
    connections: Mutex<Vec<TcpStream>>,
    seen: Mutex<Vec<SocketAddrV4>>,
    received: Mutex<Vec<String>>,
}

enum Socket {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

impl Echo {
    /// Listens on a TCP port of all addresses of `host`.
    pub(crate) fn tcp(host: &Host, port: u16) -> Self {
        let listener = host.enter(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?)).unwrap();
        Self::start(host, Socket::Tcp(listener))
    }

    /// The same for UDP.
    pub(crate) fn udp(host: &Host, port: u16) -> Self {
        Self::udp_at(host, SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))
    }

    /// On one address only, which it then answers from: a node has several.
    pub(crate) fn udp_at(host: &Host, address: SocketAddrV4) -> Self {
        let socket = host.enter(|| Ok(UdpSocket::bind(address)?)).unwrap();
        Self::start(host, Socket::Udp(socket))
    }

    fn start(host: &Host, socket: Socket) -> Self {
        let shared = Arc::new(Shared {
            name: host.name().to_owned(),
            socket,
            is_over: AtomicBool::new(false),
            connections: Mutex::default(),
            seen: Mutex::default(),
            received: Mutex::default(),
        });
        let server = Arc::clone(&shared);
        thread::spawn(move || match &server.socket {
            Socket::Tcp(listener) => server.accept(listener),
            Socket::Udp(socket) => server.answer(socket),
        });
        Self { shared }
    }

    /// The other end of every connection and datagram so far.
    pub(crate) fn seen(&self) -> Vec<SocketAddrV4> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Every line that TCP clients have sent so far.
    pub(crate) fn received(&self) -> Vec<String> {
        self.shared.received.lock().unwrap().clone()
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        let fd = match &self.shared.socket {
            Socket::Tcp(listener) => listener.as_raw_fd(),
            Socket::Udp(socket) => socket.as_raw_fd(),
        };
        // It wakes the thread; the kernel complains of sockets without a peer all the same.
        let _ = shutdown(fd, Shutdown::Both);
        for stream in self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        while let Ok((stream, peer)) = listener.accept() {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            self.saw(peer);
            if let Ok(copy) = stream.try_clone() {
                self.connections.lock().unwrap().push(copy);
            }
            let server = Arc::clone(self);
            // How a conversation ends is the client's to judge.
            thread::spawn(move || converse(&server, stream, peer));
        }
    }

    fn answer(&self, socket: &UdpSocket) {
        let mut buffer = [0; 65_536];
        while !self.is_over.load(Ordering::Relaxed) {
            let Ok((length, peer)) = socket.recv_from(&mut buffer) else { continue };
            self.saw(peer);
            let head = format!("{} {peer} ", self.name);
            let answer = [head.as_bytes(), &buffer[..length]].concat();
            // As long as the question: an answer larger than the path is another test.
            let _ = socket.send_to(&answer[..answer.len().min(length.max(64))], peer);
        }
    }

    fn saw(&self, peer: SocketAddr) {
        if let SocketAddr::V4(peer) = peer {
            self.seen.lock().unwrap().push(peer);
        }
    }
}

fn converse(server: &Shared, mut stream: TcpStream, peer: SocketAddr) -> Result<()> {
    stream.set_nodelay(true)?;
    writeln!(stream, "{} {peer}", server.name)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            // The client has closed its side: one more word, then we close ours.
            writeln!(stream, "{} farewell", server.name)?;
            stream.shutdown(std::net::Shutdown::Both)?;
            return Ok(());
        }
        let order = line.trim_end();
        server.received.lock().unwrap().push(order.to_owned());
        match order.split_once(' ') {
            // Close first.
            None if order == "close" => return Ok(stream.shutdown(std::net::Shutdown::Both)?),
            // Close our side, and go on listening.
            None if order == "half" => stream.shutdown(std::net::Shutdown::Write)?,
            None if order == "reset" => return reset(&stream),
            // So many bytes of the pattern.
            Some(("send", length)) => stream.write_all(&pattern(length.parse()?))?,
            // The client sends so many.
            Some(("take", length)) => {
                let mut bytes = vec![0; length.parse()?];
                reader.read_exact(&mut bytes)?;
                let verdict = if bytes == pattern(bytes.len()) { "same" } else { "different" };
                writeln!(stream, "{verdict}")?;
            }
            _ => writeln!(stream, "{} {order}", server.name)?,
        }
    }
}

fn reset(stream: &TcpStream) -> Result<()> {
    abandon(stream)?;
    // The copies too must be gone before the kernel sends it, so ask for it at once.
    stream.shutdown(std::net::Shutdown::Both)?;
    bail!("reset")
}

/// From now on the last close of the socket is an RST.
pub(crate) fn abandon(stream: &TcpStream) -> Result<()> {
    Ok(setsockopt(stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?)
}

/// Bytes that repeat nowhere near: a lost, doubled or moved piece shows.
pub(crate) fn pattern(length: usize) -> Vec<u8> {
    (0_u32..).flat_map(|word| word.wrapping_mul(2_654_435_761).to_be_bytes()).take(length).collect()
}
