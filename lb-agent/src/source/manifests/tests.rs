//! Scenarios of reading: files in, objects or faults out.

use super::*;
use std::fs;
use std::net::Ipv4Addr;
use std::time::Instant;
use tempfile::TempDir;

/// A directory with files of these names and texts.
fn mk_dir(files: &[(&str, &str)]) -> TempDir {
    let dir = TempDir::new().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    dir
}

/// The error's text, with paths as they are below the directory.
fn error_of(files: &[(&str, &str)]) -> String {
    let dir = mk_dir(files);
    let error = read(dir.path()).expect_err("broken").to_string();
    error.replace(&format!("{}/", dir.path().display()), "")
}

fn names(objects: &Objects) -> Vec<String> {
    let nodes = objects.nodes.iter().map(|(node, _)| node.name.clone());
    let services = objects.services.iter().map(Service::key);
    let slices = objects.slices.iter().map(|slice| format!("{}/{} slice", slice.namespace, slice.service));
    nodes.chain(services).chain(slices).collect()
}

const WEB: &str = r#"# what people write
apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  type: LoadBalancer
  loadBalancerClass: reweave.levk.dev/node-address
  loadBalancerIP: 192.0.2.1
  ports:
  - {name: http, port: 80, targetPort: http}
  - {name: dns, port: 53, protocol: UDP}
"#;

const SLICE: &str = r#"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  labels:
    kubernetes.io/service-name: web
addressType: IPv4
ports:
- name: http
  port: 8080
endpoints:
- addresses: [10.0.0.1]
  conditions: {ready: false, terminating: true}
  nodeName: node-1
"#;

#[test]
fn documents_lists_and_json_are_all_read() {
    let node = r#"{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}}"#;
    let list = format!(
        "apiVersion: v1\nkind: List\nitems:\n- {node}\n- apiVersion: v1\n  kind: Service\n  metadata: {{name: b, namespace: a}}\n"
    );
    let dir = mk_dir(&[
        ("a.yaml", &format!("{WEB}---\n{SLICE}\n--- # nothing\n# at all\n---\n")),
        ("b.yml", &list),
        (
            "deep/er/nodes.json",
            "{\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"NodeList\",\n\t\"items\": [\n\t\t{\"metadata\": {\"name\": \"node-2\"}}\n\t]\n}\n",
        ),
        (
            "c.yaml",
            "apiVersion: v1\nkind: ServiceList\nitems:\n- metadata: {name: c}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSliceList\nitems: null\n",
        ),
        (
            "d.yaml",
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndata: {a: b}\n---\napiVersion: serving.knative.dev/v1\nkind: Service\n",
        ),
    ]);
    let objects = read(dir.path()).unwrap();
    assert_eq!(names(&objects), ["node-1", "node-2", "a/b", "default/c", "default/web", "default/web slice"]);
    assert_eq!(objects.ignored, 2);
    let web = &objects.services[2];
    assert!(web.eligible);
    assert_eq!(
        (web.wanted.as_str(), web.ports[0].port, web.ports[1].protocol.as_str()),
        ("192.0.2.1", 80, "UDP")
    );
    let endpoint = &objects.slices[0].endpoints[0];
    assert_eq!(endpoint.addresses, [Ipv4Addr::new(10, 0, 0, 1)]);
    assert_eq!((endpoint.conditions.ready, endpoint.conditions.terminating), (Some(false), Some(true)));
    assert_eq!(endpoint.node_name.as_deref(), Some("node-1"));
}

#[test]
fn one_file_may_have_any_name() {
    let dir = mk_dir(&[("all", WEB)]);
    assert_eq!(names(&read(&dir.path().join("all")).unwrap()), ["default/web"]);
}

#[test]
fn hidden_files_and_those_of_editors_are_not_read() {
    let broken = "{";
    let dir = mk_dir(&[
        ("web.yaml", WEB),
        (".web.yaml.swp", broken),
        (".web.yaml", broken),
        ("web.yaml~", broken),
        ("web.swp", broken),
        ("README.md", broken),
        (".git/config.yaml", broken),
    ]);
    assert_eq!(names(&read(dir.path()).unwrap()), ["default/web"]);
}

#[test]
fn every_broken_file_is_named_with_its_line() {
    let text = error_of(&[
        ("good.yaml", WEB),
        ("syntax.yaml", "apiVersion: v1\nkind: Node\nmetadata:\n  name: \"x\n"),
        (
            "type.yaml",
            &format!(
                "{SLICE}---\napiVersion: v1\nkind: Service\nmetadata: {{name: t}}\nspec:\n  ports:\n  - port: http\n"
            ),
        ),
        (
            "item.yaml",
            "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Node\n  metadata: {name: 5}\n",
        ),
        (
            "item.json",
            r#"{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": 1}}]}"#,
        ),
        ("type.json", "{\"apiVersion\": \"v1\", \"kind\": \"Node\",\n\"metadata\": 1}"),
        ("kindless.yaml", "a: 1\n---\nkind: Node\n---\n- 1\n"),
        ("nameless.json", "{\"apiVersion\": \"v1\", \"kind\": \"Node\"}"),
    ]);
    let lines: Vec<&str> = text.lines().collect();
    let expected = [
        "item.json: line 1: Node n: invalid type",
        "item.yaml: line 4: Node ?: invalid type: integer `5`, expected a string",
        "kindless.yaml: line 1: no kind: not a Kubernetes manifest",
        "kindless.yaml: line 2: no apiVersion",
        "kindless.yaml: line 5",
        "nameless.json: line 1: Node without metadata.name",
        "syntax.yaml: line ",
        "type.json: line 2 (document from line 1): ",
        "type.yaml: line 22 (document from line 16): ",
    ];
    assert_eq!(lines.len(), expected.len(), "{text}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(expected), "{line:?} instead of {expected:?}");
    }
}

