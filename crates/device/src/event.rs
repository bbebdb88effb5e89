//! Points in a stream.

use crate::backend::EventBackend;
use crate::device::Device;
use crate::error::{Error, Result};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

/// A point in a stream that can be waited for, and whose time can be compared with another's.
///
/// [`Stream::record`](crate::Stream::record) puts it into a stream; recording it again moves it.
pub struct Event {
    pub(crate) backend: Box<dyn EventBackend>,
    pub(crate) device: Device,
    pub(crate) recorded: AtomicBool,
}

impl Event {
    /// An event that is recorded nowhere yet.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Event {
            backend: device.backend().event()?,
            device: device.clone(),
            recorded: AtomicBool::new(false),
        })
    }

    /// Waits until the stream has come to the event.
    ///
    /// # Errors
    /// [`Error::EventNotRecorded`], or what a kernel before it did wrong.
    pub fn synchronize(&self) -> Result<()> {
        self.check_recorded()?;
        self.backend.synchronize()
    }

    /// Waits for this event and says how many milliseconds after `start` it came; below 0 if it came before.
    ///
    /// # Errors
    /// [`Error::EventNotRecorded`], [`Error::WrongDevice`], or what a kernel before it did wrong.
    pub fn elapsed_ms(&self, start: &Event) -> Result<f64> {
        self.device.check_same(&start.device, "the start event")?;
        start.synchronize()?;
        self.synchronize()?;
        self.backend.elapsed_ms(&*start.backend)
    }

    pub(crate) fn check_recorded(&self) -> Result<()> {
        if self.recorded.load(Ordering::Acquire) { Ok(()) } else { Err(Error::EventNotRecorded) }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("recorded", &self.recorded).finish_non_exhaustive()
    }
}
