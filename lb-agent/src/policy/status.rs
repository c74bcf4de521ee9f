//! What to write to Services' status: what [`super::compute()`] says, and what it leaves alone but the API shows wrongly.

use crate::model::{Service, ServiceName, Shown, Status};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// What is to be written, or not, though `compute` (which knows addresses only) says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beside {
    /// The right address is shown without `ipMode: Proxy`.
    IpMode(Ipv4Addr),
    /// It is being deleted and shows something, though it takes no new connections.
    Withdraw,
    /// It is being deleted and shows nothing, as it should.
    Leave,
}

/// For a Service whose address this node holds.
pub(super) fn beside(service: &Service, address: Ipv4Addr) -> Option<Beside> {
    match (service.deleting, service.shown) {
        (true, Shown::Nothing) => Some(Beside::Leave),
        (true, _) => Some(Beside::Withdraw),
        (false, shown) => {
            let is_wrong = shown == Shown::Address(address) && !service.is_shown_by_proxy;
            is_wrong.then_some(Beside::IpMode(address))
        }
    }
}

/// The writes of this node, by Service; none clears the status. `corrects_ip_mode` is false where the API server is known
/// to drop it.
pub(super) fn writes<'a>(
    computed: &'a BTreeMap<ServiceName, Status>,
    beside: &'a BTreeMap<ServiceName, Beside>,
    corrects_ip_mode: bool,
) -> impl Iterator<Item = (&'a ServiceName, Option<Ipv4Addr>)> {
    let plain = computed.iter().filter(|(name, _)| !beside.contains_key(name));
    let corrected = beside.iter().filter_map(move |(name, beside)| match beside {
        Beside::IpMode(address) => corrects_ip_mode.then_some((name, Some(*address))),
        Beside::Withdraw => Some((name, None)),
        Beside::Leave => None,
    });
    plain.map(|(name, status)| (name, status.address)).chain(corrected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Node;
    use crate::policy::extend::Options;
    use crate::policy::state::State;
    use crate::source::store::{Changes, Store};

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const OTHER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

    fn mk_service(shown: Shown, is_shown_by_proxy: bool, deleting: bool) -> Service {
        Service {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            eligible: true,
            wanted: ADDRESS.to_string(),
            shown,
            is_shown_by_proxy,
            deleting,
            ..Service::default()
        }
    }

    /// What the node that holds the address writes, and what the other one does.
    fn answers(service: &Service, corrects: bool) -> [Option<Option<Ipv4Addr>>; 2] {
        let mut store = Store::default();
        for (name, address) in [("a", ADDRESS), ("b", OTHER)] {
            let node = Node { name: name.to_owned(), addresses: vec![address], ..Node::default() };
            store.set_node(name, Some((node, None)));
        }
        store.set_service(&service.full_name(), Some(service.clone()));
        ["a", "b"].map(|own| {
            let mut state = State::new(own, Options::default());
            state.update(&store, Changes::Everything);
            let writes: Vec<_> = state.writes(corrects).map(|(_, address)| address).collect();
            assert!(writes.len() <= 1, "{writes:?}");
            writes.first().copied()
        })
    }

    #[test]
    fn the_holder_alone_shows_the_address_and_corrects_its_mode() {
        let right = Shown::Address(ADDRESS);
        for (shown, by_proxy, corrects, holder) in [
            (Shown::Nothing, false, true, Some(Some(ADDRESS))),
            (Shown::Address(OTHER), true, true, Some(Some(ADDRESS))),
            (Shown::Other, false, true, Some(Some(ADDRESS))),
            (right, true, true, None),
            (right, false, true, Some(Some(ADDRESS))),
            (right, false, false, None),
        ] {
            let service = mk_service(shown, by_proxy, false);
            assert_eq!(answers(&service, corrects), [holder, None], "{shown:?} {by_proxy} {corrects}");
        }
    }

    #[test]
    fn a_service_that_is_being_deleted_shows_nothing() {
        for (shown, holder) in [
            (Shown::Nothing, None),
            (Shown::Address(ADDRESS), Some(None)),
            (Shown::Address(OTHER), Some(None)),
        ] {
            assert_eq!(answers(&mk_service(shown, true, true), true), [holder, None], "{shown:?}");
        }
    }

    #[test]
    fn a_service_of_another_class_is_left_alone() {
        let service = Service { eligible: false, ..mk_service(Shown::Address(OTHER), false, true) };
        assert_eq!(answers(&service, true), [None, None]);
    }
}
