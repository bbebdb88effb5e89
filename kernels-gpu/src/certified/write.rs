//! `quantize_block`: originals to tile and annotation, in one read.
//!
//! # Work split
//! One thread block a job and KV head, D threads. All 8 KiB (D = 128) of a job and head are loaded at once,
//! 16 bytes a load, four loads a thread:
//! - **keys**: a warp has 32 channels, so that it needs no other warp for their ranges; a lane has 8 channels
//!   of tokens p and p + 8 (p = lane / 4). Three exchanges among the 8 lanes of the same channels halve the
//!   channels at each step, and leave every lane with the range of one channel. It makes that channel's σ and
//!   z, and passes them on through the tile in shared memory.
//! - **values**: 8 channels of tokens t and t + 8; two neighbouring lanes have a group.
//!
//! The tile is put together in shared memory (32·D bytes, or 36·D) and leaves in whole 16-byte vectors; norms
//! are summed in the order that [`quantizer`](super::quantizer) bounds. What cannot be quantized shows as a
//! norm that is not finite; only then is the block looked through again, for the first offending element.
//!
//! # Bytes
//! For each job and head 64·D read, 32·D + 48 written, in the paper's layout 36·D + 48.

use super::layout::{Annotation, BLOCK_TOKENS, Job, TileLayout, pair};
use super::metadata::KeyMetadata;
use super::quantizer::{
    SIZE_UNIT, bound_or_infinity, chance, chance_key, key_code, key_error, key_error_bound, key_size_bound,
    norm_bound, over_size, overhang, pack_value_codes, reach, reciprocal, restore_values, squares, twice,
    uniform, value_chance, value_code, value_group, value_neighbour, value_size,
};
use crate::Element;
use glam::{UVec2, UVec4, Vec2};
use half::{bf16, f16};
use simt::bits::{byte_perm, div_u32, pack_low_bytes, rem_u32, renewed};
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Shared, SharedPlan, convert, kernel, math, thread, unroll};

/// The shared memory of [`quantize_block`](fn@quantize_block).
#[derive(Clone, Copy, Debug)]
pub struct WriteLayout {
    /// The tile, as it is going to be stored.
    pub(super) tile: Shared<u8>,
    /// 1/σ, \[D\].
    reciprocals: Shared<f32>,
    /// Sums of squares of 32 channels, `[D / 32][16 tokens]`: key errors, value errors, values, and half the
    /// distances between which values were rounded by chance.
    sums: [Shared<f32>; 4],
    /// The largest of those distances, halved, `[D / 32][16 tokens]`.
    steps: Shared<f32>,
    /// Sums of squares of 32 channels, `[D / 32]`: σ, z.
    channel_sums: [Shared<f32>; 2],
    /// Bytes in all.
    pub bytes: u32,
}

/// The layout of the shared memory of [`quantize_block`](fn@quantize_block).
pub const fn write_layout(layout: TileLayout) -> WriteLayout {
    let head_dim = layout.head_dim;
    let warps = head_dim / 32;
    let mut plan = SharedPlan::new();
    let tile = plan.array(layout.bytes);
    let reciprocals = plan.array(head_dim);
    let sums = [
        plan.array(warps * BLOCK_TOKENS),
        plan.array(warps * BLOCK_TOKENS),
        plan.array(warps * BLOCK_TOKENS),
        plan.array(warps * BLOCK_TOKENS),
    ];
    let steps = plan.array(warps * BLOCK_TOKENS);
    let channel_sums = [plan.array(warps), plan.array(warps)];
    WriteLayout { tile, reciprocals, sums, steps, channel_sums, bytes: plan.bytes() }
}

