//! Roles of a node's interfaces.

use crate::limits;
use bytemuck::{Pod, Zeroable};

/// What an interface is for; it may have several roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Interface {
    roles: u32,
}

impl Interface {
    /// Clients and the other nodes are behind it: `eth0`.
    pub const UPLINK: Self = Self { roles: 1 };
    /// Frames of the other nodes' pods and holders arrive on it: the overlay's port of the bridge, a VXLAN device, or,
    /// where nodes route to each other's pods, the uplink.
    pub const OVERLAY: Self = Self { roles: 2 };
    /// Frames of this node's pods arrive on it, and the node sends to pods through it: the bridge, or a pod's veth.
    pub const PODS: Self = Self { roles: 4 };

    /// The node's own packets to its own addresses pass it: `lo`.
    pub const NODE: Self = Self { roles: 8 };

    /// Beside UPLINK, it is a bridge: netfilter may have seen its frames before it, and tracks their connections.
    pub const BRIDGE: Self = Self { roles: 16 };

    /// Both roles.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self { roles: self.roles | other.roles }
    }

    /// Whether clients inside the cluster alone are behind it. Behind an uplink there are both.
    #[inline(always)]
    pub const fn is_inside(self) -> bool {
        !self.is(Self::UPLINK)
    }

    /// Whether all of `role` is among its roles.
    #[inline(always)]
    pub const fn is(self, role: Self) -> bool {
        self.roles & role.roles == role.roles
    }

    /// All of them, one bit each.
    #[inline(always)]
    pub const fn bits(self) -> u8 {
        #[expect(clippy::cast_possible_truncation, reason = "there are three roles")]
        let bits = self.roles as u8;
        bits
    }
}

/// Value of the `interfaces` map: a small hash table with open addressing, laid over an array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct InterfaceSlot {
    /// Interface index, 0 where the slot is free.
    pub index: u32,
    /// Its roles.
    pub interface: Interface,
}

impl InterfaceSlot {
    /// How many slots from its own on an interface may stand in.
    pub const PLACES: u32 = 8;

    /// The slots that the interface may stand in, the likeliest first.
    ///
    /// Indexes are given out in turn, and veths of pods that live long stand in rows: taken as they are, a row would
    /// fill all the places of an index that is a multiple of the table's size later. Multiplied, they are spread.
    #[inline(always)]
    pub fn places(index: u32) -> impl Iterator<Item = u32> {
        // Knuth's multiplicative hashing: 2^32 by the golden ratio; the highest bits are the best mixed.
        let own = index.wrapping_mul(0x9e37_79b1) >> (u32::BITS - limits::INTERFACES.ilog2());
        (0..Self::PLACES).map(move |step| own.wrapping_add(step) % limits::INTERFACES)
    }

    /// The roles, if the slot belongs to this interface.
    #[inline(always)]
    pub fn of(&self, index: u32) -> Option<Interface> {
        (self.index == index).then_some(self.interface)
    }
}

const _: () = assert!(size_of::<InterfaceSlot>() == 8 && limits::INTERFACES.is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Pods' veths of a node that has run for long: a row of old ones, and each newer one far behind the last.
    #[test]
    fn five_hundred_interfaces_find_a_place_whatever_their_indexes() {
        for (row, gap) in
            [(500, 1), (250, 64), (250, limits::INTERFACES), (1, 2), (100, 4095), (0, 3), (0, 1024)]
        {
            let newer = (1..=500 - row).map(|n| 600 + n * gap);
            let mut taken = BTreeSet::new();
            for index in (1..=row).chain(newer) {
                let place = InterfaceSlot::places(index).find(|place| taken.insert(*place));
                assert!(place.is_some(), "{index} of {row} and {gap}");
            }
        }
    }
}
