//! kube-proxy on a node, in the two modes that clusters use.

use super::binaries::Program;
use super::control_plane::ControlPlane;
use super::credentials::Identity;
use crate::Node;
use crate::http;
use crate::process::Process;
use crate::wait;
use anyhow::{Result, ensure};
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

/// Its own answer whether the node's rules are what the API says.
const HEALTH: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 10256);
const START: Duration = Duration::from_secs(60);

/// How it programs the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The table `kube-proxy` of nftables.
    Nftables,
    /// Chains of iptables.
    Iptables,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
        }
    }
}

/// A running kube-proxy. Its rules stay when it ends, as on a real node.
#[derive(Debug)]
pub struct KubeProxy {
    process: Process,
}

impl KubeProxy {
    /// Starts it on a node that the API knows, and waits until it has programmed the node once.
    ///
    /// # Errors
    /// When it ends or does not get there, with what it said.
    pub fn start(plane: &ControlPlane, node: &Node, mode: Mode) -> Result<Self> {
        let mut words: Vec<OsString> = vec![plane.binaries().path(Program::KubeProxy).into()];
        words.extend(["--kubeconfig".into(), plane.kubeconfig(&Identity::KubeProxy).into()]);
        let rest = [
            &format!("--hostname-override={}", node.name()),
            &format!("--proxy-mode={}", mode.name()),
            &format!("--healthz-bind-address={HEALTH}"),
            "--cluster-cidr=10.32.0.0/12",
            // As it is on the machine: these limits are not the namespace's own.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
            // A change is programmed when it comes, not a second later.
            "--iptables-min-sync-period=0s",
        ];
        words.extend(rest.map(OsString::from));
        let mut process = node.spawn("kube-proxy", &words)?;
        wait::until(&format!("kube-proxy of {} is healthy", node.name()), START, || {
            let said = process.log()?;
            ensure!(process.is_running()?, "it has ended: {}", said.trim());
            http::get(node, HEALTH, "/healthz", Duration::from_secs(1)).map_err(|error| error.context(said))
        })?;
        Ok(Self { process })
    }

    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}
