//! The Kubernetes API that the other tests rely on: that it is a real one, and that it goes away again.
//!
//! A control plane takes seconds and hundreds of megabytes, so each test here shows several things with one.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use serde_json::{from_value, json};
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::{Command, Output};
use std::time::Duration;
use testbed::kubernetes::{
    ApiClient, Binaries, Bound, Component, ControlPlane, Identity, KubeProxy, Mode,
    Options as ControlPlaneOptions,
};
use testbed::{Options, Pod, Testbed, http, server, skip, wait};

const SOON: Duration = Duration::from_secs(20);
/// What RBAC answers.
const FORBIDDEN: Option<u16> = Some(403);
/// What authentication answers.
const UNAUTHORIZED: Option<u16> = Some(401);

/// A testbed with a control plane, if this machine can have one.
fn start() -> Option<(Testbed, ControlPlane)> {
    let binaries = skip::unless(Binaries::find())?;
    let testbed = Testbed::weave(Options::default()).unwrap();
    let plane = ControlPlane::start(&testbed, binaries, ControlPlaneOptions::default()).unwrap();
    Some((testbed, plane))
}

fn admin(plane: &ControlPlane) -> ApiClient {
    plane.api(&plane.kubeconfig(&Identity::Admin)).unwrap()
}

fn service(name: &str) -> Service {
    from_value(json!({
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}
    }))
    .unwrap()
}

fn add_service(api: &ApiClient, name: &'static str) -> Service {
    api.run(async move |client| {
        Api::default_namespaced(client).create(&PostParams::default(), &service(name)).await
    })
    .unwrap()
}

/// Address, node and readiness of each endpoint of a Service, out of all its slices.
async fn endpoints(client: Client, service: &str) -> kube::Result<Vec<(String, String, bool)>> {
    let of = ListParams::default().labels(&format!("kubernetes.io/service-name={service}"));
    let slices = Api::<EndpointSlice>::default_namespaced(client).list(&of).await?;
    let endpoints = slices.items.into_iter().flat_map(|slice| slice.endpoints.unwrap_or_default());
    Ok(endpoints
        .map(|endpoint| {
            let ready = endpoint.conditions.and_then(|conditions| conditions.ready);
            (endpoint.addresses.concat(), endpoint.node_name.unwrap_or_default(), ready.unwrap_or(true))
        })
        .collect())
}

fn await_endpoints(api: &ApiClient, service: &'static str, expected: &[(&Pod, bool)]) {
    let expected: Vec<_> = expected
        .iter()
        .map(|(pod, ready)| (pod.ip().to_string(), format!("n{}", pod.node()), *ready))
        .collect();
    wait::until(&format!("endpoints of {service}"), SOON, || {
        let seen = api.run(async move |client| endpoints(client, service).await)?;
        ensure!(seen == expected, "{seen:?} instead of {expected:?}");
        Ok(())
    })
    .unwrap();
}

