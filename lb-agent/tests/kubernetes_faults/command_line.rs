//! What cannot start says why, and what to do.

use std::process::Command;

/// What `lb-agent run` complains about with these arguments, without what the environment says of a cluster.
fn complaint(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lb-agent"));
    for variable in ["KUBECONFIG", "KUBERNETES_SERVICE_HOST", "LB_KUBECONFIG", "LB_MANIFESTS"] {
        command.env_remove(variable);
    }
    let output = command.args(["run", "--node", "a"]).args(args).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn without_any_cluster_the_ways_to_one_are_named() {
    let said = complaint(&[]);
    for word in ["not in a pod", "--kubeconfig", "KUBECONFIG", "--manifests"] {
        assert!(said.contains(word), "{word}: {said}");
    }
}

#[test]
fn two_sources_exclude_each_other() {
    let said = complaint(&["--kubeconfig=/a", "--manifests=/b"]);
    assert!(said.contains("cannot be used with"), "{said}");
}

#[test]
fn a_kubeconfig_that_is_not_there_is_named() {
    let said = complaint(&["--kubeconfig=/nonexistent/config"]);
    assert!(said.contains("kubeconfig /nonexistent/config: ") && said.contains("No such file"), "{said}");
}
