//! What is to be written, by object: the latest wish wins, failures wait, and nobody is fought with.
//!
//! Pure: time is an argument. A wish is repeated by whoever has it as long as the API does not show it, so the queue
//! tells three cases apart: the same wish again while it waits or is being carried out; the echo of one that was just
//! carried out and that the API has not shown yet; and one that somebody else has undone.

use super::write::{Target, Write};
use crate::api::backoff::Backoff;
use fastrand::Rng;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// A wish that was just carried out waits for so long before it is again: its own effect is on its way here, and takes it
/// back.
const ECHO: Duration = Duration::from_millis(500);
/// Waits after failures of the API.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// Waits after somebody has undone what was written.
const CONTEST: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// What has stood for so long is no contest any more.
const SETTLED: Duration = Duration::from_secs(600);
/// Undone so many times, it is no coincidence.
const CONTESTED: u32 = 2;

/// How a write went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is as wished.
    Written,
    /// The object is another than the wish was made for, or gone: whoever has the wish looks again.
    Outdated,
    /// Why not.
    Failed(String),
}

#[derive(Debug)]
pub(super) struct Queue {
    entries: BTreeMap<Target, Entry>,
    rng: Rng,
}

#[derive(Debug)]
struct Entry {
    wish: Option<Write>,
    is_running: bool,
    due: Instant,
    retry: Backoff,
    failure: Option<String>,
    /// What was last carried out, and when.
    written: Option<(Write, Instant)>,
    contest: Backoff,
}

impl Queue {
    pub(super) fn new(rng: Rng) -> Self {
        Self { entries: BTreeMap::new(), rng }
    }

    /// Takes a wish, or takes it back. True if that is something new.
    pub(super) fn want(&mut self, target: &Target, wish: Option<Write>, now: Instant) -> bool {
        if !self.entries.contains_key(target) {
            if wish.is_none() {
                return false;
            }
            let entry = Entry::new(&mut self.rng, now);
            self.entries.insert(target.clone(), entry);
        }
        self.entries.get_mut(target).is_some_and(|entry| entry.want(wish, now))
    }

    /// Forgets what is done for good.
    pub(super) fn forget(&mut self, now: Instant) {
        self.entries.retain(|_, entry| !entry.is_forgettable(now));
    }

    /// The targets that something is wished for.
    pub(super) fn wished(&self) -> impl Iterator<Item = &Target> {
        self.entries.iter().filter(|(_, entry)| entry.wish.is_some()).map(|(target, _)| target)
    }

    /// The next one to carry out now.
    pub(super) fn next(&mut self, now: Instant) -> Option<(Target, Write)> {
        let ready = |entry: &Entry| !entry.is_running && entry.due <= now;
        let (target, entry) =
            self.entries.iter_mut().find(|(_, entry)| ready(entry) && entry.wish.is_some())?;
        entry.is_running = true;
        Some((target.clone(), entry.wish.clone()?))
    }

    /// When there will be one.
    pub(super) fn due(&self) -> Option<Instant> {
        let waiting = self.entries.values().filter(|entry| entry.wish.is_some() && !entry.is_running);
        waiting.map(|entry| entry.due).min()
    }

    /// Notes how one went.
    pub(super) fn done(&mut self, target: &Target, write: Write, outcome: Outcome, now: Instant) {
        let Some(entry) = self.entries.get_mut(target) else { return };
        entry.is_running = false;
        let is_latest = entry.wish.as_ref() == Some(&write);
        match outcome {
            Outcome::Written => {
                entry.retry.succeeded();
                (entry.failure, entry.written) = (None, Some((write, now)));
                if is_latest {
                    entry.wish = None;
                }
            }
            Outcome::Outdated => {
                entry.failure = None;
                if is_latest {
                    entry.wish = None;
                }
            }
            Outcome::Failed(why) => {
                entry.failure = Some(why);
                entry.due = now + entry.retry.after_failure();
            }
        }
    }

