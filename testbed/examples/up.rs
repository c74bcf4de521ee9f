//! A testbed with a web server in a pod of each node, to look around in. Ctrl-C removes it.

use anyhow::Result;
use std::thread;
use testbed::{Options, Testbed, server};

fn main() -> Result<()> {
    let testbed = Testbed::weave(Options::default())?;
    let mut servers = Vec::new();
    for number in 1..=3 {
        let pod = testbed.add_pod(number, &format!("web-{number}"))?;
        servers.push(server::http(&pod, 8080)?);
        println!("pod web-{number} on n{number}: {}:8080", pod.ip());
    }
    println!("enter a host: nsenter --net=/run/netns/{}", testbed.client().namespace());
    println!("files: {}", testbed.directory().display());
    // The signal's own thread removes everything and ends the process.
    loop {
        thread::park();
    }
}
