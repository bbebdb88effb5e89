//! Tensor maps of buffers.

use crate::buffer::Buffer;
use crate::error::Result;
use bytemuck::Pod;
use simt::{TensorMap, TensorMapShape};

impl<T: Pod> Buffer<T> {
    /// A map of a tensor that begins at element `start`, for kernels of this device that copy boxes of it to
    /// shared memory ([`simt::tiles`]). A kernel gets it as an element of a `Global<TensorMap>`: a
    /// `Buffer<TensorMap>` that the host has written ahead of the launch.
    ///
    /// The map holds the buffer's address and does not keep the buffer: as with [`global`](Self::global),
    /// that it lives is in the launch's contract.
    ///
    /// ```
    /// use ferrokv_device::{Buffer, Device};
    /// use simt::{Swizzle, TensorMapShape, emu::EmuOptions};
    ///
    /// let device = Device::cpu(EmuOptions::default());
    /// let rows = Buffer::<f32>::zeroed(&device, 100 * 96)?;
    /// // 100 rows of 96 elements, in boxes of 16 by 32.
    /// let shape = TensorMapShape::new::<f32, _>([96, 100], [32, 16]).with_swizzle(Swizzle::B128);
    /// let maps = Buffer::from_slice(&device, &[rows.tensor_map(0, &shape)?])?;
    /// // For a kernel's `maps: Global<TensorMap>`.
    /// let _ = maps.global();
    /// # Ok::<(), ferrokv_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range), [`Error::TensorMap`](crate::Error::TensorMap), on a GPU
    /// [`Error::NoTensorMaps`](crate::Error::NoTensorMaps) and what the driver reports.
    pub fn tensor_map(&self, start: usize, shape: &TensorMapShape) -> Result<TensorMap> {
        self.map(start, shape, false)
    }

    /// The same for kernels that copy boxes back as well.
    ///
    /// # Errors
    /// As for [`tensor_map`](Self::tensor_map), also where elements of the tensor overlap.
    pub fn tensor_map_mut(&mut self, start: usize, shape: &TensorMapShape) -> Result<TensorMap> {
        self.map(start, shape, true)
    }

    fn map(&self, start: usize, shape: &TensorMapShape, writable: bool) -> Result<TensorMap> {
        let range = self.checked(start..)?;
        let (address, bytes) = (self.address_of(start), range.len() * size_of::<T>());
        shape.check(address, bytes as u64, writable)?;
        self.device().backend().tensor_map(shape, address, writable)
    }
}
