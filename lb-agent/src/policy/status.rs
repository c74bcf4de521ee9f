//! What to write to Services' status: what [`super::compute()`] says, and what it leaves alone but the API shows wrongly.

use crate::model::{Desired, Service, ServiceName, Shown, Status};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// The writes of this node, by Service; none clears the status.
///
/// Beside the answers of `compute`, which knows addresses only:
/// - the right address without `ipMode: Proxy` is written again, if `corrects_ip_mode`;
/// - a Service that is being deleted takes no new connections, so it shows no address.
pub fn writes<'s>(
    desired: &Desired,
    service: impl Fn(&ServiceName) -> Option<&'s Service>,
    corrects_ip_mode: bool,
) -> BTreeMap<ServiceName, Option<Ipv4Addr>> {
    let name =
        |namespace: &str, name: &str| ServiceName { namespace: namespace.to_owned(), name: name.to_owned() };
    let computed = desired
        .status
        .iter()
        .map(|Status { namespace, name: service, address }| (name(namespace, service), *address));
    let mut writes: BTreeMap<ServiceName, Option<Ipv4Addr>> = computed.collect();
    for forward in &desired.forwards {
        let name = name(&forward.namespace, &forward.name);
        let Some(service) = service(&name) else { continue };
        if service.deleting {
            if service.shown == Shown::Nothing {
                writes.remove(&name);
            } else {
                writes.insert(name, None);
            }
        } else if corrects_ip_mode
            && service.shown == Shown::Address(forward.address)
            && !service.is_shown_by_proxy
        {
            writes.insert(name, Some(forward.address));
        }
    }
    writes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Node;
    use crate::policy::compute;

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
        let node =
            |name: &str, address| Node { name: name.to_owned(), addresses: vec![address], ..Node::default() };
        let nodes = [node("a", ADDRESS), node("b", OTHER)];
        ["a", "b"].map(|own| {
            let desired = compute(own, &nodes, std::slice::from_ref(service), &[]);
            writes(&desired, |_| Some(service), corrects).get(&service.full_name()).copied()
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
