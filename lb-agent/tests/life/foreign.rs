//! A packet program of somebody else: counts what it sees and lets it pass.

use aya::maps::{Array, IterableMap as _, MapData};
use aya::programs::links::{FdLink, LinkOrder};
use aya::programs::tc::TcAttachOptions;
use aya::programs::{SchedClassifier, TcAttachType};
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};
use testbed::Host;

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const NAME: &[u8; 16] = b"foreign\0\0\0\0\0\0\0\0\0";

/// `union bpf_attr`, for `BPF_PROG_LOAD` (the kernel's `include/uapi/linux/bpf.h`).
#[repr(C)]
struct LoadAttr {
    program_type: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log: [u32; 2],
    log_buffer: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
}

/// For `BPF_OBJ_PIN`.
#[repr(C)]
struct PinAttr {
    path: u64,
    fd: u32,
    flags: u32,
}

/// The program, pinned, and its counter.
pub(crate) struct Foreign {
    seen: Array<MapData, u64>,
    pin: PathBuf,
}

impl Foreign {
    /// Loads and pins it in `directory`, which is on bpffs and goes with the testbed.
    pub(crate) fn load(directory: &Path) -> Self {
        let seen: Array<MapData, u64> = Array::create(1, 0).unwrap();
        let instruction = |code: u8, registers: u8, offset: i16, value: i32| {
            u64::from_ne_bytes({
                let (o, v) = (offset.to_ne_bytes(), value.to_ne_bytes());
                [code, registers, o[0], o[1], v[0], v[1], v[2], v[3]]
            })
        };
        let code = [
            instruction(0x62, 10, -4, 0),         // *(u32 *)(r10 - 4) = 0
            instruction(0xbf, 2 | 10 << 4, 0, 0), // r2 = r10
            instruction(0x07, 2, 0, -4),          // r2 += -4
            instruction(0x18, 1 | 1 << 4, 0, seen.map().fd().as_fd().as_raw_fd()), // r1 = map
            0,
            instruction(0x85, 0, 0, 1),      // call bpf_map_lookup_elem
            instruction(0x15, 0, 2, 0),      // if r0 == 0 goto +2
            instruction(0xb7, 1, 0, 1),      // r1 = 1
            instruction(0xdb, 1 << 4, 0, 0), // lock *(u64 *)r0 += r1
            instruction(0xb7, 0, 0, -1),     // r0 = TCX_NEXT, which is TC_ACT_UNSPEC too
            instruction(0x95, 0, 0, 0),      // exit
        ];
        let mut load = LoadAttr {
            program_type: BPF_PROG_TYPE_SCHED_CLS,
            instructions: u32::try_from(code.len()).unwrap(),
            code: code.as_ptr().expose_provenance() as u64,
            license: c"GPL".as_ptr().expose_provenance() as u64,
            log: [0; 2],
            log_buffer: 0,
            kernel_version: 0,
            flags: 0,
            name: *NAME,
        };
        let pin = directory.join("foreign");
        let path = CString::new(pin.to_str().unwrap()).unwrap();
        let fd = bpf(BPF_PROG_LOAD, &mut load);
        let mut attr = PinAttr { path: path.as_ptr().expose_provenance() as u64, fd, flags: 0 };
        bpf(BPF_OBJ_PIN, &mut attr);
        // SAFETY: the descriptor is ours, and the pin keeps the program from now on.
        unsafe { libc::close(i32::try_from(fd).unwrap()) };
        Self { seen, pin }
    }

    /// The packets that it has seen.
    pub(crate) fn seen(&self) -> u64 {
        self.seen.get(&0, 0).unwrap()
    }

    /// Adds it as a filter to a device's ingress, which has a clsact qdisc.
    pub(crate) fn filter(&self, host: &Host, device: &str, priority: &str) {
        let place = ["tc", "filter", "add", "dev", device, "ingress", "prio", priority];
        let program = ["bpf", "da", "object-pinned", self.pin.to_str().unwrap()];
        host.run(&[&place[..], &program].concat()).unwrap();
    }

    /// Attaches it by TCX to a device's ingress. It stays until the returned file is removed.
    pub(crate) fn attach(&self, host: &Host, device: &str, order: LinkOrder) -> PathBuf {
        let path = self.pin.with_file_name(format!("foreign-link-{device}"));
        host.enter(|| {
            let mut program = SchedClassifier::from_pin(&self.pin)?;
            let options = TcAttachOptions::TcxOrder(order);
            let link = program.attach_with_options(device, TcAttachType::Ingress, options)?;
            FdLink::try_from(program.take_link(link)?)?.pin(&path)?;
            Ok(())
        })
        .unwrap();
        path
    }
}

/// Detaches a program that [`Foreign::attach`] attached; the kernel takes its time over a link whose pin is gone.
pub(crate) fn detach(host: &Host, link: &Path) {
    host.run(&["bpftool", "link", "detach", "pinned", link.to_str().unwrap()]).unwrap();
    fs::remove_file(link).unwrap();
}

fn bpf<T>(command: libc::c_long, attr: &mut T) -> u32 {
    // SAFETY: each caller gives the variant that the command expects, with addresses that are valid meanwhile.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    assert!(result >= 0, "{}", std::io::Error::last_os_error());
    u32::try_from(result).unwrap()
}
