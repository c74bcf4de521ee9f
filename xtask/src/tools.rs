//! Programs of other projects that draw and pack what is deployed: the machine's own where it has them, else built from
//! the Go module `deploy/tools`, which pins their versions.

use crate::sh::{self, find_program, say};
use anyhow::{Context as _, Result};
use std::path::PathBuf;
use std::process::Command;

/// `helm`. Versions differ in what they draw, so it is always the pinned one.
pub(crate) fn helm() -> Result<PathBuf> {
    built("helm", "helm.sh/helm/v4/cmd/helm")
}

/// `kustomize`.
pub(crate) fn kustomize() -> Result<PathBuf> {
    built("kustomize", "sigs.k8s.io/kustomize/kustomize/v5")
}

/// Below `target`. Go's own cache makes all but the first time quick, in every clone.
fn built(name: &str, package: &str) -> Result<PathBuf> {
    let program = sh::workspace().join("target/tools").join(name);
    let module = sh::workspace().join("deploy/tools");
    let go = find_program("go")
        .or_else(|| Some(PathBuf::from("/usr/local/go/bin/go")).filter(|go| go.is_file()))
        .with_context(|| format!("{name} is built with Go: install Go 1.26 or later (https://go.dev/dl)"))?;
    if !program.is_file() {
        say(&format!("building {name}, a few minutes the first time"));
    }
    let build = ["build", "-trimpath", "-ldflags=-s -w", "-o"];
    sh::run(Command::new(go).args(build).arg(&program).arg(package).current_dir(module))?;
    Ok(program)
}
