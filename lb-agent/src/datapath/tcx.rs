//! TCX links, pinned: they outlive the agent, and the next agent exchanges the program in them in one operation.

use super::attach::{AttachError, Device, Direction, Hook, failed};
use super::load::classifier;
use super::pins::Pins;
use super::sys;
use aya::Ebpf;
use aya::programs::SchedClassifier;
use aya::programs::links::{FdLink, LinkError, LinkOrder, PinnedLink};
use aya::programs::tc::{SchedClassifierLink, TcAttachOptions};
use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

/// The pin of a link. By the interface's index: a name may hold a dot, which bpffs refuses, and may come to belong to
/// another interface.
fn pin_path(pins: &Pins, index: u32, direction: Direction) -> PathBuf {
    pins.links().join(format!("{index}-{direction}"))
}

/// Whether a pin of this name is one of these devices', for a direction.
fn is_pin_of(name: &str, devices: &[Device], direction: Direction) -> bool {
    name.strip_suffix(&format!("-{direction}"))
        .and_then(|index| index.parse().ok())
        .is_some_and(|index| Device::is_kept(devices, index, direction))
}

/// Makes the device run the program of `ebpf`, once. Answers whether anything had to be done.
pub(super) fn ensure(
    ebpf: &mut Ebpf,
    pins: &Pins,
    device: &Device,
    direction: Direction,
) -> Result<bool, AttachError> {
    let program = classifier(ebpf, direction.program())?;
    let id = program.info().map_err(failed(&device.name, "read the program's id"))?.id();
    let ours = attached(device, direction)?;
    let path = pin_path(pins, device.index, direction);
    if ours == [id] && path.exists() {
        return Ok(false);
    }
    if !update(program, &path).map_err(failed(&device.name, "exchange the program in its link"))? {
        attach(program, &path, device, direction)?;
    }
    let strangers: Vec<u32> = attached(device, direction)?.into_iter().filter(|other| *other != id).collect();
    if !strangers.is_empty() {
        detach_links(device, &strangers)?;
    }
    let found = attached(device, direction)?;
    if found == [id] {
        return Ok(true);
    }
    Err(AttachError::NotThere {
        device: device.name.clone(),
        direction,
        hook: Hook::Tcx,
        found: format!("{found:?}"),
    })
}

/// Exchanges the program in a pinned link. False where there is no link, or its interface is gone.
fn update(program: &mut SchedClassifier, path: &Path) -> Result<bool, LinkError> {
    let pinned = match PinnedLink::from_pin(path) {
        Ok(pinned) => pinned,
        Err(LinkError::SyscallError(error)) if error.io_error.kind() == io::ErrorKind::NotFound => {
            return Ok(false);
        }
        Err(error) => return Err(error),
    };
    let link = SchedClassifierLink::try_from(FdLink::from(pinned))?;
    match program.attach_to_link(link) {
        Ok(link) => {
            // The pin keeps it; ours is one more descriptor.
            drop(program.take_link(link));
            Ok(true)
        }
        Err(_gone) => {
            // The interface of this number was another one. What refuses for another reason refuses again below.
            let _ = fs::remove_file(path);
            Ok(false)
        }
    }
}

/// In front of every other program: what is behind us sees packets as they go on.
fn attach(
    program: &mut SchedClassifier,
    path: &Path,
    device: &Device,
    direction: Direction,
) -> Result<(), AttachError> {
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory).map_err(failed(directory.display(), "create the directory"))?;
    let order = TcAttachOptions::TcxOrder(LinkOrder::first());
    let link = program
        .attach_with_options(&device.name, direction.attach_type(), order)
        .and_then(|link| program.take_link(link))
        .map_err(failed(&device.name, "attach"))?;
    let link = FdLink::try_from(link).map_err(failed(&device.name, "attach"))?;
    link.pin(path).map(drop).map_err(failed(path.display(), "pin the link"))
}

/// The ids of programs with our name on the hook.
fn attached(device: &Device, direction: Direction) -> Result<Vec<u32>, AttachError> {
    let (_, programs) = SchedClassifier::query_tcx(&device.name, direction.attach_type())
        .map_err(failed(&device.name, "ask which programs are attached"))?;
    Ok(programs
        .iter()
        .filter(|p| p.name_as_str() == Some(direction.program()))
        .map(aya::programs::ProgramInfo::id)
        .collect())
}

/// The programs that run before ours on the hook, by name or id; all of them where ours is a filter, since TCX comes first. None
/// where the kernel has no TCX.
pub(super) fn in_front(device: &Device, direction: Direction) -> Vec<String> {
    let Ok((_, programs)) = SchedClassifier::query_tcx(&device.name, direction.attach_type()) else {
        return Vec::new();
    };
    let before = programs.iter().take_while(|p| p.name_as_str() != Some(direction.program()));
    let name = |p: &aya::programs::ProgramInfo| match p.name_as_str() {
        Some(name) if !name.is_empty() => name.to_owned(),
        _ => format!("id {}", p.id()),
    };
    before.map(name).collect()
}

/// Detaches links whose pins were lost: of an agent whose bpffs was unmounted, say.
fn detach_links(device: &Device, programs: &[u32]) -> Result<(), AttachError> {
    for link in sys::link_ids() {
        let link = link.map_err(failed(&device.name, "list links"))?;
        // A link that went meanwhile is as good as detached.
        let Ok(fd) = sys::link_by_id(link) else { continue };
        let info = sys::link_info(fd.as_fd()).map_err(failed(&device.name, "read a link"))?;
        if info.is_tcx() && info.interface == device.index && programs.contains(&info.program) {
            sys::detach_link(fd.as_fd()).map_err(failed(&device.name, "detach a forgotten link"))?;
        }
    }
    Ok(())
}

/// Removes every link but these devices'. Answers which.
pub(super) fn remove_pins(pins: &Pins, keep: &[Device]) -> Result<Vec<String>, AttachError> {
    let directory = pins.links();
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(directory.display(), "list the links")(error)),
    };
    let mut removed = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed(directory.display(), "list the links"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if Direction::ALL.into_iter().any(|direction| is_pin_of(&name, keep, direction)) {
            continue;
        }
        fs::remove_file(entry.path()).map_err(failed(entry.path().display(), "remove the link"))?;
        removed.push(format!("TCX link {name}"));
    }
    Ok(removed)
}
