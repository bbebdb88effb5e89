//! Page-locked host memory.

use crate::backend::PinnedMemory;
use crate::buffer::check_range;
use crate::device::{Device, size_of_many};
use crate::error::{Error, Result};
use crate::unordered::{Access, Memory};
use bytemuck::Pod;
use simt::{Global, GlobalMut};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range, RangeBounds};
use std::panic::Location;

/// `len` elements of host memory that the device reaches too: as the source or target of an asynchronous
/// copy, or from a kernel, over the bus. On the CPU backend it is plain aligned memory.
///
/// The host uses it as a slice. While work that touches it is under way, the host must leave it alone: that
/// is in the contract of each `unsafe` call that starts such work. A device of the CPU backend with
/// [`stream_check`](simt::emu::EmuOptions::stream_check) looks after it: a slice that is taken too early, and
/// memory that is dropped too early, is a panic, or an error of [`try_slice`](Self::try_slice).
pub struct Pinned<T: Pod> {
    device: Device,
    memory: PinnedMemory,
    len: usize,
    /// Whether the device asks what the host does with it.
    watched: bool,
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
    /// [`Error::OutOfMemory`], [`Error::TooLarge`].
    #[track_caller]
    pub fn zeroed(device: &Device, len: usize) -> Result<Self> {
        let bytes = size_of_many::<T>(len)?;
        let memory = if bytes == 0 {
            PinnedMemory { host: std::ptr::null_mut(), device: 0 }
        } else {
            device.backend().allocate_pinned(Memory::of::<T>(len, true, Location::caller()))?
        };
        let watched = bytes != 0 && device.backend().watches_host();
        Ok(Pinned { device: device.clone(), memory, len, watched, element: PhantomData })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    #[track_caller]
    pub fn from_slice(device: &Device, values: &[T]) -> Result<Self> {
        let mut pinned = Self::zeroed(device, values.len())?;
        pinned.copy_from_slice(values);
        Ok(pinned)
    }

    /// How many elements there are. Unlike a look at the slice this is no use of the memory.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The elements. To use the memory as a slice does the same, and panics where this returns an error.
    ///
    /// # Errors
    /// [`Error::Unordered`] on a device of the CPU backend with `stream_check`, if
    /// work that writes the memory is under way.
    #[track_caller]
    pub fn try_slice(&self) -> Result<&[T]> {
        self.host_uses(Access::Read)?;
        if self.memory.host.is_null() {
            return Ok(zero_bytes(self.len));
        }
        // SAFETY: allocated for `len` elements, aligned to 256, initialised, and valid for any `Pod`.
        Ok(unsafe { std::slice::from_raw_parts(self.memory.host.cast(), self.len) })
    }

    /// The elements, to be changed.
    ///
    /// # Errors
    /// [`Error::Unordered`] as for [`try_slice`](Self::try_slice), also if work that
    /// reads the memory is under way.
    #[track_caller]
    pub fn try_slice_mut(&mut self) -> Result<&mut [T]> {
        self.host_uses(Access::Write)?;
        if self.memory.host.is_null() {
            // SAFETY: no byte is behind it: either no element or elements of size 0.
            return Ok(unsafe { std::slice::from_raw_parts_mut(std::ptr::dangling_mut(), self.len) });
        }
        // SAFETY: allocated for `len` elements, aligned to 256, initialised, valid for any `Pod`, and
        // borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory.host.cast(), self.len) })
    }

    #[track_caller]
    fn host_uses(&self, access: Access) -> Result<()> {
        if !self.watched {
            return Ok(());
        }
        self.device.backend().host_uses(self.memory, self.bytes(), access, Some(Location::caller()))
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

    #[track_caller]
    fn deref(&self) -> &[T] {
        self.try_slice().unwrap_or_else(unordered)
    }
}

impl<T: Pod> DerefMut for Pinned<T> {
    #[track_caller]
    fn deref_mut(&mut self) -> &mut [T] {
        match self.try_slice_mut() {
            Ok(slice) => slice,
            Err(error) => unordered(error),
        }
    }
}

/// A slice cannot be refused in another way.
#[cold]
#[track_caller]
fn unordered<R>(error: Error) -> R {
    panic!("{error}")
}

/// A slice with no byte behind it: no element, or elements of size 0.
fn zero_bytes<'a, T: Pod>(len: usize) -> &'a [T] {
    debug_assert_eq!(len * size_of::<T>(), 0);
    // SAFETY: a dangling pointer is valid for zero bytes.
    unsafe { std::slice::from_raw_parts(std::ptr::dangling(), len) }
}

impl<T: Pod> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.memory.host.is_null() {
            return;
        }
        let (backend, bytes) = (self.device.backend(), self.bytes());
        let refused =
            if self.watched { backend.host_uses(self.memory, bytes, Access::Free, None).err() } else { None };
        // SAFETY: allocated with these bytes, and gone after this.
        unsafe { backend.free_pinned(self.memory, bytes) };
        // A second panic would end the process.
        if let Some(error) = refused.filter(|_| !std::thread::panicking()) {
            unordered(error)
        }
    }
}

impl<T: Pod> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("device", &self.device.info().name).field("len", &self.len).finish()
    }
}
