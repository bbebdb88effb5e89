//! Clusters of blocks, which run at the same time and reach each other's shared memory.
//!
//! A kernel with `#[kernel(min_sm = 90, cluster = 4)]` runs in clusters of four blocks along x; `cluster =
//! (2, 2, 1)` is one of two by two. The grid is a multiple of the cluster. There are at most eight blocks,
//! which every GPU from sm_90 on has room for. A kernel without the option has clusters of one block.
//!
//! [`Shared::of_block`] is the same array in the shared memory of another block. Three rules come with it:
//! - A block that has not started has no shared memory: the first access follows a [`sync`].
//! - Accesses of several blocks to one element are ordered by [`sync`], or by fences of the device with
//!   atomics. [`sync_threads`](crate::thread::sync_threads) orders those of one block alone.
//! - A block that has ended has none either: behind the last access of another block it waits at a [`sync`],
//!   or it knows of that access by a fence and an atomic.
//!
//! ```
//! use simt::emu::{self, EmuOptions};
//! use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, cluster, kernel, thread};
//!
//! const fn sums() -> (Shared<u32>, u32) {
//!     let mut plan = SharedPlan::new();
//!     (plan.array(1), plan.bytes())
//! }
//!
//! /// `y[c]` becomes the sum of the 256 elements of cluster `c`: four blocks of 64 threads.
//! #[kernel(min_sm = 90, cluster = 4)]
//! fn sum(x: Global<u32>, y: GlobalMut<u32>) {
//!     let (sums, _) = sums();
//!     let t = thread::thread_idx_x();
//!     if t == 0 {
//!         sums.store(0, 0);
//!     }
//!     // All blocks have started, and each sum is 0.
//!     cluster::sync();
//!     sums.of_block(0).atomic_add(0, x.load(thread::index_1d()));
//!     // All have added; block 0 is still there.
//!     cluster::sync();
//!     if cluster::rank() == 0 && t == 0 {
//!         y.store(cluster::id_x() as usize, sums.load(0));
//!     }
//! }
//!
//! fn main() {
//!     let x: Vec<u32> = (0..512).collect();
//!     let mut y = [0; 2];
//!     // SAFETY: the handles cover live memory; the launch has a thread for each element of `x`.
//!     let done = unsafe {
//!         let args = sum::Args {
//!             x: Global::from_raw(x.as_ptr() as u64, x.len()),
//!             y: GlobalMut::from_raw(y.as_mut_ptr() as u64, y.len()),
//!         };
//!         let shape = LaunchShape::new(8, 64).shared(sums().1);
//!         emu::launch(&sum::kernel(), shape, args, &EmuOptions::thorough())
//!     };
//!     done.unwrap();
//!     assert_eq!(y, [32640, 98176]);
//! }
//! ```

use crate::Shared;
use crate::atomic::{AtomicOp, AtomicWord};
use crate::index::SharedIndex;
use bytemuck::Pod;

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu;
#[cfg(target_arch = "nvptx64")]
use crate::ptx;

/// The most blocks of a cluster: as many as every GPU that has clusters can run.
pub const MAX_BLOCKS: u32 = 8;

macro_rules! registers {
    ($($name:ident, $what:literal, $register:literal, |$block:ident| $emu:expr;)*) => {
        sides! {$(
            #[doc = concat!($what, " PTX: `mov.u32 %r, ", $register, "`.")]
            pub fn $name() -> u32 {
                device {
                    let value: u32;
                    // SAFETY: reads a special register.
                    unsafe {
                        core::arch::asm!(concat!("mov.u32 {0}, ", $register, ";"), out(reg32) value,
                            options(pure, nomem, nostack))
                    }
                    value
                }
                emulator {
                    emu::with_lane(|lane| {
                        let $block = lane.block();
                        $emu
                    })
                }
            }
        )*}
    };
}

