//! A kube-rs client that tests use from outside of the testbed's namespaces.

use super::control_plane::ControlPlane;
use crate::namespace;
use anyhow::{Context as _, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use nix::sched::{CloneFlags, setns};
use std::fs::File;
use std::path::Path;
use tokio::runtime::{Builder, Runtime};

/// A client, and the threads that it works on: they are on the control plane's host, so that its sockets are too.
#[derive(Debug)]
pub struct ApiClient {
    client: ClientOf,
    runtime: Runtime,
}

/// [`Client`] says nothing when debugged.
struct ClientOf(Client);

impl std::fmt::Debug for ClientOf {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Client")
    }
}

impl ControlPlane {
    /// A client for the user of a kubeconfig.
    ///
    /// # Errors
    /// When the kubeconfig does not make sense; the server is not asked yet.
    pub fn api(&self, kubeconfig: &Path) -> Result<ApiClient> {
        let name = self.host().namespace();
        let host =
            File::open(namespace::path(name)).with_context(|| format!("no network namespace {name}"))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .on_thread_start(move || {
                setns(&host, CloneFlags::CLONE_NEWNET).expect("root may enter a namespace of the testbed");
            })
            .build()?;
        let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
        let client = runtime.block_on(async {
            let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
            anyhow::Ok(Client::try_from(config)?)
        })?;
        Ok(ApiClient { client: ClientOf(client), runtime })
    }
}

impl ApiClient {
    /// Does `work` with the client, and waits for it.
    ///
    /// # Panics
    /// When `work` does.
    pub fn run<T, F>(&self, work: impl FnOnce(Client) -> F) -> T
    where
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        // Spawned, and only awaited here: this thread is not on the control plane's host.
        let task = self.runtime.spawn(work(self.client.0.clone()));
        match self.runtime.block_on(task) {
            Ok(outcome) => outcome,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}
