//! Where the programs of Kubernetes come from: what the user names, what is installed, what was built before, or a
//! build by Go.

use super::build;
use anyhow::Context as _;
use std::collections::BTreeMap;
use std::env;
use std::fmt;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variable that names the directory to keep built programs in, instead of the user's cache.
pub const CACHE: &str = "LB_CACHE";

/// Where envtest and its kin put kube-apiserver, etcd and kubectl.
const ASSETS: &str = "KUBEBUILDER_ASSETS";

/// The Go module that pins the releases.
const GO_MOD: &str = include_str!("../../kubernetes/go.mod");
const GO_SUM: &str = include_str!("../../kubernetes/go.sum");

/// A program that the tests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    /// The store.
    Etcd,
    /// The API.
    ApiServer,
    /// Makes EndpointSlices, ServiceAccounts, and what else is made out of objects.
    ControllerManager,
    /// Programs a node for Services.
    KubeProxy,
    /// The command line.
    Kubectl,
    /// Renders and installs charts.
    Helm,
}

impl Program {
    /// All, the quickest to build first.
    pub const ALL: [Self; 6] =
        [Self::Etcd, Self::Kubectl, Self::KubeProxy, Self::ApiServer, Self::ControllerManager, Self::Helm];

    /// The name of its file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::KubeProxy => "kube-proxy",
            Self::Kubectl => "kubectl",
            Self::Helm => "helm",
        }
    }

    /// The module that it is a part of, and its package in it.
    pub(super) fn package(self) -> (&'static str, String) {
        match self {
            Self::Etcd => ("go.etcd.io/etcd/server/v3", String::new()),
            Self::Helm => ("helm.sh/helm/v4", "/cmd/helm".to_owned()),
            _ => ("k8s.io/kubernetes", format!("/cmd/{}", self.name())),
        }
    }

    /// The release that the module pins, as in `v1.37.2`.
    pub(super) fn release(self) -> &'static str {
        let (module, _) = self.package();
        let mut lines = GO_MOD.lines().map(str::trim);
        lines
            .find_map(|line| line.strip_prefix(module)?.strip_prefix(' ')?.split(' ').next())
            .unwrap_or("a release that go.mod does not name")
    }

    /// Asks an installed one for its version: whether it is of the minor release that the module pins. Others may differ
    /// in what a test looks at.
    fn is_of_our_release(self, file: &Path) -> bool {
        let words: &[&str] = match self {
            Self::Kubectl => &["version", "--client"],
            Self::Helm => &["version", "--short"],
            _ => &["--version"],
        };
        let Ok(output) = Command::new(file).args(words).output() else { return false };
        let release = self.release().trim_start_matches('v');
        let minor = release.rsplit_once('.').map_or(release, |(minor, _)| minor);
        output.status.success() && names_release(&String::from_utf8_lossy(&output.stdout), minor)
    }
}

/// Whether a version such as `v1.37.2` or `1.37.0-rc.1` in the text belongs to that minor release, as in `1.37`.
fn names_release(text: &str, minor: &str) -> bool {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '.'))
        .map(|word| word.trim_start_matches('v'))
        .any(|word| word.strip_prefix(minor).is_some_and(|rest| rest.starts_with('.')))
}

/// Why the programs cannot be had on this machine.
#[derive(Debug)]
pub struct Unavailable(anyhow::Error);

impl fmt::Display for Unavailable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Kubernetes' programs cannot be had: {:#}", self.0)
    }
}

impl std::error::Error for Unavailable {}

/// The files of programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binaries {
    files: BTreeMap<Program, PathBuf>,
}

impl Binaries {
    /// Takes each program from `KUBEBUILDER_ASSETS`; else from `PATH`, when it is of the release that
    /// `testbed/kubernetes/go.mod` pins; else from the cache, where it is built first if need be. That takes minutes,
    /// and says so on standard error.
    ///
    /// # Errors
    /// When a program is missing and Go cannot build it: what to install.
    pub fn find() -> Result<Self, Unavailable> {
        Self::find_only(&Program::ALL)
    }

    /// The same for some of them: for whoever needs no API.
    ///
    /// # Errors
    /// As [`Binaries::find`].
    pub fn find_only(programs: &[Program]) -> Result<Self, Unavailable> {
        Self::look(programs).map_err(Unavailable)
    }