/// Quantizes blocks. Of `jobs`, `[⌈blocks of the grid / kv_heads⌉]`, no two have one destination; `keys` and
/// `values` are `[source blocks][kv_heads][16][D]`, `tiles` `[destination blocks][kv_heads][tile]`,
/// `annotations` `[destination blocks][kv_heads][12]`, as [`Annotation`], and `problems` `[4]`, as
/// [`Problems`](super::layout::Problems), lowered to what is found. `by_chance` and `seed` are those of
/// [`Rounding::words`](super::layout::Rounding::words).
///
/// One thread block for each job and KV head, the heads of a job side by side; D threads. Shared:
/// [`write_layout`].
#[kernel(
    system = certified,
    instances(
        (f16, 64, f16), (f16, 96, f16), (f16, 128, f16), (f16, 256, f16),
        (bf16, 64, f16), (bf16, 96, f16), (bf16, 128, f16), (bf16, 256, f16),
        (f16, 64, f32), (f16, 96, f32), (f16, 128, f32), (f16, 256, f32),
        (bf16, 64, f32), (bf16, 96, f32), (bf16, 128, f32), (bf16, 256, f32),
    ),
    max_threads = 256,
    min_blocks = 2,
    overlaps = in_turn
)]
pub fn quantize_block<T: Element<Four = UVec2>, const D: u32, M: KeyMetadata>(
    jobs: Global<Job>,
    keys: Global<T>,
    values: Global<T>,
    tiles: GlobalMut<u8>,
    annotations: GlobalMut<f32>,
    problems: GlobalMut<u64>,
    kv_heads: u32,
    by_chance: u32,
    seed: u32,
) {
    let block = thread::block_idx_x();
    let (job, head) = (div_u32(block, kv_heads), rem_u32(block, kv_heads));
    let Job { source, destination, index, .. } = jobs.load_readonly(job as usize);
    if source == Job::NONE.source {
        return;
    }
    let layout = TileLayout::new(D, M::LAYOUT);
    let start = layout.originals(source, kv_heads, head);
    let from = vector_places::<D>(start, thread::thread_idx_x());
    let vectors = [
        keys.load_vector_streaming::<UVec4>(from[0]),
        keys.load_vector_streaming::<UVec4>(from[1]),
        values.load_vector_streaming::<UVec4>(from[2]),
        values.load_vector_streaming::<UVec4>(from[3]),
    ];
    let to = Destination { block: destination, kv_heads, head, tiles, annotations, problems };
    quantize::<T, D, M>(vectors, (keys, values, start), to, Chances::new(by_chance, seed, index, head));
}

/// Where a block's tile and annotation of a KV head go.
#[derive(Clone, Copy)]
pub(super) struct Destination {
    /// The block of the quantized pool.
    pub block: u32,
    /// KV heads of the pool.
    pub kv_heads: u32,
    /// Which of them.
    pub head: u32,
    /// `[destination blocks][kv_heads][tile]`.
    pub tiles: GlobalMut<u8>,
    /// `[destination blocks][kv_heads][12]`.
    pub annotations: GlobalMut<f32>,
    /// `[4]`, lowered to what cannot be quantized.
    pub problems: GlobalMut<u64>,
}

/// The elements from which thread `t` has two vectors of keys and two of values, of a block whose first is
/// `start`.
#[inline(always)]
pub(super) fn vector_places<const D: u32>(start: usize, t: u32) -> [usize; 4] {
    let (token, channel) = key_place(t);
    let key_at = |half: u32| start + ((token + 8 * half) * D + channel) as usize;
    // Values: thread t has vectors t and t + D of the 2·D that the block is.
    let value_at = |half: u32| start + ((t + half * D) * 8) as usize;
    [key_at(0), key_at(1), value_at(0), value_at(1)]
}

