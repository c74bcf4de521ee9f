//! etcd, kube-apiserver and kube-controller-manager on one host, each to be stopped, killed and started by itself.

use super::binaries::{Binaries, Program};
use super::credentials::{Bound, Credentials, Identity};
use crate::Testbed;
use crate::host::Host;
use crate::process::Process;
use crate::wait;
use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sys::signal::Signal;
use std::ffi::OsString;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Of its host, on the nodes' network.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const PORT: u16 = 6443;
/// The addresses that Services of the cluster get.
const CLUSTER_IPS: &str = "10.96.0.0/16";
/// On the host's loopback; the host is alone in its namespace.
const STORE: &str = "http://127.0.0.1:2379";
const STORE_PEER: &str = "http://127.0.0.1:2380";
/// A cold start on a busy machine; three to five seconds are usual.
const START: Duration = Duration::from_secs(90);
/// For a program that was asked to end. Usual is a second; an API server that is asked right after its start has been seen to
/// wait for a minute.
const STOP: Duration = Duration::from_secs(5);

/// Those whose work tests look at. Nodes have no kubelet: whatever judges nodes by their heartbeat stays out.
const CONTROLLERS: &str = "endpoints-controller,endpointslice-controller,endpointslice-mirroring-controller,\
                           garbage-collector-controller,namespace-controller,\
                           root-ca-certificate-publisher-controller,serviceaccount-controller";

/// What may differ between control planes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether kube-controller-manager runs. Without it nobody makes EndpointSlices or ServiceAccounts.
    pub controllers: bool,
    /// More arguments for kube-apiserver.
    pub api_server: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self { controllers: true, api_server: Vec::new() }
    }
}

/// A program of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// The store.
    Etcd,
    /// The API.
    ApiServer,
    /// The controllers.
    ControllerManager,
}

impl Component {
    fn program(self) -> Program {
        match self {
            Self::Etcd => Program::Etcd,
            Self::ApiServer => Program::ApiServer,
            Self::ControllerManager => Program::ControllerManager,
        }
    }
}

/// A running control plane. Its programs end when it is dropped, and when the test's process dies; their logs are with the
/// testbed's, which shows their ends when a test panics.
#[derive(Debug)]
pub struct ControlPlane {
    // First: programs end before the host that they run on.
    etcd: Option<Process>,
    api_server: Option<Process>,
    controller_manager: Option<Process>,
    host: Host,
    credentials: Credentials,
    binaries: Binaries,
    options: Options,
    directory: PathBuf,
}

impl ControlPlane {
    /// Starts one on a host of its own beside the testbed's nodes, and waits until it is ready. Nothing is in it: see
    /// [`ControlPlane::add_nodes`].
    ///
    /// # Errors
    /// When a program does not start, with what it said; when the testbed has a control plane already.
    pub fn start(testbed: &Testbed, binaries: Binaries, options: Options) -> Result<Self> {
        let host = testbed.add_host("control", ADDRESS)?;
        let directory = testbed.directory().join("kubernetes");
        fs::create_dir(&directory)?;
        let nodes: Vec<_> = testbed.nodes().iter().map(|node| node.name()).collect();
        let credentials = Credentials::make(&directory, ADDRESS, PORT, &nodes)?;
        let (etcd, api_server, controller_manager) = (None, None, None);
        let mut this =
            Self { etcd, api_server, controller_manager, host, credentials, binaries, options, directory };
        this.start_again(Component::Etcd)?;
        this.start_again(Component::ApiServer)?;
        if this.options.controllers {
            this.start_again(Component::ControllerManager)?;
            // Pods are refused before it is there.
            let there = ["wait", "--for=create", "--timeout=60s", "serviceaccount/default"];
            this.kubectl(&there)?;
        }
        Ok(this)
    }

    /// Where the API is, from every host of the testbed: `https://192.0.2.2:6443`.
    pub fn url(&self) -> &str {
        self.credentials.server()
    }

    /// The certificate that clients trust, PEM.
    pub fn authority(&self) -> PathBuf {
        self.credentials.authority()
    }

    /// The kubeconfig of a user. It leads to [`ControlPlane::url`], so it is of use on the testbed's hosts.
    pub fn kubeconfig(&self, user: &Identity) -> PathBuf {
        self.credentials.kubeconfig(user)
    }

    /// The host that it runs on, `control`.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The programs that it was started with.
    pub fn binaries(&self) -> &Binaries {
        &self.binaries
    }