    /// Whether [`Binaries::find`] would find all or could build what is missing; quick, and nothing is built.
    ///
    /// # Errors
    /// When it could not: what to install.
    pub fn can_be_had() -> Result<(), Unavailable> {
        let at_hand = || {
            let cache = cache()?;
            let has = |program: Program| installed(program).is_some() || cache.join(program.name()).is_file();
            if Program::ALL.into_iter().all(has) { Ok(()) } else { build::check_go() }
        };
        at_hand().map_err(Unavailable)
    }

    /// One program's file.
    ///
    /// # Panics
    /// When it is none of those that were looked for.
    pub fn path(&self, program: Program) -> &Path {
        &self.files[&program]
    }

    fn look(programs: &[Program]) -> anyhow::Result<Self> {
        let (mut files, mut missing) = (BTreeMap::new(), Vec::new());
        let cache = cache()?;
        for &program in programs {
            let cached = cache.join(program.name());
            match installed(program).or_else(|| cached.is_file().then(|| cached.clone())) {
                Some(file) => drop(files.insert(program, file)),
                None => missing.push(program),
            }
        }
        if missing.is_empty() {
            return Ok(Self { files });
        }
        fs::create_dir_all(&cache).with_context(|| format!("{} cannot be made", cache.display()))?;
        // Tests of several processes want them at once; the second finds what the first has built.
        let lock = File::create(cache.join("lock"))?;
        lock.lock()?;
        for program in missing {
            let file = cache.join(program.name());
            if !file.is_file() {
                build::build(program, &file)?;
            }
            files.insert(program, file);
        }
        Ok(Self { files })
    }
}

/// One that the user has named or installed.
fn installed(program: Program) -> Option<PathBuf> {
    if let Some(directory) = env::var_os(ASSETS) {
        let file = Path::new(&directory).join(program.name());
        if file.is_file() {
            return Some(file);
        }
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .map(|directory| directory.join(program.name()))
        .find(|file| file.is_file() && program.is_of_our_release(file))
}

/// Where built programs are kept. Never inside the clone: they outlive it.
///
/// # Errors
/// When the environment has neither [`CACHE`] nor a home.
pub fn cache_root() -> Result<PathBuf, Unavailable> {
    directory_in(CACHE, "")
        .or_else(|| directory_in("XDG_CACHE_HOME", "reweave-lb"))
        .or_else(|| directory_in("HOME", ".cache/reweave-lb"))
        .with_context(|| format!("neither {CACHE} nor HOME says where built programs may be kept"))
        .map_err(Unavailable)
}

/// The directory for what this module's content and the recipe produce.
fn cache() -> anyhow::Result<PathBuf> {
    let root = cache_root()?;
    // It need not be the same from one Rust release to the next: then they are built once more.
    let mut hasher = DefaultHasher::new();
    (GO_MOD, GO_SUM, build::RECIPE).hash(&mut hasher);
    let release = Program::ApiServer.release();
    Ok(root.join("kubernetes").join(format!("{release}-{:016x}", hasher.finish())))
}

fn directory_in(variable: &str, below: &str) -> Option<PathBuf> {
    let value = env::var_os(variable).filter(|value| !value.is_empty())?;
    Some(Path::new(&value).join(below))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_pins_a_release_of_every_program() {
        for program in Program::ALL {
            let release = program.release();
            assert!(release.starts_with('v') && release.split('.').count() == 3, "{program:?}: {release}");
        }
        assert!(Program::Kubectl.release().starts_with("v1."));
        assert_eq!(Program::Kubectl.release(), Program::KubeProxy.release());
    }

    #[test]
    fn only_the_pinned_minor_release_is_taken_from_the_path() {
        for text in [
            "Kubernetes v1.37.2",
            "etcd Version: 1.37.0\nGit SHA: 5ed3eb7",
            "Client Version: v1.37.0-rc.1\nKustomize Version: v5.5.0",
            "v1.37.2+g1234567",
        ] {
            assert!(names_release(text, "1.37"), "{text}");
        }
        for text in ["Kubernetes v1.36.9", "Kubernetes v1.3.7", "Kubernetes v11.37.2", "v1.370.1", "", "1.37"]
        {
            assert!(!names_release(text, "1.37"), "{text}");
        }
    }
}
