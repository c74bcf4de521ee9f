//! Who the agent is: the Node that it speaks for, and what its token allows.

use crate::world::World;
use serde_json::Value;

#[test]
fn an_agent_speaks_for_the_node_of_its_host_alone() {
    let Some(mut world) = World::new() else { return };
    // No such Node, and none is made.
    world.start_as(1, "n9");
    world.await_said(1, "node n9: the API has no Node of this name");
    world.ask(1, "/readyz").unwrap_err();
    assert_eq!(world.get("node/n9").unwrap(), Value::Null);
    world.stop(1);

    // Another host's: nothing is published on it.
    world.start_as(1, "n2");
    world.await_said(1, "this host has none of them");
    world.ask(1, "/readyz").unwrap_err();
    assert_eq!(world.get("node/n2").unwrap()["metadata"]["annotations"], Value::Null);
    world.stop(1);

    world.start_as(1, "n1");
    world.await_said(1, " ready");
    assert_eq!(world.ask(1, "/readyz").unwrap(), "ok");
}

#[test]
fn what_the_token_does_not_allow_is_named() {
    let Some(mut world) = World::new() else { return };
    world.kubectl(&["delete", "clusterrolebinding/lb-agent"]);
    world.start(1);
    world.await_said(1, "cannot watch resource \"nodes\" in API group \"\" at the cluster scope");
    world.await_said(1, "the agent's ClusterRole must allow it");
    world.ask(1, "/readyz").unwrap_err();
    assert_eq!(world.ask(1, "/healthz").unwrap(), "ok", "a restart would not help");
    world.stop(1);

    let kubeconfig = world.kubeconfig.with_extension("token");
    std::fs::write(kubeconfig, "not-a-token").unwrap();
    world.start(1);
    world.await_said(1, "does not accept this agent's credentials");
}
