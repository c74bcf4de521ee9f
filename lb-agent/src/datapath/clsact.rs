//! Filters of a clsact qdisc, for kernels without TCX. They outlive the agent by themselves; fixed priority and handle
//! are how the next one finds them.

use super::attach::{AttachError, Device, Direction, Hook, failed};
use super::load::classifier;
use aya::Ebpf;
use aya::programs::SchedClassifier;
use aya::programs::tc::{
    NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle, qdisc_add_clsact,
};
use futures::TryStreamExt as _;
use netlink_packet_route::tc::{TcAttribute, TcFilterBpfOption, TcMessage, TcOption};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Between the 1 that most others use and the 49,152 that the kernel gives to who asks for none.
const PRIORITY: u16 = 7_213;
const HANDLE: TcHandle = TcHandle::new(0, 1);

/// Makes the device run the program of `ebpf`, once. Answers whether anything had to be done.
pub(super) async fn ensure(
    ebpf: &mut Ebpf,
    netlink: &rtnetlink::Handle,
    state: &Path,
    device: &Device,
    direction: Direction,
) -> Result<bool, AttachError> {
    let program = classifier(ebpf, direction.program())?;
    let id = program.info().map_err(failed(&device.name, "read the program's id"))?.id();
    let found = ours(netlink, device.index, direction).await?;
    if found == [id] {
        return Ok(false);
    }
    if found.is_empty() {
        ensure_qdisc(state, device)?;
    }
    attach(program, device, direction, !found.is_empty())?;
    let found = ours(netlink, device.index, direction).await?;
    if found == [id] {
        return Ok(true);
    }
    Err(AttachError::NotThere {
        device: device.name.clone(),
        direction,
        hook: Hook::Clsact,
        found: format!("{found:?}"),
    })
}

fn attach(
    program: &mut SchedClassifier,
    device: &Device,
    direction: Direction,
    replace: bool,
) -> Result<(), AttachError> {
    let attached = if replace {
        let old =
            SchedClassifierLink::attached(&device.name, direction.attach_type(), PRIORITY, HANDLE, None)
                .map_err(failed(&device.name, "find the interface"))?;
        program.attach_to_link(old)
    } else {
        let options = NlOptions { priority: PRIORITY, handle: HANDLE, classid: None };
        program.attach_with_options(&device.name, direction.attach_type(), TcAttachOptions::Netlink(options))
    };
    let link = attached.and_then(|link| program.take_link(link)).map_err(failed(&device.name, "attach"))?;
    // Dropping it would take the filter away, and the filter is to outlive us.
    std::mem::forget(link);
    Ok(())
}

/// A qdisc that we add is noted, so that cleanup takes away only what was not there before.
fn ensure_qdisc(state: &Path, device: &Device) -> Result<(), AttachError> {
    match qdisc_add_clsact(&device.name) {
        Ok(()) => {
            let note = note_path(state, device.index);
            let directory = note.parent().unwrap_or(state).to_owned();
            fs::create_dir_all(&directory)
                .and_then(|()| fs::write(&note, &device.name))
                .map_err(failed(note.display(), "note that we added clsact"))
        }
        Err(error) if is_exists(&error) => Ok(()),
        Err(error) => Err(failed(&device.name, "add the clsact qdisc")(error)),
    }
}

fn is_exists(error: &TcError) -> bool {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(current) = source {
        if let Some(io) = current.downcast_ref::<io::Error>() {
            return io.kind() == io::ErrorKind::AlreadyExists;
        }
        source = current.source();
    }
    error.to_string().contains("File exists")
}

fn note_path(state: &Path, index: u32) -> PathBuf {
    state.join("clsact").join(index.to_string())
}

/// The ids of the programs in filters of ours.
async fn ours(
    netlink: &rtnetlink::Handle,
    index: u32,
    direction: Direction,
) -> Result<Vec<u32>, AttachError> {
    Ok(filters(netlink, index, direction)
        .await?
        .iter()
        .filter(|message| is_ours(message, direction))
        .filter_map(program_id)
        .collect())
}

