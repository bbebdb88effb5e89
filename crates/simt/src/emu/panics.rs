//! Panics inside kernels: noted for the fault that they become, and not printed.

use super::fault::{Place, interned};
use super::lane::CURRENT;
use core::cell::Cell;
use std::sync::Once;

thread_local! {
    /// Where the kernel that runs here panicked.
    static PANIC_PLACE: Cell<Option<Place>> = const { Cell::new(None) };
}

/// Where the kernel that runs here panicked last.
pub(super) fn take_place() -> Option<Place> {
    PANIC_PLACE.take()
}

/// From the first launch on, a panic inside a kernel is noted for the fault that it becomes, and not printed.
/// Every other panic goes to the hook that was there before.
pub(super) fn watch() {
    static WATCHING: Once = Once::new();
    if std::thread::panicking() {
        return;
    }
    WATCHING.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if CURRENT.get().is_null() {
                before(info);
            } else {
                PANIC_PLACE.set(info.location().map(|at| Place {
                    file: interned(at.file()),
                    line: at.line(),
                    column: at.column(),
                }));
            }
        }));
    });
}

/// The message of a panic.
pub(super) fn message(payload: &(dyn std::any::Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|text| text.to_string())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(no message)".to_string())
}
