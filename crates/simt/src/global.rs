//! Typed handles to global memory: width and cache hint are in the method's name.
//!
//! On the device a handle is a bare pointer, and the emulator knows its length: an access outside it, or one
//! not aligned to its own size, is an error that names kernel, block, thread and source line.
//!
//! | method | PTX | for |
//! |---|---|---|
//! | `load`, `store` | `ld.global`, `st.global` | one element |
//! | `load_vector`, `store_vector` | `ld.global.v2/.v4` | 2 to 16 bytes at once, e.g. a [`glam::Vec4`] |
//! | `…_readonly` | `ld.global.nc` | data that no thread of the launch writes |
//! | `…_ahead` | `ld.global.L1::no_allocate` | the same, before the wait of a launch that overlaps |
//! | `prefetch` | `cp.async.bulk.prefetch.L2` | data that this launch reads behind its wait, or a later one |
//! | `peek` | `ld.relaxed.gpu.global` | what to prefetch: a word that another launch may be writing |
//! | `…_streaming` | `ld.global.nc.L1::no_allocate`, `st.global.cs` | data touched once |

use crate::index::GlobalIndex;
use bytemuck::Pod;
use core::marker::PhantomData;
#[cfg(not(target_arch = "nvptx64"))]
use core::{any::TypeId, mem::size_of};

#[cfg(target_arch = "nvptx64")]
use crate::ptx;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{
    emu,
    kernel::{ArgMemory, KernelArg},
};

/// Read-only global memory holding elements of type `T`.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(target_arch = "nvptx64", repr(transparent))]
#[cfg_attr(not(target_arch = "nvptx64"), repr(C))]
pub struct Global<T> {
    #[cfg(target_arch = "nvptx64")]
    pointer: *const T,
    /// Where the memory starts: a host address under the emulator, a device address on the GPU.
    #[cfg(not(target_arch = "nvptx64"))]
    address: u64,
    #[cfg(not(target_arch = "nvptx64"))]
    len: usize,
    element: PhantomData<*const T>,
}

/// Global memory holding elements of type `T` that a kernel may read and write.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(target_arch = "nvptx64", repr(transparent))]
#[cfg_attr(not(target_arch = "nvptx64"), repr(C))]
pub struct GlobalMut<T> {
    #[cfg(target_arch = "nvptx64")]
    pointer: *mut T,
    #[cfg(not(target_arch = "nvptx64"))]
    address: u64,
    #[cfg(not(target_arch = "nvptx64"))]
    len: usize,
    element: PhantomData<*mut T>,
}

// SAFETY: a handle is an address; using it is what the launch's contract covers.
unsafe impl<T> Send for Global<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Global<T> {}
// SAFETY: as above.
unsafe impl<T> Send for GlobalMut<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for GlobalMut<T> {}

// Both are `repr(C)` with the address first: the driver copies those eight bytes as the kernel's pointer.
#[cfg(not(target_arch = "nvptx64"))]
impl<T: Pod> KernelArg for Global<T> {
    fn memory(&self) -> Option<ArgMemory> {
        Some(self.extent(false))
    }
}
#[cfg(not(target_arch = "nvptx64"))]
impl<T: Pod> KernelArg for GlobalMut<T> {
    fn memory(&self) -> Option<ArgMemory> {
        Some(self.extent(true))
    }
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! host_side {
    ($handle:ident, $what:literal) => {
        impl<T: Pod> $handle<T> {
            /// A handle to `len` elements at `address`.
            ///
            /// # Safety
            #[doc = concat!("The memory must be valid for ", $what, " by every launch that gets the handle: ")]
            /// host memory for the emulator, device-accessible memory for the GPU.
            pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
                $handle { address, len, element: PhantomData }
            }

            /// Where the memory starts.
            pub const fn address(&self) -> u64 {
                self.address
            }

            /// How many elements the handle reaches.
            pub const fn len(&self) -> usize {
                self.len
            }

            fn extent(&self, writable: bool) -> ArgMemory {
                let element_bytes = size_of::<T>();
                let bytes = self.len.saturating_mul(element_bytes) as u64;
                let maps = TypeId::of::<T>() == TypeId::of::<crate::TensorMap>();
                ArgMemory { address: self.address, bytes, element_bytes, writable, maps }
            }

            /// Whether the handle reaches no element.
            pub const fn is_empty(&self) -> bool {
                self.len == 0
            }
        }
    };
}
#[cfg(not(target_arch = "nvptx64"))]
host_side!(Global, "reads");
#[cfg(not(target_arch = "nvptx64"))]
host_side!(GlobalMut, "reads and writes");

