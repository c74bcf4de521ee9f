//! Clients that never stop asking, and pods that answer.

use crate::judge::{Judge, Question};
use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{
    AddressFamily, Shutdown, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, shutdown, socket,
    sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike as _};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use testbed::{Host, Pod};

/// The pods' port, of both protocols.
pub(crate) const PORT: u16 = 8080;
/// For an answer: long enough on a busy machine, and short, since many are lost on purpose.
const ANSWER: Duration = Duration::from_millis(400);
/// Between two questions of a client.
const PAUSE: Duration = Duration::from_millis(20);
/// Ports that clients ask from, each in turn: none comes again while conntrack may remember it.
const PORTS: std::ops::Range<u16> = 10_000..60_000;

/// A pod's sockets, which answer until this is dropped.
pub(crate) struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    pod: String,
    judge: Arc<Judge>,
    tcp: TcpListener,
    udp: UdpSocket,
    is_over: AtomicBool,
}

impl Server {
    pub(crate) fn start(pod: &Pod, judge: &Arc<Judge>) -> Result<Self> {
        let any = (Ipv4Addr::UNSPECIFIED, PORT);
        let (tcp, udp) = pod.enter(|| Ok((TcpListener::bind(any)?, UdpSocket::bind(any)?)))?;
        let (pod, judge, is_over) = (pod.name().to_owned(), Arc::clone(judge), AtomicBool::new(false));
        let shared = Arc::new(Shared { pod, judge, tcp, udp, is_over });
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
    fn accept(self: &Arc<Self>) {
        while let Ok((stream, client)) = self.tcp.accept() {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            let server = Arc::clone(self);
            // A client that has given up is nothing new.
            thread::spawn(move || server.converse(&stream, client));
        }
    }

    fn converse(&self, mut stream: &TcpStream, client: SocketAddr) -> Result<()> {
        stream.set_read_timeout(Some(ANSWER))?;
        let mut question = String::new();
        BufReader::new(stream).read_line(&mut question)?;
        self.judge(&question, client)?;
        Ok(writeln!(stream, "{}", self.pod)?)
    }

    fn answer(self: &Arc<Self>) {
        let mut buffer = [0; 512];
        while !self.is_over.load(Ordering::Relaxed) {
            let Ok((length, client)) = self.udp.recv_from(&mut buffer) else { continue };
            if self.judge(&String::from_utf8_lossy(&buffer[..length]), client).is_ok() {
                let _ = self.udp.send_to(self.pod.as_bytes(), client);
            }
        }
    }

    fn judge(&self, question: &str, client: SocketAddr) -> Result<()> {
        let SocketAddr::V4(client) = client else { return Ok(()) };
        self.judge.asked(&self.pod, Question::read(question)?, client);
        Ok(())
    }
}

/// A client that asks until this is dropped.
pub(crate) struct Client {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Who asks, and from where.
pub(crate) struct Asker {
    pub(crate) name: &'static str,
    pub(crate) host: Host,
    pub(crate) is_outside: bool,
    pub(crate) services: Vec<SocketAddrV4>,
    pub(crate) judge: Arc<Judge>,
}

impl Client {
    pub(crate) fn start(asker: Asker) -> Self {
        let (stop, stopped) = channel();
        let thread = thread::spawn(move || {
            let ended = asker.host.enter({
                let asker = &asker;
                move || {
                    asker.ask_on(&stopped);
                    Ok(())
                }
            });
            if let Err(error) = ended {
                asker.judge.heard(asker.name, Err(error));
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Asker {
    fn ask_on(&self, stopped: &Receiver<()>) {
        let mut turns = PORTS.cycle();
        for number in 0.. {
            let Some(port) = turns.next() else { return };
            let service = self.services[number / 2 % self.services.len()];
            let answer =
                if number % 2 == 0 { self.by_udp(port, service) } else { self.by_tcp(port, service) };
            let protocol = if number % 2 == 0 { "UDP" } else { "TCP" };
            let answer = answer.with_context(|| format!("{protocol} to {service} from port {port}"));
            self.judge.heard(self.name, answer);
            if stopped.recv_timeout(PAUSE) == Err(RecvTimeoutError::Disconnected) {
                return;
            }
        }
    }

    fn question(&self, client: SocketAddr, service: SocketAddrV4) -> Result<String> {
        let SocketAddr::V4(client) = client else { anyhow::bail!("{client} is not IPv4") };
        Ok(Question { is_outside: self.is_outside, client, service }.text())
    }

    fn by_udp(&self, port: u16, service: SocketAddrV4) -> Result<String> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        socket.connect(service)?;
        socket.set_read_timeout(Some(ANSWER))?;
        socket.send(self.question(socket.local_addr()?, service)?.as_bytes())?;
        let mut buffer = [0; 512];
        let length = socket.recv(&mut buffer)?;
        Ok(str::from_utf8(&buffer[..length])?.to_owned())
    }

    fn by_tcp(&self, port: u16, service: SocketAddrV4) -> Result<String> {
        let mut stream = connect_from(port, service)?;
        stream.set_read_timeout(Some(ANSWER))?;
        let question = self.question(stream.local_addr()?, service)?;
        stream.write_all(question.as_bytes())?;
        let mut pod = String::new();
        BufReader::new(&stream).read_line(&mut pod)?;
        ensure!(pod.ends_with('\n'), "no answer");
        Ok(pod.trim_end().to_owned())
    }
}

fn connect_from(port: u16, to: SocketAddrV4) -> Result<TcpStream> {
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    // It limits connect as well.
    setsockopt(&fd, sockopt::SendTimeout, &TimeVal::milliseconds(ANSWER.as_millis().try_into()?))?;
    bind(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port)))?;
    connect(fd.as_raw_fd(), &SockaddrIn::from(to)).map_err(io::Error::from)?;
    Ok(TcpStream::from(fd))
}
