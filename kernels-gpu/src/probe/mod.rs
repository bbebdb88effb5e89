//! Kernels that exercise each primitive of `simt` once: their output holds everything that can be observed,
//! so that equal bits from the emulator and from the GPU prove that both sides of the primitive agree.
//!
//! | file | what it probes |
//! |---|---|
//! | [`indices`] | thread, block and grid indices and extents, lanes |
//! | [`barriers`] | block barriers, plain, counting, and, or |
//! | [`warps`] | shuffles, votes, reductions, warp barriers, masks, lanes that are together |
//! | [`atomics`] | every atomic on global and shared memory, contended and not |
//! | [`shared`] | widths and layouts of shared memory |
//! | [`matrices`] | tensor cores, `ldmatrix`, asynchronous copies |
//! | [`products`] | products of groups of four warps (sm_90) |
//! | [`tiles`] | tensor copies: boxes of every rank and swizzle, both ways |
//! | [`memory`] | widths and cache hints of global memory |
//! | [`functions`] | one-operand functions over bit patterns: conversions, roundings, `simt::math` |
//! | [`operators`] | operators of two and three operands over mixed patterns: f32, f64, integers, bytes |
//! | [`clusters`] | clusters of blocks: their barrier, each other's shared memory (sm_90) |
//! | [`fences`] | blocks that meet through fences and atomics |
//! | [`overlaps`] | launches that start before the one ahead of them has ended |
//!
//! A value that may be a NaN without promised bits is stored with the one NaN of `simt::math::canonical_nan`.

pub mod atomics;
pub mod barriers;
pub mod clusters;
pub mod fences;
pub mod functions;
pub mod indices;
pub mod matrices;
pub mod memory;
pub mod operators;
pub mod overlaps;
pub mod products;
pub mod shared;
pub mod tiles;
pub mod warps;

use crate::mix;

/// A 32-bit word for thread or element `i` of round `round`.
#[inline(always)]
pub(crate) fn word(seed: u32, i: u32, round: u32) -> u32 {
    (mix((seed as u64) << 48 ^ (round as u64) << 32 ^ i as u64) >> 16) as u32
}
