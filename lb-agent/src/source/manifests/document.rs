//! From the text of a file to typed objects, each with its place.

use super::{Fault, Place};
use crate::model::{EndpointSlice, Service};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::{Options, Spanned};
use std::path::Path;

/// The objects of the kinds that matter, in the order of the files.
#[derive(Default)]
pub(super) struct Kinds {
    pub(super) nodes: Vec<Document<core::Node>>,
    pub(super) services: Vec<Document<Service>>,
    pub(super) slices: Vec<Document<EndpointSlice>>,
    pub(super) ignored: usize,
}

/// An object and where it stands.
pub(super) struct Document<T> {
    pub(super) kind: &'static str,
    /// Empty for Nodes.
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) at: Place,
    pub(super) object: T,
}

/// What a file holds, and what is wrong in it. A document that is broken does not hide what is wrong in the next.
///
/// A file that says it is JSON is read as such: YAML's parser refuses characters that JSON allows.
pub(super) fn read(file: &Path, text: &str) -> (Kinds, Vec<Fault>) {
    let is_json = file.extension().is_some_and(|ending| ending == "json");
    let sources: Vec<Source<'_>> = if is_json {
        vec![Source { file, begin: 1, content: Content::Json(text) }]
    } else {
        let source = |(begin, text)| Source { file, begin, content: Content::Yaml(text) };
        documents(text).into_iter().map(source).collect()
    };
    let mut kinds = Kinds::default();
    let faults = sources.iter().filter_map(|source| kinds.add(source).err()).collect();
    (kinds, faults)
}

/// The documents of a file, each with the number of its first line, from 1.
///
/// A line that begins with `---` parts documents wherever it stands, also in a block of text (YAML 1.2, 9.1.2);
/// parting them here lets every error be told with the place of its document.
fn documents(text: &str) -> Vec<(u64, &str)> {
    let is_marker =
        |line: &str| line.strip_prefix("---").is_some_and(|rest| rest.trim_start().len() < rest.len());
    let mut documents = vec![(1, 0)];
    let mut offset = 0;
    for (number, line) in (1..).zip(text.split_inclusive('\n')) {
        if is_marker(line) || line == "---" {
            documents.push((number, offset));
        }
        offset += line.len();
    }
    let ends = documents.iter().skip(1).map(|(_, begin)| *begin).chain([text.len()]);
    documents.iter().zip(ends).map(|((line, begin), end)| (*line, &text[*begin..end])).collect()
}

/// What every object says of itself.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Head {
    api_version: Option<String>,
    kind: Option<String>,
}

#[derive(Deserialize)]
struct List<T> {
    #[serde(default = "Option::default")]
    items: Option<Vec<T>>,
}

/// A document, or an item of a `List`.
struct Source<'a> {
    file: &'a Path,
    /// The line that it begins with, from 1.
    begin: u64,
    content: Content<'a>,
}

