//! `cargo xtask setup`: what this machine lacks, installed. Quick when it lacks nothing: only paths are looked at.

use crate::bpf_toolchain::{self, TOOLCHAIN_OVERRIDE, Toolchain};
use crate::sh::{self, as_root, find_program, say};
use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use testbed::kubernetes::Binaries;

/// Programs that tests and demo run, and the packages that have them: the first that the machine's archive knows.
const PROGRAMS: [(&str, &[&str]); 14] = [
    ("bpftool", &["bpftool", "linux-tools-generic"]),
    ("bridge", &["iproute2"]),
    ("conntrack", &["conntrack"]),
    ("curl", &["curl"]),
    ("dnsmasq", &["dnsmasq-base"]),
    ("ethtool", &["ethtool"]),
    ("ip", &["iproute2"]),
    ("iperf3", &["iperf3"]),
    ("iptables", &["iptables"]),
    ("nft", &["nftables"]),
    ("nginx", &["nginx-light"]),
    ("ps", &["procps"]),
    ("tcpdump", &["tcpdump"]),
    ("tshark", &["tshark"]),
];

/// A compiler with a ready `core` for the BPF target, and its lints, in Debian's archive.
const READY_TOOLCHAIN: [&str; 4] = ["rustc-web", "cargo-web", "libstd-rust-web-dev-bpf", "rust-web-clippy"];

const BPFFS: &str = "/sys/fs/bpf";

/// Installs what is missing and says what it did.
pub(crate) fn run() -> Result<()> {
    let mut did = need(&PROGRAMS)?;
    did |= plugins()?;
    let (toolchain, installed) = toolchain()?;
    did |= installed;
    did |= linker(&toolchain)?;
    did |= bpffs()?;
    let how = match toolchain.core {
        bpf_toolchain::Core::Ready => "its core for BPF is ready-made",
        bpf_toolchain::Core::Source => "it compiles core for BPF from source",
    };
    let outcome = if did { "set up" } else { "nothing to set up" };
    say(&format!("{outcome}; BPF by {} ({how})", toolchain.rustc.display()));
    Ok(())
}

/// Go, which builds what tests on a Kubernetes API run, and what draws the chart. Demo and build do without it, so that a
/// machine which cannot have it is no failure here.
pub(crate) fn kubernetes() -> Result<()> {
    let Err(reason) = Binaries::can_be_had() else { return Ok(()) };
    if find_program("go").is_none() && find_program("apt-get").is_some() {
        refresh_lists()?;
        if packaged_go_is_new_enough() {
            say("the chart and tests on a Kubernetes API need Go");
            return install(&["golang-go"]);
        }
    }
    say(&format!(
        "without Kubernetes there is no look at the chart, no test and no demo on its API. {reason}"
    ));
    Ok(())
}

/// Whether the distribution's Go fetches the release that the module of the tests asks for: those since 1.21 do.
fn packaged_go_is_new_enough() -> bool {
    let known = sh::output(Command::new("apt-cache").args(["show", "--no-all-versions", "golang-go"]));
    let known = known.unwrap_or_default();
    let version = known.lines().find_map(|line| line.strip_prefix("Version: "));
    version.is_some_and(|version| {
        sh::succeeds(Command::new("dpkg").args(["--compare-versions", version, "ge", "2:1.21~"]))
    })
}

/// Installs these programs where they are missing: each with the packages that may have it. Whether anything had to be
/// installed; so for the other steps.
pub(crate) fn need(programs: &[(&str, &[&str])]) -> Result<bool> {
    let missing: Vec<_> = programs.iter().filter(|(program, _)| find_program(program).is_none()).collect();
    if missing.is_empty() {
        return Ok(false);
    }
    let names: Vec<_> = missing.iter().map(|(program, _)| *program).collect();
    say(&format!("missing: {}", names.join(", ")));
    if find_program("apt-get").is_none() {
        bail!(
            "install these with your distribution's package manager, then run this again: {}",
            names.join(" ")
        );
    }
    refresh_lists()?;
    let mut packages = Vec::new();
    for (program, choices) in missing {
        let package = choices.iter().find(|package| is_packaged(package));
        packages.push(*package.with_context(|| format!("no package has {program}; looked for {choices:?}"))?);
    }
    packages.sort_unstable();
    packages.dedup();
    install(&packages)?;
    Ok(true)
}

/// The CNI plugins that flannel's nodes run, which no PATH leads to.
fn plugins() -> Result<bool> {
    const PACKAGE: &str = "containernetworking-plugins";
    let Err(reason) = testbed::plugin_directory() else { return Ok(false) };
    if find_program("apt-get").is_none() {
        bail!("{reason}; install them with your distribution's package manager ({PACKAGE}, cni-plugins)");
    }
    refresh_lists()?;
    install(&[PACKAGE])?;
    Ok(true)
}

