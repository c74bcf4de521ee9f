//! Calls of bpf(2) that aya does not offer: batches over maps, and links by id.
//!
//! Layouts of `union bpf_attr` are from the kernel's `include/uapi/linux/bpf.h`.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

const BPF_LINK_GET_FD_BY_ID: libc::c_long = 30;
const BPF_LINK_DETACH: libc::c_long = 34;
const BPF_MAP_LOOKUP_BATCH: libc::c_long = 24;
const BPF_MAP_UPDATE_BATCH: libc::c_long = 26;

/// `union bpf_attr`, for `BPF_MAP_*_BATCH` (Linux 5.6).
#[repr(C)]
#[derive(Default)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// # Safety
///
/// `attr` must be the variant of `union bpf_attr` that `command` expects, and the addresses in it must be valid for
/// what the command reads and writes.
unsafe fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: by this function's own duty; the size is that of the variant, which the kernel accepts.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn address<T>(slice: &[T]) -> u64 {
    slice.as_ptr().expose_provenance() as u64
}

fn map_fd(map: BorrowedFd<'_>) -> u32 {
    u32::try_from(map.as_raw_fd()).unwrap_or(u32::MAX)
}

/// Every entry of a hash or array map whose keys and values have these types, in no order. An entry that is added or
/// removed meanwhile may be missing.
pub(super) fn read_all<K: aya::Pod + Default, V: aya::Pod + Default>(
    map: BorrowedFd<'_>,
    max_entries: u32,
) -> io::Result<Vec<(K, V)>> {
    // A bucket of a hash map must fit whole; the kernel says ENOSPC where it does not.
    let mut chunk = max_entries.clamp(1, 16_384) as usize;
    let mut all = Vec::new();
    let mut keys = vec![K::default(); chunk];
    let mut values = vec![V::default(); chunk];
    // The position is a u32 for hash maps and a key (u32 too) for array maps.
    let mut position: Option<u32> = None;
    loop {
        match read_batch(map, position, &mut keys, &mut values) {
            Ok(Batch { count, next }) => {
                all.extend(keys.iter().copied().zip(values.iter().copied()).take(count));
                match next {
                    Some(next) => position = Some(next),
                    None => return Ok(all),
                }
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && chunk < (1 << 24) => {
                chunk *= 2;
                keys.resize(chunk, K::default());
                values.resize(chunk, V::default());
            }
            Err(error) => return Err(error),
        }
    }
}

/// Up to `count` values of an array map, from the index `first` on.
pub(super) fn read_array<V: aya::Pod + Default>(
    map: BorrowedFd<'_>,
    first: u32,
    count: u32,
) -> io::Result<Vec<V>> {
    let mut keys = vec![0_u32; count as usize];
    let mut values = vec![V::default(); count as usize];
    let Batch { count, next: _ } = read_batch(map, first.checked_sub(1), &mut keys, &mut values)?;
    values.truncate(count);
    Ok(values)
}

/// What a batch came to.
struct Batch {
    /// How many were read.
    count: usize,
    /// Where the next batch goes on; none after the last.
    next: Option<u32>,
}

/// Reads as many entries as there is room for, from behind a position on.
fn read_batch<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    position: Option<u32>,
    keys: &mut [K],
    values: &mut [V],
) -> io::Result<Batch> {
    let mut next = 0_u32;
    let mut attr = BatchAttr {
        in_batch: position.as_ref().map_or(0, |p| std::ptr::from_ref(p).expose_provenance() as u64),
        out_batch: std::ptr::from_mut(&mut next).expose_provenance() as u64,
        keys: keys.as_mut_ptr().expose_provenance() as u64,
        values: values.as_mut_ptr().expose_provenance() as u64,
        count: u32::try_from(keys.len().min(values.len())).unwrap_or(u32::MAX),
        map_fd: map_fd(map),
        ..BatchAttr::default()
    };
    // SAFETY: keys and values have room for `count` entries of the map's sizes, which the caller's types have.
    let next = match unsafe { bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) } {
        Ok(_) => Some(next),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => None,
        Err(error) => return Err(error),
    };
    Ok(Batch { count: attr.count as usize, next })
}

/// Writes every pair.
pub(super) fn write_all<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    keys: &[K],
    values: &[V],
) -> io::Result<()> {
    let count = keys.len().min(values.len());
    if count == 0 {
        return Ok(());
    }
    let mut attr = BatchAttr {
        keys: address(keys),
        values: address(values),
        count: u32::try_from(count).unwrap_or(u32::MAX),
        map_fd: map_fd(map),
        ..BatchAttr::default()
    };
    // SAFETY: keys and values hold `count` entries of the map's sizes, which the caller's types have.
    unsafe { bpf(BPF_MAP_UPDATE_BATCH, &mut attr) }.map(drop)
}

#[repr(C)]
#[derive(Default)]
struct IdAttr {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

/// Opens a link by its id.
pub(super) fn link_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut attr = IdAttr { id, ..IdAttr::default() };
    // SAFETY: the variant for this command, without addresses.
    let fd = unsafe { bpf(BPF_LINK_GET_FD_BY_ID, &mut attr) }?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes a link's program off its hook; the link itself stays, without effect (Linux 5.9).
pub(super) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = map_fd(link);
    // SAFETY: the variant for this command is the descriptor alone.
    unsafe { bpf(BPF_LINK_DETACH, &mut attr) }.map(drop)
}

/// `BPF_LINK_TYPE_TCX`.
const LINK_TYPE_TCX: u32 = 11;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_LINK_GET_NEXT_ID: libc::c_long = 31;

/// The first fields of `struct bpf_link_info`, as a TCX link fills them.
#[repr(C)]
#[derive(Default)]
pub(super) struct LinkInfo {
    kind: u32,
    id: u32,
    /// Id of the program in it.
    pub(super) program: u32,
    /// The union behind is aligned to eight bytes.
    padding: u32,
    /// Index of the interface, 0 once that is gone.
    pub(super) interface: u32,
    attach_type: u32,
}

impl LinkInfo {
    pub(super) fn is_tcx(&self) -> bool {
        self.kind == LINK_TYPE_TCX
    }
}

#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    fd: u32,
    length: u32,
    info: u64,
}

/// What a link is.
pub(super) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let mut info = LinkInfo::default();
    let mut attr = InfoAttr {
        fd: map_fd(link),
        length: u32::try_from(size_of::<LinkInfo>()).unwrap_or(0),
        info: std::ptr::from_mut(&mut info).expose_provenance() as u64,
    };
    // SAFETY: the kernel writes at most `length` bytes to `info`.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr) }?;
    Ok(info)
}

/// The ids of all links of the machine.
pub(super) fn link_ids() -> impl Iterator<Item = io::Result<u32>> {
    let mut last = Some(0);
    std::iter::from_fn(move || {
        let mut attr = IdAttr { id: last?, ..IdAttr::default() };
        // SAFETY: the variant for this command, without addresses.
        match unsafe { bpf(BPF_LINK_GET_NEXT_ID, &mut attr) } {
            Ok(_) => {
                last = Some(attr.next_id);
                Some(Ok(attr.next_id))
            }
            Err(error) => {
                last = None;
                (error.raw_os_error() != Some(libc::ENOENT)).then_some(Err(error))
            }
        }
    })
}
