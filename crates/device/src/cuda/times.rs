//! How long launches take: an event on each side of one.

use super::context::Context;
use super::ffi::{check, cu, note};
use crate::error::Result;
use crate::times::{KernelTimes, by_kernel};
use cust::sys::{CUevent, CUstream};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Those launches of a device that are timed.
#[derive(Default)]
pub(super) struct Times {
    on: AtomicBool,
    /// Whose times nobody has taken.
    launches: Mutex<Vec<Launch>>,
}

struct Launch {
    kernel: &'static str,
    start: Point,
    end: Point,
}

impl Times {
    pub(super) fn record(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    /// Whether launches are timed.
    #[inline]
    pub(super) fn are_recorded(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Times what `put` puts into `stream`, a launch of `kernel`. The context is bound, the stream captures
    /// nothing, and its lock is held, so that nothing of this handle comes between the two events.
    pub(super) fn around(
        &self,
        kernel: &'static str,
        context: &Arc<Context>,
        stream: CUstream,
        put: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        // Both are made ahead of the launch: what the host does behind the first is measured with it.
        let (start, end) = (Point::new(context)?, Point::new(context)?);
        start.record(stream)?;
        put()?;
        end.record(stream)?;
        self.launches().push(Launch { kernel, start, end });
        Ok(())
    }

    /// Waits for the launches that are timed and says how long each took; they are forgotten then.
    pub(super) fn take(&self, context: &Context) -> Result<Vec<KernelTimes>> {
        let launches = std::mem::take(&mut *self.launches());
        context.bind()?;
        let times: Result<Vec<_>> = launches.iter().map(|of| Ok((of.kernel, of.microseconds()?))).collect();
        Ok(by_kernel(times?))
    }

    /// The list is whole at any time, also after a panic.
    fn launches(&self) -> MutexGuard<'_, Vec<Launch>> {
        self.launches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Launch {
    /// Waits for the launch. The context is bound.
    fn microseconds(&self) -> Result<f32> {
        // SAFETY: the event lives as long as `self`.
        let code = unsafe { cu!(cuEventSynchronize(self.end.raw)) };
        check(code, || format!("waiting for a launch of {}", self.kernel))?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: `milliseconds` is valid for a write, and both events live.
        let code = unsafe { cu!(cuEventElapsedTime(&mut milliseconds, self.start.raw, self.end.raw)) };
        check(code, || format!("timing a launch of {}", self.kernel))?;
        Ok(milliseconds * 1e3)
    }
}

/// An event. The public one keeps the module, which keeps the list that this one is in.
struct Point {
    raw: CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver lets any thread use an event.
unsafe impl Send for Point {}
// SAFETY: as above.
unsafe impl Sync for Point {}

impl Point {
    /// The context is bound.
    fn new(context: &Arc<Context>) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for a write.
        check(unsafe { cu!(cuEventCreate(&mut raw, 0)) }, || "making an event".into())?;
        Ok(Point { raw, context: context.clone() })
    }

    fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the event lives as long as `self`, and the caller puts work into the stream.
        check(unsafe { cu!(cuEventRecord(self.raw, stream)) }, || "recording an event".into())
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        if self.context.bind_quietly() {
            // SAFETY: made by `new`, and not used again.
            note(unsafe { cu!(cuEventDestroy_v2(self.raw)) }, "dropping an event");
        }
    }
}
