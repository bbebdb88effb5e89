//! The 32 lanes of a warp: shuffles, votes and reductions.
//!
//! Every function takes the mask of the lanes that take part; each named lane must make the same call. The
//! emulator reports a lane that is missing from the mask, one that is named but elsewhere, and a shuffle that
//! reads a lane outside the mask (undefined in PTX). Only [`sync_warp`] orders memory accesses: shuffles,
//! votes and reductions exchange registers, and the race check takes them for no more.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu::{self, ReduceOp, ShuffleKind, VoteKind};
#[cfg(target_arch = "nvptx64")]
use crate::ptx::convergent;
#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

/// The mask of all 32 lanes.
pub const FULL_MASK: u32 = 0xffff_ffff;

/// Lanes of a warp.
pub const WARP_SIZE: u32 = 32;

mod sealed {
    pub trait Sealed {}
}

/// A value that a shuffle can move: any 32- or 64-bit scalar.
pub trait Word: sealed::Sealed + Copy {
    /// Whether the value takes 64 bits.
    const WIDE: bool;
    #[doc(hidden)]
    fn to_bits64(self) -> u64;
    #[doc(hidden)]
    fn from_bits64(bits: u64) -> Self;
}

macro_rules! words {
    ($($t:ty, $wide:literal, |$x:ident| $to:expr, |$b:ident| $from:expr;)*) => {$(
        impl sealed::Sealed for $t {}
        impl Word for $t {
            const WIDE: bool = $wide;
            #[inline(always)]
            fn to_bits64(self) -> u64 { let $x = self; $to }
            #[inline(always)]
            fn from_bits64($b: u64) -> Self { $from }
        }
    )*};
}
words! {
    u32, false, |x| x as u64, |b| b as u32;
    i32, false, |x| x as u32 as u64, |b| b as u32 as i32;
    f32, false, |x| x.to_bits() as u64, |b| f32::from_bits(b as u32);
    u64, true, |x| x, |b| b;
    i64, true, |x| x as u64, |b| b as i64;
    f64, true, |x| x.to_bits(), |b| f64::from_bits(b);
}

sides! {
    /// This thread's lane, 0 to 31. PTX: `mov.u32 %r, %laneid`.
    pub fn lane_id() -> u32 {
        device {
            let lane: u32;
            // SAFETY: reads a special register.
            unsafe { asm!("mov.u32 {0}, %laneid;", out(reg32) lane, options(pure, nomem, nostack)) }
            lane
        }
        emulator { emu::with_lane(|l| l.lane()) }
    }

    /// The mask of the lanes that execute this call together: at least this one. Which others is up to how
    /// the GPU runs the warp and may change from run to run, even where all lanes take one path. So no result
    /// may depend on it, and it says nothing of who takes a branch: it is no mask for a primitive that all
    /// lanes of a branch shall make, which needs one that the kernel computes (by [`warp_vote_ballot`] ahead
    /// of the branch). It serves to share work among the lanes that happen to be together, as one atomic for
    /// all of them. PTX: `activemask.b32`.
    ///
    /// The emulator waits until no lane of the warp can go on otherwise. In ascending order the lanes that
    /// have come to this call by then are together, in reversed order each is alone, and in an order of a
    /// seed they are split at random: with `orders` a kernel whose result depends on it is an
    /// `OrderDependence`.
    pub fn active_mask() -> u32 {
        device {
            // SAFETY: no precondition.
            unsafe { convergent::active_mask() }
        }
        emulator { emu::active_mask() }
    }

    /// Waits for the lanes of `mask` and orders their memory accesses. PTX: `bar.warp.sync`.
    pub fn sync_warp(mask: u32) {
        device {
            // SAFETY: no precondition but convergence, which the emulator checks.
            unsafe { convergent::warp_barrier(mask) }
        }
        emulator { emu::sync_warp(mask); }
    }

    /// The mask of the lanes whose `predicate` is true. PTX: `vote.sync.ballot.b32`.
    pub fn warp_vote_ballot(mask: u32, predicate: bool) -> u32 {
        device {
            // SAFETY: no precondition but convergence, which the emulator checks.
            unsafe { convergent::vote_ballot(mask, predicate) }
        }
        emulator { emu::vote(mask, VoteKind::Ballot, predicate) }
    }

    /// Whether every lane of `mask` has a true `predicate`. PTX: `vote.sync.all.pred`.
    pub fn warp_vote_all(mask: u32, predicate: bool) -> bool {
        device {
            // SAFETY: no precondition but convergence, which the emulator checks.
            unsafe { convergent::vote_all(mask, predicate) }
        }
        emulator { emu::vote(mask, VoteKind::All, predicate) != 0 }
    }

    /// Whether any lane of `mask` has a true `predicate`. PTX: `vote.sync.any.pred`.
    pub fn warp_vote_any(mask: u32, predicate: bool) -> bool {
        device {
            // SAFETY: no precondition but convergence, which the emulator checks.
            unsafe { convergent::vote_any(mask, predicate) }
        }
        emulator { emu::vote(mask, VoteKind::Any, predicate) != 0 }
    }
}

