//! What runs on a machine: test binaries and the programs that they call, each at its path here, with the libraries that it
//! loads.
//!
//! They are the binaries that `cargo xtask test` runs. A static build would need none of the libraries, but be a second
//! build of everything, and programs such as `ip` need theirs all the same.

use super::cpio::Archive;
use crate::{build, sh};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Programs that testbed, agent and tests call, and what the kernel calls.
const PROGRAMS: [&str; 17] = [
    "bridge",
    "bpftool",
    "conntrack",
    "curl",
    "dnsmasq",
    "ethtool",
    "ip",
    "iperf3",
    "iptables",
    "iptables-restore",
    "iptables-save",
    "modprobe",
    "nft",
    "nginx",
    "sh",
    "tc",
    "tcpdump",
];

/// Libraries that programs look for by themselves: iptables' extensions.
const PLUGINS: &str = "/usr/lib/x86_64-linux-gnu/xtables";

/// Read by programs that become another user.
const FILES: [&str; 4] = ["/etc/passwd", "/etc/group", "/etc/protocols", "/etc/services"];

/// Files for a machine: their path there, and where they are here.
pub(super) struct Payload {
    files: BTreeMap<PathBuf, PathBuf>,
    tests: BTreeMap<String, PathBuf>,
}

impl Payload {
    /// Builds the tests and finds the rest.
    ///
    /// # Errors
    /// When something is missing here.
    pub(super) fn gather(tests: &[&str]) -> Result<Self> {
        let mut this = Self { files: BTreeMap::new(), tests: BTreeMap::new() };
        sh::say("building the tests");
        let stripped = super::directory().join("stripped");
        fs::create_dir_all(&stripped)?;
        for (name, file) in built(tests)? {
            // Debug information is most of their size.
            let small = stripped.join(&name);
            sh::output(Command::new("strip").arg("-o").arg(&small).arg(&file))?;
            this.libraries(&file)?;
            this.files.insert(file.clone(), small);
            this.tests.insert(name, file);
        }
        for program in PROGRAMS {
            let file = sh::find_program(program).with_context(|| format!("{program} is missing"))?;
            this.libraries(&file)?;
            this.files.insert(file.clone(), file);
        }
        let plugins =
            fs::read_dir(PLUGINS).with_context(|| format!("no extensions of iptables in {PLUGINS}"))?;
        for plugin in plugins {
            let file = plugin?.path();
            this.libraries(&file)?;
            this.files.insert(file.clone(), file);
        }
        this.files.extend(
            FILES
                .map(PathBuf::from)
                .into_iter()
                .filter(|file| file.is_file())
                .map(|file| (file.clone(), file)),
        );
        Ok(this)
    }

    /// Where a test binary is on the machine.
    pub(super) fn test(&self, name: &str) -> Result<&Path> {
        self.tests.get(name).map(PathBuf::as_path).with_context(|| format!("no test {name} was built"))
    }

    /// Writes them as an archive, with `more` files.
    pub(super) fn write(&self, out: &mut impl Write, more: &[(&str, String)]) -> Result<()> {
        let mut archive = Archive::new(out);
        for (path, from) in &self.files {
            archive.copy(path, from)?;
        }
        for (path, content) in more {
            archive.file(Path::new(path), 0o644, content.as_bytes())?;
        }
        archive.finish()?;
        Ok(())
    }

    /// What the dynamic linker would load for a file.
    fn libraries(&mut self, file: &Path) -> Result<()> {
        let output =
            Command::new("ldd").arg(file).env_remove("LD_LIBRARY_PATH").output().context("cannot run ldd")?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(!said.contains("not found"), "{} lacks libraries: {said}", file.display());
        // A static one loads nothing, and ldd calls that a failure.
        for library in said.lines().filter_map(library) {
            self.files.insert(library.to_owned(), library.to_owned());
        }
        Ok(())
    }
}

/// Out of `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f…)`, or `/lib64/ld-linux-x86-64.so.2 (0x7f…)`.
fn library(line: &str) -> Option<&Path> {
    let line = line.trim();
    let path = line.split_once("=> ").map_or(line, |(_, path)| path).split(" (").next()?;
    path.starts_with('/').then(|| Path::new(path))
}

/// Builds the agent and these test binaries of its package: names and files.
fn built(tests: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    let mut command = sh::cargo();
    command.args([
        "test",
        "--no-run",
        "--package",
        "lb-agent",
        "--message-format",
        "json-render-diagnostics",
    ]);
    for test in tests {
        command.args(["--test", test]);
    }
    command.arg("--target-dir").arg(build::target());
    let output = command.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    ensure!(output.status.success(), "the tests do not build");
    let said = String::from_utf8(output.stdout)?;
    let mut found = Vec::new();
    for line in said.lines() {
        let message: Value = serde_json::from_str(line)?;
        if let (Some(name), Some(file)) = (message["target"]["name"].as_str(), message["executable"].as_str())
        {
            found.push((name.to_owned(), PathBuf::from(file)));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_what_ldd_says() {
        let lines = [
            ("\tlinux-vdso.so.1 (0x00007ffc0e7f2000)", None),
            (
                "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f1b)",
                Some("/lib/x86_64-linux-gnu/libc.so.6"),
            ),
            ("\t/lib64/ld-linux-x86-64.so.2 (0x00007f1b6a5d2000)", Some("/lib64/ld-linux-x86-64.so.2")),
            ("\tstatically linked", None),
        ];
        for (line, path) in lines {
            assert_eq!(library(line), path.map(Path::new), "{line}");
        }
    }
}