registers! {
    rank, "This block's number in its cluster, x fastest.", "%cluster_ctarank", |block| block.rank.get();
    size, "Blocks of the cluster.", "%cluster_nctarank", |block| block.cluster().size();
    id_x, "The cluster's x index in the grid.", "%clusterid.x",
        |block| block.index.get().x / block.info.cluster.x;
    id_y, "The cluster's y index in the grid.", "%clusterid.y",
        |block| block.index.get().y / block.info.cluster.y;
    id_z, "The cluster's z index in the grid.", "%clusterid.z",
        |block| block.index.get().z / block.info.cluster.z;
}

sides! {
    /// This thread arrives at the cluster's barrier, and does not wait: what it did before is done for those
    /// who [`wait`] in this phase. Then it has to [`wait`] before it may arrive again. All lanes of a warp
    /// must make the same call. PTX: `barrier.cluster.arrive.aligned` (release).
    pub fn arrive() {
        device {
            // SAFETY: no precondition but convergence, which the emulator checks.
            unsafe { ptx::convergent::barrier(ptx::convergent::CLUSTER_ARRIVE) }
        }
        emulator { emu::cluster_barrier(false) }
    }

    /// Waits until every thread of the cluster has [arrived](arrive) as often as this one: it then sees what
    /// they did before. All lanes of a warp must make the same call. PTX: `barrier.cluster.wait.aligned`
    /// (acquire).
    pub fn wait() {
        device {
            // SAFETY: as for `arrive`.
            unsafe { ptx::convergent::barrier(ptx::convergent::CLUSTER_WAIT) }
        }
        emulator { emu::cluster_barrier(true) }
    }
}

/// Waits until every thread of the cluster is here; orders their shared and global memory accesses. Every
/// thread of every block must reach one, the lanes of a warp the same call. PTX:
/// `barrier.cluster.arrive.aligned`, `barrier.cluster.wait.aligned`.
#[crate::device(in_line)]
pub fn sync() {
    arrive();
    wait();
}

/// An array in the shared memory of a block of the cluster: see the [module](self).
#[derive(Clone, Copy, Debug)]
pub struct ClusterShared<T> {
    array: Shared<T>,
    #[cfg(not(target_arch = "nvptx64"))]
    rank: u32,
    /// Where it starts, in the cluster's window.
    #[cfg(target_arch = "nvptx64")]
    address: u32,
}

impl<T: Pod> Shared<T> {
    /// The array that lies in the same place in the shared memory of the cluster's block number `rank`, which
    /// may be this one. PTX: `mapa.shared::cluster.u32`.
    #[crate::device]
    pub fn of_block(self, rank: u32) -> ClusterShared<T> {
        #[cfg(target_arch = "nvptx64")]
        return ClusterShared {
            array: self,
            address: ptx::map_to_block(ptx::shared_base() + self.byte_offset(0), rank),
        };
        #[cfg(not(target_arch = "nvptx64"))]
        {
            emu::check_rank(rank);
            ClusterShared { array: self, rank }
        }
    }
}

impl<T: Pod> ClusterShared<T> {
    /// How many elements the array has.
    #[inline(always)]
    pub const fn len(self) -> u32 {
        self.array.len()
    }

