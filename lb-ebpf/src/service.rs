//! Served ports.

use aya_ebpf::{btf_maps::HashMap, macros::btf_map};
use lb_common::{
    flow::FlowKey,
    limits,
    service::{Service, ServiceKey},
};

#[btf_map(name = "services")]
static SERVICES: HashMap<ServiceKey, Service, { limits::SERVICES as usize }> = HashMap::new();

/// The served port that the packet is addressed to.
#[inline(always)]
pub(crate) fn find(key: &FlowKey) -> Option<Service> {
    let key = ServiceKey::new(key.destination, key.destination_port, key.protocol);
    // SAFETY: copied out at once.
    unsafe { SERVICES.get(key) }.copied()
}
