//! The other side of [`crate::echo`].

use crate::echo::abandon;
use crate::world::SOON;
use anyhow::{Context as _, Result, ensure};
use nix::libc;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike as _};
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::Duration;
use testbed::Host;

/// A TCP connection to an echo server.
#[derive(Debug)]
pub(crate) struct Talk {
    reader: BufReader<TcpStream>,
    /// The server's name.
    pub(crate) pod: String,
    /// What the server sees of us.
    pub(crate) seen_as: SocketAddrV4,
}

impl Talk {
    /// Connects and is greeted.
    pub(crate) fn open(host: &Host, server: SocketAddrV4) -> Result<Self> {
        Self::from_port(host, 0, server)
    }

    /// The same from a port of the caller's choice.
    pub(crate) fn from_port(host: &Host, port: u16, server: SocketAddrV4) -> Result<Self> {
        Self::begin(connect_from(host, (Ipv4Addr::UNSPECIFIED, port), server, SOON)?)
    }

    /// On a connected socket.
    pub(crate) fn begin(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SOON))?;
        let mut talk = Self {
            reader: BufReader::new(stream),
            pod: String::new(),
            seen_as: SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0),
        };
        let greeting = talk.hear()?;
        let (pod, seen_as) = greeting.split_once(' ').context("no greeting")?;
        talk.pod = pod.to_owned();
        talk.seen_as = seen_as.parse()?;
        Ok(talk)
    }

    /// Our own end, as our kernel has it.
    pub(crate) fn local(&self) -> SocketAddrV4 {
        match self.stream().local_addr().unwrap() {
            SocketAddr::V4(address) => address,
            SocketAddr::V6(address) => panic!("{address}"),
        }
    }

    /// The socket.
    pub(crate) fn stream(&self) -> &TcpStream {
        self.reader.get_ref()
    }

    /// Sends a line.
    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        Ok(self.reader.get_mut().write_all(format!("{line}\n").as_bytes())?)
    }

    /// Receives a line.
    pub(crate) fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.reader.read_line(&mut line)? > 0, io::Error::from(ErrorKind::UnexpectedEof));
        Ok(line.trim_end().to_owned())
    }

    /// Sends a line, and has it come back from the same pod.
    pub(crate) fn check(&mut self, line: &str) -> Result<()> {
        self.tell(line)?;
        let (answer, expected) = (self.hear()?, format!("{} {line}", self.pod));
        ensure!(answer == expected, "{answer:?}");
        Ok(())
    }

    /// Receives bytes.
    pub(crate) fn take(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Sends bytes.
    pub(crate) fn give(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.reader.get_mut().write_all(bytes)?)
    }

    /// Ends it by an RST.
    pub(crate) fn reset(self) {
        abandon(self.stream()).unwrap();
    }
}

/// A TCP connection from a given address and port; 0 for any.
pub(crate) fn connect_from(
    host: &Host,
    from: (Ipv4Addr, u16),
    to: SocketAddrV4,
    limit: Duration,
) -> Result<TcpStream> {
    host.enter(|| {
        let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
        // It limits connect as well.
        setsockopt(&fd, sockopt::SendTimeout, &TimeVal::milliseconds(limit.as_millis().try_into()?))?;
        bind(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(from.0, from.1)))?;
        connect(fd.as_raw_fd(), &SockaddrIn::from(to)).map_err(io::Error::from)?;
        Ok(TcpStream::from(fd))
    })
    .with_context(|| format!("{} from port {} to {to}", host.name(), from.1))
}

/// A UDP socket that talks to one server.
#[derive(Debug)]
pub(crate) struct Asker {
    socket: UdpSocket,
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The server's name.
    pub(crate) pod: String,
    /// What the server sees of us.
    pub(crate) seen_as: SocketAddrV4,
    /// All of it.
    pub(crate) text: String,
}

impl Asker {
    /// From a port of the caller's choice, 0 for any.
    pub(crate) fn from_port(host: &Host, port: u16, server: SocketAddrV4) -> Self {
        Self::bound(host, SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port), server)
    }

    /// From an address and port.
    pub(crate) fn bound(host: &Host, from: SocketAddrV4, server: SocketAddrV4) -> Self {
        let socket = host.enter(|| {
            let socket = UdpSocket::bind(from)?;
            socket.connect(server)?;
            socket.set_read_timeout(Some(SOON))?;
            Ok(socket)
        });
        Self { socket: socket.unwrap() }
    }

    /// From any port.
    pub(crate) fn new(host: &Host, server: SocketAddrV4) -> Self {
        Self::from_port(host, 0, server)
    }

    /// From now on datagrams may be cut on their way (`IP_MTU_DISCOVER`).
    pub(crate) fn may_be_cut(&self) {
        let value = libc::IP_PMTUDISC_DONT;
        // SAFETY: the value outlives the call, and has the length that is given.
        let done = unsafe {
            let value = (&raw const value).cast();
            libc::setsockopt(self.socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, value, 4)
        };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }

    /// Our own end.
    pub(crate) fn local(&self) -> SocketAddr {
        self.socket.local_addr().unwrap()
    }

    /// Sends without waiting for an answer.
    pub(crate) fn tell(&self, text: &str) -> Result<()> {
        ensure!(self.socket.send(text.as_bytes())? == text.len(), "cut");
        Ok(())
    }

    /// One datagram there, one back.
    pub(crate) fn ask(&self, text: &str) -> Result<Answer> {
        self.tell(text)?;
        self.hear()
    }

    /// One datagram back.
    pub(crate) fn hear(&self) -> Result<Answer> {
        let mut buffer = vec![0; 65_536];
        let length = self.socket.recv(&mut buffer)?;
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        let mut words = text.splitn(3, ' ');
        let (pod, seen_as) = words.next().zip(words.next()).context("no answer of an echo server")?;
        Ok(Answer { pod: pod.to_owned(), seen_as: seen_as.parse()?, text: text.clone() })
    }
}

/// Why a connection or a datagram failed, as the kernel has it.
pub(crate) fn failure<T: std::fmt::Debug>(outcome: Result<T>) -> io::Error {
    outcome.expect_err("it must fail").downcast().unwrap()
}

/// The kind of that.
pub(crate) fn kind<T: std::fmt::Debug>(outcome: Result<T>) -> ErrorKind {
    failure(outcome).kind()
}
