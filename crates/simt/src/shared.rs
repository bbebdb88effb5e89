//! Shared memory: 32-bit addresses, explicit `ld.shared` and `st.shared`, and a layout computed by a function
//! that the host calls as well to size the launch.
//!
//! ```
//! use simt::{Shared, SharedPlan};
//! struct Layout { keys: Shared<u32>, maxima: Shared<f32>, bytes: u32 }
//! const fn layout(rows: u32) -> Layout {
//!     let mut plan = SharedPlan::new();
//!     let keys = plan.array(rows * 32);
//!     let maxima = plan.array(rows);
//!     Layout { keys, maxima, bytes: plan.bytes() }
//! }
//! assert_eq!(layout(8).bytes, 8 * 32 * 4 + 8 * 4);
//! # let _ = (layout(8).keys, layout(8).maxima);
//! ```

use crate::Swizzle;
use crate::index::SharedIndex;
use bytemuck::Pod;
use core::marker::PhantomData;

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu;
#[cfg(target_arch = "nvptx64")]
use crate::ptx;

/// Lays arrays one after another in a block's dynamic shared memory, each aligned to 16 bytes at the most, or
/// as tiles are.
#[derive(Clone, Copy, Debug, Default)]
pub struct SharedPlan {
    bytes: u32,
}

impl SharedPlan {
    /// An empty plan.
    pub const fn new() -> Self {
        SharedPlan { bytes: 0 }
    }

    /// Room for `len` elements, aligned so that vectors of up to 16 bytes fit from element 0 on.
    pub const fn array<T: Pod>(&mut self, len: u32) -> Shared<T> {
        let bytes = core::mem::size_of::<T>() as u32 * len;
        self.aligned(len, if bytes >= 16 { 16 } else { core::mem::align_of::<T>() as u32 })
    }

    /// Room for `len` elements of boxes that [tensor copies](crate::tiles) move: aligned to 128 bytes, and to
    /// the swizzle's [`period`](Swizzle::period).
    pub const fn tile<T: Pod>(&mut self, len: u32, swizzle: Swizzle) -> Shared<T> {
        self.aligned(len, swizzle.tile_align())
    }

    const fn aligned<T: Pod>(&mut self, len: u32, align: u32) -> Shared<T> {
        let offset = self.bytes.next_multiple_of(align);
        self.bytes = offset + core::mem::size_of::<T>() as u32 * len;
        Shared { offset, len, element: PhantomData }
    }

    /// The shared memory the plan needs, in bytes: what [`LaunchShape::shared`](crate::LaunchShape::shared)
    /// wants.
    pub const fn bytes(&self) -> u32 {
        self.bytes
    }
}

/// An array in the block's dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Shared<T> {
    offset: u32,
    len: u32,
    element: PhantomData<*mut T>,
}

impl<T: Pod> Shared<T> {
    /// How many elements the array has.
    #[inline(always)]
    pub const fn len(self) -> u32 {
        self.len
    }

    /// Whether the array has no element.
    #[inline(always)]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Byte offset of element `index` in the block's dynamic shared memory.
    #[inline(always)]
    pub(crate) fn byte_offset(self, index: u32) -> u32 {
        self.offset + index * core::mem::size_of::<T>() as u32
    }

    /// Offset of the array in bytes, and its length: what the emulator checks accesses against.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(crate) fn extent(self) -> (u32, u32) {
        (self.offset, self.len)
    }

    /// Element `index`. PTX: `ld.shared`.
    #[crate::device]
    pub fn load(self, index: impl SharedIndex) -> T {
        let index = index.index();
        self.load_vector::<T>(index)
    }

    /// Writes element `index`. PTX: `st.shared`.
    #[crate::device]
    pub fn store(self, index: impl SharedIndex, value: T) {
        let index = index.index();
        self.store_vector::<T>(index, value)
    }

    /// The bytes of one `V` (1, 2, 4, 8 or 16 bytes) from element `index` on, aligned to `V`'s size.
    #[crate::device]
    pub fn load_vector<V: Pod>(self, index: impl SharedIndex) -> V {
        let index = index.index();
        #[cfg(target_arch = "nvptx64")]
        return ptx::shared_load::<V>(ptx::shared_base() + self.byte_offset(index));
        #[cfg(not(target_arch = "nvptx64"))]
        emu::shared_load::<T, V>(self.offset, self.len, index)
    }

    /// Writes the bytes of one `V` (1, 2, 4, 8 or 16 bytes) from element `index` on, aligned to `V`'s size.
    #[crate::device]
    pub fn store_vector<V: Pod>(self, index: impl SharedIndex, value: V) {
        let index = index.index();
        #[cfg(target_arch = "nvptx64")]
        ptx::shared_store::<V>(ptx::shared_base() + self.byte_offset(index), value);
        #[cfg(not(target_arch = "nvptx64"))]
        emu::shared_store::<T, V>(self.offset, self.len, index, value)
    }
}
