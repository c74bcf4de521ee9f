//! Runs a program on one packet (`BPF_PROG_TEST_RUN`): for the packet tests and the bench.

use aya::programs::{ProgramError, SchedClassifier, TestRun as _, TestRunOptions};
use bytemuck::{Pod, Zeroable};

/// Room for the largest packet that a test makes, and what an answer may add.
const ROOM: usize = 4096;

/// `struct __sk_buff` of the kernel's `include/uapi/linux/bpf.h`. The kernel refuses (EINVAL) what test-run cannot
/// set, so the rest has no name here.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct SkBuff {
    unset: [u32; 2],
    mark: u32,
    unset_from_queue_mapping: [u32; 7],
    interface: u32,
    unset_from_tc_index: [u32; 25],
    unset_from_flow_keys: [u64; 2],
    unset_from_wire_len: [u32; 2],
    unset_sk: u64,
    gso_size: u32,
    unset_tstamp_type: u32,
    unset_hwtstamp: u64,
}

const _: () = assert!(size_of::<SkBuff>() == 192);
const _: () = assert!(std::mem::offset_of!(SkBuff, interface) == 40);
const _: () = assert!(std::mem::offset_of!(SkBuff, gso_size) == 176);

/// What the kernel says of a packet beside its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Index of the interface on whose hook the program runs. It must exist in the calling thread's network namespace.
    pub interface: u32,
    /// The packet mark.
    pub mark: u32,
    /// Bytes of payload in each segment of a GSO packet; 0 for an ordinary one.
    pub gso_size: u32,
}

/// Buffers for running programs, and what the last run left in them.
#[derive(Debug)]
pub struct Runner {
    bytes: Vec<u8>,
    length: usize,
    context: SkBuff,
}

impl Default for Runner {
    fn default() -> Self {
        Self { bytes: vec![0; ROOM], length: 0, context: SkBuff::default() }
    }
}

impl Runner {
    /// Runs once and returns the verdict (`TC_ACT_*`). `packet` begins with the Ethernet header, has at least its 14
    /// bytes and at most about 3,500 (a page with the kernel's own needs taken off).
    pub fn run(&mut self, program: &SchedClassifier, packet: &[u8], meta: Meta) -> Result<i32, ProgramError> {
        let Meta { interface, mark, gso_size } = meta;
        let context = SkBuff { mark, interface, gso_size, ..SkBuff::default() };
        let result = program.test_run(TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut self.bytes),
            ctx_in: Some(bytemuck::bytes_of(&context)),
            ctx_out: Some(bytemuck::bytes_of_mut(&mut self.context)),
            ..TestRunOptions::new()
        })?;
        self.length = (result.data_size_out as usize).min(self.bytes.len());
        Ok(result.return_value.cast_signed())
    }

    /// The packet after the last run.
    pub fn packet(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// The packet mark after the last run.
    pub fn mark(&self) -> u32 {
        self.context.mark
    }
}
