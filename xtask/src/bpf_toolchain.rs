//! Which cargo, rustc and linker build for the BPF target on this machine.
//!
//! Shared by `cargo xtask` and the agent's build script (which includes this file by path), so that both always
//! agree; therefore the standard library only. Two kinds of toolchain do:
//!
//! - one that comes with a compiled `core` for the target, as Debian's `libstd-rust-web-dev-bpf` does;
//! - a nightly of rustup with the `rust-src` component, which compiles `core` on the way.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The target of the packet program. Little-endian hosts only.
pub(crate) const TARGET: &str = "bpfel-unknown-none";

/// Takes the place of every search: the path of a `rustc`; its `cargo` is expected beside it.
pub(crate) const RUSTC_OVERRIDE: &str = "REWEAVE_BPF_RUSTC";

/// The name of the rustup toolchain to try, `nightly` unless set.
pub(crate) const TOOLCHAIN_OVERRIDE: &str = "REWEAVE_BPF_TOOLCHAIN";

/// The oldest compiler that the workspace (and aya-ebpf) accepts, as (major, minor).
const OLDEST: (u32, u32) = (1, 89);

/// Where `core` for the target comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Core {
    /// It lies in the sysroot, compiled.
    Ready,
    /// From the sysroot's source, by `-Z build-std`.
    Source,
}

/// A compiler that can build for [`TARGET`].
#[derive(Clone, Debug)]
pub(crate) struct Toolchain {
    /// The compiler itself, not a proxy.
    pub(crate) rustc: PathBuf,
    /// Where `core` comes from.
    pub(crate) core: Core,
}

