//! Where the story's objects are: what differs between its tellings.

use anyhow::Result;
use std::path::PathBuf;
use testbed::cluster::{Endpoint, Service};
use testbed::{Pod, Process, Testbed};

/// Holds the objects that agents read and write.
pub(super) trait Cluster {
    /// Adds a Service and the pods behind it.
    fn add_service(&self, testbed: &Testbed, service: Service, pods: &[&Pod]) -> Result<()>;

    /// Starts the agent of a node, which reads and writes here.
    fn start_agent(&self, testbed: &Testbed, node: u8) -> Result<Process>;

    /// What a Service shows as its address, as text.
    fn status(&self, testbed: &Testbed, service: &str) -> Result<String>;

    /// Says that a pod is about to end: no new connections. `others` are those that stay.
    fn terminate(&self, testbed: &Testbed, service: &str, pod: &Pod, others: &[&Pod]) -> Result<()>;

    /// Says that it has ended.
    fn forget(&self, testbed: &Testbed, service: &str, pod: &Pod, others: &[&Pod]) -> Result<()>;

    /// Commands to look at and change the objects with, as root on this machine.
    fn to_try(&self, testbed: &Testbed) -> Vec<String>;
}

/// A directory of manifests, which the testbed has.
pub(super) struct Manifests;

impl Cluster for Manifests {
    fn add_service(&self, testbed: &Testbed, service: Service, pods: &[&Pod]) -> Result<()> {
        let name = service.name().to_owned();
        testbed.cluster().set_service(service)?;
        testbed.cluster().set_endpoints(&name, &ready(pods))
    }

    fn start_agent(&self, testbed: &Testbed, node: u8) -> Result<Process> {
        testbed.start_agent(node, &[])
    }

    fn status(&self, testbed: &Testbed, service: &str) -> Result<String> {
        testbed.cluster().status(service)
    }

    fn terminate(&self, testbed: &Testbed, service: &str, pod: &Pod, others: &[&Pod]) -> Result<()> {
        let mut endpoints = ready(others);
        endpoints.push(pod.endpoint().terminating());
        testbed.cluster().set_endpoints(service, &endpoints)
    }

    fn forget(&self, testbed: &Testbed, service: &str, _pod: &Pod, others: &[&Pod]) -> Result<()> {
        testbed.cluster().set_endpoints(service, &ready(others))
    }

    fn to_try(&self, testbed: &Testbed) -> Vec<String> {
        let endpoints: PathBuf = testbed.cluster().directory().join("endpoints-web.yaml");
        vec![format!("$EDITOR {}", endpoints.display())]
    }
}

fn ready(pods: &[&Pod]) -> Vec<Endpoint> {
    pods.iter().map(|pod| pod.endpoint()).collect()
}
