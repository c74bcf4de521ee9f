//! Roles of a node's interfaces.

use bytemuck::{Pod, Zeroable};

/// Value of the `interfaces` map, key = interface index. An interface may have several roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Interface {
    roles: u32,
}

impl Interface {
    /// Clients and the other nodes are behind it: `eth0`.
    pub const UPLINK: Self = Self { roles: 1 };
    /// Frames of the other nodes' pods and holders arrive on it: the overlay's port of the bridge.
    pub const OVERLAY: Self = Self { roles: 2 };
    /// Frames of this node's pods arrive on it, and the node sends to pods through it: the bridge.
    pub const PODS: Self = Self { roles: 4 };

    /// Both roles.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self { roles: self.roles | other.roles }
    }

    /// Whether all of `role` is among its roles.
    #[inline(always)]
    pub const fn is(self, role: Self) -> bool {
        self.roles & role.roles == role.roles
    }
}

const _: () = assert!(size_of::<Interface>() == 4);
