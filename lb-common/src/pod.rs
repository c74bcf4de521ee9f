//! The one place that tells aya which types may be copied into maps.

#[cfg(feature = "user")]
mod user {
    use crate::{
        addr, backend, config, counters, flow, fragment, holder, interface, masquerade, service, way,
    };

    macro_rules! pod {
        ($($t:ty),* $(,)?) => {
            $(
                // SAFETY: the type is `bytemuck::Pod`, which has the same duties: any bit pattern is valid, no padding.
                unsafe impl aya::Pod for $t {}
                const _: () = { const fn is_pod<T: bytemuck::Pod>() {} is_pod::<$t>() };
            )*
        };
    }

    pod!(
        addr::Ipv4,
        addr::Mac,
        backend::Backend,
        config::Config,
        counters::Outcome,
        flow::Flow,
        flow::FlowKey,
        flow::Reply,
        fragment::Fragment,
        fragment::FragmentKey,
        holder::EndpointHolders,
        holder::EndpointKey,
        holder::Holder,
        interface::InterfaceSlot,
        masquerade::Client,
        masquerade::Masquerade,
        masquerade::MasqueradedKey,
        masquerade::Own,
        service::RingPlace,
        service::Service,
        service::ServiceKey,
        service::ServiceStats,
        way::BackendWay,
    );
}
