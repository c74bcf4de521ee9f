//! The bounds gate: the only pointer arithmetic on packet bytes, and the fields of the context.

use aya_ebpf::{
    EbpfContext as _,
    bindings::__sk_buff,
    helpers::{bpf_skb_load_bytes, bpf_skb_pull_data, bpf_skb_store_bytes},
    programs::TcContext,
};
use core::ffi::c_void;

/// Length of an Ethernet header without tags.
pub(crate) const ETH_LEN: usize = 14;
/// Length of an IPv4 header without options.
pub(crate) const IPV4_LEN: usize = 20;
/// Length of a UDP header.
pub(crate) const UDP_LEN: usize = 8;
/// Length of a TCP header without options.
pub(crate) const TCP_LEN: usize = 20;

/// One packet on a TC hook.
pub(crate) struct Packet<'a> {
    ctx: &'a TcContext,
}

impl<'a> Packet<'a> {
    #[inline(always)]
    pub(crate) fn new(ctx: &'a TcContext) -> Self {
        Self { ctx }
    }

    #[inline(always)]
    pub(crate) fn skb(&self) -> *mut __sk_buff {
        self.ctx.skb.skb
    }

    /// For helpers that take any context.
    #[inline(always)]
    pub(crate) fn ctx(&self) -> *mut c_void {
        self.ctx.as_ptr()
    }

    /// Length in bytes, from the Ethernet header on.
    #[inline(always)]
    pub(crate) fn len(&self) -> u32 {
        // SAFETY: the kernel hands a valid context to the program; the verifier turns the field into a load.
        unsafe { (*self.skb()).len }
    }

    /// Index of the interface whose hook this is.
    #[inline(always)]
    pub(crate) fn interface(&self) -> u32 {
        // SAFETY: as in `len`.
        unsafe { (*self.skb()).ifindex }
    }

    /// Whether this node itself made the packet: it came in on no interface.
    #[inline(always)]
    pub(crate) fn is_from_this_node(&self) -> bool {
        // SAFETY: as in `len`.
        unsafe { (*self.skb()).ingress_ifindex == 0 }
    }

    /// The protocol of the frame as the kernel has it, host order: 0x0800 for IPv4.
    #[inline(always)]
    pub(crate) fn ether_type(&self) -> u16 {
        // SAFETY: as in `len`.
        let protocol = unsafe { (*self.skb()).protocol };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the kernel stores a 16-bit value, network order"
        )]
        u16::from_be(protocol as u16)
    }

    /// Whether the frame carries a VLAN tag in its metadata: it belongs to a VLAN device, not to this one.
    #[inline(always)]
    pub(crate) fn is_tagged(&self) -> bool {
        // SAFETY: as in `len`.
        unsafe { (*self.skb()).vlan_present != 0 }
    }

    /// Payload size of each segment of a GSO packet, 0 for an ordinary one.
    #[inline(always)]
    pub(crate) fn gso_size(&self) -> u32 {
        // SAFETY: as in `len`.
        unsafe { (*self.skb()).gso_size }
    }

    /// The packet mark.
    #[inline(always)]
    pub(crate) fn mark(&self) -> u32 {
        // SAFETY: as in `len`.
        unsafe { (*self.skb()).mark }
    }

    #[inline(always)]
    pub(crate) fn set_mark(&self, mark: u32) {
        self.ctx.set_mark(mark);
    }

    /// Keeps something in the packet's control block, which is the traffic control hooks' own, while this program runs. `None`
    /// must be kept before [`Packet::kept`] is asked: others leave there what they like.
    #[inline(always)]
    pub(crate) fn keep(&self, words: Option<[u32; 4]>) {
        let skb = self.skb();
        // SAFETY: as in `len`; a TC program may write this field.
        unsafe {
            (*skb).cb[4] = u32::from(words.is_some());
            if let Some([a, b, c, d]) = words {
                (*skb).cb[0] = a;
                (*skb).cb[1] = b;
                (*skb).cb[2] = c;
                (*skb).cb[3] = d;
            }
        }
    }

    /// Whether something is kept.
    #[inline(always)]
    pub(crate) fn keeps(&self) -> bool {
        // SAFETY: as in `len`.
        unsafe { (*self.skb()).cb[4] != 0 }
    }

    /// What is kept.
    #[inline(always)]
    pub(crate) fn kept(&self) -> [u32; 4] {
        let skb = self.skb();
        // SAFETY: as in `len`.
        unsafe { [(*skb).cb[0], (*skb).cb[1], (*skb).cb[2], (*skb).cb[3]] }
    }

    /// Copies `T` out of the linear part. `None` where it does not reach that far.
    #[inline(always)]
    pub(crate) fn read<T: Copy>(&self, offset: usize) -> Option<T> {
        let start = self.ctx.data();
        if start + offset + size_of::<T>() > self.ctx.data_end() {
            return None;
        }
        const { assert!(align_of::<T>() <= 2) };
        // SAFETY: the bytes lie between data and data_end, as just checked (the verifier insists on this very
        // comparison). The kernel puts a frame at an even address (NET_SKB_PAD and NET_IP_ALIGN are even), and the
        // offsets in use are even. `T` is a struct of bytes, valid with any content.
        Some(unsafe { ((start + offset) as *const T).read() })
    }

    /// Writes `value` into the linear part. `false` where it does not reach that far.
    #[inline(always)]
    pub(crate) fn write<T: Copy>(&self, offset: usize, value: T) -> bool {
        let start = self.ctx.data();
        if start + offset + size_of::<T>() > self.ctx.data_end() {
            return false;
        }
        // SAFETY: the bytes are there, as in `read`; a TC program may write them, the kernel has unshared them.
        unsafe { ((start + offset) as *mut T).write_unaligned(value) };
        true
    }

    /// Makes the first `length` bytes linear, as far as the packet has them. Every earlier read stays valid,
    /// since it was a copy.
    #[inline(always)]
    pub(crate) fn pull(&self, length: usize) -> bool {
        #[expect(clippy::cast_possible_truncation, reason = "at most the length of three headers")]
        let length = length as u32;
        // SAFETY: the context is valid; the helper checks the length.
        unsafe { bpf_skb_pull_data(self.skb(), length) == 0 }
    }

    /// Copies `T` from any offset, linear or not.
    #[inline(always)]
    pub(crate) fn load<T: Copy>(&self, offset: u32) -> Option<T> {
        let mut value = core::mem::MaybeUninit::<T>::uninit();
        // SAFETY: the helper writes exactly `size_of::<T>()` bytes or fails.
        let result = unsafe {
            bpf_skb_load_bytes(
                self.ctx().cast_const(),
                offset,
                value.as_mut_ptr().cast(),
                size_of::<T>() as u32,
            )
        };
        if result != 0 {
            return None;
        }
        // SAFETY: the helper has filled it; `T` is a struct of bytes, valid with any content.
        Some(unsafe { value.assume_init() })
    }

    /// Writes `value` at any offset; false where the packet does not reach that far or cannot be made writable.
    #[inline(always)]
    pub(crate) fn store<T>(&self, offset: u32, value: &T) -> bool {
        // SAFETY: the helper reads exactly `size_of::<T>()` bytes of `value` and checks the offset.
        unsafe {
            bpf_skb_store_bytes(
                self.skb(),
                offset,
                core::ptr::from_ref(value).cast(),
                size_of::<T>() as u32,
                0,
            ) == 0
        }
    }
}