    /// What could not be written so far, and why.
    pub(super) fn failures(&self) -> impl Iterator<Item = (&Target, &str)> {
        self.entries.iter().filter_map(|(target, entry)| Some((target, entry.failure.as_deref()?)))
    }

    /// What somebody else undoes again and again.
    pub(super) fn contested(&self, now: Instant) -> impl Iterator<Item = &Target> {
        let is_contested =
            move |entry: &Entry| entry.contest.failures() >= CONTESTED && !entry.is_settled(now);
        self.entries.iter().filter(move |(_, entry)| is_contested(entry)).map(|(target, _)| target)
    }
}

impl Entry {
    fn new(rng: &mut Rng, now: Instant) -> Self {
        Self {
            wish: None,
            is_running: false,
            due: now,
            retry: Backoff::new(RETRY.0, RETRY.1, rng.fork()),
            failure: None,
            written: None,
            contest: Backoff::new(CONTEST.0, CONTEST.1, rng.fork()),
        }
    }

    fn want(&mut self, wish: Option<Write>, now: Instant) -> bool {
        if wish == self.wish {
            return false;
        }
        let Some(wish) = wish else {
            (self.wish, self.failure) = (None, None);
            self.retry.succeeded();
            return true;
        };
        if let Some((written, at)) = &self.written {
            let age = now.saturating_duration_since(*at);
            if wish == *written && age < ECHO {
                self.due = *at + ECHO;
            } else if wish.says_the_same_as(written) {
                if age >= SETTLED {
                    self.contest.succeeded();
                }
                self.due = now + self.contest.after_failure();
                self.written = None;
            }
        }
        self.wish = Some(wish);
        true
    }

    fn is_settled(&self, now: Instant) -> bool {
        let written = self.written.as_ref();
        written.is_some_and(|(_, at)| now.saturating_duration_since(*at) >= SETTLED)
    }