/// Quantizes a block of a KV head, of which each of the D threads has the `vectors` that [`vector_places`]
/// says. The originals, and their first element, are looked at again only where something cannot be
/// quantized. Shared: [`write_layout`].
#[inline(always)]
pub(super) fn quantize<T: Element<Four = UVec2>, const D: u32, M: KeyMetadata>(
    vectors: [UVec4; 4],
    (keys, values, start): (Global<T>, Global<T>, usize),
    to: Destination,
    chances: Chances,
) {
    let Destination { block: destination, kv_heads, head, tiles, annotations, problems } = to;
    let layout = TileLayout::new(D, M::LAYOUT);
    let shared = write_layout(layout);
    let t = thread::thread_idx_x();
    let (lane, own_warp) = (t % 32, t / 32);
    write_keys::<M, D>([widen::<T>(vectors[0]), widen::<T>(vectors[1])], t, chances);
    unroll!(for half in 0..2 {
        let first = (t + half as u32 * D) * 8;
        let (token, channel) = (div_u32(first, D), rem_u32(first, D));
        write_values::<M, D>(widen::<T>(vectors[2 + half]), token, channel, chances);
    });
    thread::sync_threads();

    // Two vectors a thread, and in the paper's layout one more for a quarter of the threads: the tile is 2·D
    // of them, or 2.25·D.
    let tile = layout.tile(destination, kv_heads, head);
    unroll!(for part in 0..3 {
        if part < 2 || t < layout.bytes / 16 - 2 * D {
            let at = (t + part as u32 * D) * 16;
            tiles.store_vector::<UVec4>(tile + at as usize, shared.tile.load_vector::<UVec4>(at));
        }
    });
    let record = Annotation::WORDS * pair(destination, kv_heads, head);
    if own_warp == 0 {
        // A token a lane, twice over.
        let token = lane % 16;
        let eta = norm_bound(token_sum::<D>(shared.sums[1], token));
        let norm = norm_bound(token_sum::<D>(shared.sums[2], token));
        let (eta, nu) = (bound_or_infinity(largest(eta)), bound_or_infinity(largest(norm)));
        let (size, unit) = (value_size(norm, nu), nu * SIZE_UNIT);
        let spread = over_size(norm_bound(token_sum::<D>(shared.sums[3], token)), size, unit);
        let step = over_size(token_maximum::<D>(shared.steps, token), size, unit);
        let (spread, step) = (bound_or_infinity(largest(spread)), bound_or_infinity(largest(step)));
        // Four tokens are a word, which the first of their lanes stores.
        let own = (math::to_i32_trunc(size) as u32) << (8 * (lane % 4));
        let two = own | warp::warp_shuffle_xor(FULL_MASK, own, 1, 32);
        let word = two | warp::warp_shuffle_xor(FULL_MASK, two, 2, 32);
        if lane == 0 {
            annotations.store_vector::<Vec2>(record, Vec2::new(eta, nu));
            annotations.store_vector::<Vec2>(record + 4, Vec2::new(spread, step));
        }
        if lane < 16 && lane.is_multiple_of(4) {
            annotations.store(record + 8 + (lane / 4) as usize, f32::from_bits(word));
        }
        if !(eta <= f32::MAX && nu <= f32::MAX) {
            find_value_problems::<T, D>(values, start, problems);
        }
    } else if own_warp == 1 {
        let error = largest(norm_bound(token_sum::<D>(shared.sums[0], lane % 16)));
        let scale = norm_bound(channel_sum::<D>(shared.channel_sums[0]));
        let zero = norm_bound(channel_sum::<D>(shared.channel_sums[1]));
        let (eps, zeta) = (key_error_bound(error, scale), key_size_bound(zero, scale));
        if lane == 0 {
            annotations.store_vector::<Vec2>(record + 2, Vec2::new(eps, zeta));
            annotations.store_vector::<Vec2>(record + 6, Vec2::new(reach(chances.taken), 0.0));
        }
        if !(eps <= f32::MAX && zeta <= f32::MAX) {
            find_key_problems::<T, D, M>(keys, start, overhang(chances.taken), problems);
        }
    }
}

/// How the block is rounded.
#[derive(Clone, Copy)]
pub(super) struct Chances {
    /// By chance, not to the nearest.
    taken: bool,
    /// Of the block and KV head.
    key: u32,
}

impl Chances {
    /// Those of block `index` of a sequence, by
    /// [`Rounding::words`](super::layout::Rounding::words).
    #[inline(always)]
    pub fn new(by_chance: u32, seed: u32, index: u32, head: u32) -> Self {
        Chances { taken: by_chance != 0, key: chance_key(seed, index, head) }
    }
}

/// Keys: lane 4p + i of warp w has channels 32w + 8i … + 7 of tokens p and p + 8. Token p, and the first of
/// the channels.
#[inline(always)]
fn key_place(t: u32) -> (u32, u32) {
    (t % 32 / 4, t / 32 * 32 + t % 4 * 8)
}

/// Eight elements as f32.
#[inline(always)]
fn widen<T: Element<Four = UVec2>>(vector: UVec4) -> [f32; 8] {
    let (a, b) = (T::widen(UVec2::new(vector.x, vector.y)), T::widen(UVec2::new(vector.z, vector.w)));
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}

