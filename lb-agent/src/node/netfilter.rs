//! Requests to nfnetlink: one message with its replies, or a batch that the kernel takes as a whole or not at all.

use netlink_bindings::builtin::Nlmsghdr;
use netlink_bindings::nftables::ChainedFinal;
use netlink_bindings::traits::{NetlinkChained as _, NetlinkRequest, Protocol};
use rtnetlink::sys::{AsyncSocket as _, AsyncSocketExt as _, TokioSocket, protocols::NETLINK_NETFILTER};
use std::io;

/// Sequence number of a single request.
const SINGLE: u32 = 1;
/// Sequence number of the first message of a batch.
pub(super) const FIRST_OF_BATCH: u32 = 1;

/// A socket in the network namespace of the thread that opened it.
pub(super) struct Socket {
    socket: TokioSocket,
}

/// A message from the kernel, without its header.
enum Reply {
    Data(Vec<u8>),
    /// Also the end of a dump.
    Acknowledged,
}

impl Socket {
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind_auto()?;
        Ok(Self { socket })
    }

    /// Sends a request and gives the payloads of its replies to `decode`.
    pub(super) async fn request<R: NetlinkRequest, T>(
        &self,
        request: &R,
        decode: impl Fn(R::ReplyType<'_>) -> T,
    ) -> io::Result<Vec<T>> {
        let Protocol::Raw { request_type, .. } = request.protocol() else {
            return Err(io::Error::other("not a netfilter request"));
        };
        let flags = request.flags() | flag(libc::NLM_F_REQUEST) | flag(libc::NLM_F_ACK);
        let length = Nlmsghdr::len() + request.payload().len();
        let len = u32::try_from(length).map_err(io::Error::other)?;
        let header = Nlmsghdr { len, r#type: request_type, flags, seq: SINGLE, pid: 0 };
        self.send(&[header.as_slice(), request.payload()].concat()).await?;

        let mut decoded = Vec::new();
        loop {
            for (_, reply) in self.receive().await? {
                match reply? {
                    Reply::Data(payload) => decoded.push(decode(R::decode_reply(&payload))),
                    Reply::Acknowledged => return Ok(decoded),
                }
            }
        }
    }

    /// Sends a batch (its first and last message are its brackets) and waits until the kernel has taken all of it.
    pub(super) async fn batch(&self, batch: &ChainedFinal<'_>) -> io::Result<()> {
        self.send(batch.buf()).await?;
        // Kernels before 6.10 do not acknowledge the brackets; the messages between them always are.
        let brackets = 2;
        let mut awaited = batch.chain_len().saturating_sub(brackets);
        let between = |seq: u32| {
            seq > FIRST_OF_BATCH && (seq - FIRST_OF_BATCH) as usize <= batch.chain_len() - brackets
        };
        while awaited > 0 {
            for (seq, reply) in self.receive().await? {
                if let Reply::Acknowledged = reply?
                    && between(seq)
                {
                    awaited = awaited.saturating_sub(1);
                }
            }
        }
        Ok(())
    }

    async fn send(&self, message: &[u8]) -> io::Result<()> {
        let sent = self.socket.send(message).await?;
        if sent == message.len() { Ok(()) } else { Err(io::Error::other("netlink took part of a message")) }
    }

    /// The messages of one datagram with their sequence numbers; an error that the kernel answers is a message.
    async fn receive(&self) -> io::Result<Vec<(u32, io::Result<Reply>)>> {
        let (datagram, _) = self.socket.recv_from_full().await?;
        split(&datagram)
    }
}

fn split(mut rest: &[u8]) -> io::Result<Vec<(u32, io::Result<Reply>)>> {
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "malformed netlink message");
    let mut messages = Vec::new();
    while !rest.is_empty() {
        let header = rest.get(..Nlmsghdr::len()).and_then(Nlmsghdr::new_from_slice).ok_or_else(malformed)?;
        let length = header.len as usize;
        let payload = rest.get(Nlmsghdr::len()..length).ok_or_else(malformed)?;
        let reply = match i32::from(header.r#type) {
            libc::NLMSG_DONE | libc::NLMSG_ERROR => {
                let code =
                    payload.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes)).ok_or_else(malformed)?;
                if code == 0 {
                    Ok(Reply::Acknowledged)
                } else {
                    Err(io::Error::from_raw_os_error(code.saturating_neg()))
                }
            }
            _ => Ok(Reply::Data(payload.to_vec())),
        };
        messages.push((header.seq, reply));
        // Messages are aligned to four bytes; the last one need not be.
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(messages)
}

fn flag(flag: libc::c_int) -> u16 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the header's flags are 16 bits"
    )]
    let flag = flag as u16;
    flag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cut_short_is_an_error_and_never_a_panic() {
        let header = Nlmsghdr { len: 20, r#type: 2, flags: 0, seq: 7, pid: 0 };
        let whole = [header.as_slice(), &0_i32.to_ne_bytes()].concat();
        assert!(matches!(split(&whole).unwrap().as_slice(), [(7, Ok(Reply::Acknowledged))]));
        for length in 1..whole.len() {
            assert!(split(&whole[..length]).is_err(), "{length}");
        }
        let refused = [header.as_slice(), &(-libc::EPERM).to_ne_bytes()].concat();
        let replies = split(&refused).unwrap();
        let Err(error) = &replies[0].1 else { panic!("a refusal was taken for consent") };
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        let endless = Nlmsghdr { len: 0, ..header };
        assert!(split(endless.as_slice()).is_err(), "a length of zero would never end");
    }
}
