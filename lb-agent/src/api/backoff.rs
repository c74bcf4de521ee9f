//! How long to wait before something is tried again.

use fastrand::Rng;
use std::time::Duration;

/// Doubles from `first` up to `most`. Half of each wait is left to chance, so that the agents of a cluster do not
/// come back in one moment.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    most: Duration,
    failures: u32,
    rng: Rng,
}

impl Backoff {
    /// Begins with `first`.
    pub fn new(first: Duration, most: Duration, rng: Rng) -> Self {
        Self { first, most, failures: 0, rng }
    }

    /// How long to wait after one more failure.
    pub fn after_failure(&mut self) -> Duration {
        let whole = self.first.saturating_mul(1 << self.failures.min(20)).min(self.most);
        self.failures = self.failures.saturating_add(1);
        whole.mul_f64(self.rng.f64().mul_add(0.5, 0.5))
    }

    /// Failures since the last success.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// It worked.
    pub fn succeeded(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_a_limit_and_begin_again_after_a_success() {
        let (first, most) = (Duration::from_secs(1), Duration::from_secs(10));
        let mut backoff = Backoff::new(first, most, Rng::with_seed(1));
        for whole in [1, 2, 4, 8, 10, 10].map(Duration::from_secs) {
            let wait = backoff.after_failure();
            assert!(whole / 2 <= wait && wait <= whole, "{wait:?} of {whole:?}");
        }
        assert_eq!(backoff.failures(), 6);
        backoff.succeeded();
        assert!(backoff.after_failure() <= first);
    }

    #[test]
    fn two_agents_do_not_wait_alike() {
        let second = Duration::from_secs(1);
        let mut waits: Vec<Duration> =
            (0..20).map(|seed| Backoff::new(second, second, Rng::with_seed(seed)).after_failure()).collect();
        waits.sort();
        waits.dedup();
        assert_eq!(waits.len(), 20);
    }
}