    /// A kubeconfig with a token of a ServiceAccount, which exists, by the TokenRequest API. The token is in a file beside
    /// it, `.token` in place of `.kubeconfig`, valid for an hour.
    ///
    /// # Errors
    /// When there is no such ServiceAccount, Pod or Node.
    pub fn service_account(&self, namespace: &str, name: &str, bound: Bound<'_>) -> Result<PathBuf> {
        let mut words = vec!["create", "token", name, "--namespace", namespace, "--duration=1h"];
        let file = match bound {
            Bound::No => format!("{namespace}.{name}"),
            Bound::Pod(pod) => {
                words.extend(["--bound-object-kind=Pod", "--bound-object-name", pod]);
                format!("{namespace}.{name}.pod-{pod}")
            }
            Bound::Node(node) => {
                words.extend(["--bound-object-kind=Node", "--bound-object-name", node]);
                format!("{namespace}.{name}.node-{node}")
            }
        };
        let token = self.kubectl(&words)?;
        let path = self.directory.join(format!("{file}.token"));
        fs::write(&path, token.trim())?;
        self.credentials.kubeconfig_for_token_file(&file, &path)
    }

    /// Runs kubectl as the admin and returns what it printed.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn kubectl(&self, words: &[&str]) -> Result<String> {
        self.kubectl_as(&self.kubeconfig(&Identity::Admin), words)
    }

    /// Runs kubectl as the user of a kubeconfig.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn kubectl_as(&self, kubeconfig: &Path, words: &[&str]) -> Result<String> {
        output_of(self.kubectl_command(kubeconfig).args(words))
    }

    /// Runs helm as the admin and returns what it printed.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn helm(&self, words: &[&str]) -> Result<String> {
        let mut command = self.host.command(self.binaries.path(Program::Helm));
        for (variable, directory) in
            [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")]
        {
            command.env(variable, self.directory.join("helm").join(directory));
        }
        output_of(command.arg("--kubeconfig").arg(self.kubeconfig(&Identity::Admin)).args(words))
    }

    /// Applies manifests as the admin, on the server's side: they need not be complete, and again is no error.
    ///
    /// # Errors
    /// When the server refuses one, with what it said.
    pub fn apply(&self, manifests: &str) -> Result<()> {
        self.feed_kubectl(&["apply", "--server-side", "--force-conflicts", "-f", "-"], manifests)
    }

    pub(super) fn feed_kubectl(&self, words: &[&str], text: &str) -> Result<()> {
        let mut command = self.kubectl_command(&self.kubeconfig(&Identity::Admin));
        crate::namespace::feed(command.args(words), text)
    }

    /// kubectl on the control plane's host. What it caches goes with the run.
    fn kubectl_command(&self, kubeconfig: &Path) -> Command {
        let mut command = self.host.command(self.binaries.path(Program::Kubectl));
        command.arg("--kubeconfig").arg(kubeconfig).arg("--cache-dir").arg(self.directory.join("kubectl"));
        command
    }

    /// Ends a program without asking (SIGKILL), as a crash would. That it did not run is no error.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill(&mut self, component: Component) -> Result<()> {
        self.process(component).take().map_or(Ok(()), |process| process.kill().map(drop))
    }

    /// Asks a program to end (SIGTERM), and ends it (SIGKILL) when it takes long, as a kubelet does. That it did not run is
    /// no error.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn stop(&mut self, component: Component) -> Result<()> {
        let Some(mut process) = self.process(component).take() else { return Ok(()) };
        process.signal(Signal::SIGTERM)?;
        if process.wait(STOP).is_ok() { Ok(()) } else { process.kill().map(drop) }
    }

    /// Starts a program that does not run; the API server is ready on return, if etcd runs.
    ///
    /// # Errors
    /// When it runs, or does not start, with what it said.
    pub fn start_again(&mut self, component: Component) -> Result<()> {
        ensure!(self.process(component).is_none(), "{component:?} runs already");
        let words = match component {
            Component::Etcd => self.etcd_words(),
            Component::ApiServer => self.api_server_words(),
            Component::ControllerManager => self.controller_manager_words(),
        };
        let process = self.host.spawn(component.program().name(), &words)?;
        *self.process(component) = Some(process);
        if component == Component::ApiServer { self.await_ready() } else { Ok(()) }
    }

    /// What a program has printed, over all its starts.
    ///
    /// # Errors
    /// When it never ran.
    pub fn log(&self, component: Component) -> Result<String> {
        let path = self.host.log_path(component.program().name());
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// Copies the store's content into the run's directory, for [`ControlPlane::restore_store`].
    ///
    /// # Errors
    /// When etcd runs, or a file cannot be copied.
    pub fn back_up_store(&mut self) -> Result<()> {
        ensure!(self.etcd.is_none(), "etcd runs; its files are whole only when it does not");
        replace_directory(&self.store(), &self.backup())
    }

    /// Puts the store back to what [`ControlPlane::back_up_store`] saw.
    ///
    /// # Errors
    /// When etcd runs, or there is no back-up.
    pub fn restore_store(&mut self) -> Result<()> {
        ensure!(self.etcd.is_none(), "etcd runs");
        replace_directory(&self.backup(), &self.store())
    }

    /// Empties the store.
    ///
    /// # Errors
    /// When etcd runs, or a file cannot be removed.
    pub fn wipe_store(&mut self) -> Result<()> {
        ensure!(self.etcd.is_none(), "etcd runs");
        Ok(fs::remove_dir_all(self.store())?)
    }

    /// Waits until the API server says that it is ready.
    ///
    /// # Errors
    /// At once when it ends, and when it is not ready in time: with the end of its log.
    pub fn await_ready(&mut self) -> Result<()> {
        wait::until("kube-apiserver is ready", START, || {
            let process = self.api_server.as_mut().context("it was not started")?;
            if !process.is_running()? {
                return Ok(Err(anyhow!("kube-apiserver has ended: {}", end_of(&process.log()?))));
            }
            let ready = self.kubectl(&["get", "--raw", "/readyz"]);
            ready
                .with_context(|| self.log(Component::ApiServer).map_or(String::new(), |log| end_of(&log)))?;
            Ok(Ok(()))
        })?
    }

    fn process(&mut self, component: Component) -> &mut Option<Process> {
        match component {
            Component::Etcd => &mut self.etcd,
            Component::ApiServer => &mut self.api_server,
            Component::ControllerManager => &mut self.controller_manager,
        }
    }

    fn store(&self) -> PathBuf {
        self.directory.join("etcd")
    }

    fn backup(&self) -> PathBuf {
        self.directory.join("etcd-backup")
    }

    fn etcd_words(&self) -> Vec<OsString> {
        let mut words =
            vec![self.binaries.path(Program::Etcd).into(), "--data-dir".into(), self.store().into()];
        let rest = [
            "--name=testbed",
            &format!("--listen-client-urls={STORE}"),
            &format!("--advertise-client-urls={STORE}"),
            &format!("--listen-peer-urls={STORE_PEER}"),
            &format!("--initial-advertise-peer-urls={STORE_PEER}"),
            &format!("--initial-cluster=testbed={STORE_PEER}"),
            // What is lost with the machine's power is lost with the test anyway.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ];
        words.extend(rest.map(OsString::from));
        words
    }

    fn api_server_words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec![self.binaries.path(Program::ApiServer).into()];
        let files = [
            ("--tls-cert-file", self.credentials.server_certificate()),
            ("--tls-private-key-file", self.credentials.server_key()),
            ("--token-auth-file", self.credentials.tokens()),
            ("--service-account-signing-key-file", self.credentials.service_account_key()),
            ("--service-account-key-file", self.credentials.service_account_public_key()),
        ];
        for (flag, file) in files {
            words.extend([flag.into(), file.into()]);
        }
        let rest = [
            &format!("--etcd-servers={STORE}"),
            &format!("--secure-port={PORT}"),
            &format!("--advertise-address={ADDRESS}"),
            &format!("--service-cluster-ip-range={CLUSTER_IPS}"),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            "--authorization-mode=Node,RBAC",
            "--anonymous-auth=false",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            // There is one, which writes no Endpoints of itself: tests see their own Services alone.
            "--endpoint-reconciler-type=none",
        ];
        words.extend(rest.map(OsString::from));
        words.extend(self.options.api_server.iter().map(OsString::from));
        words
    }

    fn controller_manager_words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec![self.binaries.path(Program::ControllerManager).into()];
        words.extend(["--kubeconfig".into(), self.kubeconfig(&Identity::ControllerManager).into()]);
        words.extend(["--root-ca-file".into(), self.credentials.authority().into()]);
        let rest = [
            &format!("--controllers={CONTROLLERS}"),
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--secure-port=0",
            // The default; batches would only make tests wait.
            "--endpointslice-updates-batch-period=0s",
            "--mirroring-endpointslice-updates-batch-period=0s",
        ];
        words.extend(rest.map(OsString::from));
        words
    }
}

fn output_of(command: &mut Command) -> Result<String> {
    let output = command.output();
    let line = || {
        let words = command.get_args().map(|word| word.to_string_lossy()).collect::<Vec<_>>();
        format!("{} {}", command.get_program().display(), words.join(" "))
    };
    let output = output.with_context(|| format!("cannot run {}", line()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}: {}", line(), output.status, said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Makes `to` a copy of the directory `from`, whatever it was.
fn replace_directory(from: &Path, to: &Path) -> Result<()> {
    match fs::remove_dir_all(to) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    copy_directory(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

fn copy_directory(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_directory(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

fn end_of(log: &str) -> String {
    const LINES: usize = 15;
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
