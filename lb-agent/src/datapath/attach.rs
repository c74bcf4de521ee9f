//! The programs on the hooks of interfaces: put there, asked for, taken away.

use super::load::LoadError;
use super::pins::Pins;
use super::{clsact, tcx};
use aya::Ebpf;
use aya::programs::TcAttachType;
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use tracing::info;

/// Which hook of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// TCX links (Linux 6.6).
    Tcx,
    /// A filter of a clsact qdisc (Linux 4.5).
    Clsact,
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        })
    }
}

/// Which way packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// Into the node.
    Ingress,
    /// Out of it.
    Egress,
}

impl Direction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

    /// The program for it, one of [`super::load::PROGRAMS`].
    pub const fn program(self) -> &'static str {
        match self {
            Self::Ingress => "reweave_ingress",
            Self::Egress => "reweave_egress",
        }
    }

    pub(super) const fn attach_type(self) -> TcAttachType {
        match self {
            Self::Ingress => TcAttachType::Ingress,
            Self::Egress => TcAttachType::Egress,
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// An interface as the hooks know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The kernel's number for it.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// The programs that it runs.
    pub directions: &'static [Direction],
}

impl Device {
    /// Whether it is among `devices`, with this direction.
    pub(super) fn is_kept(devices: &[Self], index: u32, direction: Direction) -> bool {
        devices.iter().any(|device| device.index == index && device.directions.contains(&direction))
    }
}

/// Why a program is not where it should be.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The object has no such program.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The kernel or the file system refused.
    #[error("{what}: cannot {action}")]
    Failed {
        /// An interface or a path.
        what: String,
        /// What was tried.
        action: &'static str,
        /// Why not.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It was attached without an error, but the kernel does not list it there.
    #[error(
        "{device} {direction}: the kernel took the program but does not list it on the hook ({hook}); it lists: {found}"
    )]
    NotThere {
        /// The interface.
        device: String,
        /// The direction.
        direction: Direction,
        /// The hook.
        hook: Hook,
        /// Program ids.
        found: String,
    },
}

/// Somebody else's program, before ours on a hook.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InFront {
    /// The interface.
    pub device: String,
    /// The direction.
    pub direction: Direction,
    /// Its name, or its id where it has none.
    pub program: String,
}

/// The hooks of one agent.
#[derive(Debug)]
pub struct Hooks {
    pins: Pins,
    state: PathBuf,
    hook: Hook,
    netlink: rtnetlink::Handle,
}

impl Hooks {
    /// `state` is a directory that survives the agent, not the machine's reboot.
    pub fn new(pins: Pins, state: &Path, hook: Hook, netlink: rtnetlink::Handle) -> Self {
        Self { pins, state: state.to_owned(), hook, netlink }
    }

    /// Which hook is used.
    pub fn hook(&self) -> Hook {
        self.hook
    }

    /// Makes these devices, and no others, run their programs of `ebpf`, each exactly once, and asks the kernel whether
    /// they do. What is right already stays as it is. Answers which programs were put in place.
    ///
    /// # Errors
    /// The first thing that could not be done; what was done before stays.
    pub async fn ensure(
        &self,
        ebpf: &mut Ebpf,
        devices: &[Device],
    ) -> Result<Vec<(String, Direction)>, AttachError> {
        let mut done = Vec::new();
        for device in devices {
            for &direction in device.directions {
                let new = match self.hook {
                    Hook::Tcx => tcx::ensure(ebpf, &self.pins, device, direction)?,
                    Hook::Clsact => {
                        clsact::ensure(ebpf, &self.netlink, &self.state, device, direction).await?
                    }
                };
                if new {
                    done.push((device.name.clone(), direction));
                }
            }
        }
        // After the programs are in place on the hook in use: none of ours on the other one, or elsewhere.
        let (on_tcx, on_clsact) = match self.hook {
            Hook::Tcx => (devices, &[][..]),
            Hook::Clsact => (&[][..], devices),
        };
        clsact::remove_all(&self.netlink, &self.state, on_clsact).await?;
        tcx::remove_pins(&self.pins, on_tcx)?;
        self.forget_other_layouts()?;
        Ok(done)
    }

    /// The TCX programs of others that run before ours: what they accept, drop or redirect never reaches us.
    pub fn in_front(&self, devices: &[Device]) -> BTreeSet<InFront> {
        let mut found = BTreeSet::new();
        for device in devices {
            for &direction in device.directions {
                let programs = tcx::in_front(device, direction).into_iter();
                let in_front = |program| InFront { device: device.name.clone(), direction, program };
                found.extend(programs.map(in_front));
            }
        }
        found
    }

    /// No program uses them any more: they would hold memory for nothing.
    fn forget_other_layouts(&self) -> Result<(), AttachError> {
        let root = self.pins.root().display();
        for directory in
            self.pins.other_layouts().map_err(failed(root, "look for maps of another version"))?
        {
            info!(directory = %directory.display(), "removed the maps of another version");
            fs::remove_dir_all(&directory).map_err(failed(directory.display(), "remove"))?;
        }
        Ok(())
    }

    /// Takes every program of ours off every hook. Answers what was removed.
    ///
    /// # Errors
    /// The first thing that could not be done.
    pub async fn remove(&self) -> Result<Vec<String>, AttachError> {
        let mut removed = tcx::remove_pins(&self.pins, &[])?;
        removed.extend(clsact::remove_all(&self.netlink, &self.state, &[]).await?);
        Ok(removed)
    }
}

/// TCX where the kernel has it.
pub fn best_hook() -> Hook {
    match aya::util::KernelVersion::current() {
        Ok(version) if version >= aya::util::KernelVersion::new(6, 6, 0) => Hook::Tcx,
        _ => Hook::Clsact,
    }
}

/// The error of something that was tried with an interface or a path.
pub(super) fn failed<E>(what: impl fmt::Display, action: &'static str) -> impl FnOnce(E) -> AttachError
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let what = what.to_string();
    move |source| AttachError::Failed { what, action, source: source.into() }
}
