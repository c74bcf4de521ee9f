//! lb-agent

fn main() {}