    /// Whether the array has no element.
    #[inline(always)]
    pub const fn is_empty(self) -> bool {
        self.array.is_empty()
    }

    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    fn address(self, index: u32) -> u32 {
        self.address + index * core::mem::size_of::<T>() as u32
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn remote(self) -> emu::Remote {
        let (base, len) = self.array.extent();
        emu::Remote { rank: self.rank, base, len }
    }

    /// Element `index`. PTX: `ld.shared::cluster`.
    #[crate::device]
    pub fn load(self, index: impl SharedIndex) -> T {
        let index = index.index();
        self.load_vector::<T>(index)
    }

    /// Writes element `index`. PTX: `st.shared::cluster`.
    #[crate::device]
    pub fn store(self, index: impl SharedIndex, value: T) {
        let index = index.index();
        self.store_vector::<T>(index, value)
    }

    /// The bytes of one `V` (1, 2, 4, 8 or 16 bytes) from element `index` on, aligned to `V`'s size. PTX:
    /// `ld.shared::cluster`.
    #[crate::device]
    pub fn load_vector<V: Pod>(self, index: impl SharedIndex) -> V {
        let index = index.index();
        #[cfg(target_arch = "nvptx64")]
        return ptx::cluster_load::<V>(self.address(index));
        #[cfg(not(target_arch = "nvptx64"))]
        emu::cluster_load::<T, V>(self.remote(), index)
    }

    /// Writes the bytes of one `V` (1, 2, 4, 8 or 16 bytes) from element `index` on, aligned to `V`'s size.
    /// PTX: `st.shared::cluster`.
    #[crate::device]
    pub fn store_vector<V: Pod>(self, index: impl SharedIndex, value: V) {
        let index = index.index();
        #[cfg(target_arch = "nvptx64")]
        ptx::cluster_store::<V>(self.address(index), value);
        #[cfg(not(target_arch = "nvptx64"))]
        emu::cluster_store::<T, V>(self.remote(), index, value)
    }
}

/// Words of 32 bits, which atomics on another block's memory are for. Of 64 bits ptxas 13.0 makes a load and
/// a store of some, which is no atomic.
pub trait ClusterWord: AtomicWord {}
impl ClusterWord for u32 {}
impl ClusterWord for i32 {}

macro_rules! updates {
    ($($(#[$doc:meta])* $name:ident, $op:ident;)*) => {
        /// Atomics on another block's words, relaxed and of the device's scope, as those of [`Shared`].
        impl<T: ClusterWord> ClusterShared<T> {
            $(
                $(#[$doc])*
                #[crate::device]
                pub fn $name(self, index: u32, value: T) -> T {
                    self.atomic(AtomicOp::$op, index, value, value)
                }
            )*
            /// Writes `value` to element `index` if it holds `compare`. PTX: `atom.shared::cluster.cas`.
            #[crate::device]
            pub fn atomic_cas(self, index: u32, compare: T, value: T) -> T {
                self.atomic(AtomicOp::CompareExchange, index, value, compare)
            }
            /// Element `index`, which other threads may update at the same time; without a fence perhaps an
            /// older value. PTX: `ld.relaxed.gpu.shared::cluster`.
            #[crate::device]
            pub fn atomic_load(self, index: u32) -> T {
                self.atomic(AtomicOp::Load, index, T::zeroed(), T::zeroed())
            }
            /// Puts `value` in element `index`, which other threads may update at the same time. PTX:
            /// `st.relaxed.gpu.shared::cluster`.
            #[crate::device]
            pub fn atomic_store(self, index: u32, value: T) {
                self.atomic(AtomicOp::Store, index, value, value);
            }

            #[crate::device]
            fn atomic(self, op: AtomicOp, index: u32, value: T, compare: T) -> T {
                #[cfg(target_arch = "nvptx64")]
                return T::cluster(op, self.address(index), value, compare);
                #[cfg(not(target_arch = "nvptx64"))]
                emu::cluster_atomic(op, self.remote(), index, value, compare)
            }
        }
    };
}
updates! {
    /// Adds `value` to element `index`, modulo its width. PTX: `atom.shared::cluster.add`.
    atomic_add, Add;
    /// Lowers element `index` to `value` if that is smaller. PTX: `atom.shared::cluster.min`.
    atomic_min, Min;
    /// Raises element `index` to `value` if that is larger. PTX: `atom.shared::cluster.max`.
    atomic_max, Max;
    /// Ands `value` into element `index`. PTX: `atom.shared::cluster.and`.
    atomic_and, And;
    /// Ors `value` into element `index`. PTX: `atom.shared::cluster.or`.
    atomic_or, Or;
    /// Exclusive-ors `value` into element `index`. PTX: `atom.shared::cluster.xor`.
    atomic_xor, Xor;
    /// Puts `value` in element `index`. PTX: `atom.shared::cluster.exch`.
    atomic_exchange, Exchange;
}