/// The largest of the lanes' numbers, none of them negative. NaN counts as more than any number.
#[inline(always)]
fn largest(x: f32) -> f32 {
    f32::from_bits(warp::warp_reduce_max_u32(FULL_MASK, x.to_bits()))
}

/// One channel's range out of those that the 8 lanes of the same channels have: of `low` and `high`, the
/// channel number lane / 4. Each step sends half of the channels away, and keeps the half that the lane's bit
/// says.
#[inline(always)]
fn channel_range(low: [f32; 8], high: [f32; 8], lane: u32) -> (f32, f32) {
    let (mut low, mut high) = (low, high);
    unroll!(for step in 0..3 {
        let (bit, kept) = (16u32 >> step, 4usize >> step);
        let upper = lane & bit != 0;
        unroll!(for i in 0..4 {
            if i < kept {
                let (own, away) = if upper { (low[i + kept], low[i]) } else { (low[i], low[i + kept]) };
                low[i] = math::min(own, warp::warp_shuffle_xor(FULL_MASK, away, bit, 32));
                let (own, away) = if upper { (high[i + kept], high[i]) } else { (high[i], high[i + kept]) };
                high[i] = math::max(own, warp::warp_shuffle_xor(FULL_MASK, away, bit, 32));
            }
        });
    });
    (low[0], high[0])
}

/// Quantizes the keys of thread `t`.
#[inline(always)]
fn write_keys<M: KeyMetadata, const D: u32>(keys: [[f32; 8]; 2], t: u32, chances: Chances) {
    let layout = TileLayout::new(D, M::LAYOUT);
    let shared = write_layout(layout);
    let lane = t % 32;
    let (token, channel) = key_place(t);
    let mut low = [0f32; 8];
    let mut high = [0f32; 8];
    unroll!(for i in 0..8 {
        low[i] = math::min(keys[0][i], keys[1][i]);
        high[i] = math::max(keys[0][i], keys[1][i]);
    });
    let (low, high) = channel_range(low, high, lane);

    // Of its eight channels the lane has the one that its token's number says.
    let own = channel + token;
    let (scale, zero) = M::channel(low, high, overhang(chances.taken));
    let (s, z) = (scale.to_f32(), zero.to_f32());
    shared.tile.store_vector::<M>(layout.key_scale(own), scale);
    shared.tile.store_vector::<M>(layout.key_zero(own), zero);
    shared.reciprocals.store(own, reciprocal(s));
    let (scales, zeros) = (warp::warp_sum_f32(s * s), warp::warp_sum_f32(z * z));
    if lane == 0 {
        shared.channel_sums[0].store(channel / 32, scales);
        shared.channel_sums[1].store(channel / 32, zeros);
    }
    warp::sync_warp(FULL_MASK);

    // In a register all the time they would be one too many.
    let (token, channel) = key_place(renewed(t));
    let s = M::load_eight(shared.tile, layout.key_scale(channel));
    let z = M::load_eight(shared.tile, layout.key_zero(channel));
    let low = shared.reciprocals.load_vector::<glam::Vec4>(channel);
    let high = shared.reciprocals.load_vector::<glam::Vec4>(channel + 4);
    let r = [low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w];
    unroll!(for half in 0..2 {
        let mut words = [0u32; 8];
        let mut errors = [0f32; 8];
        unroll!(for i in 0..8 {
            let k = keys[half][i];
            let mut offset = 0.0;
            if chances.taken {
                offset = uniform(chance(chances.key, token + 8 * half as u32, channel + i as u32)) - 0.5;
            }
            let (code, word) = key_code(k, z[i], r[i], offset);
            words[i] = word;
            errors[i] = key_error(k, code, s[i], z[i]);
        });
        let packed = UVec2::new(
            pack_low_bytes([words[0], words[1], words[2], words[3]]),
            pack_low_bytes([words[4], words[5], words[6], words[7]]),
        );
        let token = token + 8 * half as u32;
        shared.tile.store_vector::<UVec2>(layout.key_code(token, channel), packed);
        store_sum(shared.sums[0], squares(errors), token, channel);
    });
}