enum Content<'a> {
    Yaml(&'a str),
    Json(&'a str),
    Item(Value),
}

impl Kinds {
    fn add(&mut self, source: &Source<'_>) -> Result<(), Fault> {
        let Some(head) = source.decode::<Option<Head>>()? else { return Ok(()) };
        let Some(kind) = head.kind else { return Err(source.fault("no kind: not a Kubernetes manifest")) };
        let Some(version) = head.api_version else { return Err(source.fault("no apiVersion")) };
        match (version.as_str(), kind.as_str()) {
            ("v1", "Node") => self.nodes.push(source.node(source.decode()?)?),
            ("v1", "Service") => self.services.push(source.service(&source.decode()?)?),
            ("discovery.k8s.io/v1", "EndpointSlice") => self.slices.push(source.slice(&source.decode()?)?),
            ("v1", "NodeList") => {
                for object in source.items()? {
                    self.nodes.push(source.node(object)?);
                }
            }
            ("v1", "ServiceList") => {
                for object in source.items()? {
                    self.services.push(source.service(&object)?);
                }
            }
            ("discovery.k8s.io/v1", "EndpointSliceList") => {
                for object in source.items()? {
                    self.slices.push(source.slice(&object)?);
                }
            }
            ("v1", "List") => {
                for Spanned { value, referenced, .. } in source.items()? {
                    let begin = source.line(referenced.line());
                    self.add(&Source { file: source.file, begin, content: Content::Item(value) })?;
                }
            }
            _ => self.ignored += 1,
        }
        Ok(())
    }
}

impl Source<'_> {
    fn decode<T: DeserializeOwned>(&self) -> Result<T, Fault> {
        match &self.content {
            Content::Yaml(text) => serde_saphyr::from_str_with_options(text, options()).map_err(|error| {
                let line = error.location().map_or(1, |location| location.line());
                self.fault_at(self.line(line), without_place(&error.to_string()))
            }),
            Content::Json(text) => serde_json::from_str(text).map_err(|error| {
                let line = u64::try_from(error.line()).unwrap_or(1);
                self.fault_at(self.line(line), without_place(&error.to_string()))
            }),
            // Its line may be unknown, so it is named.
            Content::Item(value) => T::deserialize(value).map_err(|error| {
                let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
                let (kind, name) = (text(&value["kind"]), text(&value["metadata"]["name"]));
                self.fault(&format!("{kind} {name}: {error}"))
            }),
        }
    }

    fn items<T: DeserializeOwned>(&self) -> Result<Vec<T>, Fault> {
        Ok(self.decode::<List<T>>()?.items.unwrap_or_default())
    }

    fn node(&self, object: core::Node) -> Result<Document<core::Node>, Fault> {
        let ObjectMeta { name, .. } = &object.metadata;
        let name = name.clone().unwrap_or_default();
        self.document("Node", String::new(), name, object)
    }

    fn service(&self, object: &core::Service) -> Result<Document<Service>, Fault> {
        let mut service = Service::from(object);
        in_default(&mut service.namespace);
        self.document("Service", service.namespace.clone(), service.name.clone(), service)
    }

    fn slice(&self, object: &discovery::EndpointSlice) -> Result<Document<EndpointSlice>, Fault> {
        let mut slice = EndpointSlice::from(object);
        in_default(&mut slice.namespace);
        self.document("EndpointSlice", slice.namespace.clone(), slice.name.clone(), slice)
    }

    fn document<T>(
        &self,
        kind: &'static str,
        namespace: String,
        name: String,
        object: T,
    ) -> Result<Document<T>, Fault> {
        if name.is_empty() {
            return Err(self.fault(&format!("{kind} without metadata.name")));
        }
        Ok(Document { kind, namespace, name, at: self.place(self.begin), object })
    }

    /// A line of the text as a line of the file.
    fn line(&self, in_text: u64) -> u64 {
        self.begin + in_text.saturating_sub(1)
    }

    fn place(&self, line: u64) -> Place {
        Place { file: self.file.to_owned(), line: Some(line), document: Some(self.begin) }
    }

    fn fault(&self, reason: &str) -> Fault {
        self.fault_at(self.begin, reason)
    }

    fn fault_at(&self, line: u64, reason: &str) -> Fault {
        Fault { at: self.place(line), reason: reason.to_owned() }
    }
}

/// As kubectl does.
fn in_default(namespace: &mut String) {
    if namespace.is_empty() {
        "default".clone_into(namespace);
    }
}

/// Large clusters fit in; what a small file can blow up to (by aliases) is limited.
fn options() -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 100_000_000,
            max_nodes: 100_000_000,
            max_total_scalar_bytes: 1 << 30,
            max_recorded_anchor_events: 100_000,
        },
        with_snippet: false,
    }
}

/// The parser's own place counts from the document's first line: the caller says the line of the file.
fn without_place(reason: &str) -> &str {
    reason.split_once(" at line ").map_or(reason, |(reason, _)| reason)
}