/// The mask of the lanes whose `value` has the same bits as this lane's. PTX: `match.any.sync.b32` or `.b64`.
#[crate::device(in_line)]
pub fn warp_match_any<T: Word>(mask: u32, value: T) -> u32 {
    let bits = value.to_bits64();
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no precondition but convergence, which the emulator checks.
    unsafe {
        if T::WIDE {
            convergent::match_any_wide(mask, bits)
        } else {
            convergent::match_any(mask, bits as u32)
        }
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emu::match_any(mask, bits)
}

/// Whether the `value` of every lane of `mask` has the same bits. PTX: `match.all.sync.b32` or `.b64`.
#[crate::device(in_line)]
pub fn warp_match_all<T: Word>(mask: u32, value: T) -> bool {
    let bits = value.to_bits64();
    #[cfg(target_arch = "nvptx64")]
    {
        if T::WIDE {
            convergent::match_all_wide(mask, bits)
        } else {
            convergent::match_all(mask, bits as u32)
        }
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emu::match_all(mask, bits)
}

macro_rules! shuffles {
    ($($(#[$doc:meta])* $name:ident, $kind:ident, $intrinsic:ident, $clamp:expr, $param:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// `width` (a power of two up to 32) splits the warp into groups that shuffle among themselves.
        #[crate::device(in_line)]
        pub fn $name<T: Word>(mask: u32, value: T, $param: u32, width: u32) -> T {
            #[cfg(target_arch = "nvptx64")]
            {
                // PTX: bits 8 to 12 of `c` select the group, bits 0 to 4 are the clamp.
                let control = (32 - width) << 8 | $clamp;
                // SAFETY: no precondition but convergence, which the emulator checks.
                let shuffle = |word: u32| unsafe { convergent::$intrinsic(mask, word, $param, control) };
                let bits = value.to_bits64();
                let low = shuffle(bits as u32) as u64;
                T::from_bits64(if T::WIDE { low | (shuffle((bits >> 32) as u32) as u64) << 32 } else { low })
            }
            #[cfg(not(target_arch = "nvptx64"))]
            T::from_bits64(emu::shuffle(mask, ShuffleKind::$kind, value.to_bits64(), $param, width))
        }
    )*};
}
shuffles! {
    /// The value of lane `source` of this lane's group. PTX: `shfl.sync.idx.b32`, twice for 64 bits.
    warp_shuffle_idx, Idx, shuffle_idx, 0x1f, source;
    /// The value of the lane `delta` below, or this lane's own where the group has none.
    /// PTX: `shfl.sync.up.b32`, twice for 64 bits.
    warp_shuffle_up, Up, shuffle_up, 0, delta;
    /// The value of the lane `delta` above, or this lane's own where the group has none.
    /// PTX: `shfl.sync.down.b32`, twice for 64 bits.
    warp_shuffle_down, Down, shuffle_down, 0x1f, delta;
    /// The value of the lane whose number differs in the bits of `lane_mask`.
    /// PTX: `shfl.sync.bfly.b32`, twice for 64 bits.
    warp_shuffle_xor, Xor, shuffle_xor, 0x1f, lane_mask;
}

macro_rules! reductions {
    ($($name:ident, $t:ty, $op:ident, $intrinsic:ident, $suffix:literal, $what:literal;)*) => {
        sides! {$(
            #[doc = concat!($what, " over the lanes of `mask`, in every one of them. PTX: `redux.sync.", $suffix, "`.")]
            pub fn $name(mask: u32, value: $t) -> $t {
                device {
                    // SAFETY: no precondition but convergence, which the emulator checks.
                    unsafe { convergent::$intrinsic(value as u32, mask) as $t }
                }
                emulator { emu::reduce(mask, ReduceOp::$op, value as u32) as $t }
            }
        )*}
    };
}
reductions! {
    warp_reduce_add_u32, u32, AddU32, reduce_add, "add.u32", "Sum modulo 2^32";
    warp_reduce_min_u32, u32, MinU32, reduce_umin, "min.u32", "Minimum";
    warp_reduce_max_u32, u32, MaxU32, reduce_umax, "max.u32", "Maximum";
    warp_reduce_add_i32, i32, AddI32, reduce_add, "add.s32", "Sum modulo 2^32";
    warp_reduce_min_i32, i32, MinI32, reduce_min, "min.s32", "Minimum";
    warp_reduce_max_i32, i32, MaxI32, reduce_max, "max.s32", "Maximum";
    warp_reduce_and, u32, And, reduce_and, "and.b32", "Bitwise and";
    warp_reduce_or, u32, Or, reduce_or, "or.b32", "Bitwise or";
    warp_reduce_xor, u32, Xor, reduce_xor, "xor.b32", "Bitwise exclusive or";
}

/// Sum over the 32 lanes in the fixed order of a butterfly: lanes 16 apart first, then 8, 4, 2 and 1. The
/// same bits in every lane and on every machine.
#[crate::device]
pub fn warp_sum_f32(value: f32) -> f32 {
    let mut sum = value;
    sum += warp_shuffle_xor(FULL_MASK, sum, 16, 32);
    sum += warp_shuffle_xor(FULL_MASK, sum, 8, 32);
    sum += warp_shuffle_xor(FULL_MASK, sum, 4, 32);
    sum += warp_shuffle_xor(FULL_MASK, sum, 2, 32);
    sum += warp_shuffle_xor(FULL_MASK, sum, 1, 32);
    sum
}
