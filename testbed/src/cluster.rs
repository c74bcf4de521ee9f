//! The cluster's state as a directory of manifests, which every agent of a testbed reads and reports to.

use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const NAMESPACE: &str = "default";

/// The directory. Files are replaced as a whole, so a reader sees the old state or the new one.
#[derive(Debug)]
pub struct Cluster {
    directory: PathBuf,
    services: Mutex<BTreeMap<String, Service>>,
}

/// A Service of type LoadBalancer, of our class, in the namespace `default`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    name: String,
    app: String,
    address: Ipv4Addr,
    affinity: &'static str,
    ports: Vec<Port>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Port {
    protocol: &'static str,
    port: u16,
    target: u16,
}

/// One endpoint of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The pod's address.
    pub address: Ipv4Addr,
    /// The node that it runs on.
    pub node: String,
    /// Gets new connections.
    pub ready: bool,
    /// Goes on with those it has.
    pub serving: bool,
    /// About to end.
    pub terminating: bool,
}

impl Service {
    /// Without ports yet. On an API its pods are those with its name as the label `app`.
    pub fn new(name: &str, address: Ipv4Addr) -> Self {
        Self { name: name.to_owned(), app: name.to_owned(), address, affinity: "None", ports: Vec::new() }
    }

    /// With the pods of that label `app`.
    #[must_use]
    pub fn selecting(self, app: &str) -> Self {
        Self { app: app.to_owned(), ..self }
    }

    /// With session affinity by the client's address.
    #[must_use]
    pub fn sticky(self) -> Self {
        Self { affinity: "ClientIP", ..self }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// With a TCP port that leads to the pods' `target`.
    #[must_use]
    pub fn tcp(self, port: u16, target: u16) -> Self {
        self.with("TCP", port, target)
    }

    /// With a UDP port that leads to the pods' `target`.
    #[must_use]
    pub fn udp(self, port: u16, target: u16) -> Self {
        self.with("UDP", port, target)
    }

    fn with(mut self, protocol: &'static str, port: u16, target: u16) -> Self {
        self.ports.push(Port { protocol, port, target });
        self
    }

    /// As it is applied to an API.
    pub fn manifest(&self) -> String {
        let Self { name, app, address, affinity, ports } = self;
        let mut text = format!(
            "apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\n  namespace: {NAMESPACE}\nspec:\n  \
             type: LoadBalancer\n  loadBalancerClass: reweave.levk.dev/node-address\n  loadBalancerIP: {address}\n  \
             sessionAffinity: {affinity}\n  selector: {{app: {app}}}\n  ports:\n"
        );
        for Port { protocol, port, target } in ports {
            let name = port_name(protocol, *port);
            let _ = writeln!(
                text,
                "  - {{name: {name}, protocol: {protocol}, port: {port}, targetPort: {target}}}"
            );
        }
        text
    }

    fn slice(&self, endpoints: &[Endpoint]) -> String {
        let Self { name, ports, .. } = self;
        let mut text = format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {name}-1\n  namespace: \
             {NAMESPACE}\n  labels:\n    kubernetes.io/service-name: {name}\naddressType: IPv4\nports:\n"
        );
        // Writing to a String cannot fail.
        for Port { protocol, port, target } in ports {
            let name = port_name(protocol, *port);
            let _ = writeln!(text, "- {{name: {name}, protocol: {protocol}, port: {target}}}");
        }
        text.push_str(if endpoints.is_empty() { "endpoints: []\n" } else { "endpoints:\n" });
        for Endpoint { address, node, ready, serving, terminating } in endpoints {
            let _ = writeln!(
                text,
                "- addresses: [{address}]\n  nodeName: {node}\n  conditions: {{ready: {ready}, serving: {serving}, \
                 terminating: {terminating}}}"
            );
        }
        text
    }
}

fn port_name(protocol: &str, port: u16) -> String {
    format!("{}-{port}", protocol.to_lowercase())
}

impl Endpoint {
    /// A ready one.
    pub fn ready(address: Ipv4Addr, node: &str) -> Self {
        Self { address, node: node.to_owned(), ready: true, serving: true, terminating: false }
    }

    /// The same, about to end: no new connections.
    #[must_use]
    pub fn terminating(self) -> Self {
        Self { ready: false, terminating: true, ..self }
    }

    /// The same, neither ready nor serving.
    #[must_use]
    pub fn not_ready(self) -> Self {
        Self { ready: false, serving: false, ..self }
    }
}

impl Cluster {
    pub(crate) fn new(directory: PathBuf) -> Result<Self> {
        fs::create_dir_all(&directory)?;
        Ok(Self { directory, services: Mutex::default() })
    }