#[test]
fn a_file_that_is_not_text_is_named() {
    let dir = mk_dir(&[("web.yaml", WEB)]);
    fs::write(dir.path().join("bin.yaml"), b"\xff\xfe\0").unwrap();
    let error = read(dir.path()).expect_err("broken").to_string();
    assert!(error.contains("bin.yaml: ") && error.contains("UTF-8"), "{error}");
}

#[test]
fn an_object_in_two_files_names_both() {
    let text = error_of(&[("a.yaml", WEB), ("b.yaml", &format!("# again\n---\n{WEB}"))]);
    assert_eq!(text, "b.yaml: line 2: Service default/web is already defined in a.yaml: line 1");
    let node = "apiVersion: v1\nkind: Node\nmetadata: {name: n}\n";
    let text = error_of(&[("a.yaml", &format!("{node}---\n{node}"))]);
    assert_eq!(text, "a.yaml: line 4: Node n is already defined in a.yaml: line 1");
}

#[test]
fn nothing_to_read_is_an_error() {
    let dir = mk_dir(&[("notes.txt", "x")]);
    let error = read(dir.path()).expect_err("empty");
    assert!(matches!(error, ManifestError::Empty { .. }), "{error}");
    let error = read(&dir.path().join("absent")).expect_err("absent");
    assert!(matches!(error, ManifestError::Unreadable { .. }), "{error}");
    assert!(error.to_string().contains("absent: No such file"), "{error}");
}

#[test]
fn aliases_do_not_blow_up() {
    let mut text = "apiVersion: v1\nkind: ConfigMap\na0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for i in 1..10 {
        let aliases = vec![format!("*a{}", i - 1); 10].join(", ");
        text.push_str(&format!("a{i}: &a{i} [{aliases}]\n"));
    }
    let begin = Instant::now();
    let error = error_of(&[("bomb.yaml", &text), ("web.yaml", WEB)]);
    println!("{error} {:?}", begin.elapsed());
    assert!(error.starts_with("bomb.yaml: line "), "{error}");
}

/// What changed is seen, what did not is the same as before, and an error goes with its cause.
#[test]
fn reading_again_gives_what_reading_anew_does() {
    let dir = mk_dir(&[("web.yaml", WEB), ("slice.yaml", SLICE)]);
    let mut reader = Reader::default();
    let mut same = || {
        let (again, anew) = (reader.read(dir.path()), read(dir.path()));
        match (again, anew) {
            (Ok(again), Ok(anew)) => assert_eq!(again, anew),
            (Err(again), Err(anew)) => assert_eq!(again.to_string(), anew.to_string()),
            (again, anew) => panic!("{again:?} instead of {anew:?}"),
        }
        read(dir.path()).is_ok()
    };
    assert!(same());
    // As long as it was, and within the same instant.
    fs::write(dir.path().join("web.yaml"), WEB.replace("192.0.2.1", "192.0.2.2")).unwrap();
    assert!(same());
    fs::write(dir.path().join("web.yaml"), "kind: [").unwrap();
    assert!(!same());
    assert!(!same());
    fs::write(dir.path().join("web.yaml"), WEB).unwrap();
    assert!(same());
    fs::remove_file(dir.path().join("slice.yaml")).unwrap();
    fs::write(dir.path().join("other.yaml"), WEB).unwrap();
    assert!(!same());
}

#[test]
fn reports_lie_over_the_manifests() {
    let dir = mk_dir(&[
        ("web.yaml", WEB),
        (
            "n.yaml",
            "apiVersion: v1\nkind: Node\nmetadata:\n  name: node-1\n  annotations:\n    reweave.levk.dev/weave: 10.32.0.1,fe:00:00:00:00:01\n    reweave.levk.dev/addresses: 192.0.2.77\n",
        ),
        (
            "nodes/node-1.yaml",
            "apiVersion: v1\nkind: Node\nmetadata:\n  name: node-1\n  annotations:\n    reweave.levk.dev/addresses: 192.0.2.1\n",
        ),
        (
            "nodes/node-2.yaml",
            "apiVersion: v1\nkind: Node\nmetadata:\n  name: node-2\n  annotations:\n    reweave.levk.dev/addresses: x\n",
        ),
        (
            "status/default.web.yaml",
            "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: default}\nspec: {type: ClusterIP}\nstatus: {loadBalancer: {ingress: [{ip: 192.0.2.1, ipMode: Proxy}]}}\n",
        ),
        (
            "status/default.gone.yaml",
            "apiVersion: v1\nkind: Service\nmetadata: {name: gone, namespace: default}\n",
        ),
    ]);
    let objects = read(dir.path()).unwrap();
    assert_eq!(names(&objects), ["node-1", "node-2", "default/web"]);
    let (first, web) = (&objects.nodes[0].0, &objects.services[0]);
    assert_eq!(first.addresses, [Ipv4Addr::new(192, 0, 2, 1)]);
    assert_eq!(first.weave_ip, Some(Ipv4Addr::new(10, 32, 0, 1)), "what the report does not say stays");
    assert_eq!(web.shown.address(), Some(Ipv4Addr::new(192, 0, 2, 1)));
    assert!(web.eligible, "of a reported Service only the status counts");
    let errors: Vec<String> =
        objects.nodes.iter().filter_map(|(_, error)| Some(error.as_ref()?.to_string())).collect();
    assert_eq!(errors, ["node node-2: reweave.levk.dev/addresses: \"x\" is not an IPv4 address"]);
}
