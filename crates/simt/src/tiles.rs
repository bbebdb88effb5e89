//! Tensor copies: one thread moves boxes of a tensor between global and shared memory, by a descriptor.
//!
//! A [`TensorMap`] says where a tensor of one to five dimensions lies and how large a box of it is. The host
//! makes it from a [`TensorMapShape`] (`ferrokv_device` has it of a buffer, [`emu::tensor_map`] of memory
//! of the host), copies it to the device ahead of the launch, and hands the kernel a `Global<TensorMap>`. A
//! copy names the box by the coordinates of its first element, the innermost dimension first:
//!
//! ```text
//! maps.acquire(0);
//! full.arrive_and_expect(stage, bytes);
//! tile.copy_tile(0, maps, 0, [column, row], full, stage);
//! full.wait(stage, phase);
//! ```
//!
//! A box lies in shared memory without gaps, the innermost dimension first, or [swizzled](crate::Swizzle).
//! [`SharedPlan::tile`](crate::SharedPlan::tile) has room for it at a place that is aligned as copies need
//! it. A box may reach outside of its tensor on any side, by negative coordinates too: what comes from there
//! are zeros, which an mbarrier counts as it does other bytes, and what goes there is dropped.
//!
//! Copies to global memory, by a map that is [made for writing](emu::tensor_map_mut), belong to groups as
//! those of [`bulk`](crate::bulk) do. So do its fences: tensor copies are of the asynchronous proxy too.
//!
//! The copy engine keeps maps in a cache of its own. Whoever copies makes an
//! [`acquire`](Global::<TensorMap>::acquire) of each map ahead of its first copy: that sees what the host
//! wrote, though another map lay there before.
//!
//! All of it needs sm_90: mark the kernel `#[kernel(min_sm = 90)]`.
#![cfg_attr(target_arch = "nvptx64", allow(rustdoc::broken_intra_doc_links))]

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu;
use crate::{Global, Mbarrier, Pod, Shared, Zeroable};
#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

#[cfg(not(target_arch = "nvptx64"))]
mod shape;

#[cfg(not(target_arch = "nvptx64"))]
pub use shape::{TensorMapError, TensorMapShape, TileElement};

/// The most dimensions of a tensor.
pub const MAX_RANK: usize = 5;

/// A descriptor of a tensor in global memory: 128 bytes that mean something to the device they are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

#[cfg(not(target_arch = "nvptx64"))]
impl TensorMap {
    /// The map of these bytes, which the driver's `cuTensorMapEncodeTiled` wrote.
    pub const fn from_words(words: [u64; 16]) -> Self {
        TensorMap(words)
    }

    /// Its bytes.
    pub const fn words(&self) -> &[u64; 16] {
        &self.0
    }
}

const fn check_rank(rank: usize) {
    assert!(rank >= 1 && rank <= MAX_RANK, "a tensor has 1 to 5 dimensions");
}

/// One instruction for each rank: `cp.async.bulk.tensor.` and the rank, then `$text` with the coordinates in
/// braces, then `$end`.
#[cfg(target_arch = "nvptx64")]
macro_rules! by_rank {
    ($coordinates:ident: $rank:ident, $text:literal, $end:literal, $($operands:tt)*) => {{
        let c = |i: usize| if i < $rank { $coordinates[i] } else { 0 };
        match $rank {
            1 => asm!(concat!("cp.async.bulk.tensor.1d", $text, "{{{a}}}", $end), $($operands)*,
                a = in(reg32) c(0), options(nostack)),
            2 => asm!(concat!("cp.async.bulk.tensor.2d", $text, "{{{a}, {b}}}", $end), $($operands)*,
                a = in(reg32) c(0), b = in(reg32) c(1), options(nostack)),
            3 => asm!(concat!("cp.async.bulk.tensor.3d", $text, "{{{a}, {b}, {c}}}", $end), $($operands)*,
                a = in(reg32) c(0), b = in(reg32) c(1), c = in(reg32) c(2), options(nostack)),
            4 => asm!(concat!("cp.async.bulk.tensor.4d", $text, "{{{a}, {b}, {c}, {d}}}", $end), $($operands)*,
                a = in(reg32) c(0), b = in(reg32) c(1), c = in(reg32) c(2), d = in(reg32) c(3), options(nostack)),
            _ => asm!(concat!("cp.async.bulk.tensor.5d", $text, "{{{a}, {b}, {c}, {d}, {e}}}", $end), $($operands)*,
                a = in(reg32) c(0), b = in(reg32) c(1), c = in(reg32) c(2), d = in(reg32) c(3), e = in(reg32) c(4),
                options(nostack)),
        }
    }};
}

impl<T: Pod> Shared<T> {
    /// Starts copying the box at `coordinates` of the tensor of map `at` to element `index`, the innermost
    /// coordinate first; element `barrier_at` of `barrier` gets to know of all bytes of the box, of those
    /// outside of the tensor too. PTX, for two dimensions:
    /// `cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes`.
    #[crate::device]
    pub fn copy_tile<const RANK: usize>(
        self,
        index: u32,
        map: Global<TensorMap>,
        at: usize,
        coordinates: [i32; RANK],
        barrier: Shared<Mbarrier>,
        barrier_at: u32,
    ) {
        const { check_rank(RANK) };
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds and aligned by the launch's contract, which the emulator checks.
        unsafe {
            by_rank!(coordinates: RANK,
                ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [{to}], [{map}, ", "], [{full}];",
                to = in(reg32) crate::ptx::shared_base() + self.byte_offset(index),
                map = in(reg64) map.element(at), full = in(reg32) barrier.address(barrier_at))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::tile_load((self, index), (map, at), &coordinates, emu::Named::new(barrier, barrier_at))
    }
}

impl Global<TensorMap> {
    /// Starts copying a box from element `from` of `source`, in shared memory, to `coordinates` of the tensor
    /// of map `at`, the innermost coordinate first; what is outside of the tensor is left out. The copy is
    /// one of those that [`bulk::commit`](crate::bulk::commit) closes into a group. PTX, for two dimensions:
    /// `cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group`.
    #[crate::device]
    pub fn copy_tile<T: Pod, const RANK: usize>(
        self,
        at: usize,
        coordinates: [i32; RANK],
        source: Shared<T>,
        from: u32,
    ) {
        const { check_rank(RANK) };
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as above.
        unsafe {
            by_rank!(coordinates: RANK, ".global.shared::cta.tile.bulk_group [{map}, ", "], [{from}];",
                map = in(reg64) self.element(at),
                from = in(reg32) crate::ptx::shared_base() + source.byte_offset(from))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::tile_store((self, at), &coordinates, (source, from))
    }

    /// From here on this thread copies by map `at` as the host wrote it ahead of the launch: once for each
    /// map, in each thread that copies by it, ahead of the first copy. PTX:
    /// `fence.proxy.tensormap::generic.acquire.sys`.
    #[crate::device]
    pub fn acquire(self, at: usize) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds and aligned by the launch's contract, which the emulator checks.
        unsafe {
            asm!("fence.proxy.tensormap::generic.acquire.sys [{0}], 128;", in(reg64) self.element(at),
                options(nostack))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::tile_acquire(self, at)
    }

    /// Asks for map `at` to come to the copy engine's cache: a hint, for maps that this thread has
    /// [acquired](Self::acquire). PTX: `prefetch.tensormap`.
    #[crate::device]
    pub fn prefetch_map(self, at: usize) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as above.
        unsafe {
            asm!("prefetch.tensormap [{0}];", in(reg64) self.element(at), options(nostack))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::tile_prefetch(self, at)
    }
}