async fn filters(
    netlink: &rtnetlink::Handle,
    index: u32,
    direction: Direction,
) -> Result<Vec<TcMessage>, AttachError> {
    let Ok(signed) = i32::try_from(index) else { return Ok(Vec::new()) };
    let mut filter = netlink.traffic_filter(signed);
    let request = match direction {
        Direction::Ingress => filter.get().ingress(),
        Direction::Egress => filter.get().egress(),
    };
    match request.execute().try_collect().await {
        Ok(filters) => Ok(filters),
        // No clsact qdisc, or no interface any more.
        Err(rtnetlink::Error::NetlinkError(error))
            if matches!(-error.raw_code(), libc::EINVAL | libc::ENODEV | libc::ENOENT) =>
        {
            Ok(Vec::new())
        }
        Err(error) => Err(failed(index, "list the filters")(error)),
    }
}

fn is_ours(message: &TcMessage, direction: Direction) -> bool {
    priority(message) == PRIORITY && options(message).any(|option| {
        matches!(option, TcOption::Bpf(TcFilterBpfOption::ProgName(name)) if name.starts_with(direction.program()))
    })
}

/// The upper half of `tcm_info`.
fn priority(message: &TcMessage) -> u16 {
    let [high, low, _, _] = message.header.info.to_be_bytes();
    u16::from_be_bytes([high, low])
}

fn program_id(message: &TcMessage) -> Option<u32> {
    options(message).find_map(|option| match option {
        TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
        _ => None,
    })
}

fn options(message: &TcMessage) -> impl Iterator<Item = &TcOption> {
    message.attributes.iter().flat_map(|attribute| match attribute {
        TcAttribute::Options(options) => options.as_slice(),
        _ => &[],
    })
}

/// Takes our filters off every interface but these devices', and the qdiscs that we added, unless others use them. Answers what
/// went.
pub(super) async fn remove_all(
    netlink: &rtnetlink::Handle,
    state: &Path,
    keep: &[Device],
) -> Result<Vec<String>, AttachError> {
    let mut removed = Vec::new();
    let interfaces = nix::net::if_::if_nameindex().map_err(failed("interfaces", "list"))?;
    for interface in &interfaces {
        let name = interface.name().to_string_lossy().into_owned();
        let mut others = false;
        for direction in Direction::ALL {
            if Device::is_kept(keep, interface.index(), direction) {
                others = true;
                continue;
            }
            for message in filters(netlink, interface.index(), direction).await? {
                if priority(&message) == PRIORITY && program_id(&message).is_none() {
                    // Each priority also has a line of its own, without a program.
                    continue;
                }
                if is_ours(&message, direction) {
                    let link =
                        SchedClassifierLink::attached(&name, direction.attach_type(), PRIORITY, HANDLE, None)
                            .map_err(failed(&name, "find the interface"))?;
                    // Dropping the link is what detaches it.
                    drop(link);
                    removed.push(format!("clsact filter {name} {direction}"));
                } else {
                    others = true;
                }
            }
        }
        let note = note_path(state, interface.index());
        if note.exists() && !others {
            remove_qdisc(&name, interface.index(), netlink).await?;
            removed.push(format!("clsact qdisc {name}"));
        }
        if note.exists() && !keep.iter().any(|device| device.index == interface.index()) {
            fs::remove_file(&note).map_err(failed(note.display(), "remove the note"))?;
        }
    }
    Ok(removed)
}

async fn remove_qdisc(name: &str, index: u32, netlink: &rtnetlink::Handle) -> Result<(), AttachError> {
    let Ok(signed) = i32::try_from(index) else { return Ok(()) };
    let mut request = netlink.qdisc().del(signed);
    let message = request.message_mut();
    // clsact's handle and parent: TC_H_CLSACT.
    message.header.parent = netlink_packet_route::tc::TcHandle { major: 0xffff, minor: 0xfff1 };
    message.header.handle = netlink_packet_route::tc::TcHandle { major: 0xffff, minor: 0 };
    request.execute().await.map_err(failed(name, "remove the clsact qdisc that we added"))
}
