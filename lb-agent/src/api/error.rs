//! What an error of the API means, for people.

use kube::core::Status;
use std::error::Error;
use std::fmt::Write as _;

/// The error with all its causes, and what to do where that is known.
pub fn explain(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => explain_status(status),
        other => with_causes(other),
    }
}

/// The same for an error that the server reports inside a watch.
pub fn explain_status(status: &Status) -> String {
    let Status { code, message, .. } = status;
    match code {
        401 => format!(
            "the API server does not accept this agent's credentials (401 {message}): the token has expired, or is \
             another cluster's, or its ServiceAccount is gone"
        ),
        // The message names user, verb and resource.
        403 => format!("{message} (403): the agent's ClusterRole must allow it"),
        _ => format!("the API server says {code}: {message}"),
    }
}

/// The label of the error in metrics: the HTTP status, or `none` where no answer came.
pub fn code(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.code.to_string(),
        _ => "none".to_owned(),
    }
}

/// Errors of the HTTP stack say the least in their outermost text.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let inner = error.to_string();
        if !text.ends_with(&inner) {
            // A string takes any text.
            let _ = write!(text, ": {inner}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn api(code: u16, message: &str) -> kube::Error {
        kube::Error::Api(Status::failure(message, "").with_code(code).boxed())
    }

    #[test]
    fn what_is_forbidden_is_named_and_what_to_do() {
        let message = r#"nodes is forbidden: User "u" cannot list resource "nodes" in API group """#;
        let text = explain(&api(403, message));
        assert!(text.contains(r#"cannot list resource "nodes""#) && text.contains("ClusterRole"), "{text}");
        assert!(explain(&api(401, "Unauthorized")).contains("token has expired"));
        assert_eq!(explain(&api(500, "etcd is gone")), "the API server says 500: etcd is gone");
        assert_eq!(
            (code(&api(403, "")), code(&kube::Error::LinesCodecMaxLineLengthExceeded)),
            ("403".into(), "none".into())
        );
    }

    #[test]
    fn causes_are_told_once() {
        let inner = std::io::Error::other("connection refused");
        let text = explain(&kube::Error::Service(Box::new(std::io::Error::other(inner))));
        assert_eq!(text.matches("connection refused").count(), 1, "{text}");
    }
}
