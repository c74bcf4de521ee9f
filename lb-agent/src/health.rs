//! How the agent is doing, for those who ask: published by the loop after each pass, read by probes and metrics.

use crate::datapath::sweep::Swept;
use lb_common::service::ServiceKey;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// What the last passes of the loop came to.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// When the loop started or last began a pass: a loop that hangs begins none.
    pub alive: Option<Instant>,
    /// How long a loop that is well may wait between passes when nothing happens.
    pub period: Duration,
    /// When a pass last ended with everything as wanted.
    pub synced: Option<Instant>,
    /// How long that pass took.
    pub duration: Duration,
    /// Passes that failed since the start.
    pub failures: u64,
    /// What an operator should hear about now: why the agent is not ready, or what it leaves out.
    pub problems: Vec<String>,
    /// Whether the last pass was a good one.
    pub is_ready: bool,
    /// Names of the served ports.
    pub services: BTreeMap<ServiceKey, (String, String)>,
    /// The last sweep.
    pub swept: Swept,
    /// All of them since the start.
    pub sweeps: Sweeps,
}

/// What the sweeps since the start came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sweeps {
    /// How many there were.
    pub number: u64,
    /// How long the last one took.
    pub duration: Duration,
    /// Flows that they have removed.
    pub removed_flows: u64,
    /// Replies that they have removed.
    pub removed_replies: u64,
    /// Source ports of clients inside the cluster that they have given back.
    pub removed_masquerades: u64,
}

/// For the loop.
pub type Publisher = watch::Sender<Health>;
/// For probes and metrics.
pub type Subscriber = watch::Receiver<Health>;

impl Health {
    /// Notes a sweep that took so long.
    pub fn note_sweep(&mut self, swept: Swept, duration: Duration) {
        let Sweeps { number, duration: last, removed_flows, removed_replies, removed_masquerades } =
            &mut self.sweeps;
        *number += 1;
        *last = duration;
        *removed_flows += swept.removed_flows;
        *removed_replies += swept.removed_replies;
        *removed_masquerades += swept.removed_masquerades;
        self.swept = swept;
    }

    /// A loop whose next pass is overdue for so long hangs.
    const HANGS: Duration = Duration::from_secs(120);

    /// Why the process should be restarted; `None` while it is fine.
    pub fn hangs(&self, now: Instant) -> Option<String> {
        let since = now.saturating_duration_since(self.alive?);
        (since > self.period + Self::HANGS).then(|| format!("no pass for {} s", since.as_secs()))
    }

    /// Why the node is not as wanted; `None` when it is. What a loop that hangs has found last is not known to hold.
    pub fn not_ready(&self, now: Instant) -> Option<String> {
        if let Some(hangs) = self.hangs(now) {
            return Some(hangs);
        }
        if self.is_ready {
            return None;
        }
        if self.problems.is_empty() {
            return Some("the first pass is not over".to_owned());
        }
        Some(self.problems.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_never_began_or_has_just_begun_is_alive() {
        let now = Instant::now();
        assert_eq!(Health::default().hangs(now), None);
        let health = Health { alive: Some(now), ..Health::default() };
        assert_eq!(health.hangs(now + Duration::from_secs(100)), None);
        assert_eq!(health.hangs(now + Duration::from_secs(121)).as_deref(), Some("no pass for 121 s"));
    }

    /// Otherwise `--period=600` alone would get a good agent restarted.
    #[test]
    fn a_loop_may_wait_for_its_period() {
        let now = Instant::now();
        let health = Health { alive: Some(now), period: Duration::from_secs(600), ..Health::default() };
        assert_eq!(health.hangs(now + Duration::from_secs(720)), None);
        assert!(health.hangs(now + Duration::from_secs(721)).is_some());
    }

    #[test]
    fn a_loop_that_hangs_is_not_ready() {
        let now = Instant::now();
        let health = Health { alive: Some(now), is_ready: true, ..Health::default() };
        assert_eq!(health.not_ready(now), None);
        let later = now + Duration::from_secs(121);
        assert_eq!(health.not_ready(later).as_deref(), Some("no pass for 121 s"));
    }

    #[test]
    fn sweeps_add_up() {
        let mut health = Health::default();
        for seconds in [3, 2] {
            let swept =
                Swept { removed_flows: 5, removed_replies: 6, removed_masquerades: 7, ..Swept::default() };
            health.note_sweep(swept, Duration::from_secs(seconds));
        }
        let duration = Duration::from_secs(2);
        let (removed_flows, removed_replies, removed_masquerades) = (10, 12, 14);
        let expected = Sweeps { number: 2, duration, removed_flows, removed_replies, removed_masquerades };
        assert_eq!(health.sweeps, expected);
        assert_eq!(health.swept.removed_flows, 5);
    }

    #[test]
    fn not_ready_says_why() {
        let now = Instant::now();
        assert!(Health::default().not_ready(now).unwrap().contains("first pass"));
        let health = Health { problems: vec!["no bridge".to_owned()], ..Health::default() };
        assert_eq!(health.not_ready(now).as_deref(), Some("no bridge"));
        assert_eq!(Health { is_ready: true, ..health }.not_ready(now), None);
    }
}