/// Quantizes this lane's values: 8 channels from `channel` on, of one token. The neighbouring lane has the
/// group's rest.
#[inline(always)]
fn write_values<M: KeyMetadata, const D: u32>(v: [f32; 8], token: u32, channel: u32, chances: Chances) {
    let layout = TileLayout::new(D, M::LAYOUT);
    let shared = write_layout(layout);
    let (mut low, mut high) = (v[0], v[0]);
    unroll!(for i in 1..8 {
        low = math::min(low, v[i]);
        high = math::max(high, v[i]);
    });
    let low = math::min(low, warp::warp_shuffle_xor(FULL_MASK, low, 1, 32));
    let high = math::max(high, warp::warp_shuffle_xor(FULL_MASK, high, 1, 32));
    let (scale, zero) = value_group(low, high);
    let (s, z) = (twice(scale), twice(zero));
    let (r, z32) = (reciprocal(convert::f32_from_f16(scale)), convert::f32_from_f16(zero));

    let mut codes = [0f32; 8];
    unroll!(for i in 0..8 {
        codes[i] = value_code(v[i], z32, r);
    });
    let mut restored = restore_eight(codes, s, z);
    let mut halves = [f32::INFINITY; 8];
    let mut step = f32::INFINITY;
    if chances.taken {
        let mut neighbours = [0f32; 8];
        unroll!(for i in 0..8 {
            neighbours[i] = value_neighbour(v[i], codes[i], restored[i]);
        });
        let others = restore_eight(neighbours, s, z);
        step = 0.0;
        unroll!(for i in 0..8 {
            let (probability, half) = value_chance(v[i], restored[i], others[i]);
            if uniform(chance(chances.key, token, channel + i as u32) >> 16) < probability {
                (codes[i], restored[i]) = (neighbours[i], others[i]);
            }
            halves[i] = half;
            step = math::max(step, half);
        });
    }
    let mut errors = [0f32; 8];
    unroll!(for i in 0..8 {
        errors[i] = v[i] - restored[i];
    });
    let packed = byte_perm(
        pack_value_codes([codes[0], codes[1], codes[2], codes[3]]),
        pack_value_codes([codes[4], codes[5], codes[6], codes[7]]),
        0x5410,
    );
    shared.tile.store_vector::<u32>(layout.value_code(token, channel), packed);
    if channel.is_multiple_of(16) {
        shared.tile.store_vector::<u16>(layout.value_scale(token, channel / 16), scale.to_bits());
        shared.tile.store_vector::<u16>(layout.value_zero(token, channel / 16), zero.to_bits());
    }
    store_sum(shared.sums[1], squares(errors), token, channel);
    store_sum(shared.sums[2], squares(v), token, channel);
    store_sum(shared.sums[3], squares(halves), token, channel);
    let two = math::max(step, warp::warp_shuffle_xor(FULL_MASK, step, 1, 32));
    let four = math::max(two, warp::warp_shuffle_xor(FULL_MASK, two, 2, 32));
    if channel.is_multiple_of(32) {
        shared.steps.store(channel / 32 * BLOCK_TOKENS + token, four);
    }
}

/// V^ of eight codes of a group; `s` and `z` hold scale and zero twice.
#[inline(always)]
fn restore_eight(codes: [f32; 8], s: u32, z: u32) -> [f32; 8] {
    let mut restored = [0f32; 8];
    unroll!(for i in 0..4 {
        let pair = restore_values([codes[2 * i], codes[2 * i + 1]], s, z);
        restored[2 * i] = convert::f32_from_f16(f16::from_bits(pair as u16));
        restored[2 * i + 1] = convert::f32_from_f16(f16::from_bits((pair >> 16) as u16));
    });
    restored
}

/// Adds up what four neighbouring lanes have of a token's 32 channels, and stores it.
#[inline(always)]
fn store_sum(sums: Shared<f32>, own: f32, token: u32, channel: u32) {
    let two = own + warp::warp_shuffle_xor(FULL_MASK, own, 1, 32);
    let four = two + warp::warp_shuffle_xor(FULL_MASK, two, 2, 32);
    if channel.is_multiple_of(32) {
        sums.store(channel / 32 * BLOCK_TOKENS + token, four);
    }
}

