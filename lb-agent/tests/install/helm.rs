//! Helm: what it creates, changes and removes, and what it says about values that are wrong.

use crate::world::{NAME, NAMESPACE, World, chart, manifests, show};
use serde_json::{Value, json};
use std::path::Path;

/// Settings that the chart refuses, and what the person who misspelt them must read.
const WRONG: [(&str, &[&str]); 6] = [
    ("agent.uplnk=eth0", &["at '/agent'", "'uplnk' not allowed"]),
    ("agent.max-flows=many", &["at '/agent/max-flows'", "got string, want integer"]),
    ("agent.mark-shift=25", &["at '/agent/mark-shift'", "24"]),
    ("tolerance=1", &["'tolerance' not allowed"]),
    ("image.repo=example.org/lb", &["at '/image'", "'repo' not allowed"]),
    ("podMonitor.enabled=true", &["set agent.listen to $(HOST_IP):9213"]),
];

/// Runs helm for our release: the verb, then the chart where it takes one, then the rest.
fn helm(world: &World, verb: &str, more: &[&str]) -> anyhow::Result<String> {
    let chart = chart();
    let mut words = vec![verb, NAME, "--namespace", NAMESPACE];
    if verb != "uninstall" {
        words.insert(2, show(&chart));
    }
    words.extend(more);
    world.plane.helm(&words)
}

/// Which objects of a drawn file there are.
fn present(world: &World, file: &Path) -> Vec<String> {
    let names = world.kubectl(&["get", "--filename", show(file), "--ignore-not-found", "--output=name"]);
    names.lines().map(str::to_owned).collect()
}

fn daemon_set(world: &World) -> Value {
    let text = world.kubectl(&["get", "daemonset", NAME, "--namespace", NAMESPACE, "--output=json"]);
    serde_json::from_str(&text).unwrap()
}

/// What an environment variable of the agent is set to.
fn variable(world: &World, name: &str) -> Value {
    let set = daemon_set(world);
    let variables = set["spec"]["template"]["spec"]["containers"][0]["env"].as_array().unwrap();
    variables
        .iter()
        .find(|variable| variable["name"] == name)
        .map_or(Value::Null, |found| found["value"].clone())
}

#[test]
fn a_release_comes_changes_and_goes() {
    let Some(world) = World::new() else { return };
    let (plain, everything) = (manifests().join("install.yaml"), manifests().join("everything/install.yaml"));
    helm(&world, "install", &[]).unwrap();
    let installed = present(&world, &plain);
    let text = std::fs::read_to_string(&plain).unwrap();
    assert_eq!(installed.len(), text.matches("\nkind: ").count(), "{installed:?}");
    assert_eq!(variable(&world, "LB_MAX_FLOWS"), Value::Null, "the agent's own default");

    // Flags, and parts that come and go.
    helm(&world, "upgrade", &["--set", "agent.max-flows=2000000", "--set", "admissionPolicy.enabled=false"])
        .unwrap();
    assert_eq!(variable(&world, "LB_MAX_FLOWS"), "2000000");
    let without_policy = present(&world, &plain);
    assert!(!without_policy.iter().any(|name| name.contains("admission")), "{without_policy:?}");

    let values = chart().join("ci/everything-values.yaml");
    helm(&world, "upgrade", &["--reset-values", "--values", show(&values)]).unwrap();
    let all = present(&world, &everything);
    for part in ["servicemonitor", "podmonitor", "prometheusrule", "configmap", "validatingadmissionpolicy"] {
        assert!(all.iter().any(|name| name.starts_with(part)), "no {part} in {all:?}");
    }

    // What is wrong is said, and nothing comes of it.
    let before = daemon_set(&world)["metadata"]["generation"].clone();
    for (setting, expected) in WRONG {
        let refusal = helm(&world, "upgrade", &["--reset-values", "--set", setting]).unwrap_err();
        let said = format!("{refusal:#}");
        assert!(expected.iter().all(|words| said.contains(words)), "{setting}: {said}");
    }
    assert_eq!(daemon_set(&world)["metadata"]["generation"], before);

    // As deploy/README.md says to remove it.
    helm(&world, "upgrade", &["--reset-values", "--set", "cleanup=true"]).unwrap();
    let pod = daemon_set(&world)["spec"]["template"]["spec"].take();
    assert_eq!(pod["containers"][0]["args"], json!(["cleanup", "--stay"]));
    helm(&world, "uninstall", &["--wait"]).unwrap();
    assert_eq!(present(&world, &everything), [""; 0]);
    let label = format!("--selector=app.kubernetes.io/name={NAME}");
    let kinds = "daemonsets,serviceaccounts,configmaps,clusterroles,clusterrolebindings,validatingadmissionpolicies,\
                 validatingadmissionpolicybindings,services";
    assert_eq!(world.kubectl(&["get", kinds, "--all-namespaces", &label, "--output=name"]), "");
}
