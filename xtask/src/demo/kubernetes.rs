//! The story on a real Kubernetes API, and its chapters that only such a one has.

use super::cluster::Cluster;
use super::heading;
use super::stage::{self, SOON, Stage, WEB, home};
use crate::sh;
use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::time::Instant;
use testbed::cluster::Service;
use testbed::kubernetes::{Binaries, Bound, Component, ControlPlane, Identity, Options, Program};
use testbed::load::Load;
use testbed::{Pod, Process, Testbed, http, server, wait};

/// Of the DaemonSet, its ServiceAccount and the release.
const NAME: &str = "reweave-lb";
const NAMESPACE: &str = "kube-system";
const CHART: &str = "deploy/chart/reweave-lb";
/// Held by nobody, at first.
const LATE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 103), 80);

/// A control plane with the chart installed, and each agent's way to it.
pub(super) struct Kubernetes {
    plane: ControlPlane,
    /// By the node's number: with a token of the DaemonSet's pod there.
    kubeconfigs: BTreeMap<u8, PathBuf>,
}

impl Kubernetes {
    pub(super) fn start(testbed: &Testbed, binaries: Binaries) -> Result<Self> {
        sh::say("starting etcd, kube-apiserver and kube-controller-manager");
        let plane = ControlPlane::start(testbed, binaries, Options::default())?;
        plane.add_nodes(testbed)?;
        sh::say(&format!("helm install {NAME} {CHART} --namespace {NAMESPACE}"));
        let chart = sh::workspace().join(CHART);
        let chart = chart.to_str().context("the workspace's path is not UTF-8")?;
        plane.helm(&["install", NAME, chart, "--namespace", NAMESPACE])?;
        // No kubelet is here to start what the DaemonSet says: agents run beside, as its pods' ServiceAccount.
        let kubeconfigs = testbed.nodes().iter().map(|node| {
            let pod = plane.add_daemon_pod(NAMESPACE, NAME, node.name())?;
            Ok((node.number(), plane.service_account(NAMESPACE, NAME, Bound::Pod(&pod))?))
        });
        let kubeconfigs = kubeconfigs.collect::<Result<_>>()?;
        Ok(Self { plane, kubeconfigs })
    }

    /// Runs kubectl and shows both what was asked and what it answers.
    fn show(&self, words: &[&str]) -> Result<()> {
        println!("$ kubectl {}", words.join(" "));
        println!("{}", self.plane.kubectl(words)?.trim_end());
        Ok(())
    }
}

impl Cluster for Kubernetes {
    fn add_service(&self, _testbed: &Testbed, service: Service, pods: &[&Pod]) -> Result<()> {
        self.plane.apply(&service.manifest())?;
        pods.iter().try_for_each(|pod| self.plane.add_pod(pod, service.name()))
    }

    fn start_agent(&self, testbed: &Testbed, node: u8) -> Result<Process> {
        let kubeconfig = self.kubeconfigs.get(&node).context("no such node")?;
        testbed.start_agent_as(kubeconfig, node, &[])
    }

    fn status(&self, _testbed: &Testbed, service: &str) -> Result<String> {
        self.plane.kubectl(&["get", "service", service, "--output=jsonpath={.status.loadBalancer}"])
    }

    fn terminate(&self, _testbed: &Testbed, _service: &str, pod: &Pod, _others: &[&Pod]) -> Result<()> {
        println!("$ kubectl delete pod {} --wait=false", pod.name());
        self.plane.terminate_pod(pod)
    }

    fn forget(&self, _testbed: &Testbed, _service: &str, pod: &Pod, _others: &[&Pod]) -> Result<()> {
        self.plane.remove_pod(pod)
    }

    fn to_try(&self, _testbed: &Testbed) -> Vec<String> {
        let kubectl = self.plane.binaries().path(Program::Kubectl).display();
        let control = self.plane.host().namespace();
        vec![
            format!("export KUBECONFIG={}", self.plane.kubeconfig(&Identity::Admin).display()),
            format!("kubectl() {{ nsenter --net=/run/netns/{control} {kubectl} \"$@\"; }}"),
            "kubectl get services,endpointslices".to_owned(),
            "kubectl describe service web".to_owned(),
            "kubectl delete pod web-a --wait=false".to_owned(),
        ]
    }
}

