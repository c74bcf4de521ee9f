//! Tests that a machine cannot run: said so that nobody takes them for passed.

use std::env;
use std::fmt::Display;
use std::io::Write as _;
use std::thread;

/// How the line of a skipped test begins; `cargo xtask test` counts these.
pub const MARK: &str = "SKIPPED ";

/// What a test needs. `None` when this machine does not have it, and then the test's name and the reason are on standard
/// output, also when the harness keeps what tests print.
///
/// # Panics
/// Instead, when the environment variable `CI` is set: there a skip is a failure.
pub fn unless<T, E: Display>(needed: Result<T, E>) -> Option<T> {
    match needed {
        Ok(needed) => Some(needed),
        Err(reason) => {
            assert!(!is_ci(), "in CI no test may be skipped: {reason}");
            let test = thread::current();
            let line = format!("\n{MARK}{}: {reason}\n", test.name().unwrap_or("a test"));
            // Not println: the harness would keep it. Nobody to tell is no reason to fail.
            let _ = std::io::stdout().write_all(line.as_bytes());
            None
        }
    }
}

/// Whether the environment variable `CI` is set.
pub fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|value| !value.is_empty())
}
