//! The chart's schema is what `lb-agent run` accepts: `LB_UPDATE_SCHEMA=1 cargo test -p lb-agent --test chart` writes it.

use clap::{Arg, ArgAction, Args as _, Command};
use lb_agent::cli::run::Args;
use serde_json::{Map, Value, json};
use std::any::TypeId;
use std::path::PathBuf;
use std::{env, fs};

/// Flags that the chart itself sets: see `templates/_helpers.tpl`.
const OF_THE_CHART: [&str; 5] = ["node", "manifests", "kubeconfig", "bpffs", "proc-sys"];

fn flags() -> Vec<Arg> {
    let run = Args::augment_args(Command::new("run"));
    run.get_arguments()
        .filter(|flag| !["help", "version"].contains(&flag.get_id().as_str()))
        .cloned()
        .collect()
}

fn long(flag: &Arg) -> &str {
    flag.get_long().expect("every flag has a long name")
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/reweave-lb").join(name)
}

#[test]
fn every_flag_is_an_environment_variable_of_its_name_and_has_help() {
    let flags = flags();
    assert!(flags.len() > 25, "only {} flags", flags.len());
    for flag in &flags {
        let name = format!("LB_{}", long(flag).to_uppercase().replace('-', "_"));
        assert_eq!(flag.get_env().and_then(|env| env.to_str()), Some(name.as_str()), "--{}", long(flag));
        assert!(flag.get_help().is_some(), "--{} has no help", long(flag));
        assert!(!flag.is_hide_set(), "--{} is hidden", long(flag));
    }
}

#[test]
fn the_charts_schema_knows_every_flag() {
    let committed = file("values.schema.json");
    let schema = serde_json::to_string_pretty(&schema()).unwrap() + "\n";
    if env::var_os("LB_UPDATE_SCHEMA").is_some() {
        fs::write(&committed, &schema).unwrap();
    }
    let found = fs::read_to_string(&committed).unwrap();
    assert!(found == schema, "{} is stale: LB_UPDATE_SCHEMA=1 writes it anew", committed.display());
}

/// As the chart renders booleans and lists.
#[test]
fn values_arrive_by_the_environment() {
    let run = |fallback: &str| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_lb-agent"))
            .args(["run", "--node=n1", "--manifests=/nonexistent/manifests"])
            .env("LB_TERMINATING_FALLBACK", fallback)
            .env("LB_UPLINK", "eth0,bond*")
            .output()
            .unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    for value in ["true", "false"] {
        assert!(run(value).contains("not a directory"), "{value}: {}", run(value));
    }
    assert!(run("maybe").contains("invalid value 'maybe'"), "{}", run("maybe"));
}

/// `agent` from the command line, the rest from the defaults in `values.yaml`.
fn schema() -> Value {
    let agent: Map<String, Value> = flags()
        .iter()
        .filter(|flag| !OF_THE_CHART.contains(&long(flag)))
        .map(|flag| (long(flag).to_owned(), property(flag)))
        .collect();
    let text = fs::read_to_string(file("values.yaml")).expect("the chart has values.yaml");
    let values: Value = serde_saphyr::from_str(&text).expect("values.yaml is YAML");
    let mut properties =
        of_default(&values)["properties"].as_object().cloned().expect("values.yaml is a map");
    properties.insert(
        "agent".to_owned(),
        json!({
            "description": "Flags of `lb-agent run`, without their dashes",
            "type": "object",
            "additionalProperties": false,
            "properties": agent,
        }),
    );
    // Subcharts and their parents put it there.
    properties.insert("global".to_owned(), json!({ "type": "object" }));
    json!({
        "$schema": "https://json-schema.org/draft-07/schema#",
        "$comment": "Written by `LB_UPDATE_SCHEMA=1 cargo test -p lb-agent --test chart`. Do not edit.",
        "type": "object",
        "additionalProperties": false,
        "properties": properties,
    })
}

fn property(flag: &Arg) -> Value {
    let mut description = flag.get_help().map(ToString::to_string).unwrap_or_default();
    if let [default] = flag.get_default_values() {
        description += &format!(" (default: {})", default.display());
    }
    let mut schema = kind(flag);
    schema["description"] = description.into();
    schema
}

fn kind(flag: &Arg) -> Value {
    let parser = flag.get_value_parser();
    let is_number = [TypeId::of::<u8>(), TypeId::of::<u16>(), TypeId::of::<u32>(), TypeId::of::<u64>()]
        .iter()
        .any(|number| parser.type_id() == *number);
    let choices: Vec<String> =
        parser.possible_values().into_iter().flatten().map(|choice| choice.get_name().to_owned()).collect();
    if matches!(flag.get_action(), ArgAction::SetTrue) {
        json!({ "type": "boolean" })
    } else if flag.get_value_delimiter().is_some() {
        let words = json!({ "type": "string" });
        json!({ "type": ["array", "string"], "items": words })
    } else if is_number && choices.is_empty() {
        json!({ "type": "integer", "minimum": 0 })
    } else if is_number {
        json!({ "enum": choices.iter().map(|choice| choice.parse::<u64>().expect("a number")).collect::<Vec<_>>() })
    } else if choices.is_empty() {
        json!({ "type": "string" })
    } else {
        json!({ "enum": choices })
    }
}

/// Values of the type of the default.
fn of_default(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let properties: Map<String, Value> = map
                .iter()
                .map(|(key, value)| {
                    let is_open = OF_KUBERNETES.contains(&key.as_str());
                    (key.clone(), if is_open { json!({ "type": "object" }) } else { of_default(value) })
                })
                .collect();
            json!({ "type": "object", "additionalProperties": false, "properties": properties })
        }
        Value::Array(_) => json!({ "type": "array" }),
        Value::Bool(_) => json!({ "type": "boolean" }),
        Value::Number(_) => json!({ "type": "integer" }),
        _ => json!({ "type": "string" }),
    }
}

/// Values that go into objects as they are: the API server checks those.
const OF_KUBERNETES: [&str; 8] = [
    "affinity",
    "labels",
    "nodeSelector",
    "podAnnotations",
    "podLabels",
    "resources",
    "seLinuxOptions",
    "updateStrategy",
];
