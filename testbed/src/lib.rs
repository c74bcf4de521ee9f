//! Network namespaces as hosts.
