//! The plain way: from the API to the client, and back to the API.

use crate::world::{HELD, PATIENCE, SOON, World, service};
use anyhow::ensure;
use serde_json::json;
use testbed::wait;

const ADDRESSES: &str = "reweave.levk.dev/addresses";
const WEAVE: &str = "reweave.levk.dev/weave";

#[test]
fn what_the_api_shows_is_served_and_what_the_node_holds_is_shown() {
    let Some(world) = World::serving() else { return };
    let shown = json!([{ "ip": HELD[0].to_string(), "ipMode": "Proxy" }]);
    world.await_shown("web", &shown);

    // The Node says what it holds, by us, and nothing else of it is ours.
    let node = world.get("node/n1").unwrap();
    let annotations = &node["metadata"]["annotations"];
    assert_eq!(annotations[ADDRESSES], "192.0.2.101,192.0.2.11");
    let own = world.testbed.node(1);
    assert!(
        annotations[WEAVE].as_str().unwrap().starts_with(&format!("{},", own.overlay())),
        "{annotations}"
    );
    let managed = node["metadata"]["managedFields"].as_array().unwrap();
    let ours: Vec<_> = managed.iter().filter(|entry| entry["manager"] == "reweave-lb-agent").collect();
    let fields = json!({ "f:metadata": { "f:annotations": { format!("f:{ADDRESSES}"): {}, format!("f:{WEAVE}"): {} } } });
    assert_eq!((ours.len(), &ours[0]["operation"], &ours[0]["fieldsV1"]), (1, &json!("Apply"), &fields));

    // What somebody removes comes back; what comes to the node is shown.
    world.kubectl(&[
        "annotate",
        "--overwrite",
        "node/n1",
        &format!("{ADDRESSES}-"),
        &format!("{WEAVE}=nonsense"),
    ]);
    wait::until("the annotations are back", SOON, || {
        let now = world.get("node/n1")?["metadata"]["annotations"].take();
        ensure!(now[ADDRESSES] == annotations[ADDRESSES] && now[WEAVE] == annotations[WEAVE], "{now}");
        Ok(())
    })
    .unwrap();
    world.node(1).ip("address add 192.0.2.150/32 dev eth0").unwrap();
    wait::until("the new address is shown", SOON, || {
        let now = world.get("node/n1")?["metadata"]["annotations"][ADDRESSES].take();
        ensure!(now == "192.0.2.101,192.0.2.11,192.0.2.150", "{now}");
        Ok(())
    })
    .unwrap();

    // A status that kube-proxy would misread is corrected.
    let patch = json!({ "status": { "loadBalancer": { "ingress": [{ "ip": HELD[0].to_string(), "ipMode": "VIP" }] } } });
    world.kubectl(&[
        "patch",
        "service/web",
        "--subresource=status",
        "--type=merge",
        "--patch",
        &patch.to_string(),
    ]);
    world.await_shown("web", &shown);

    let metrics = world.ask(1, "/metrics").unwrap();
    for resource in ["nodes", "services", "endpointslices"] {
        let line = format!("reweave_lb_api_contact_age_seconds{{resource=\"{resource}\"}}");
        assert!(metrics.contains(&line), "{metrics}");
    }

    // The address goes to another node, and everything after it.
    world.testbed.move_address(HELD[0], 1, 2).unwrap();
    world.await_served();
    world.await_shown("web", &shown);
    assert_eq!(world.ask(2, "/readyz").unwrap(), "ok");

    world.kubectl(&["delete", "service/web"]);
    wait::until("nothing is served any more", PATIENCE, || {
        ensure!(world.request().is_err(), "an answer");
        Ok(())
    })
    .unwrap();
    world.apply(&service("web", HELD[0]));
    world.await_served();
}
