//! What a Service's status shows over time, as somebody who watches it sees it.

use crate::world::{PATIENCE, World};
use anyhow::ensure;
use std::net::Ipv4Addr;
use testbed::kubernetes::{Identity, Program};
use testbed::{Process, wait};

/// A `kubectl get --watch`.
pub(crate) struct Recorder {
    process: Process,
}

/// An ingress that kube-proxy leaves alone, as kubectl prints it.
pub(crate) fn proxied(address: Ipv4Addr) -> String {
    format!(r#"[{{"ip":"{address}","ipMode":"Proxy"}}]"#)
}

impl Recorder {
    /// Begins with what is shown now.
    pub(crate) fn start(world: &World, service: &str) -> Self {
        let plane = &world.plane;
        let (kubectl, cache) = (plane.binaries().path(Program::Kubectl), world.testbed.directory());
        let words = [
            kubectl.to_str().unwrap().to_owned(),
            format!("--kubeconfig={}", plane.kubeconfig(&Identity::Admin).display()),
            format!("--cache-dir={}", cache.join("kubectl").display()),
            "get".to_owned(),
            format!("service/{service}"),
            "--watch".to_owned(),
            r#"--output=jsonpath={.status.loadBalancer.ingress}{"\n"}"#.to_owned(),
        ];
        let process = plane.host().spawn(&format!("status-of-{service}"), &words).unwrap();
        let this = Self { process };
        wait::until("the first status", PATIENCE, || {
            ensure!(!this.process.log()?.is_empty(), "nothing");
            Ok(())
        })
        .unwrap();
        this
    }

    /// What it has shown, each change once: `""` is nothing.
    pub(crate) fn seen(&self) -> Vec<String> {
        let log = self.process.log().unwrap();
        let mut seen: Vec<String> = log.lines().map(str::to_owned).collect();
        seen.dedup();
        seen
    }

    /// Waits until it shows this.
    pub(crate) fn await_last(&self, ingress: &str) {
        wait::until(&format!("the status {ingress:?}"), PATIENCE, || {
            let seen = self.seen();
            ensure!(seen.last().is_some_and(|last| last == ingress), "{seen:?}");
            Ok(())
        })
        .unwrap();
    }
}
