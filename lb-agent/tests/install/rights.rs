//! What the token of an agent's pod allows, by RBAC and by the admission policies: `rights.yaml` has the cases.

use crate::world::{NAME, NAMESPACE, PATIENCE, World};
use anyhow::{Context as _, Result, bail, ensure};
use http::Request;
use kube::core::Status;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;
use testbed::kubernetes::{ApiClient, Bound};
use testbed::wait;

/// What the cases are about.
const OBJECTS: &str = "
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {example.org/theirs: set}, annotations: {example.org/theirs: set, reweave.levk.dev/addresses: 192.0.2.10}}
spec: {taints: [{key: example.org/theirs, effect: NoSchedule}]}
---
apiVersion: v1
kind: Node
metadata: {name: n2, annotations: {reweave.levk.dev/weave: '10.32.0.2,02:0a:20:00:00:02'}}
---
apiVersion: v1
kind: Service
metadata: {name: ours, namespace: default, annotations: {example.org/theirs: set}}
spec: {type: LoadBalancer, loadBalancerClass: reweave.levk.dev/node-address, loadBalancerIP: 192.0.2.101, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: theirs, namespace: default}
spec: {type: LoadBalancer, loadBalancerClass: example.org/other, loadBalancerIP: 192.0.2.101, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: given-away, namespace: default}
spec: {type: LoadBalancer, loadBalancerClass: example.org/other, loadBalancerIP: 192.0.2.101, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: plain, namespace: default}
spec: {ports: [{port: 80}]}
---
apiVersion: events.k8s.io/v1
kind: Event
metadata: {name: known, namespace: default}
eventTime: '2026-01-01T00:00:00.000000Z'
reportingController: reweave.levk.dev/lb-agent
reportingInstance: n1
action: Serve
reason: NotServed
type: Warning
note: no node holds 192.0.2.103
regarding: {apiVersion: v1, kind: Service, name: ours, namespace: default}
";

/// A role that allows all: then the policies alone stand in the way.
const EVERYTHING: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: everything}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: reweave-lb, namespace: kube-system}]
";

/// See `rights.yaml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    r#try: String,
    #[serde(default)]
    what: String,
    #[serde(default)]
    body: Value,
    refused: Option<By>,
    says: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum By {
    Role,
    Policy,
}

impl Case {
    fn request(&self) -> Result<Request<Vec<u8>>> {
        let (verb, path) = self.r#try.split_once(' ').context("no request")?;
        let (method, parameters, content) = match verb {
            "GET" => ("GET", "", ""),
            "DELETE" => ("DELETE", "?dryRun=All", "application/json"),
            "POST" => ("POST", "?dryRun=All", "application/json"),
            "MERGE" => ("PATCH", "?dryRun=All", "application/merge-patch+json"),
            "APPLY" => {
                let parameters = "?dryRun=All&fieldManager=reweave-lb-agent&force=true";
                ("PATCH", parameters, "application/apply-patch+yaml")
            }
            _ => bail!("{verb} is no verb of ours"),
        };
        let body = if self.body.is_null() { Vec::new() } else { self.body.to_string().into_bytes() };
        let request = Request::builder().method(method).uri(format!("{path}{parameters}"));
        Ok(request.header("Content-Type", content).body(body)?)
    }

    /// Tries it, and says what was not as it should be.
    fn check(&self, api: &ApiClient, expected: Expected<'_>) -> Result<()> {
        let request = self.request()?;
        let answer = api.run(async move |client| client.request_text(request).await);
        let refusal = match answer {
            Ok(_) => None,
            Err(kube::Error::Api(status)) => Some(status),
            Err(error) => return Err(error.into()),
        };
        expected.compare(refusal.as_deref())
    }
}

/// What should come of a request.
#[derive(Clone, Copy, Debug)]
enum Expected<'a> {
    Allowed,
    RefusedByRole,
    RefusedByPolicy(&'a str),
}