    /// What agents get as `--manifests`.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Adds a Node, without our annotations: its agent publishes those.
    ///
    /// # Errors
    /// When the file cannot be written; so for the others.
    pub fn set_node(&self, name: &str, address: Ipv4Addr) -> Result<()> {
        self.write(
            &format!("node-{name}.yaml"),
            &format!(
                "apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\nstatus:\n  addresses:\n  - {{type: InternalIP, \
                 address: {address}}}\n"
            ),
        )
    }

    /// Adds or changes a Service.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn set_service(&self, service: Service) -> Result<()> {
        self.write(&format!("service-{}.yaml", service.name), &service.manifest())?;
        self.services().insert(service.name.clone(), service);
        Ok(())
    }

    /// Replaces the endpoints of a Service.
    ///
    /// # Errors
    /// When there is no such Service, or the file cannot be written.
    pub fn set_endpoints(&self, service: &str, endpoints: &[Endpoint]) -> Result<()> {
        let slice = self
            .services()
            .get(service)
            .with_context(|| format!("no Service {service} was set"))?
            .slice(endpoints);
        self.write(&format!("endpoints-{service}.yaml"), &slice)
    }

    /// Removes a Service and its endpoints.
    ///
    /// # Errors
    /// When a file cannot be removed.
    pub fn remove_service(&self, service: &str) -> Result<()> {
        self.services().remove(service);
        for kind in ["service", "endpoints"] {
            match fs::remove_file(self.directory.join(format!("{kind}-{service}.yaml"))) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes any file, as a whole: for manifests of other shapes, and broken ones.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, file: &str, text: &str) -> Result<()> {
        // Not `*.yaml`: nobody shall read it before it is complete.
        let temporary = self.directory.join(format!(".{file}.new"));
        fs::write(&temporary, text)
            .and_then(|()| fs::rename(&temporary, self.directory.join(file)))
            .with_context(|| format!("cannot write {file} of the cluster"))
    }

    /// What the agent of a node has published about it.
    ///
    /// # Errors
    /// When it has published nothing.
    pub fn published_node(&self, node: &str) -> Result<String> {
        self.read(&format!("nodes/{node}.yaml"))
    }

    /// What the holder has written as a Service's status.
    ///
    /// # Errors
    /// When nobody has written it.
    pub fn status(&self, service: &str) -> Result<String> {
        self.read(&format!("status/{NAMESPACE}.{service}.yaml"))
    }

    fn read(&self, file: &str) -> Result<String> {
        fs::read_to_string(self.directory.join(file)).with_context(|| format!("{file} of the cluster"))
    }

    fn services(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Service>> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_holds_ordinary_manifests() {
        let directory = std::env::temp_dir().join(format!("reweave-cluster-{}", std::process::id()));
        let cluster = Cluster::new(directory.clone()).unwrap();
        cluster.set_node("n1", Ipv4Addr::new(192, 0, 2, 11)).unwrap();
        assert!(cluster.set_endpoints("web", &[]).is_err());
        cluster
            .set_service(Service::new("web", Ipv4Addr::new(192, 0, 2, 101)).tcp(80, 8080).udp(53, 53))
            .unwrap();
        let pod = Endpoint::ready(Ipv4Addr::new(10, 32, 1, 1), "n1");
        let other = Endpoint::ready(Ipv4Addr::new(10, 32, 2, 1), "n2");
        cluster.set_endpoints("web", &[pod, other.terminating()]).unwrap();

        let read = |file: &str| fs::read_to_string(directory.join(file)).unwrap();
        assert_eq!(
            read("service-web.yaml"),
            "apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: default
spec:
  type: LoadBalancer
  loadBalancerClass: reweave.levk.dev/node-address
  loadBalancerIP: 192.0.2.101
  sessionAffinity: None
  selector: {app: web}
  ports:
  - {name: tcp-80, protocol: TCP, port: 80, targetPort: 8080}
  - {name: udp-53, protocol: UDP, port: 53, targetPort: 53}
"
        );
        assert_eq!(
            read("endpoints-web.yaml"),
            "apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  namespace: default
  labels:
    kubernetes.io/service-name: web
addressType: IPv4
ports:
- {name: tcp-80, protocol: TCP, port: 8080}
- {name: udp-53, protocol: UDP, port: 53}
endpoints:
- addresses: [10.32.1.1]
  nodeName: n1
  conditions: {ready: true, serving: true, terminating: false}
- addresses: [10.32.2.1]
  nodeName: n2
  conditions: {ready: false, serving: true, terminating: true}
"
        );
        cluster.remove_service("web").unwrap();
        let left: Vec<_> =
            fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["node-n1.yaml"], "no temporary file stays");
        fs::remove_dir_all(directory).unwrap();
    }
}
