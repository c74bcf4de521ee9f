//! Follows one kind of objects: a list, then a watch, and again where that breaks.
//!
//! It is a loop of our own around kube's requests, and not `kube::runtime::watcher`, for what that does not show or
//! leave to choose (5.0): bookmarks, by which a quiet API is told from a silent one; that a watch goes on after a
//! failure; a new list where the server is behind what was seen (an etcd that was restored); the paged list where the server has
//! no streamed ones; and a wait where a server ends each watch at once.

use super::reduced::{Kind, Reduced};
use crate::api::backoff::Backoff;
use crate::api::error;
use crate::api::stats::{Operation, Stats};
use futures::{Stream, StreamExt as _};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use kube::{Api, Client};
use std::pin::pin;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tracing::debug;

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// A watch on which nothing has come for so long is given up. The API server sends a bookmark each minute or so.
    pub silence: Duration,
    /// The first wait after a failure; it doubles.
    pub retry_first: Duration,
    /// The longest wait after a failure.
    pub retry_most: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            silence: Duration::from_secs(90),
            retry_first: Duration::from_millis(500),
            retry_most: Duration::from_secs(30),
        }
    }
}

/// Objects of one page of a list: EndpointSlices of a hundred endpoints are 30 kB each.
const PAGE: u32 = 100;
/// The server ends a watch by itself after about so many seconds; spread, so that agents do not come back together.
const WATCH_SECONDS: std::ops::Range<u32> = 240..290;
/// A watch that did not last so long is no success, however it ended.
const LASTED: Duration = Duration::from_secs(10);
/// Of the bookmark after the last object of a streamed list.
const END_OF_LIST: &str = "k8s.io/initial-events-end";

/// What happened to the objects of one kind.
#[derive(Debug)]
pub(super) enum Happened<K: Kind> {
    /// A whole list follows.
    ListBegins,
    /// The object is there, or is another than before.
    Set(Reduced<K>),
    /// The object is gone.
    Gone(Reduced<K>),
    /// What has not been set since the list began is not there.
    ListEnds,
    /// The API answers (again).
    Answers,
    /// The API does not answer, or refuses; why.
    Fails(String),
}

/// One kind, and where to tell of it.
pub(super) struct Follower<K: Kind> {
    api: Api<Reduced<K>>,
    timing: Timing,
    stats: Stats,
    tell: mpsc::Sender<Happened<K>>,
    rng: fastrand::Rng,
    /// The server streams lists: assumed until it says otherwise.
    streams: bool,
}

/// Why a watch is over.
enum End {
    /// Nobody listens any more.
    Unwanted,
    /// The server ended it, as it does now and then.
    Ended,
    /// It broke, or was silent. It can go on from where it was.
    Broken(String),
    /// The server does not know the version any more, or will not go on from it.
    Outdated(String),
    /// No answer, or a refusal.
    Failed(String),
    /// The server does not stream lists.
    NoStreams(String),
}

impl<K: Kind> Follower<K> {
    pub(super) fn new(client: Client, timing: Timing, stats: Stats, tell: mpsc::Sender<Happened<K>>) -> Self {
        Self { api: Api::all(client), timing, stats, tell, rng: fastrand::Rng::new(), streams: true }
    }

    /// Runs until nobody listens.
    pub(super) async fn run(mut self) {
        let Timing { retry_first, retry_most, .. } = self.timing;
        let mut backoff = Backoff::new(retry_first, retry_most, self.rng.fork());
        // Where the watch goes on; a list comes first where there is none.
        let mut version: Option<String> = None;
        loop {
            let begun = Instant::now();
            let resource = K::RESOURCE.name();
            let end = self.follow(&mut version).await;
            if begun.elapsed() >= LASTED {
                backoff.succeeded();
            }
            match end {
                End::Unwanted => return,
                End::Ended if backoff.failures() == 0 => continue,
                End::NoStreams(why) => {
                    debug!(resource, why, "the API server does not stream lists; asking for pages");
                    self.streams = false;
                    continue;
                }
                End::Ended => {}
                End::Broken(why) => debug!(resource, why, "the watch broke; going on with it"),
                End::Outdated(why) => {
                    debug!(resource, why, "the watch cannot go on; listing again");
                    version = None;
                }
                End::Failed(why) => {
                    // The server may have come back with another past (a restored etcd): a watch that could not be
                    // resumed at the first try begins with a list.
                    version = None;
                    if self.tell.send(Happened::Fails(why)).await.is_err() {
                        return;
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.after_failure()) => {}
                () = self.tell.closed() => return,
            }
        }
    }

    /// One watch, with a list in front where there is no version to go on from.
    async fn follow(&mut self, version: &mut Option<String>) -> End {
        if let Some(seen) = version {
            match self.is_behind(seen).await {
                Ok(false) => {}
                Ok(true) => {
                    return End::Outdated("the server has another past than the one we saw".to_owned());
                }
                Err(end) => return end,
            }
        }
        if version.is_none() && !self.streams {
            match self.list().await {
                Ok(listed) => *version = Some(listed),
                Err(end) => return end,
            }
        }
        let params = WatchParams {
            label_selector: K::LABELS.map(str::to_owned),
            timeout: Some(self.rng.u32(WATCH_SECONDS)),
            send_initial_events: version.is_none(),
            ..WatchParams::default()
        };
        let at = version.clone().unwrap_or_default();
        let stream = match timeout(self.timing.silence, self.api.watch(&params, &at)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(refused)) => return self.refused(Operation::Watch, &refused, params.send_initial_events),
            Err(_elapsed) => return self.no_answer(Operation::Watch),
        };
        self.stats.heard(K::RESOURCE);
        let begins = if version.is_none() { Happened::ListBegins } else { Happened::Answers };
        if self.tell.send(begins).await.is_err() {
            return End::Unwanted;
        }
        self.listen(pin!(stream), version).await
    }

