//! Packets, captured by tcpdump and judged by tshark: a stranger to our own arithmetic.

use crate::host::Host;
use crate::process::Process;
use crate::wait;
use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A capture that goes on.
#[derive(Debug)]
pub struct Capture {
    tcpdump: Process,
    file: PathBuf,
}

impl Capture {
    pub(crate) fn begin(host: &Host, device: &str, filter: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let label = format!("capture-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let file = host.files().join(format!("{}-{label}.pcap", host.name()));
        let path = file.to_str().context("the run's directory is not UTF-8")?;
        // Each packet is written when it is seen. The kernel keeps room for a packet of full length for each, so short ones
        // (two kB, in 16 MiB) make room for many.
        let mut words = vec!["tcpdump", "-n", "-U", "--immediate-mode", "-s", "2048", "-B", "16384"];
        words.extend(["-Z", "root", "-i", device, "-w", path, filter]);
        let mut tcpdump = host.spawn(&label, &words)?;
        tcpdump.await_log("listening on", Duration::from_secs(5))?;
        Ok(Self { tcpdump, file })
    }

    /// Ends it, once every packet until now is in the file.
    ///
    /// # Errors
    /// When tcpdump does not end well, or missed packets.
    pub fn finish(mut self) -> Result<Captured> {
        wait::until("tcpdump has read all packets", Duration::from_secs(5), || {
            // It says: "tcpdump: 3 packets captured, 3 packets received by filter, 0 packets dropped by kernel".
            self.tcpdump.signal(Signal::SIGUSR1)?;
            let log = self.tcpdump.log()?;
            let line =
                log.lines().rfind(|line| line.contains("captured, ")).context("it says nothing yet")?;
            let counts: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            ensure!(matches!(counts[..], [captured, received, 0] if captured == received), "{line}");
            Ok(())
        })?;
        self.tcpdump.signal(Signal::SIGINT)?;
        let status = self.tcpdump.wait(Duration::from_secs(5))?;
        ensure!(status.success(), "tcpdump: {status}: {}", self.tcpdump.log()?.trim());
        Ok(Captured { file: self.file })
    }
}

/// A finished capture.
#[derive(Debug)]
pub struct Captured {
    file: PathBuf,
}

impl Captured {
    /// The pcap file.
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// The packets that match a display filter of tshark, one line each; all for an empty filter.
    ///
    /// # Errors
    /// When tshark cannot be run or does not like the filter.
    pub fn packets(&self, filter: &str) -> Result<Vec<String>> {
        self.tshark(filter, &[])
    }

    /// One field of tshark's (`ip.len`) of each packet that matches.
    ///
    /// # Errors
    /// As [`Captured::packets`].
    pub fn field(&self, filter: &str, field: &str) -> Result<Vec<String>> {
        self.tshark(filter, &["-T", "fields", "-e", field])
    }

    /// Several fields of each packet that matches, separated by tabs. One that a packet does not have is empty.
    ///
    /// # Errors
    /// As [`Captured::packets`].
    pub fn fields(&self, filter: &str, fields: &[&str]) -> Result<Vec<String>> {
        let names = fields.iter().flat_map(|field| ["-e", field]);
        self.tshark(filter, &["-T", "fields"].into_iter().chain(names).collect::<Vec<_>>())
    }

    fn tshark(&self, filter: &str, more: &[&str]) -> Result<Vec<String>> {
        let output = Command::new("tshark")
            .arg("-n")
            .args(
                ["ip", "tcp", "udp"]
                    .iter()
                    .flat_map(|layer| ["-o".to_owned(), format!("{layer}.check_checksum:TRUE")]),
            )
            .arg("-r")
            .arg(&self.file)
            .args(["-Y", filter])
            .args(more)
            .output()
            .context("cannot run tshark")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "tshark: {}: {}", output.status, said.trim());
        Ok(String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(|line| line.trim_matches(' ').to_owned())
            .collect())
    }

    /// The packets with a wrong IP, TCP, UDP or ICMP checksum. Meaningful where the sender's checksum offload is off
    /// ([`crate::Options::checksum_offload`]): else the sums are partial until they leave for a real device.
    ///
    /// # Errors
    /// As [`Captured::packets`].
    pub fn bad_checksums(&self) -> Result<Vec<String>> {
        // 0 is "bad" in tshark's enumeration. It calls 0xffff bad where 0 is right, which sum up the same, and the kernel
        // writes 0xffff for TCP as well (skb_checksum_help, CSUM_MANGLED_0).
        self.packets(
            "ip.checksum.status == 0 || (tcp.checksum.status == 0 && tcp.checksum != 0xffff) || \
             udp.checksum.status == 0 || icmp.checksum.status == 0",
        )
    }
}