/// No toolchain was found: what was looked at, and what it lacked.
#[derive(Debug)]
pub(crate) struct Missing {
    tried: Vec<String>,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no Rust toolchain here can build for {TARGET}; run `cargo xtask setup`")?;
        self.tried.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

impl std::error::Error for Missing {}

/// Finds the toolchain: the override alone if it is set, else the first that will do.
pub(crate) fn find() -> Result<Toolchain, Missing> {
    let mut tried = Vec::new();
    for (what, rustc) in candidates() {
        let outcome = match rustc {
            Some(rustc) => inspect(rustc),
            None => Err("not installed".to_owned()),
        };
        match outcome {
            Ok(toolchain) => return Ok(toolchain),
            Err(lacks) => tried.push(format!("{what}: {lacks}")),
        }
    }
    Err(Missing { tried })
}

/// Finds `bpf-linker`, which rustc calls by name: in `PATH`, or where `cargo install` puts it.
pub(crate) fn find_linker() -> Option<PathBuf> {
    let cargo_home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(cargo_home.map(|home| home.join("bin")))
        .map(|dir| dir.join("bpf-linker"))
        .find(|file| file.is_file())
}

impl Toolchain {
    /// `cargo SUBCOMMAND --package lb-ebpf` for the BPF target, with the flags that it needs.
    /// `arch` is the host's architecture as in `cfg(target_arch)`: aya-ebpf lays out `pt_regs` by it.
    pub(crate) fn cargo(&self, subcommand: &str, arch: &str) -> Command {
        let cargo = self.rustc.with_file_name("cargo");
        let mut command = match subcommand {
            // As `cargo clippy` would look it up in PATH, where another toolchain's may come first.
            "clippy" => Command::new(self.rustc.with_file_name("cargo-clippy")),
            _ => Command::new(&cargo),
        };
        forget_outer_cargo(&mut command);
        command
            .arg(subcommand)
            .args(["--package", "lb-ebpf", "--release", "--target", TARGET])
            .env("CARGO", &cargo)
            .env("RUSTC", &self.rustc)
            // aya-ebpf asks for unstable features.
            .env("RUSTC_BOOTSTRAP", "1")
            // Debug information and --btf together give the maps and programs their BTF. With memcpy "in order" LLVM
            // leaves small memsets as calls, loops over bytes for each packet. \x1f separates flags.
            .env(
                "CARGO_ENCODED_RUSTFLAGS",
                format!("--cfg=bpf_target_arch=\"{arch}\"\x1f-Cdebuginfo=2\x1f-Clink-arg=--btf\x1f-Clink-arg=--disable-expand-memcpy-in-order"),
            );
        if let Some(linker) = find_linker() {
            command.env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", linker);
        }
        if self.core == Core::Source {
            command.args(["-Z", "build-std=core"]);
        }
        command
    }
}

/// The compilers to look at, in order, each with words for people.
fn candidates() -> Vec<(String, Option<PathBuf>)> {
    if let Some(rustc) = env::var_os(RUSTC_OVERRIDE) {
        return vec![(format!("{RUSTC_OVERRIDE}={}", rustc.display()), Some(rustc.into()))];
    }
    let toolchain = env::var_os(TOOLCHAIN_OVERRIDE).unwrap_or_else(|| "nightly".into());
    let of_rustup = answer(
        Path::new("rustup"),
        &["which".as_ref(), "--toolchain".as_ref(), toolchain.as_ref(), "rustc".as_ref()],
    );
    vec![
        // By its full path: where rustup is installed too, PATH usually finds rustup's.
        (
            "the distribution's /usr/bin/rustc".to_owned(),
            Some(PathBuf::from("/usr/bin/rustc")).filter(|rustc| rustc.is_file()),
        ),
        ("rustc in PATH".to_owned(), sysroot(Path::new("rustc")).map(|root| root.join("bin/rustc"))),
        (format!("rustup's {}", toolchain.display()), of_rustup.map(PathBuf::from)),
    ]
}

/// What a compiler offers, or what it lacks.
fn inspect(rustc: PathBuf) -> Result<Toolchain, String> {
    let version = answer(&rustc, &["--version".as_ref()]).ok_or("it does not run")?;
    if parse_version(&version).is_none_or(|found| found < OLDEST) {
        return Err(format!("{version} is older than {}.{}", OLDEST.0, OLDEST.1));
    }
    let rustlib = sysroot(&rustc).ok_or("it names no sysroot")?.join("lib/rustlib");
    if rustlib.join(TARGET).is_dir() {
        Ok(Toolchain { rustc, core: Core::Ready })
    } else if rustlib.join("src/rust/library/core").is_dir() {
        Ok(Toolchain { rustc, core: Core::Source })
    } else {
        Err(format!("{version} has neither {TARGET} nor the rust-src component"))
    }
}

fn sysroot(rustc: &Path) -> Option<PathBuf> {
    answer(rustc, &["--print".as_ref(), "sysroot".as_ref()]).map(PathBuf::from)
}

/// (major, minor) out of `rustc 1.96.0 (…)`.
fn parse_version(line: &str) -> Option<(u32, u32)> {
    let mut numbers = line.split_whitespace().nth(1)?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// What a program prints, without the line end; `None` if it is not there or fails.
fn answer(program: &Path, args: &[&OsStr]) -> Option<String> {
    let mut command = Command::new(program);
    forget_outer_cargo(&mut command);
    let output = command.args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim_end().to_owned())
}

/// A cargo that runs us has set much that is true of its own toolchain, target and package only.
fn forget_outer_cargo(command: &mut Command) {
    for (name, _) in env::vars_os().filter(|(name, _)| is_of_outer_cargo(name)) {
        command.env_remove(name);
    }
}

fn is_of_outer_cargo(name: &OsString) -> bool {
    // How the user reaches the registry and wants to be talked to holds for the inner cargo too.
    const KEEP: [&str; 6] =
        ["CARGO_HOME", "CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTRIES_", "CARGO_REGISTRY_", "CARGO_TERM_"];
    // LD_LIBRARY_PATH: cargo points it at its own compiler's libraries, and another compiler would load those.
    const FORGET: [&str; 6] =
        ["CARGO", "RUSTC", "RUSTDOC", "RUSTFLAGS", "RUSTUP_TOOLCHAIN", "LD_LIBRARY_PATH"];
    let name = name.to_string_lossy();
    FORGET.iter().any(|prefix| name.starts_with(prefix))
        && !KEEP.iter().any(|prefix| name.starts_with(prefix))
}
