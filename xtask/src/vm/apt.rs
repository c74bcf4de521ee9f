//! Debian's packages of a suite that the machine itself need not have: looked up and fetched by the machine's apt, with lists
//! and sources of their own. Nothing of it is installed.

use crate::sh;
use anyhow::{Context as _, Result, ensure};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variable that names where Debian's archives are: the part of their addresses before `debian` and
/// `debian-security`. Unless it is set, they are where the machine's apt has them from.
pub(super) const MIRROR: &str = "LB_DEBIAN_MIRROR";

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// One suite.
pub(super) struct Suite {
    configuration: PathBuf,
}

impl Suite {
    /// Gets the suite's lists, kept below `directory`.
    ///
    /// # Errors
    /// When it is not known where they are, or they cannot be fetched.
    pub(super) fn open(directory: &Path, suite: &str) -> Result<Self> {
        let root = directory.join(suite);
        for part in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(root.join(part)).with_context(|| format!("cannot make {}", root.display()))?;
        }
        let archive = archive(suite)?;
        ensure!(
            Path::new(KEYRING).is_file(),
            "{KEYRING} is missing: install the package debian-archive-keyring"
        );
        fs::write(root.join("sources.list"), format!("deb [signed-by={KEYRING}] {archive} {suite} main\n"))?;
        let configuration = root.join("apt.conf");
        fs::write(&configuration, configuration_of(&root))?;
        let this = Self { configuration };
        sh::output(&mut this.apt("apt-get", &["update", "--error-on=any"]))
            .with_context(|| format!("the packages of {suite} cannot be looked up"))?;
        Ok(this)
    }

    /// The newest release (`uname -r`) that begins with `prefix` and ends with `flavour`.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn newest(&self, prefix: &str, flavour: &str) -> Result<String> {
        let names = sh::output(&mut self.apt("apt-cache", &["pkgnames", &format!("linux-image-{prefix}")]))?;
        let releases = names.lines().filter_map(|name| name.strip_prefix("linux-image-"));
        releases
            .filter(|release| release.ends_with(flavour))
            .max_by_key(|release| numbers(release))
            .map(str::to_owned)
            .with_context(|| format!("the suite has no linux-image-{prefix}…{flavour}"))
    }

    /// Unpacks what the packages of a release have into `root`.
    ///
    /// Up to 6.18 all is in `linux-image-RELEASE`; from 6.19 on that is an empty shell over the others.
    ///
    /// # Errors
    /// When one cannot be fetched.
    pub(super) fn unpack(&self, release: &str, root: &Path) -> Result<()> {
        let packages = root.with_file_name("packages");
        fs::create_dir_all(&packages)?;
        fs::create_dir_all(root)?;
        let known = sh::output(&mut self.apt("apt-cache", &["pkgnames", "linux-"]))?;
        let names = ["image", "binary", "modules", "base"].map(|part| format!("linux-{part}-{release}"));
        let names: Vec<_> =
            names.iter().map(String::as_str).filter(|name| is_line_of(&known, name)).collect();
        let words = [&["download", "--quiet"], &names[..]].concat();
        sh::output(self.apt("apt-get", &words).current_dir(&packages))
            .with_context(|| format!("Linux {release} cannot be fetched"))?;
        for entry in fs::read_dir(&packages)? {
            sh::run(Command::new("dpkg-deb").arg("--extract").arg(entry?.path()).arg(root))?;
        }
        Ok(fs::remove_dir_all(&packages)?)
    }

    fn apt(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(words).env("APT_CONFIG", &self.configuration);
        command
    }
}

fn is_line_of(text: &str, line: &str) -> bool {
    text.lines().any(|found| found == line)
}

/// Where the archive of a suite is.
fn archive(suite: &str) -> Result<String> {
    let is_security = suite.ends_with("-security");
    if let Some(mirror) = env::var(MIRROR).ok().filter(|mirror| !mirror.is_empty()) {
        let name = if is_security { "debian-security" } else { "debian" };
        return Ok(format!("{}/{name}", mirror.trim_end_matches('/')));
    }
    let format = "$(LABEL) $(REPO_URI)";
    let known = sh::output(Command::new("apt-get").args(["indextargets", "--format", format]))
        .context("kernels are Debian's packages, which need apt")?;
    let label = if is_security { "Debian-Security " } else { "Debian " };
    let archive = known.lines().find_map(|line| line.strip_prefix(label));
    archive.map(str::to_owned).with_context(|| {
        format!(
            "apt has no archive labelled {label:?} here; run `apt-get update`, or name a mirror in {MIRROR}"
        )
    })
}

/// Lists, sources and cache below `root`; how the archive is reached stays the machine's.
fn configuration_of(root: &Path) -> String {
    let root = root.display();
    format!(
        r#"Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State::lists "{root}/lists";
Dir::Cache "{root}";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
APT::Sandbox::User "root";
"#
    )
}

/// The numbers in a release, without those of its flavour: by them releases of one kernel are ordered.
pub(super) fn numbers(release: &str) -> Vec<u32> {
    let version = release.split_once("-cloud").map_or(release, |(version, _)| version);
    version.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_ordered_by_their_numbers() {
        let ordered = [
            "6.12.86+deb13-cloud-amd64",
            "6.12.115+deb13-cloud-amd64",
            "6.12.115+deb13.1-cloud-amd64",
            "6.12.118+deb13-cloud-amd64",
        ];
        assert!(ordered.is_sorted_by_key(|release| numbers(release)));
        assert!(numbers("6.1.0-9-cloud-amd64") < numbers("6.1.0-57-cloud-amd64"));
    }
}
