//! What the attention kernels have in common: tiles of 16 tokens, fragments of the tensor cores, the online
//! softmax. And what several systems launch: exact attention ([`dense`]) and rotation ([`rotation`]).
//!
//! # One warp, one tile
//! A warp handles 16 tokens (one cache block) of one KV head for up to eight query rows at a time. With
//! `g = lane / 4` and `q = lane % 4` a lane owns query row `g`, tokens 2q, 2q + 1, 2q + 8 and 2q + 9 of the
//! tile, and output columns 2q and 2q + 1 of each output tile, whose dimensions [`output_dimension`] names.
//!
//! A tensor-core operand has 16 rows, decoding needs eight or fewer. The other eight carry what rounding to
//! 16 bits has cut off: row `g + 8` of the probabilities holds `p − round(p)`, rounded itself. Both land in
//! accumulators of their own and are added at the end. So probabilities enter with some 22 bits (f16) or 16
//! (bf16), at no cost: the instruction is the same.
//!
//! The order of dimensions inside a contraction is free as long as both operands agree. Keys use that to be
//! loaded 16 bytes at a time: lane `q` takes chunk `4s + q` of its row, and step `2s` and `2s + 1` contract
//! over the two halves of the four lanes' chunks.

mod chain;
pub mod dense;
mod fragments;
mod grid;
pub mod integers;
pub mod outward;
mod pace;
mod partial;
pub mod query;
mod ring;
pub mod rotation;
mod softmax;
mod window;

pub use chain::Chain;
pub use fragments::{KeyTile, Queries, ValueTile, Values, output_dimension, width};
pub use grid::GridPlace;
pub use pace::{MAX_WARPS, Pace, tiles_of};
pub use partial::{
    Adding, MAX_PARTS, Merged, PartialRow, Parts, combine, combine_to_part, combine_to_part_of,
    combined_rows, last_to_arrive, part_floats, split_count,
};
pub use ring::{Glance, Ring, fill, first_blocks, walk, walk_on};
pub use softmax::{Lift, Running};
pub use window::Window;

use crate::Element;
use half::{bf16, f16};
use simt::{convert, tensor};

/// Tokens of a cache block, and of a tile.
pub const BLOCK_TOKENS: u32 = 16;
/// Query rows that a warp handles.
pub const ROWS: u32 = 8;
/// Warps of a block for head_dim `head_dim`: one block fills a multiprocessor, and few parts are left to
/// merge.
#[inline(always)]
pub const fn warps(head_dim: u32) -> u32 {
    if head_dim <= 128 { 8 } else { 4 }
}

/// Threads of a block.
#[inline(always)]
pub const fn threads(head_dim: u32) -> u32 {
    32 * warps(head_dim)
}

/// A 16-bit float that the tensor cores multiply.
pub trait Half: Element {
    /// Whether the type is f16.
    const IS_F16: bool;
    /// A·B + C, f32 accumulation: see [`simt::tensor`].
    fn multiply(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4];
    /// Two f32 rounded and packed, `low` in bits 0 to 15.
    fn pack(low: f32, high: f32) -> u32;
    /// The pair as f32, exactly.
    fn unpack(pair: u32) -> [f32; 2];
}

impl Half for f16 {
    const IS_F16: bool = true;
    #[simt::device]
    fn multiply(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        tensor::mma_f16(a, b, c)
    }
    #[inline(always)]
    fn pack(low: f32, high: f32) -> u32 {
        convert::f16x2_from_f32(low, high)
    }
    #[inline(always)]
    fn unpack(pair: u32) -> [f32; 2] {
        let half = |bits: u32| convert::f32_from_f16(f16::from_bits(bits as u16));
        [half(pair), half(pair >> 16)]
    }
}

impl Half for bf16 {
    const IS_F16: bool = false;
    #[simt::device]
    fn multiply(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        tensor::mma_bf16(a, b, c)
    }
    #[inline(always)]
    fn pack(low: f32, high: f32) -> u32 {
        convert::bf16x2_from_f32(low, high)
    }
    #[inline(always)]
    fn unpack(pair: u32) -> [f32; 2] {
        [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
    }
}
