//! Events: each problem once on the object that it is about, and its end.
//!
//! An Event's name is made from what it says, so an agent that starts again (and again) repeats the one that is there
//! instead of writing another. It is repeated now and then while the problem lasts, because the API forgets Events
//! after an hour.

use super::write::{Target, Write};
use crate::model::ServiceName;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;
use tokio::time::Instant;

/// The API keeps Events for an hour by default; what still holds is repeated before.
const REPEAT: Duration = Duration::from_secs(1800);
/// The API refuses longer notes.
const NOTE: usize = 1024;
const CONTROLLER: &str = "reweave.levk.dev/lb-agent";

/// What a problem is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum About {
    /// A Service.
    Service(ServiceName),
    /// A Node.
    Node(String),
}

/// Reads from a problem's text what it is about, and what there is to say. Names of objects have no space or colon.
pub fn about(problem: &str) -> Option<(About, &str)> {
    if let Some(rest) = problem.strip_prefix("node ") {
        let end = rest.find([' ', ':'])?;
        return Some((About::Node(rest[..end].to_owned()), rest[end..].trim_start_matches([':', ' '])));
    }
    let (object, message) = problem.split_once(": ")?;
    let (namespace, name) = object.split_once('/')?;
    let is_name = |text: &str| {
        !text.is_empty()
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c))
    };
    let service = ServiceName { namespace: namespace.to_owned(), name: name.to_owned() };
    (is_name(namespace) && is_name(name)).then_some((About::Service(service), message))
}

/// One thing to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Said {
    about: About,
    uid: String,
    /// Who says it: the node's name.
    instance: String,
    note: String,
    is_over: bool,
}

/// What was said and still holds.
#[derive(Debug, Default)]
pub(super) struct Speaker {
    said: BTreeMap<(About, String), (String, Instant)>,
}

impl Speaker {
    /// What is to be said now that these problems hold, each with the uid of the object that it is about.
    pub(super) fn say(
        &mut self,
        instance: &str,
        problems: BTreeMap<(About, String), String>,
        now: Instant,
    ) -> Vec<(Target, Write)> {
        let event = |(about, message): &(About, String), uid: &str, is_over| {
            let note = shortened(message);
            let (about, uid, instance) = (about.clone(), uid.to_owned(), instance.to_owned());
            Said { about, uid, instance, note, is_over }.addressed()
        };
        let mut events = Vec::new();
        let mut said = BTreeMap::new();
        for (problem, uid) in problems {
            let before = self.said.remove(&problem).filter(|(known, _)| *known == uid);
            let is_due = before.as_ref().is_none_or(|(_, at)| now.saturating_duration_since(*at) >= REPEAT);
            if is_due {
                events.push(event(&problem, &uid, false));
            }
            let at = before.filter(|_| !is_due).map_or(now, |(_, at)| at);
            said.insert(problem, (uid, at));
        }
        let over = std::mem::replace(&mut self.said, said);
        events.extend(over.iter().map(|(problem, (uid, _))| event(problem, uid, true)));
        events
    }
}

/// At the end of a character.
fn shortened(message: &str) -> String {
    let mut end = message.len().min(NOTE);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message[..end].to_owned()
}

impl Said {
    fn addressed(self) -> (Target, Write) {
        let (namespace, name) = match &self.about {
            About::Service(ServiceName { namespace, name }) => (namespace.clone(), name),
            // Where the API wants Events about objects without a namespace.
            About::Node(name) => ("default".to_owned(), name),
        };
        let mut hasher = DefaultHasher::new();
        (&self.uid, &self.instance, &self.note, self.is_over).hash(&mut hasher);
        let target = Target::Event(namespace, format!("{name}.{:016x}", hasher.finish()));
        (target, Write::Event(Box::new(self)))
    }