macro_rules! loads {
    ($handle:ident, $pointer:ty) => {
        impl<T: Pod> $handle<T> {
            /// The same bytes as elements of type `V`: for structs that are larger than one access. What is
            /// left of the last element is out of reach.
            #[inline(always)]
            pub fn cast<V: Pod>(self) -> $handle<V> {
                #[cfg(target_arch = "nvptx64")]
                return $handle { pointer: self.pointer as $pointer, element: PhantomData };
                #[cfg(not(target_arch = "nvptx64"))]
                $handle {
                    address: self.address,
                    len: self.len * size_of::<T>() / size_of::<V>(),
                    element: PhantomData,
                }
            }

            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn at(self, index: usize) -> *const T {
                self.pointer.wrapping_add(index) as *const T
            }

            /// `len` elements from element `start` on.
            #[crate::device]
            pub(crate) fn part(self, start: usize, len: usize) -> Self {
                #[cfg(target_arch = "nvptx64")]
                {
                    let _ = len;
                    return $handle { pointer: self.pointer.wrapping_add(start), element: PhantomData };
                }
                #[cfg(not(target_arch = "nvptx64"))]
                {
                    emu::check_slice::<T>(self.len, start, len);
                    let address = self.address + (start * size_of::<T>()) as u64;
                    $handle { address, len, element: PhantomData }
                }
            }

            /// Element `index`.
            #[crate::device]
            pub fn load(self, index: impl GlobalIndex) -> T {
                let index = index.index();
                self.load_vector::<T>(index)
            }

            /// The bytes of one `V` (1, 2, 4, 8 or 16 bytes) starting at element `index`, whose address must
            /// be a multiple of `V`'s size.
            #[crate::device]
            pub fn load_vector<V: Pod>(self, index: impl GlobalIndex) -> V {
                let index = index.index();
                #[cfg(target_arch = "nvptx64")]
                // SAFETY: in bounds and aligned by the launch's contract.
                return unsafe { *self.at(index).cast::<V>() };
                #[cfg(not(target_arch = "nvptx64"))]
                emu::global_load::<T, V>(self.address, self.len, index)
            }
        }
    };
}
loads!(Global, *const V);
loads!(GlobalMut, *mut V);

impl<T: Pod> Global<T> {
    /// Element `index`, through the read-only path.
    #[crate::device]
    pub fn load_readonly(self, index: impl GlobalIndex) -> T {
        let index = index.index();
        self.load_vector_readonly::<T>(index)
    }

    /// Element `index`, which no thread will read again.
    #[crate::device]
    pub fn load_streaming(self, index: impl GlobalIndex) -> T {
        let index = index.index();
        self.load_vector_streaming::<T>(index)
    }

    /// Element `index`, of data that no launch writes which the stream may still be at. Before
    /// [`wait_for_previous`](crate::thread::wait_for_previous) it is the load to take: it is under way when
    /// the wait begins.
    #[crate::device]
    pub fn load_ahead(self, index: impl GlobalIndex) -> T {
        let index = index.index();
        self.load_vector_ahead::<T>(index)
    }

    /// [`load_vector`](Self::load_vector) of such data.
    #[crate::device]
    pub fn load_vector_ahead<V: Pod>(self, index: impl GlobalIndex) -> V {
        let index = index.index();
        #[cfg(target_arch = "nvptx64")]
        return ptx::load_ahead(self.at(index).cast::<V>());
        #[cfg(not(target_arch = "nvptx64"))]
        emu::global_load::<T, V>(self.address, self.len, index)
    }

