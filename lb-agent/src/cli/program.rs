//! Which program uses the maps, and on which interfaces it has something to do.

use crate::datapath::loaded::Loaded;
use crate::explain::device_name;
use lb_common::interface::Interface;
use serde::Serialize;
use std::collections::BTreeMap;

/// The ingress program in the kernel.
#[derive(Serialize)]
pub(super) struct Program {
    /// None where the kernel has none on these maps; so for the rest.
    id: Option<u32>,
    /// None where its settings cannot be read either; so for the next.
    forwarding: Option<&'static str>,
    mark_shift: Option<u32>,
}

impl Program {
    pub(super) fn new(loaded: Option<Loaded>) -> Self {
        let config = loaded.and_then(|loaded| loaded.config);
        Self {
            id: loaded.map(|loaded| loaded.id),
            forwarding: config.map(|config| if config.through_stack == 0 { "redirect" } else { "stack" }),
            mark_shift: config.map(|config| config.mark_shift),
        }
    }

    pub(super) fn text(&self) -> String {
        match (self.id, self.forwarding, self.mark_shift) {
            (None, ..) => "none: packets go to the node itself".to_owned(),
            (Some(id), Some(forwarding), Some(shift)) => {
                format!("id {id}, forwarding by {forwarding}, mark shift {shift}")
            }
            (Some(id), ..) => format!("id {id}, with settings that cannot be read"),
        }
    }
}

/// An interface with a role.
#[derive(Serialize)]
pub(super) struct Device {
    index: u32,
    /// None where it is not in this network namespace.
    name: Option<String>,
    roles: Vec<&'static str>,
}

/// By the kernel's number.
pub(super) fn devices(interfaces: &BTreeMap<u32, Interface>) -> Vec<Device> {
    let all = [
        ("uplink", Interface::UPLINK),
        ("overlay", Interface::OVERLAY),
        ("pods", Interface::PODS),
        ("node", Interface::NODE),
    ];
    let roles = |interface: &Interface| {
        all.iter().filter(|(_, role)| interface.is(*role)).map(|(name, _)| *name).collect()
    };
    let device = |(index, interface): (&u32, &Interface)| Device {
        index: *index,
        name: device_name(*index),
        roles: roles(interface),
    };
    interfaces.iter().map(device).collect()
}

/// In one line.
pub(super) fn name_all(devices: &[Device]) -> String {
    if devices.is_empty() {
        return "none has a role".to_owned();
    }
    let names = devices.iter().map(|Device { index, name, roles }| {
        let name = name.clone().unwrap_or_else(|| format!("interface {index}"));
        format!("{name} {}", roles.join("+"))
    });
    names.collect::<Vec<_>>().join(", ")
}