    /// Nothing is to be done, and nothing that was done is to be remembered.
    fn is_forgettable(&self, now: Instant) -> bool {
        let is_remembered = self.written.is_some() && !self.is_settled(now);
        self.wish.is_none() && !self.is_running && !is_remembered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ServiceName;
    use std::net::Ipv4Addr;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

    fn web() -> Target {
        Target::Service(ServiceName { namespace: "default".to_owned(), name: "web".to_owned() })
    }

    fn show(version: &str) -> Write {
        Write::Status { version: version.to_owned(), address: Some(ADDRESS) }
    }

    fn clear(version: &str) -> Write {
        Write::Status { version: version.to_owned(), address: None }
    }

    fn mk_queue() -> (Queue, Instant) {
        (Queue::new(Rng::with_seed(7)), Instant::now())
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[tokio::test]
    async fn the_latest_wish_is_carried_out_and_each_object_one_at_a_time() {
        let (mut queue, now) = mk_queue();
        queue.want(&web(), Some(show("1")), now);
        queue.want(&web(), Some(clear("2")), now);
        assert_eq!(queue.next(now), Some((web(), clear("2"))));
        queue.want(&web(), Some(show("3")), now);
        assert_eq!(queue.next(now), None, "the first is still under way");
        queue.done(&web(), clear("2"), Outcome::Written, now);
        assert_eq!(queue.next(now), Some((web(), show("3"))));
        queue.done(&web(), show("3"), Outcome::Written, now);
        assert_eq!((queue.next(now), queue.due()), (None, None));
    }

    #[tokio::test]
    async fn a_wish_that_is_taken_back_is_not_carried_out() {
        let (mut queue, now) = mk_queue();
        queue.want(&web(), Some(show("1")), now);
        queue.want(&web(), None, now);
        queue.forget(now);
        assert_eq!((queue.next(now), queue.wished().count(), queue.entries.len()), (None, 0, 0));
    }

    #[tokio::test]
    async fn the_echo_of_a_write_is_taken_back_before_it_is_carried_out() {
        let (mut queue, now) = mk_queue();
        queue.want(&web(), Some(show("1")), now);
        queue.next(now);
        queue.done(&web(), show("1"), Outcome::Written, now);
        queue.want(&web(), Some(show("1")), now + ECHO / 2);
        assert_eq!(queue.next(now + ECHO / 2), None);
        queue.want(&web(), None, now + ECHO / 2);
        assert_eq!(queue.due(), None);
        // The API shows something else still: it was undone before anybody saw it.
        queue.want(&web(), Some(show("1")), now + ECHO / 2);
        assert_eq!(queue.next(now + ECHO), Some((web(), show("1"))));
        assert_eq!(queue.contested(now).count(), 0);
    }

    #[tokio::test]
    async fn an_outdated_wish_waits_for_the_next_look() {
        let (mut queue, now) = mk_queue();
        queue.want(&web(), Some(show("1")), now);
        queue.next(now);
        queue.done(&web(), show("1"), Outcome::Outdated, now);
        assert_eq!((queue.next(now), queue.failures().count()), (None, 0));
        queue.want(&web(), Some(show("2")), now);
        assert_eq!(queue.next(now), Some((web(), show("2"))), "at once: nobody has undone anything");
    }

    #[tokio::test]
    async fn failures_wait_longer_each_time_and_are_told_until_it_works() {
        let (mut queue, mut now) = mk_queue();
        queue.want(&web(), Some(show("1")), now);
        let mut waits = Vec::new();
        for _ in 0..8 {
            assert!(queue.next(now).is_some());
            queue.done(&web(), show("1"), Outcome::Failed("no route".to_owned()), now);
            assert_eq!(queue.failures().collect::<Vec<_>>(), [(&web(), "no route")]);
            waits.push(queue.due().unwrap() - now);
            now = queue.due().unwrap();
        }
        assert!(waits[0] <= seconds(1) && waits[7] >= seconds(15) && waits[7] <= seconds(30), "{waits:?}");
        queue.next(now);
        queue.done(&web(), show("1"), Outcome::Written, now);
        assert_eq!(queue.failures().count(), 0);
    }

    #[tokio::test]
    async fn who_undoes_a_write_is_answered_ever_later_and_named() {
        let (mut queue, mut now) = mk_queue();
        queue.want(&web(), Some(show("0")), now);
        let mut waits = Vec::new();
        for round in 0..12 {
            let write = show(&round.to_string());
            assert_eq!(queue.next(now), Some((web(), write.clone())), "round {round}");
            queue.done(&web(), write, Outcome::Written, now);
            now += Duration::from_millis(20);
            queue.want(&web(), Some(show(&(round + 1).to_string())), now);
            waits.push(queue.due().unwrap() - now);
            assert_eq!(queue.contested(now).count(), usize::from(round >= 1), "round {round}");
            now = queue.due().unwrap();
        }
        assert!(waits[0] <= seconds(1), "{waits:?}");
        assert!(waits[11] >= seconds(150) && waits[11] <= seconds(300), "{waits:?}");
        queue.next(now);
        queue.done(&web(), show("12"), Outcome::Written, now);
        assert_eq!(queue.contested(now + SETTLED).count(), 0, "it has stood for long");
        queue.forget(now + SETTLED);
        assert_eq!(queue.entries.len(), 0);
    }

    #[tokio::test]
    async fn another_decision_is_no_contest() {
        let (mut queue, now) = mk_queue();
        for (round, write) in [show("1"), clear("2"), show("3"), clear("4")].into_iter().enumerate() {
            queue.want(&web(), Some(write.clone()), now);
            assert_eq!(queue.next(now), Some((web(), write.clone())), "{round}");
            queue.done(&web(), write, Outcome::Written, now);
        }
        assert_eq!(queue.contested(now).count(), 0);
    }
}
