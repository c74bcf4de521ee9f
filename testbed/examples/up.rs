//! A testbed with a web server in a pod of each node, to look around in: `up [TOPOLOGY] [AGENT]`. With an agent's binary
//! also a Service and an agent on every node. Ctrl-C removes it.

use anyhow::Result;
use std::path::PathBuf;
use std::thread;
use testbed::cluster::Service;
use testbed::{Options, Testbed, Topology, server};

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1).peekable();
    let named = words.next_if(|word| Topology::ALL.iter().any(|topology| topology.name() == word));
    let topology = named.map_or(Ok(Topology::default()), |name| name.parse())?;
    let agent = words.next().map(PathBuf::from);
    let testbed = Testbed::new(Options { topology, agent: agent.clone(), ..Options::default() })?;
    let (mut servers, mut endpoints, mut agents) = (Vec::new(), Vec::new(), Vec::new());
    for number in 1..=3 {
        let pod = testbed.add_pod(number, &format!("web-{number}"))?;
        servers.push(server::http(&pod, 8080)?);
        println!("pod web-{number} on n{number}: {}:8080", pod.ip());
        endpoints.push(pod.endpoint());
    }
    if agent.is_some() {
        testbed.cluster().set_service(Service::new("web", "192.0.2.101".parse()?).tcp(80, 8080))?;
        testbed.cluster().set_endpoints("web", &endpoints)?;
        for number in 1..=3 {
            agents.push(testbed.start_agent(number, &[])?);
        }
        println!("Service web: http://192.0.2.101/, held by n1");
    }
    println!("enter a host: nsenter --net=/run/netns/{}", testbed.client().namespace());
    println!("files: {}", testbed.directory().display());
    // The signal's own thread removes everything and ends the process.
    loop {
        thread::park();
    }
}
