//! A DNS question over UDP: one datagram there, one back.

use crate::host::Host;
use anyhow::{Context as _, Result, ensure};
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::Duration;

const TYPE_TXT: u16 = 16;
const CLASS_IN: u16 = 1;
/// Bytes of the header (RFC 1035, section 4.1.1).
const HEADER: usize = 12;
const ID: u16 = 0x7265;

/// Asks for the text that `name` has, from a fresh port, and returns it.
///
/// # Errors
/// When no answer comes from `server` within `limit`, or it has no text.
pub fn ask(host: &Host, server: SocketAddrV4, name: &str, limit: Duration) -> Result<String> {
    host.enter(|| ask_here(server, name, limit)).with_context(|| format!("TXT {name} from {server}"))
}

/// [`ask`] from the calling thread's own host: for loops inside [`Host::enter`].
///
/// # Errors
/// As [`ask`].
pub fn ask_here(server: SocketAddrV4, name: &str, limit: Duration) -> Result<String> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // Connected: an answer from another address is not received, a port unreachable is an error.
    socket.connect(server)?;
    socket.set_read_timeout(Some(limit))?;
    let question = question(name)?;
    socket.send(&question)?;
    let mut buffer = [0; 1500];
    let length = socket.recv(&mut buffer)?;
    text_of(&buffer[..length], question.len()).context("the answer has no text")
}

fn question(name: &str) -> Result<Vec<u8>> {
    let mut message = ID.to_be_bytes().to_vec();
    // Recursion desired; one question, no records.
    message.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        let length = u8::try_from(label.len()).ok().filter(|length| (1..64).contains(length));
        message.push(length.with_context(|| format!("{name:?} is no domain name"))?);
        message.extend(label.bytes());
    }
    message.push(0);
    message.extend(TYPE_TXT.to_be_bytes());
    message.extend(CLASS_IN.to_be_bytes());
    ensure!(message.len() <= 512, "{name:?} is too long");
    Ok(message)
}

/// The first text of the first answer; `answers_at` is where the question ends, which an answer repeats.
fn text_of(message: &[u8], answers_at: usize) -> Option<String> {
    if message.get(..2)? != ID.to_be_bytes() || message.get(6..8)? == [0, 0] || answers_at < HEADER {
        return None;
    }
    let record = message.get(answers_at..)?;
    // The name is a pointer of two bytes to the question's; then type, class, time to live (4) and length.
    if record.get(2..4)? != TYPE_TXT.to_be_bytes() {
        return None;
    }
    let text = record.get(12..)?;
    let length = usize::from(*text.first()?);
    String::from_utf8(text.get(1..=length)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_from_an_answer_and_from_nothing_else() {
        let question = question("who.testbed").unwrap();
        assert_eq!(question.len(), HEADER + 13 + 4);
        let mut answer = question.clone();
        answer[7] = 1;
        answer.extend([0xc0, 12, 0, 16, 0, 1, 0, 0, 0, 0, 0, 4, 3, b'w', b'e', b'b']);
        assert_eq!(text_of(&answer, question.len()).as_deref(), Some("web"));
        for length in 0..answer.len() {
            assert_eq!(text_of(&answer[..length], question.len()), None, "cut to {length}");
        }
        assert!(super::question("a..b").is_err());
    }
}