/// The toolchain for the BPF target: the one that is there; else the distribution's, if it has one that is new enough;
/// else rustup's nightly.
fn toolchain() -> Result<(Toolchain, bool)> {
    if let Ok(toolchain) = bpf_toolchain::find() {
        let has_lints = toolchain.rustc.with_file_name("cargo-clippy").is_file();
        if !has_lints && toolchain.rustc.starts_with("/usr/bin") && find_program("apt-get").is_some() {
            say("lints of the packet program need a package");
            install(&["rust-web-clippy"])?;
            return Ok((toolchain, true));
        }
        return Ok((toolchain, false));
    }
    if find_program("apt-get").is_some() {
        refresh_lists()?;
        if READY_TOOLCHAIN.iter().all(|package| is_packaged(package)) {
            say("installing the distribution's Rust with core for BPF");
            install(&READY_TOOLCHAIN)?;
            if let Ok(toolchain) = bpf_toolchain::find() {
                return Ok((toolchain, true));
            }
            say("it is too old; trying rustup");
        }
    }
    if find_program("rustup").is_some() {
        let name = std::env::var(TOOLCHAIN_OVERRIDE).unwrap_or_else(|_| "nightly".to_owned());
        say(&format!("installing rustup's {name} with rust-src"));
        sh::run(
            Command::new("rustup").args(["toolchain", "install", &name, "--profile", "minimal"]).args([
                "--component",
                "rust-src",
                "--component",
                "clippy",
            ]),
        )?;
    }
    let toolchain = bpf_toolchain::find().context(
        "install rustup (https://rustup.rs), then `rustup toolchain install nightly --component rust-src --component clippy`",
    )?;
    Ok((toolchain, true))
}

/// bpf-linker, built against the LLVM that the toolchain has: older ones do not read a newer rustc's bitcode.
fn linker(toolchain: &Toolchain) -> Result<bool> {
    if bpf_toolchain::find_linker().is_some() {
        return Ok(false);
    }
    let llvm = llvm_major(&toolchain.rustc)?;
    let prefix = PathBuf::from(format!("/usr/lib/llvm-{llvm}"));
    if find_program("apt-get").is_some() {
        let development = format!("llvm-{llvm}-dev");
        let polly = format!("libpolly-{llvm}-dev");
        if !prefix.join("include/llvm-c").is_dir() {
            refresh_lists()?;
        }
        if is_packaged(&development) {
            let wanted = [&development, "libzstd-dev", "zlib1g-dev", &polly];
            let packages: Vec<_> = wanted.into_iter().filter(|package| is_packaged(package)).collect();
            say(&format!("bpf-linker needs LLVM {llvm}'s libraries"));
            install(&packages)?;
        }
    }
    say("installing bpf-linker, about a minute");
    let mut command = sh::cargo();
    command.args(["install", "bpf-linker", "--locked"]);
    if prefix.is_dir() {
        // llvm-sys looks for its version by name, the linker's own build script for LLVM_PREFIX and llvm-config.
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .args(["--no-default-features", "--features", &format!("llvm-{llvm}")])
            .env("LLVM_PREFIX", &prefix)
            .env(format!("LLVM_SYS_{llvm}1_PREFIX"), &prefix)
            .env("PATH", format!("{}:{path}", prefix.join("bin").display()));
    }
    sh::run(&mut command).context(
        "bpf-linker does not build here; a binary from its project's release page in a directory of PATH does as well",
    )?;
    Ok(true)
}

/// The major version of the LLVM inside a compiler.
fn llvm_major(rustc: &Path) -> Result<u32> {
    let output =
        Command::new(rustc).arg("--version").arg("--verbose").env_remove("LD_LIBRARY_PATH").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .find_map(|line| line.strip_prefix("LLVM version: ")?.split('.').next()?.parse().ok())
        .with_context(|| format!("{} does not name its LLVM: {text}", rustc.display()))
}

/// Pins live here; systemd mounts it at boot, containers and small systems do not.
fn bpffs() -> Result<bool> {
    if statfs(BPFFS).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC) {
        return Ok(false);
    }
    say(&format!("mounting bpffs on {BPFFS}"));
    sh::run(as_root("mount", "mounting a file system").args(["-t", "bpf", "bpf", BPFFS]))?;
    Ok(true)
}

/// The package lists, once: a fresh container has none, and old ones name files that are gone.
fn refresh_lists() -> Result<()> {
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    sh::run(as_root("apt-get", "refreshing the package lists").args(["update", "--quiet"]))
}

/// Whether apt knows a real package of this name.
fn is_packaged(package: &str) -> bool {
    sh::succeeds(Command::new("apt-cache").args(["show", "--no-all-versions", package]))
}

/// Installs packages without their recommendations, and without their services: nginx would take port 80.
fn install(packages: &[&str]) -> Result<()> {
    // invoke-rc.d and deb-systemd-invoke ask policy-rc.d; 101 forbids every start. An own policy stays as it is.
    // A package that is new here is also kept from starting at the next boot.
    const SCRIPT: &str = r#"
        set -eu
        policy=/usr/sbin/policy-rc.d
        had_nginx=$(command -v nginx || true)
        if [ ! -e $policy ]; then
            trap 'rm -f $policy' EXIT
            printf '#!/bin/sh\nexit 101\n' >$policy
            chmod +x $policy
        fi
        DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends "$@"
        if [ -z "$had_nginx" ] && [ -e /lib/systemd/system/nginx.service ] && command -v systemctl >/dev/null; then
            systemctl disable --quiet nginx
        fi
    "#;
    ensure!(!packages.is_empty(), "no package to install");
    let why = format!("installing {}", packages.join(" "));
    say(&why);
    sh::run(as_root("sh", &why).args(["-c", SCRIPT, "setup"]).args(packages))
}
