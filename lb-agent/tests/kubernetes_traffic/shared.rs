//! One world for many scenarios: a control plane with agents takes ten seconds to start and half a gigabyte.

use crate::world::World;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use testbed::kubernetes::Mode;

static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// The world, for one scenario at a time. A scenario that fails takes it down, and the next one gets a new one.
pub(crate) struct Shared(MutexGuard<'static, Option<World>>);

/// Without kube-proxy; none if this machine cannot have Kubernetes.
pub(crate) fn world() -> Option<Shared> {
    with_proxies(None)
}

/// With kube-proxy on every node, in this mode.
pub(crate) fn with_proxies(mode: Option<Mode>) -> Option<Shared> {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    if world.as_ref().is_none_or(|world| world.mode() != mode) {
        // The old one first: there is no room for two.
        *world = None;
        *world = Some(World::start(mode)?);
        end_with_the_process();
    }
    Some(Shared(world))
}

impl Deref for Shared {
    type Target = World;

    fn deref(&self) -> &World {
        self.0.as_ref().unwrap()
    }
}

impl DerefMut for Shared {
    fn deref_mut(&mut self) -> &mut World {
        self.0.as_mut().unwrap()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if thread::panicking() {
            // Shows the logs, too.
            *self.0 = None;
        } else if let Some(world) = self.0.as_mut() {
            world.tidy();
        }
    }
}

/// Values of statics are not dropped.
fn end_with_the_process() {
    static ASKED: Once = Once::new();
    extern "C" fn end() {
        WORLD.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
    ASKED.call_once(|| {
        // SAFETY: `end` takes no argument, and touches nothing that exit() has taken away: a mutex, files, processes.
        let refused = unsafe { libc::atexit(end) };
        assert_eq!(refused, 0, "the world would outlive its tests");
    });
}
