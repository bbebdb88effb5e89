//! Typed device memory.

use crate::backend::Place;
use crate::device::{Device, size_of_many};
use crate::error::{Error, Result};
use crate::unordered::Memory;
use bytemuck::Pod;
use simt::{Global, GlobalMut};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};
use std::panic::Location;

/// `len` elements of device memory, freed when dropped.
///
/// Dropping waits for work of the device that is under way, and works from any thread. Memory that
/// [another library owns](Self::from_raw) is left alone instead.
pub struct Buffer<T: Pod> {
    device: Device,
    address: u64,
    len: usize,
    /// Whether dropping frees it.
    owned: bool,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Memory whose contents are unspecified. (The CPU backend fills it with the byte `0xa5`, so that a
    /// kernel which counts on zeros shows it.)
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TooLarge`].
    #[track_caller]
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        let bytes = size_of_many::<T>(len)?;
        let memory = Memory::of::<T>(len, false, Location::caller());
        let address = if bytes == 0 { 0 } else { device.backend().allocate(memory)? };
        Ok(Buffer { device: device.clone(), address, len, owned: true, element: PhantomData })
    }

    /// Memory of zero bytes.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    #[track_caller]
    pub fn zeroed(device: &Device, len: usize) -> Result<Self> {
        let buffer = Self::new(device, len)?;
        if buffer.bytes() != 0 {
            // SAFETY: the buffer is valid for its bytes, and nothing else knows it yet.
            unsafe { device.backend().fill_now(buffer.address, 0, buffer.bytes()) }?;
        }
        Ok(buffer)
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    #[track_caller]
    pub fn from_slice(device: &Device, values: &[T]) -> Result<Self> {
        let buffer = Self::new(device, values.len())?;
        if buffer.bytes() != 0 {
            let from = Place::Host(values.as_ptr().cast_mut().cast());
            // SAFETY: both are valid for the buffer's bytes, the slice is only read, and nothing else knows
            // the buffer yet.
            unsafe { device.backend().copy_now(Place::Device(buffer.address), from, buffer.bytes()) }?;
        }
        Ok(buffer)
    }

    /// Memory that another library owns, such as a tensor's: `len` elements from `address` on. Everything
    /// that takes a buffer takes it, and checks its length as it does that of any other. Dropping it frees
    /// nothing and waits for nothing.
    ///
    /// On a GPU `address` is what its driver calls a device pointer, in the primary context, which the CUDA
    /// runtime uses, and so PyTorch; on the CPU it is a pointer of the host, exposed
    /// (`expose_provenance`).
    ///
    /// # Safety
    /// Until the value is dropped and every piece of work that was given it has finished (for a capture:
    /// until no run of the graph can follow):
    /// - so many elements are there, and the device reaches them;
    /// - the alignment is what the kernels ask for that are launched on them: up to 16 bytes, where they move
    ///   vectors;
    /// - nothing else writes them, or for memory that work here writes, touches them, unless it is ordered
    ///   with that work. The device's own waits ([`Device::synchronize`] and what is said to wait for the
    ///   device) know nothing of the streams that the other library uses.
    ///
    /// # Errors
    /// [`Error::Misaligned`] if the address is no multiple of an element's alignment, or 0 for elements that
    /// have bytes; [`Error::NotReached`] if the GPU's driver knows that the memory is not the device's;
    /// [`Error::TooLarge`].
    pub unsafe fn from_raw(device: &Device, address: u64, len: usize) -> Result<Self> {
        let bytes = size_of_many::<T>(len)?;
        let align = align_of::<T>();
        if bytes != 0 {
            if address == 0 || !address.is_multiple_of(align as u64) {
                return Err(Error::Misaligned { address, align });
            }
            device.backend().check_foreign(address)?;
        }
        Ok(Buffer { device: device.clone(), address, len, owned: false, element: PhantomData })
    }

    /// Waits for **all work of the device**, then copies the contents out.
    ///
    /// # Errors
    /// What a kernel did wrong.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.len];
        self.read(0, &mut values)?;
        Ok(values)
    }

    /// Waits for **all work of the device**, then copies elements from `start` on to `values`.
    ///
    /// # Errors
    /// [`Error::Range`], and as [`to_vec`](Self::to_vec).
    pub fn read(&self, start: usize, values: &mut [T]) -> Result<()> {
        let range = self.sized(start, values.len())?;
        self.device.backend().synchronize()?;
        let bytes = size_of_val(values);
        if bytes == 0 {
            return Ok(());
        }
        let to = Place::Host(values.as_mut_ptr().cast());
        // SAFETY: both ends are valid for `bytes`, and the device has no work under way.
        unsafe { self.device.backend().copy_now(to, Place::Device(self.address_of(range.start)), bytes) }
    }

    /// Waits for **all work of the device**, then overwrites elements from `start` on with `values`.
    ///
    /// # Errors
    /// [`Error::Range`], and as [`to_vec`](Self::to_vec).
    pub fn write(&mut self, start: usize, values: &[T]) -> Result<()> {
        let range = self.sized(start, values.len())?;
        self.device.backend().synchronize()?;
        let bytes = size_of_val(values);
        if bytes == 0 {
            return Ok(());
        }
        let from = Place::Host(values.as_ptr().cast_mut().cast());
        // SAFETY: both ends are valid for `bytes`, and the device has no work under way.
        unsafe { self.device.backend().copy_now(Place::Device(self.address_of(range.start)), from, bytes) }
    }

    /// How many elements there are.
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

    /// Where the memory is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The whole buffer as a kernel's argument, for reading.
    pub fn global(&self) -> Global<T> {
        // SAFETY: the memory is valid for reads; that it stays so is in the launch's contract.
        unsafe { Global::from_raw(self.address, self.len) }
    }

    /// The whole buffer as a kernel's argument, for reading and writing.
    pub fn global_mut(&mut self) -> GlobalMut<T> {
        // SAFETY: the memory is valid; that it stays so is in the launch's contract.
        unsafe { GlobalMut::from_raw(self.address, self.len) }
    }

    /// Some elements as a kernel's argument, for reading.
    ///
    /// # Errors
    /// [`Error::Range`].
    pub fn global_range(&self, range: impl RangeBounds<usize>) -> Result<Global<T>> {
        let range = self.checked(range)?;
        // SAFETY: inside the buffer; that it stays valid is in the launch's contract.
        Ok(unsafe { Global::from_raw(self.address_of(range.start), range.len()) })
    }

    /// Some elements as a kernel's argument, for reading and writing.
    ///
    /// # Errors
    /// [`Error::Range`].
    pub fn global_range_mut(&mut self, range: impl RangeBounds<usize>) -> Result<GlobalMut<T>> {
        let range = self.checked(range)?;
        // SAFETY: inside the buffer; that it stays valid is in the launch's contract.
        Ok(unsafe { GlobalMut::from_raw(self.address_of(range.start), range.len()) })
    }

    pub(crate) fn address_of(&self, element: usize) -> u64 {
        self.address + (element * size_of::<T>()) as u64
    }

    pub(crate) fn checked(&self, range: impl RangeBounds<usize>) -> Result<Range<usize>> {
        check_range("buffer", range, self.len)
    }

    /// The `len` elements from `start` on.
    pub(crate) fn sized(&self, start: usize, len: usize) -> Result<Range<usize>> {
        self.checked(start..start.saturating_add(len))
    }
}

impl<T: Pod> Drop for Buffer<T> {
    fn drop(&mut self) {
        let bytes = self.bytes();
        if self.owned && bytes != 0 {
            // SAFETY: allocated with these bytes, and gone after this.
            unsafe { self.device.backend().free(self.address, bytes) };
        }
    }
}

impl<T: Pod> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("device", &self.device.info().name)
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .finish()
    }
}

/// `range` as two numbers, if it lies in `len` elements.
pub(crate) fn check_range(
    what: &'static str,
    range: impl RangeBounds<usize>,
    len: usize,
) -> Result<Range<usize>> {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => len,
    };
    if start <= end && end <= len { Ok(start..end) } else { Err(Error::Range { what, start, end, len }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::reversed_empty_ranges)]
    fn ranges_are_checked_at_every_edge() {
        let inside =
            |range: Result<Range<usize>>, expected: Range<usize>| assert_eq!(range.unwrap(), expected);
        inside(check_range("x", .., 5), 0..5);
        inside(check_range("x", 5.., 5), 5..5);
        inside(check_range("x", ..=4, 5), 0..5);
        inside(check_range("x", 2..3, 5), 2..3);
        inside(check_range("x", .., 0), 0..0);
        assert!(matches!(
            check_range("x", 0..6, 5),
            Err(Error::Range { what: "x", start: 0, end: 6, len: 5 })
        ));
        assert!(check_range("x", 6.., 5).is_err());
        assert!(check_range("x", 3..2, 5).is_err());
        assert!(check_range("x", 0..=usize::MAX, 5).is_err());
        assert!(check_range("x", usize::MAX..usize::MAX, 5).is_err());
    }
}
