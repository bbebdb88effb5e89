//! Page-locked host memory.

use crate::backend::PinnedMemory;
use crate::buffer::check_range;
use crate::device::{Device, size_of_many};
use crate::error::Result;
use bytemuck::Pod;
use simt::{Global, GlobalMut};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range, RangeBounds};

/// `len` elements of host memory that the device reaches too: as the source or target of an asynchronous
/// copy, or from a kernel, over the bus. On the CPU backend it is plain aligned memory.
///
/// The host uses it as a slice. While work that touches it is under way, the host must leave it alone: that
/// is in the contract of each `unsafe` call that starts such work.
pub struct Pinned<T: Pod> {
    device: Device,
    memory: PinnedMemory,
    len: usize,
    element: PhantomData<T>,
}

// SAFETY: the memory belongs to the value alone, and a `Pod` element may be used from any thread.
unsafe impl<T: Pod + Send> Send for Pinned<T> {}
// SAFETY: shared use is reading elements, through a slice.
unsafe impl<T: Pod + Sync> Sync for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// Zeroed memory.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], [`crate::Error::TooLarge`].
    pub fn zeroed(device: &Device, len: usize) -> Result<Self> {
        let bytes = size_of_many::<T>(len)?;
        let memory = if bytes == 0 {
            PinnedMemory { host: std::ptr::null_mut(), device: 0 }
        } else {
            device.backend().allocate_pinned(bytes)?
        };
        Ok(Pinned { device: device.clone(), memory, len, element: PhantomData })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn from_slice(device: &Device, values: &[T]) -> Result<Self> {
        let mut pinned = Self::zeroed(device, values.len())?;
        pinned.copy_from_slice(values);
        Ok(pinned)
    }

    /// The device that reaches it.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The memory as a kernel's argument, for reading.
    pub fn global(&self) -> Global<T> {
        // SAFETY: the device reaches the memory; that it stays valid is in the launch's contract.
        unsafe { Global::from_raw(self.memory.device, self.len) }
    }

    /// The memory as a kernel's argument, for reading and writing.
    pub fn global_mut(&mut self) -> GlobalMut<T> {
        // SAFETY: as above.
        unsafe { GlobalMut::from_raw(self.memory.device, self.len) }
    }

    pub(crate) fn checked(&self, range: impl RangeBounds<usize>) -> Result<Range<usize>> {
        check_range("pinned memory", range, self.len)
    }

    /// Where the host sees `element`, which is at most `len`.
    pub(crate) fn host_address(&self, element: usize) -> *mut u8 {
        self.memory.host.wrapping_add(element * size_of::<T>())
    }
}

impl<T: Pod> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        if self.memory.host.is_null() {
            return zero_bytes(self.len);
        }
        // SAFETY: allocated for `len` elements, aligned to 256, initialised, and valid for any `Pod`.
        unsafe { std::slice::from_raw_parts(self.memory.host.cast(), self.len) }
    }
}

impl<T: Pod> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        if self.memory.host.is_null() {
            // SAFETY: no byte is behind it: either no element or elements of size 0.
            return unsafe { std::slice::from_raw_parts_mut(std::ptr::dangling_mut(), self.len) };
        }
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.memory.host.cast(), self.len) }
    }
}

/// A slice with no byte behind it: no element, or elements of size 0.
fn zero_bytes<'a, T: Pod>(len: usize) -> &'a [T] {
    debug_assert_eq!(len * size_of::<T>(), 0);
    // SAFETY: a dangling pointer is valid for zero bytes.
    unsafe { std::slice::from_raw_parts(std::ptr::dangling(), len) }
}

impl<T: Pod> Drop for Pinned<T> {
    fn drop(&mut self) {
        if !self.memory.host.is_null() {
            // SAFETY: allocated with these bytes, and gone after this.
            unsafe { self.device.backend().free_pinned(self.memory, self.len * size_of::<T>()) };
        }
    }
}

impl<T: Pod> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("device", &self.device.info().name).field("len", &self.len).finish()
    }
}