impl Stage<Kubernetes> {
    /// What the agents have written, and what the controllers have made.
    pub(super) fn objects(&self) -> Result<()> {
        heading("What kubectl shows");
        self.cluster.show(&["version"])?;
        let annotation = "NODE:.metadata.name,ADDRESSES:.metadata.annotations.reweave\\.levk\\.dev/addresses";
        self.cluster.show(&["get", "nodes", &format!("--output=custom-columns={annotation}")])?;
        self.cluster.show(&["get", "services"])?;
        self.cluster.show(&["get", "endpointslices"])
    }

    /// An address that no node has: said so where people look. Then one gets it.
    pub(super) fn nobody_holds(self) -> Result<Self> {
        heading(&format!("A Service that asks for {}, which no node holds", LATE.ip()));
        let service = Service::new("late", *LATE.ip()).tcp(LATE.port(), 8080).selecting("web");
        println!("$ kubectl apply --server-side --filename=- <<END\n{}END", service.manifest());
        self.cluster.plane.apply(&service.manifest())?;
        self.await_event("LoadBalancerProblem")?;
        self.cluster.show(&["describe", "service", "late"])?;
        let node = home(&self.testbed, 3, 1);
        println!("\nn{node}$ ip addr add {}/32 dev eth0", LATE.ip());
        let given = Instant::now();
        self.testbed.add_address(*LATE.ip(), node)?;
        let answer = wait::until("an answer", SOON, || http::get(self.testbed.client(), LATE, "/", SOON))?;
        println!("{answer} has answered a client after {} ms", given.elapsed().as_millis());
        self.await_event("LoadBalancerProblemOver")?;
        self.cluster.show(&["get", "service", "late"])?;
        self.cluster.show(&["events", "--for=service/late"])?;
        Ok(self)
    }

    fn await_event(&self, reason: &str) -> Result<()> {
        let selector = format!("--field-selector=involvedObject.name=late,reason={reason}");
        wait::until(&format!("the Event {reason}"), SOON, || {
            let events = self.cluster.plane.kubectl(&["get", "events", &selector, "--output=name"])?;
            ensure!(!events.is_empty(), "there is none");
            Ok(())
        })
    }

    /// Nothing needs the API but changes; those come with it.
    pub(super) fn api_dies(mut self) -> Result<Self> {
        heading("Under load, the API server is killed (kill -9), and started again");
        let load = Load::start(self.testbed.client(), WEB, 2);
        load.await_answers(500, SOON)?;
        self.cluster.plane.kill(Component::ApiServer)?;
        let gone = Instant::now();
        let refusal = self.cluster.plane.kubectl(&["get", "services"]).err();
        let refusal = refusal.context("a killed server has answered")?.to_string();
        let (_, said) = refusal.rsplit_once("exit status: 1: ").unwrap_or(("", &refusal));
        println!("$ kubectl get services\n{said}");
        load.await_answers(2000, SOON)?;
        println!("without it: {} requests answered so far", load.counts().answered);
        self.cluster.plane.start_again(Component::ApiServer)?;
        println!("it is back after {} ms; a pod is added", gone.elapsed().as_millis());
        self.web_grows("web-e")?;
        stage::report(&load.finish()?)?;
        Ok(self)
    }

    /// Adds a pod behind the Service, and waits until it has answered.
    fn web_grows(&mut self, name: &str) -> Result<()> {
        let new =
            stage::backend(&self.testbed, home(&self.testbed, 2, 1), name, |pod| server::http(pod, 8080))?;
        self.cluster.plane.add_pod(&new.pod, "web")?;
        let added = Instant::now();
        wait::until("its first answer", SOON, || {
            let answer = http::get(self.testbed.client(), WEB, "/", SOON)?;
            ensure!(answer == name, "{answer}");
            Ok(())
        })?;
        println!("{name} has answered a client after {} ms", added.elapsed().as_millis());
        self.web.push(new);
        Ok(())
    }
}