/// The status of an answer that refuses.
fn code<T>(outcome: kube::Result<T>) -> Option<u16> {
    match outcome {
        Err(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    }
}

#[test]
fn the_controllers_make_slices_of_services_and_pods() {
    let Some((testbed, plane)) = start() else { return };
    let api = admin(&plane);
    plane.add_nodes(&testbed).unwrap();
    let pod = testbed.add_pod(1, "web-a").unwrap();
    add_service(&api, "web");
    plane.add_pod(&pod, "web").unwrap();
    await_endpoints(&api, "web", &[(&pod, true)]);
    plane.set_ready(&pod, "web", false).unwrap();
    await_endpoints(&api, "web", &[(&pod, false)]);
    plane.set_ready(&pod, "web", true).unwrap();
    plane.terminate_pod(&pod).unwrap();
    await_endpoints(&api, "web", &[(&pod, false)]);
    plane.remove_pod(&pod).unwrap();
    await_endpoints(&api, "web", &[]);

    // Endpoints without a selector, made by hand, are mirrored.
    plane
        .apply(
            "
apiVersion: v1
kind: Service
metadata: {name: outside, namespace: default}
spec: {ports: [{port: 80}]}
---
apiVersion: v1
kind: Endpoints
metadata: {name: outside, namespace: default}
subsets: [{addresses: [{ip: 203.0.113.7}], ports: [{port: 8080}]}]
",
        )
        .unwrap();
    wait::until("the mirrored slice", SOON, || {
        let seen = api.run(async |client| endpoints(client, "outside").await)?;
        ensure!(seen == [("203.0.113.7".to_owned(), String::new(), true)], "{seen:?}");
        Ok(())
    })
    .unwrap();

    // A Service's slices go with it.
    api.run(async |client| {
        Api::<Service>::default_namespaced(client).delete("outside", &DeleteParams::default()).await
    })
    .unwrap();
    wait::until("the end of the slices", SOON, || {
        let slices = plane.kubectl(&["get", "endpointslices", "--output=name"])?;
        ensure!(!slices.contains("outside"), "{slices}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn tokens_are_bound_and_what_roles_do_not_allow_is_forbidden() {
    let Some((testbed, plane)) = start() else { return };
    plane.add_nodes(&testbed).unwrap();
    plane
        .apply(
            "
apiVersion: v1
kind: ServiceAccount
metadata: {name: reader, namespace: default}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reader}
rules: [{apiGroups: [''], resources: [services], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}
subjects: [{kind: ServiceAccount, name: reader, namespace: default}]
",
        )
        .unwrap();
    let reader = plane.api(&plane.service_account("default", "reader", Bound::No).unwrap()).unwrap();
    let list = async |client| Api::<Service>::all(client).list(&ListParams::default()).await;
    // The role reaches the authorizer by a watch.
    wait::until("the role is in force", SOON, || Ok(reader.run(list)?)).unwrap();
    let write = reader.run(async |client| {
        Api::<Service>::default_namespaced(client).create(&PostParams::default(), &service("web")).await
    });
    assert_eq!(code(write), FORBIDDEN);
    let secrets = reader.run(async |client| {
        Api::<ConfigMap>::all(client).list(&ListParams::default()).await.map(|list| list.items.len())
    });
    assert_eq!(code(secrets), FORBIDDEN);

    // Bound to a node, a token says which one, and ends with it.
    let kubeconfig = plane.service_account("default", "reader", Bound::Node("n2")).unwrap();
    let bound = plane.api(&kubeconfig).unwrap();
    bound.run(list).unwrap();
    let who = plane.kubectl_as(&kubeconfig, &["auth", "whoami", "--output=json"]).unwrap();
    assert!(who.contains("authentication.kubernetes.io/node-name") && who.contains("\"n2\""), "{who}");
    // Bound to a pod, as in a DaemonSet, it names the pod's node too.
    plane
        .apply(
            "
apiVersion: v1
kind: Pod
metadata: {name: agent, namespace: default}
spec: {nodeName: n1, serviceAccountName: reader, containers: [{name: agent, image: none}]}
",
        )
        .unwrap();
    let of_pod = plane.service_account("default", "reader", Bound::Pod("agent")).unwrap();
    let who = plane.kubectl_as(&of_pod, &["auth", "whoami", "--output=json"]).unwrap();
    assert!(who.contains("authentication.kubernetes.io/pod-name") && who.contains("\"n1\""), "{who}");

    // A kubelet's user may write its own Node alone.
    let kubelet = plane.kubeconfig(&Identity::Node("n1".to_owned()));
    plane.kubectl_as(&kubelet, &["annotate", "node", "n1", "example.com/own=yes"]).unwrap();
    let refused = plane.kubectl_as(&kubelet, &["annotate", "node", "n3", "example.com/own=no"]).unwrap_err();
    assert!(format!("{refused:#}").contains("only its own Node object"), "{refused:#}");

    plane.kubectl(&["delete", "node", "n2"]).unwrap();
    // The server keeps what it has found about a token for some seconds.
    wait::until("the token ends with its node", SOON, || {
        let outcome = bound.run(list).map(|list| list.items.len());
        ensure!(outcome.is_err(), "{outcome:?}");
        assert_eq!(code(outcome), UNAUTHORIZED);
        Ok(())
    })
    .unwrap();

    // Without a token nobody is let in, not even to look.
    let answer =
        plane.host().run(&["curl", "--silent", "--insecure", &format!("{}/api", plane.url())]).unwrap();
    assert!(answer.contains("Unauthorized"), "{answer}");
}

#[test]
fn admission_policies_are_in_force() {
    let Some((_testbed, plane)) = start() else { return };
    plane
        .apply(
            "
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-web}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [services]}]
  validations: [{expression: \"object.metadata.name != 'forbidden'\", message: that name is taken}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-web}
spec: {policyName: no-web, validationActions: [Deny]}
",
        )
        .unwrap();
    let api = admin(&plane);
    wait::until("the policy is in force", SOON, || {
        let trial = PostParams { dry_run: true, ..PostParams::default() };
        let outcome = api.run(async move |client| {
            Api::default_namespaced(client).create(&trial, &service("forbidden")).await
        });
        let refusal = outcome.err().context("it was accepted")?.to_string();
        ensure!(refusal.contains("that name is taken"), "{refusal}");
        Ok(())
    })
    .unwrap();
    add_service(&api, "allowed");
}

fn has_service(api: &ApiClient, name: &'static str) -> Result<bool> {
    let found =
        api.run(async move |client| Api::<Service>::default_namespaced(client).get_opt(name).await)?;
    Ok(found.is_some())
}

#[test]
fn server_and_store_can_be_lost_and_come_back() {
    let Some((_testbed, mut plane)) = start() else { return };
    let api = admin(&plane);
    add_service(&api, "before");

    plane.kill(Component::ApiServer).unwrap();
    assert!(has_service(&api, "before").is_err(), "a killed server answered");
    plane.start_again(Component::ApiServer).unwrap();
    assert!(has_service(&api, "before").unwrap(), "objects went with the server");

    let stop_all = |plane: &mut ControlPlane| {
        plane.stop(Component::ApiServer).unwrap();
        plane.stop(Component::Etcd).unwrap();
    };
    let start_all = |plane: &mut ControlPlane| {
        plane.start_again(Component::Etcd).unwrap();
        plane.start_again(Component::ApiServer).unwrap();
    };
    stop_all(&mut plane);
    plane.back_up_store().unwrap();
    start_all(&mut plane);
    add_service(&api, "after");

    stop_all(&mut plane);
    plane.wipe_store().unwrap();
    start_all(&mut plane);
    assert!(!has_service(&api, "before").unwrap());

    stop_all(&mut plane);
    plane.restore_store().unwrap();
    start_all(&mut plane);
    assert!(has_service(&api, "before").unwrap());
    assert!(!has_service(&api, "after").unwrap(), "the store is newer than its back-up");
}

#[test]
fn every_host_reaches_the_api_by_its_certificate() {
    let Some((testbed, plane)) = start() else { return };
    let authority = plane.authority();
    let url = format!("{}/version", plane.url());
    for host in [&**testbed.node(1), &**testbed.node(3), testbed.client()] {
        let words =
            ["curl", "--silent", "--show-error", "--cacert", authority.to_str().unwrap(), "--max-time", "10"];
        // Unauthorized by TLS that is in order: the certificate is good for the address.
        let answer = host.run(&[&words[..], &[&url]].concat()).unwrap();
        assert!(answer.contains("Unauthorized"), "{}: {answer}", host.name());
    }
}

#[test]
fn kube_proxy_programs_a_node_in_both_modes() {
    let Some((testbed, plane)) = start() else { return };
    let api = admin(&plane);
    plane.add_nodes(&testbed).unwrap();
    let (pod, asker) = (testbed.add_pod(2, "web-a").unwrap(), testbed.add_pod(1, "asker").unwrap());
    let _server = server::http(&pod, 8080).unwrap();
    let service = add_service(&api, "web");
    let cluster_ip: Ipv4Addr = service.spec.unwrap().cluster_ip.unwrap().parse().unwrap();
    let address = SocketAddrV4::new(cluster_ip, 80);
    plane.add_pod(&pod, "web").unwrap();
    await_endpoints(&api, "web", &[(&pod, true)]);

    for (node, mode, rules) in [
        (1, Mode::Nftables, ["nft", "list", "table", "ip", "kube-proxy"].as_slice()),
        (3, Mode::Iptables, ["iptables-save", "-t", "nat"].as_slice()),
    ] {
        let host = testbed.node(node);
        assert!(http::get(host, address, "/", Duration::from_millis(200)).is_err(), "before kube-proxy");
        let mut proxy = KubeProxy::start(&plane, host, mode).unwrap();
        wait::until("the ClusterIP leads to the pod", SOON, || {
            let answer = http::get(host, address, "/", Duration::from_secs(1))?;
            ensure!(answer == "web-a", "{answer}");
            Ok(())
        })
        .unwrap();
        let rules = host.run(rules).unwrap();
        assert!(rules.contains(&cluster_ip.to_string()), "{mode:?} did not do it: {rules}");
        assert!(proxy.process().is_running().unwrap());
    }
    // A pod of the node too, through the bridge.
    assert_eq!(http::get(&asker, address, "/", SOON).unwrap(), "web-a");
}

/// Processes by the run's directory in their command lines: etcd's data, the servers' kubeconfigs.
fn processes(testbed: &Testbed) -> Vec<String> {
    let directory = testbed.directory().join("kubernetes").display().to_string();
    let all = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("cmdline"));
    let lines = all.map(|file| fs::read_to_string(file).unwrap_or_default().replace('\0', " "));
    lines.filter(|line| line.contains(&directory)).collect()
}

#[test]
fn a_dropped_control_plane_leaves_no_process() {
    let Some((testbed, plane)) = start() else { return };
    let running = processes(&testbed);
    for program in ["etcd", "kube-apiserver", "kube-controller-manager"] {
        assert!(running.iter().any(|line| line.contains(&format!("/{program} "))), "{program}: {running:?}");
    }
    drop(plane);
    assert_eq!(processes(&testbed), [""; 0]);
}

/// This test binary with one test, on a machine that has neither Kubernetes nor Go.
fn without_kubernetes(ci: Option<&str>) -> Output {
    let nothing = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "admission_policies_are_in_force"]);
    command.env("PATH", nothing.path()).env("LB_CACHE", nothing.path());
    command.env_remove("KUBEBUILDER_ASSETS").env_remove("CI").envs(ci.map(|value| ("CI", value)));
    command.output().unwrap()
}

#[test]
fn without_kubernetes_a_test_is_skipped_loudly_and_fails_in_ci() {
    let output = without_kubernetes(None);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    let line = said.lines().find(|line| line.starts_with(skip::MARK)).unwrap();
    assert!(line.contains("admission_policies_are_in_force") && line.contains("install Go"), "{line}");

    let output = without_kubernetes(Some("true"));
    assert!(!output.status.success());
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("in CI no test may be skipped") && said.contains("install Go"), "{said}");
}
