//! Waiting for something to become true, instead of for some time to pass.

use anyhow::Result;
use std::thread;
use std::time::{Duration, Instant};

const SHORTEST: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_millis(50);

/// Looks again and again, every 5 to 50 ms, until `look` succeeds, and returns what it saw.
///
/// # Errors
/// After `limit`: what was awaited, and the last error of `look`, which should say what it saw instead.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    let mut pause = SHORTEST;
    loop {
        match look() {
            Ok(seen) => return Ok(seen),
            Err(error) if started.elapsed() >= limit => {
                return Err(error.context(format!("awaited for {limit:?}: {what}")));
            }
            Err(_) => {}
        }
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place that waits between two looks at a condition"
        )]
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::ensure;

    #[test]
    fn returns_what_was_seen_as_soon_as_it_is_seen() {
        let mut looks = 0;
        let seen = until("three looks", Duration::from_secs(5), || {
            looks += 1;
            ensure!(looks == 3, "{looks} looks");
            Ok(looks)
        });
        assert_eq!(seen.unwrap(), 3);
    }

    #[test]
    fn an_error_names_what_was_awaited_and_what_was_seen() {
        let error = until::<()>("snow", Duration::from_millis(20), || anyhow::bail!("rain")).unwrap_err();
        assert_eq!(format!("{error:#}"), "awaited for 20ms: snow: rain");
    }
}
