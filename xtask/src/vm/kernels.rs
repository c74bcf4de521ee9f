//! The list of kernels: `xtask/kernels.yaml`, the only place that names them.

use anyhow::{Context as _, Result};
use serde::Deserialize;

const LIST: &str = include_str!("../../kernels.yaml");

/// A kernel to test.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Kernel {
    /// As it is named on the command line.
    pub(super) name: String,
    /// Debian's suite that has it.
    pub(super) suite: String,
    /// What the release (`uname -r`) begins with.
    pub(super) release: String,
    /// Modules that it is known to lack.
    pub(super) lacks: Vec<String>,
}

/// Those with these names, all without names, in the order of the list.
pub(super) fn named(names: &[String]) -> Result<Vec<Kernel>> {
    let all: Vec<Kernel> = serde_saphyr::from_str(LIST).context("xtask/kernels.yaml")?;
    for name in names {
        let known = || all.iter().map(|kernel| kernel.name.as_str()).collect::<Vec<_>>().join(", ");
        all.iter()
            .find(|kernel| kernel.name == *name)
            .with_context(|| format!("no kernel {name} in xtask/kernels.yaml; it has {}", known()))?;
    }
    Ok(all.into_iter().filter(|kernel| names.is_empty() || names.contains(&kernel.name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_chosen_by_name() {
        let all = named(&[]).unwrap();
        assert!(all.len() >= 5, "{all:?}");
        let two = named(&["6.12".to_owned(), "5.10".to_owned()]).unwrap();
        assert_eq!(two.iter().map(|kernel| kernel.name.as_str()).collect::<Vec<_>>(), ["5.10", "6.12"]);
        let error = named(&["2.6".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("no kernel 2.6") && error.contains("6.12"), "{error}");
    }

    #[test]
    fn a_release_belongs_to_one_kernel_of_its_suite() {
        let all = named(&[]).unwrap();
        for one in &all {
            for other in all.iter().filter(|other| other.suite == one.suite && other.name != one.name) {
                assert!(!one.release.starts_with(&other.release), "{} and {}", one.name, other.name);
            }
        }
    }
}
