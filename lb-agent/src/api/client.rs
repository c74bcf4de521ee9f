//! The way to the API server: a kubeconfig, or what a pod finds in itself.

use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// Why there is no API to talk to.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// Neither a kubeconfig was named, nor is this a pod with a ServiceAccount.
    #[error(
        "no Kubernetes API to talk to: not in a pod ({source}). Name a kubeconfig with --kubeconfig or KUBECONFIG, or \
         a directory of manifests with --manifests"
    )]
    NotInPod {
        /// What is missing.
        source: InClusterError,
    },
    /// The kubeconfig cannot be used.
    #[error("kubeconfig {path}: {source}")]
    Kubeconfig {
        /// As given.
        path: String,
        /// What is wrong in it.
        source: KubeconfigError,
    },
    /// A client cannot be made from it: a certificate or a token file that cannot be read, say.
    #[error("cannot make a client for {server}: {source}")]
    Client {
        /// Its address.
        server: String,
        /// Why.
        source: kube::Error,
    },
}

/// A connection must stand within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A client for the kubeconfig if one is named, else for that of `KUBECONFIG`, else for the cluster that this pod is
/// in. Nothing is sent yet.
///
/// Tokens from files (a pod's, too) are read again each minute, so a token that is rotated goes on working.
///
/// # Errors
/// There is no way to the API, or it is not usable.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
    let mut config = load(kubeconfig).await?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Whoever asks retries by itself, later and with the newest state; hidden retries would add to its time limit.
    config.default_retry = false;
    let server = config.cluster_url.to_string();
    Client::try_from(config).map_err(|source| ConnectError::Client { server, source })
}

async fn load(kubeconfig: Option<&Path>) -> Result<Config, ConnectError> {
    let named = kubeconfig.map(Path::to_owned);
    let from_environment =
        || std::env::var_os("KUBECONFIG").filter(|path| !path.is_empty()).map(PathBuf::from);
    let Some(path) = named.or_else(from_environment) else {
        return Config::incluster_env().map_err(|source| ConnectError::NotInPod { source });
    };
    let fault = |source| ConnectError::Kubeconfig { path: path.display().to_string(), source };
    // KUBECONFIG may name several files.
    let content = match kubeconfig {
        Some(path) => Kubeconfig::read_from(path),
        None => Kubeconfig::read(),
    };
    let options = KubeConfigOptions::default();
    Config::from_custom_kubeconfig(content.map_err(fault)?, &options).await.map_err(fault)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    async fn refusal(text: Option<&str>) -> String {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("config");
        if let Some(text) = text {
            fs::write(&path, text).unwrap();
        }
        connect(Some(&path)).await.err().unwrap().to_string()
    }

    #[tokio::test]
    async fn a_kubeconfig_that_cannot_be_used_is_named_with_the_reason() {
        let missing = refusal(None).await;
        assert!(missing.starts_with("kubeconfig /") && missing.contains("No such file"), "{missing}");
        let broken = refusal(Some("clusters: [")).await;
        assert!(broken.starts_with("kubeconfig /"), "{broken}");
        let empty = refusal(Some("apiVersion: v1\nkind: Config\n")).await;
        assert!(empty.contains("context"), "{empty}");
    }

    #[tokio::test]
    async fn a_token_file_that_is_not_there_is_named() {
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: a, user: a}}]\n\
                    clusters: [{name: a, cluster: {server: 'https://192.0.2.1:6443'}}]\n\
                    users: [{name: a, user: {tokenFile: /nonexistent/token}}]\n";
        let error = refusal(Some(text)).await;
        assert!(error.contains("192.0.2.1:6443") && error.contains("/nonexistent/token"), "{error}");
    }
}