    fn regarding(&self) -> ObjectReference {
        let uid = Some(self.uid.clone()).filter(|uid| !uid.is_empty());
        let (kind, namespace, name) = match &self.about {
            About::Service(ServiceName { namespace, name }) => ("Service", Some(namespace.clone()), name),
            About::Node(name) => ("Node", None, name),
        };
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some(kind.to_owned()),
            name: Some(name.clone()),
            namespace,
            uid,
            ..ObjectReference::default()
        }
    }

    fn event(&self, namespace: &str, name: &str) -> Event {
        let (type_, reason) = if self.is_over {
            ("Normal", "LoadBalancerProblemOver")
        } else {
            ("Warning", "LoadBalancerProblem")
        };
        Event {
            metadata: ObjectMeta {
                namespace: Some(namespace.to_owned()),
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(Timestamp::now())),
            type_: Some(type_.to_owned()),
            reason: Some(reason.to_owned()),
            action: Some("LoadBalancing".to_owned()),
            note: Some(self.note.clone()),
            regarding: Some(self.regarding()),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            ..Event::default()
        }
    }

    /// Writes it, or counts the one that is there up.
    pub(super) async fn publish(&self, client: &Client, namespace: &str, name: &str) -> kube::Result<()> {
        let events: Api<Event> = Api::namespaced(client.clone(), namespace);
        match events.create(&PostParams::default(), &self.event(namespace, name)).await {
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            other => return other.map(|_| ()),
        }
        let there = events.get(name).await?;
        let count = there.series.map_or(1, |series| series.count).saturating_add(1);
        let series = EventSeries { count, last_observed_time: MicroTime(Timestamp::now()) };
        let patch = Patch::Merge(json!({ "series": series }));
        events.patch(name, &PatchParams::default(), &patch).await.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web() -> About {
        About::Service(ServiceName { namespace: "default".to_owned(), name: "web".to_owned() })
    }

    fn holding(problems: &[(About, &str)]) -> BTreeMap<(About, String), String> {
        problems.iter().map(|(about, text)| ((about.clone(), (*text).to_owned()), "u".to_owned())).collect()
    }

    fn notes(events: &[(Target, Write)]) -> Vec<(String, bool)> {
        let note = |(_, write): &(Target, Write)| match write {
            Write::Event(said) => (said.note.clone(), said.is_over),
            _ => unreachable!(),
        };
        events.iter().map(note).collect()
    }

    #[test]
    fn a_problem_says_what_it_is_about() {
        let node = |name: &str| About::Node(name.to_owned());
        for (problem, expected) in [
            ("default/web: no node holds 192.0.2.1", Some((web(), "no node holds 192.0.2.1"))),
            ("node a: bad annotation", Some((node("a"), "bad annotation"))),
            ("node a.b holds an address but", Some((node("a.b"), "holds an address but"))),
            ("/etc/x: no such file", None),
            ("cannot watch nodes: no answer", None),
            ("251 other nodes forward to pods", None),
        ] {
            assert_eq!(about(problem), expected, "{problem}");
        }
    }

    #[tokio::test]
    async fn a_problem_is_said_once_then_repeated_before_the_api_forgets_it_then_over() {
        let (mut speaker, now) = (Speaker::default(), Instant::now());
        let problem = holding(&[(web(), "broken")]);
        let first = speaker.say("node-1", problem.clone(), now);
        assert_eq!(notes(&first), [("broken".to_owned(), false)]);
        assert_eq!(notes(&speaker.say("node-1", problem.clone(), now + REPEAT / 2)), []);
        let again = speaker.say("node-1", problem.clone(), now + REPEAT);
        assert_eq!(again, first, "the same event, not another");
        assert_eq!(notes(&speaker.say("node-1", problem, now + REPEAT)), []);
        let over = speaker.say("node-1", BTreeMap::new(), now + REPEAT);
        assert_eq!(notes(&over), [("broken".to_owned(), true)]);
        assert_eq!(speaker.say("node-1", BTreeMap::new(), now + REPEAT), []);
    }

    #[tokio::test]
    async fn an_agent_that_starts_again_says_the_same_event() {
        let problem = holding(&[(web(), "broken")]);
        let once = Speaker::default().say("node-1", problem.clone(), Instant::now());
        assert_eq!(Speaker::default().say("node-1", problem.clone(), Instant::now()), once);
        assert_ne!(Speaker::default().say("node-2", problem, Instant::now()), once);
    }

    #[test]
    fn a_long_note_is_cut_at_a_character() {
        let long = "é".repeat(NOTE);
        assert_eq!(shortened(&long).len(), NOTE);
        assert_eq!(shortened(&format!("a{long}")).len(), NOTE - 1);
    }
}