    /// Asks for `bytes` bytes from element `index` on to come to the second-level cache, where one thread
    /// says `wanted`: a hint, which waits for nothing and may stand before
    /// [`wait_for_previous`](crate::thread::wait_for_previous). Address and `bytes` are multiples of 16. PTX:
    /// `cp.async.bulk.prefetch.L2.global`, on sm_90 and later; else nothing.
    #[crate::device]
    pub fn prefetch(self, index: usize, bytes: u32, wanted: bool) {
        #[cfg(target_arch = "nvptx64")]
        ptx::prefetch(self.at(index), bytes, wanted);
        #[cfg(not(target_arch = "nvptx64"))]
        emu::prefetch::<T>(self.address, self.len, index, bytes, wanted)
    }

    /// [`load_vector`](Self::load_vector) through the read-only path.
    #[crate::device]
    pub fn load_vector_readonly<V: Pod>(self, index: impl GlobalIndex) -> V {
        let index = index.index();
        #[cfg(target_arch = "nvptx64")]
        return ptx::load_readonly(self.at(index).cast::<V>());
        #[cfg(not(target_arch = "nvptx64"))]
        emu::global_load_readonly::<T, V>(self.address, self.len, index)
    }

    /// [`load_vector`](Self::load_vector) of bytes that no thread will read again.
    #[crate::device]
    pub fn load_vector_streaming<V: Pod>(self, index: impl GlobalIndex) -> V {
        let index = index.index();
        #[cfg(target_arch = "nvptx64")]
        return ptx::load_streaming(self.at(index).cast::<V>());
        #[cfg(not(target_arch = "nvptx64"))]
        emu::global_load_readonly::<T, V>(self.address, self.len, index)
    }
}

impl<T: Pod> Global<T> {
    /// Address of element `index`.
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    pub(crate) fn element(self, index: usize) -> *const T {
        self.at(index)
    }
}

impl Global<u32> {
    /// Element `index` as it is or once was, though a launch that is still under way may write it: nothing
    /// may depend on it but what is [`prefetch`](Self::prefetch)ed. 0 where it is not `wanted`, and nothing
    /// is read then. The emulator makes some of them up: what comes of them must be in bounds whatever they
    /// are, and change no result. PTX: `ld.relaxed.gpu.global`.
    #[crate::device]
    pub fn peek(self, index: usize, wanted: bool) -> u32 {
        #[cfg(target_arch = "nvptx64")]
        return ptx::peek(self.at(index), wanted);
        #[cfg(not(target_arch = "nvptx64"))]
        if wanted { emu::peek(self.address, self.len, index) } else { 0 }
    }
}

impl<T: Pod> GlobalMut<T> {
    /// The same memory, for reading.
    #[inline(always)]
    pub fn as_const(self) -> Global<T> {
        #[cfg(target_arch = "nvptx64")]
        return Global { pointer: self.pointer, element: PhantomData };
        #[cfg(not(target_arch = "nvptx64"))]
        Global { address: self.address, len: self.len, element: PhantomData }
    }

    /// Writes element `index`.
    #[crate::device]
    pub fn store(self, index: impl GlobalIndex, value: T) {
        let index = index.index();
        self.store_vector::<T>(index, value)
    }

    /// Writes element `index`, which the launch will not touch again.
    #[crate::device]
    pub fn store_streaming(self, index: impl GlobalIndex, value: T) {
        let index = index.index();
        self.store_vector_streaming::<T>(index, value)
    }

    /// Writes the bytes of one `V` (1, 2, 4, 8 or 16 bytes) from element `index` on, whose address must be a
    /// multiple of `V`'s size.
    #[crate::device]
    pub fn store_vector<V: Pod>(self, index: impl GlobalIndex, value: V) {
        let index = index.index();
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds, aligned and without a race by the launch's contract.
        unsafe {
            *self.pointer.wrapping_add(index).cast::<V>() = value
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::global_store::<T, V>(self.address, self.len, index, value)
    }

    /// [`store_vector`](Self::store_vector) of bytes that the launch will not touch again.
    #[crate::device]
    pub fn store_vector_streaming<V: Pod>(self, index: impl GlobalIndex, value: V) {
        let index = index.index();
        #[cfg(target_arch = "nvptx64")]
        ptx::store_streaming(self.pointer.wrapping_add(index).cast::<V>(), value);
        #[cfg(not(target_arch = "nvptx64"))]
        emu::global_store::<T, V>(self.address, self.len, index, value)
    }

    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    pub(crate) fn element_pointer(self, index: usize) -> *mut T {
        self.pointer.wrapping_add(index)
    }
}