impl Expected<'_> {
    fn compare(self, refusal: Option<&Status>) -> Result<()> {
        match (self, refusal) {
            (Self::Allowed, None) => {}
            (Self::Allowed, Some(status)) => bail!("it is refused: {}", status.message),
            (_, None) => bail!("it is allowed"),
            (Self::RefusedByRole, Some(status)) => {
                let by_role = status.code == 403 && status.message.contains(" cannot ");
                ensure!(by_role, "not RBAC refuses it: {} {}", status.code, status.message);
            }
            (Self::RefusedByPolicy(says), Some(status)) => {
                let by_policy = status.message.contains("ValidatingAdmissionPolicy 'reweave-lb-");
                ensure!(
                    by_policy && status.message.contains(says),
                    "it is refused otherwise: {}",
                    status.message
                );
            }
        }
        Ok(())
    }
}

fn cases() -> Vec<Case> {
    serde_saphyr::from_str(include_str!("rights.yaml")).unwrap()
}

fn client(world: &World, kubeconfig: &Path) -> ApiClient {
    world.plane.api(kubeconfig).unwrap()
}

/// All that are not as they should be, at once. `expected` has no answer for those that say nothing.
fn check_all<'a>(cases: &'a [Case], api: &ApiClient, expected: impl Fn(&'a Case) -> Option<Expected<'a>>) {
    let tried = cases.iter().filter_map(|case| Some((case, expected(case)?)));
    let wrong: Vec<_> = tried
        .filter_map(|(case, expected)| {
            let error = case.check(api, expected).err()?;
            Some(format!("{} ({}): {error:#}", case.r#try, case.what))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// Roles and policies reach the server by watches: waits until the last of the kind is in force.
fn await_in_force(api: &ApiClient, cases: &[Case], is_sign: impl Fn(&Case) -> bool, expected: Expected<'_>) {
    let sign = cases.iter().rfind(|case| is_sign(case)).unwrap();
    wait::until(&sign.r#try, PATIENCE, || sign.check(api, expected)).unwrap();
}

#[test]
fn an_agents_token_allows_what_it_needs_and_nothing_else() {
    let Some(world) = World::installed() else { return };
    world.plane.apply(OBJECTS).unwrap();
    // As the agent left it, when the class was still ours; and what another controller shows.
    for (service, author) in [("given-away", "reweave-lb-agent"), ("theirs", "other-controller")] {
        let shown = r#"{"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.101"}]}}}"#;
        let patch = ["patch", "service", service, "--subresource=status", "--type=merge", "--patch", shown];
        world.kubectl(&[&patch[..], &["--field-manager", author]].concat());
    }
    let api = client(&world, &world.kubeconfig_on("n1"));
    let cases = cases();
    let says = |case: &Case, text: &str| case.says.as_ref().is_some_and(|says| says.contains(text));
    let by_policy = |case: &Case| case.refused == Some(By::Policy);
    await_in_force(&api, &cases, |case| case.r#try == "GET /api/v1/nodes", Expected::Allowed);
    let (nodes, services) = ("annotations reweave", "not of type LoadBalancer");
    for text in [nodes, services] {
        await_in_force(
            &api,
            &cases,
            |case| by_policy(case) && says(case, text),
            Expected::RefusedByPolicy(text),
        );
    }

    check_all(&cases, &api, |case| {
        Some(match (case.refused, &case.says) {
            (None, _) => Expected::Allowed,
            (Some(By::Role), _) => Expected::RefusedByRole,
            (Some(By::Policy), says) => Expected::RefusedByPolicy(says.as_deref().unwrap()),
        })
    });

    // The policies do not lean on the role: somebody may have given the ServiceAccount another one.
    world.plane.apply(EVERYTHING).unwrap();
    await_in_force(&api, &cases, |case| case.r#try == "GET /api/v1/secrets", Expected::Allowed);
    check_all(&cases, &api, |case| match (case.refused, &case.says) {
        (None, _) => Some(Expected::Allowed),
        (Some(_), Some(says)) => Some(Expected::RefusedByPolicy(says)),
        (Some(_), None) => None,
    });

    // A token that names no node may do nothing to any.
    let unbound = client(&world, &world.plane.service_account(NAMESPACE, NAME, Bound::No).unwrap());
    let own = cases.iter().find(|case| case.r#try.starts_with("APPLY")).unwrap();
    own.check(&unbound, Expected::RefusedByPolicy("not bound to a pod")).unwrap();
    // And others are none of the policies' business.
    world.kubectl(&["label", "node", "n2", "example.org/free=yes"]);
    world.kubectl(&["delete", "service", "plain"]);
}