    /// Whether the server has not reached a version that we have seen, which is so after an etcd was restored. It would
    /// take the watch all the same, and tell of nothing until it has caught up.
    async fn is_behind(&self, seen: &str) -> Result<bool, End> {
        let params = ListParams {
            label_selector: K::LABELS.map(str::to_owned),
            limit: Some(1),
            ..ListParams::default()
        };
        let now = match timeout(self.timing.silence, self.api.list_metadata(&params)).await {
            Ok(Ok(page)) => page.metadata.resource_version.unwrap_or_default(),
            Ok(Err(refused)) => return Err(self.refused(Operation::List, &refused, false)),
            Err(_elapsed) => return Err(self.no_answer(Operation::List)),
        };
        // Numbers, as the API defines them since Kubernetes 1.35, and as etcd has always made them.
        let number = |version: &str| version.parse::<u64>().ok();
        Ok(number(&now).zip(number(seen)).is_some_and(|(now, seen)| now < seen))
    }

    /// A whole list in pages; answers with its version.
    async fn list(&self) -> Result<String, End> {
        let mut params = ListParams {
            label_selector: K::LABELS.map(str::to_owned),
            limit: Some(PAGE),
            ..ListParams::default()
        };
        let tell = async |happened| self.tell.send(happened).await.map_err(|_| End::Unwanted);
        tell(Happened::ListBegins).await?;
        loop {
            let page = match timeout(self.timing.silence, self.api.list(&params)).await {
                Ok(Ok(page)) => page,
                Ok(Err(refused)) => return Err(self.refused(Operation::List, &refused, false)),
                Err(_elapsed) => return Err(self.no_answer(Operation::List)),
            };
            self.stats.heard(K::RESOURCE);
            for object in page.items {
                tell(Happened::Set(object)).await?;
            }
            params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                tell(Happened::ListEnds).await?;
                return Ok(page.metadata.resource_version.unwrap_or_default());
            }
        }
    }

    /// Takes what a watch sends until it ends.
    async fn listen(
        &self,
        mut stream: std::pin::Pin<&mut impl Stream<Item = kube::Result<WatchEvent<Reduced<K>>>>>,
        version: &mut Option<String>,
    ) -> End {
        // A streamed list has no version before its end: an object's own would leave out the rest of the list.
        let mut is_list = version.is_none();
        loop {
            let event = match timeout(self.timing.silence, stream.next()).await {
                Ok(Some(Ok(event))) => event,
                Ok(Some(Err(broken))) => {
                    self.stats.failed(Operation::Watch, error::code(&broken));
                    return End::Broken(error::explain(&broken));
                }
                Ok(None) => return End::Ended,
                // Servers before 1.27 take the request for an ordinary watch, and never end the list.
                Err(_elapsed) if is_list => return End::NoStreams("the list did not end".to_owned()),
                Err(_elapsed) => {
                    self.stats.failed(Operation::Watch, "none".to_owned());
                    return End::Broken(format!("silent for {} s", self.timing.silence.as_secs()));
                }
            };
            self.stats.heard(K::RESOURCE);
            let (happened, at) = match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let at = object.version().map(str::to_owned);
                    (Some(Happened::Set(object)), at)
                }
                WatchEvent::Deleted(object) => {
                    let at = object.version().map(str::to_owned);
                    (Some(Happened::Gone(object)), at)
                }
                WatchEvent::Bookmark(bookmark) => {
                    let ends = is_list && bookmark.metadata.annotations.contains_key(END_OF_LIST);
                    is_list &= !ends;
                    (ends.then_some(Happened::ListEnds), Some(bookmark.metadata.resource_version))
                }
                WatchEvent::Error(status) => {
                    self.stats.failed(Operation::Watch, status.code.to_string());
                    return End::Outdated(error::explain_status(&status));
                }
            };
            if !is_list {
                *version = at.filter(|at| !at.is_empty());
            }
            if let Some(happened) = happened
                && self.tell.send(happened).await.is_err()
            {
                return End::Unwanted;
            }
        }
    }

    /// A request that was answered with an error, or not at all.
    fn refused(&self, operation: Operation, refused: &kube::Error, is_streamed_list: bool) -> End {
        let why = error::explain(refused);
        match refused {
            // 422 with the feature gate off, 400 from others that do not know the parameter.
            kube::Error::Api(status) if is_streamed_list && matches!(status.code, 400 | 422) => {
                return End::NoStreams(why);
            }
            _ => self.stats.failed(operation, error::code(refused)),
        }
        match refused {
            kube::Error::Api(status) if is_outdated(status) => End::Outdated(why),
            _ => End::Failed(format!("cannot {} {}: {why}", operation.label(), K::RESOURCE.name())),
        }
    }

    fn no_answer(&self, operation: Operation) -> End {
        self.stats.failed(operation, "none".to_owned());
        let (operation, resource) = (operation.label(), K::RESOURCE.name());
        End::Failed(format!(
            "cannot {operation} {resource}: no answer within {} s",
            self.timing.silence.as_secs()
        ))
    }
}

/// The version is too old: a plain part of a watch's life, no failure.
fn is_outdated(status: &Status) -> bool {
    status.code == 410
}
