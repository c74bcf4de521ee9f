//! Real servers for pods, which say in their logs whom they saw.

use crate::host::Host;
use crate::process::Process;
use crate::{dns, wait};
use anyhow::{Context as _, Result};
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

/// The name that [`dns()`] servers answer to: with a text, the name of the pod.
pub const WHO: &str = "who.testbed";

/// How long a server may take until it answers.
const START: Duration = Duration::from_secs(5);
/// Bytes of what HTTP servers have at `/big` and `/slow`; a file with nothing but holes.
const BIG: u64 = 1 << 30;

/// A running server. It ends when this is dropped.
#[derive(Debug)]
pub struct Server {
    process: Process,
    requests: PathBuf,
    client_in: fn(&str) -> Option<&str>,
}

impl Server {
    /// The program.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// The source address of each request so far, as the server saw and logged it. It may log a request shortly
    /// after it has answered.
    ///
    /// # Errors
    /// When its log cannot be read.
    pub fn clients(&self) -> Result<Vec<String>> {
        let log = fs::read_to_string(&self.requests)
            .with_context(|| format!("cannot read {}", self.requests.display()))?;
        Ok(log.lines().filter_map(self.client_in).map(str::to_owned).collect())
    }
}

/// nginx. `/` answers with the host's name, `/client` with the client's `address:port`, `/big` with a GiB of zeros,
/// `/slow` with the same at 1 MB/s. Idle connections stay for an hour.
///
/// # Errors
/// When it does not run, or does not accept connections soon.
pub fn http(host: &Host, port: u16) -> Result<Server> {
    let name = host.name();
    let label = format!("http-{port}");
    let directory = host.files().join(format!("{name}-{label}"));
    fs::create_dir_all(&directory)?;
    let big = host.files().join("big");
    File::options().create(true).truncate(false).write(true).open(&big)?.set_len(BIG)?;
    let requests = host.log_path(&format!("{label}-requests"));

    let config = directory.join("nginx.conf");
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|user| format!("{user}_temp_path {};\n", directory.display()))
        .concat();
    // One process, so that killing it kills it all.
    let text = format!(
        r#"
        daemon off; master_process off; user root;
        pid {directory}/pid; error_log stderr warn;
        events {{ worker_connections 16000; }}
        http {{
            {temporary}
            log_format who '$remote_addr $remote_port $request_uri';
            access_log {requests} who;
            default_type text/plain;
            client_header_timeout 1h; keepalive_timeout 1h; keepalive_requests 1000000;
            server {{
                listen {port} backlog=4096;
                location / {{ return 200 "{name}\n"; }}
                location = /client {{ return 200 "$remote_addr:$remote_port\n"; }}
                location = /big {{ alias {big}; }}
                location = /slow {{ alias {big}; limit_rate 1m; }}
            }}
        }}
        "#,
        directory = directory.display(),
        requests = requests.display(),
        big = big.display(),
    );
    fs::write(&config, text)?;
    let config = config.to_str().context("the run's directory is not UTF-8")?;
    // As many open files as the hard limit allows; the shell becomes nginx.
    let raise = r#"ulimit -Sn "$(ulimit -Hn)"; exec "$@""#;
    let mut process =
        host.spawn(&label, &["sh", "-c", raise, "sh", "nginx", "-e", "stderr", "-c", config])?;
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
    wait::until(&format!("nginx of {name} on port {port}"), START, || {
        let said = process.log()?;
        anyhow::ensure!(process.is_running()?, "it ended: {}", said.trim());
        host.enter(|| Ok(TcpStream::connect_timeout(&address.into(), START)?))
    })?;
    Ok(Server { process, requests, client_in: |line| line.split(' ').next() })
}

/// dnsmasq on UDP port 53, which knows one name: [`WHO`].
///
/// # Errors
/// When it does not run, or does not answer soon. The question that finds out is in its log, from 127.0.0.1.
pub fn dns(host: &Host) -> Result<Server> {
    let text = format!("--txt-record={WHO},{}", host.name());
    let words = [
        "dnsmasq",
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        "--user=root",
    ];
    let more = ["--group=root", "--pid-file", "--log-queries", "--log-facility=-", &text];
    let mut process = host.spawn("dns", &[&words[..], &more[..]].concat())?;
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 53);
    wait::until(&format!("dnsmasq of {}", host.name()), START, || {
        let said = process.log()?;
        anyhow::ensure!(process.is_running()?, "it ended: {}", said.trim());
        dns::ask(host, address, WHO, Duration::from_millis(200))
    })?;
    let requests = process.log_path().to_owned();
    Ok(Server { process, requests, client_in: dns_client })
}

/// iperf3, one test after the other.
///
/// # Errors
/// When it does not run, or does not listen soon.
pub fn iperf3(host: &Host, port: u16) -> Result<Process> {
    let mut process = host.spawn(
        &format!("iperf3-{port}"),
        &["iperf3", "--server", "--forceflush", "--port", &port.to_string()],
    )?;
    process.await_log("Server listening", START)?;
    Ok(process)
}

/// Out of `dnsmasq: query[TXT] who.testbed from 198.51.100.10`.
fn dns_client(line: &str) -> Option<&str> {
    line.contains(" query[").then(|| line.rsplit_once(" from "))?.map(|(_, client)| client)
}
