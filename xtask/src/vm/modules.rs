//! The kernel's modules that a machine of ours gets: what networking may ask for, decompressed, with the index that
//! `modprobe` reads.

use super::cpio::Archive;
use crate::sh;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the tests need beside what every cluster's node has; looked for when the machine boots.
pub(super) const NEEDED: [&str; 18] = [
    "8021q",
    "br_netfilter",
    "bridge",
    "cls_bpf",
    "dummy",
    "geneve",
    "ip_vs",
    "ipip",
    "nf_conntrack",
    "nf_tables",
    "nft_compat",
    "sch_ingress",
    "sch_netem",
    "sctp",
    "veth",
    "vrf",
    "vxlan",
    "xt_MASQUERADE",
];

/// Directories below `kernel` that are taken whole, and those whose own files are.
const WHOLE: [&str; 5] = ["arch/x86/crypto", "crypto", "lib", "net", "drivers/net/vxlan"];
const FLAT: [&str; 1] = ["drivers/net"];

/// Takes from an unpacked kernel all but the modules named above, decompresses these and writes their index.
pub(super) fn prepare(root: &Path, release: &str) -> Result<()> {
    let tree = tree(root, release)?;
    let kernel = tree.join("kernel");
    for module in files(&kernel)? {
        let path = module.strip_prefix(&kernel)?;
        let directory = path.parent().unwrap_or(path);
        let is_wanted = WHOLE.iter().any(|whole| directory.starts_with(whole))
            || FLAT.iter().any(|flat| directory == Path::new(flat));
        if !is_wanted {
            fs::remove_file(&module)?;
        }
    }
    for (ending, program) in [("xz", "xz"), ("zst", "zstd")] {
        let compressed: Vec<_> = files(&kernel)?
            .into_iter()
            .filter(|file| file.extension().is_some_and(|e| e == ending))
            .collect();
        if !compressed.is_empty() {
            let rm: &[&str] = if program == "zstd" { &["--rm"] } else { &[] };
            sh::output(Command::new(program).args(["-d", "-q"]).args(rm).args(&compressed))?;
        }
    }
    // depmod looks in lib/modules; newer packages have usr/lib/modules.
    let base = tree.ancestors().nth(3).context("the modules are in no root")?;
    let depmod = sh::find_program("depmod").context("depmod is missing: it is part of kmod")?;
    sh::output(Command::new(depmod).arg("-b").arg(base).arg(release))?;
    Ok(())
}

/// Adds them as `/lib/modules/RELEASE`.
pub(super) fn pack<W: Write>(archive: &mut Archive<W>, root: &Path, release: &str) -> Result<()> {
    let tree = tree(root, release)?;
    let target = Path::new("/lib/modules").join(release);
    for file in files(&tree)? {
        let path = target.join(file.strip_prefix(&tree)?);
        archive.file(&path, 0o644, &fs::read(&file)?)?;
    }
    Ok(())
}

fn tree(root: &Path, release: &str) -> Result<PathBuf> {
    let places = ["lib/modules", "usr/lib/modules"].map(|place| root.join(place).join(release));
    let found = places.iter().find(|place| place.join("kernel").is_dir());
    found.cloned().with_context(|| format!("Linux {release} came without modules"))
}

fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut due = vec![directory.to_owned()];
    while let Some(directory) = due.pop() {
        let entries = fs::read_dir(&directory).with_context(|| format!("no {}", directory.display()))?;
        for entry in entries {
            let entry = entry?;
            let list = if entry.file_type()?.is_dir() { &mut due } else { &mut found };
            list.push(entry.path());
        }
    }
    ensure!(!found.is_empty(), "nothing in {}", directory.display());
    found.sort();
    Ok(found)
}