/// A token's sum of squares over all channels.
#[inline(always)]
fn token_sum<const D: u32>(sums: Shared<f32>, token: u32) -> f32 {
    let mut sum = sums.load(token);
    unroll!(for i in 1..(D / 32) as usize, at_most 8 {
        sum += sums.load(i as u32 * BLOCK_TOKENS + token);
    });
    sum
}

/// A sum of squares over all channels.
#[inline(always)]
fn channel_sum<const D: u32>(sums: Shared<f32>) -> f32 {
    let mut sum = sums.load(0);
    unroll!(for i in 1..(D / 32) as usize, at_most 8 {
        sum += sums.load(i as u32);
    });
    sum
}

/// A token's largest over all channels.
#[inline(always)]
fn token_maximum<const D: u32>(steps: Shared<f32>, token: u32) -> f32 {
    let mut most = steps.load(token);
    unroll!(for i in 1..(D / 32) as usize, at_most 8 {
        most = math::max(most, steps.load(i as u32 * BLOCK_TOKENS + token));
    });
    most
}

/// Whether an element is NaN or infinite.
#[inline(always)]
fn not_finite(x: f32) -> bool {
    x.to_bits() & 0x7f80_0000 == 0x7f80_0000
}

/// Reports the first keys of a block that are not finite or out of range; by one warp.
#[inline(always)]
fn find_key_problems<T: Element, const D: u32, M: KeyMetadata>(
    keys: Global<T>,
    start: usize,
    over: f32,
    problems: GlobalMut<u64>,
) {
    let mut i = warp::lane_id();
    while i < BLOCK_TOKENS * D {
        let k = keys.load(start + i as usize).to_f32();
        let channel = start + rem_u32(i, D) as usize;
        let (low, high) = range(keys, channel, D);
        let (scale, zero) = M::channel(low, high, over);
        let (s, z) = (scale.to_f32(), zero.to_f32());
        let (code, _) = key_code(k, z, reciprocal(s), 0.0);
        report(problems, 0, k, key_error(k, code, s, z), start + i as usize);
        i += 32;
    }
}

/// Reports the first values of a block that are not finite or out of range; by one warp.
#[inline(always)]
fn find_value_problems<T: Element, const D: u32>(values: Global<T>, start: usize, problems: GlobalMut<u64>) {
    let mut i = warp::lane_id();
    while i < BLOCK_TOKENS * D {
        let v = values.load(start + i as usize).to_f32();
        let (low, high) = range(values, start + (i - i % 16) as usize, 1);
        let (scale, zero) = value_group(low, high);
        let code = value_code(v, convert::f32_from_f16(zero), reciprocal(convert::f32_from_f16(scale)));
        let restored = restore_values([code, code], twice(scale), twice(zero));
        let error = v - convert::f32_from_f16(f16::from_bits(restored as u16));
        report(problems, 2, v, error, start + i as usize);
        i += 32;
    }
}

/// The range of 16 elements `stride` apart.
#[inline(always)]
fn range<T: Element>(data: Global<T>, first: usize, stride: u32) -> (f32, f32) {
    let mut low = f32::INFINITY;
    let mut high = f32::NEG_INFINITY;
    let mut i = 0;
    while i < 16 {
        let x = data.load(first + (i * stride) as usize).to_f32();
        (low, high) = (math::min(low, x), math::max(high, x));
        i += 1;
    }
    (low, high)
}

/// Lowers the problem that an element and its error show, if any: `kind` for an element that is not finite,
/// the next for one whose error is not.
#[inline(always)]
fn report(problems: GlobalMut<u64>, kind: usize, element: f32, error: f32, index: usize) {
    if not_finite(element) {
        problems.atomic_min(kind, index as u64);
    } else if not_finite(error) {
        problems.atomic_min(kind + 1, index as u64);
    }
}

/// The launch of [`quantize_block`](fn@quantize_block) over `jobs` jobs; `None` where 32 bits cannot number
/// the blocks.
#[cfg(not(target_arch = "nvptx64"))]
pub fn launch(layout: TileLayout, kv_heads: u32, jobs: u32) -> Option<simt::LaunchShape> {
    let blocks = jobs.checked_mul(kv_heads).filter(|blocks| *blocks <= i32::MAX as u32)?;
    Some(simt::LaunchShape::new(blocks, layout.head_dim).shared(write_layout(layout).bytes))
}
