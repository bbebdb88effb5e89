//! # Mathematics
//! Steps over [resident](super::admit) sequences are `dense` attention over their originals, so that what
//! bounds a head's error is rounding: docs/certificate.md, (1b) with δ_F, and (7). That follows from the
//! query, and from what no norm of a key and none of a value is above.
//!
//! # Layout
//! Slots of `near`, for keys and for values: [sequences, resident blocks, kv_heads, 16, D] at the beginning
//! of each; `annotations` as in [`attend`](fn@super::attend).
//!
//! # Bytes
//! 16 a full block and KV head; 64·D of the block that is not full.
//!
//! # Work split
//! Grid (1, kv_heads · row groups, sequences), a block of four warps: a thread for each annotation. The first
//! warp has the eight queries, and the block that is not full.

use super::admit::Scratch;
use super::carried::exact::{certificate, of_warp};
use super::layout::{Annotation, pair};
use super::pass::StepShape;
use super::policy::{Certificate, reason, rung};
use super::promote::largest_norms;
use super::query::Query;
use super::tokens::CacheShape;
use crate::attention::{BLOCK_TOKENS, Chain, GridPlace, Half, KeyTile, ROWS, ValueTile};
use half::{bf16, f16};
use simt::math::max;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, kernel, thread, unroll};

/// Threads of a block.
pub const THREADS: u32 = 128;
const WARPS: u32 = THREADS / 32;

/// Shared memory of [`vouch`](fn@vouch).
#[derive(Clone, Copy)]
pub struct VouchLayout {
    /// A tile of keys, then one of values.
    tiles: Shared<u32>,
    /// The largest norms of values and keys of each warp.
    norms: Shared<f32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory.
pub const fn vouch_layout(head_dim: u32) -> VouchLayout {
    let mut plan = SharedPlan::new();
    let tiles = plan.array(2 * BLOCK_TOKENS * head_dim / 2);
    let norms = plan.array(2 * WARPS);
    VouchLayout { tiles, norms, bytes: plan.bytes() }
}

/// Certificates of `dense` attention over resident sequences, [sequences, query heads].
///
/// `queries` [sequences, query heads, D]; `table` and `lengths` of the cache; `shape` with the splits of that
/// `dense`; `cache` with the resident blocks, and the slots of `scratch`: `near` is its pool.
#[kernel(
    system = certified,
    instances((f16, 64), (f16, 128), (bf16, 64), (bf16, 128)),
    max_threads = 128,
    overlaps = in_turn
)]
pub fn vouch<E: Half, const D: usize>(
    queries: Global<E>,
    annotations: Global<Annotation>,
    table: Global<u32>,
    lengths: Global<u32>,
    near: Global<E>,
    certificates: GlobalMut<Certificate>,
    shape: StepShape,
    cache: CacheShape,
    scratch: Scratch,
) {
    let GridPlace { sequence, head, row_group, .. } = GridPlace::of(shape.row_groups());
    let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
    let layout = vouch_layout(D as u32);
    let length = lengths.load(sequence as usize);
    let (blocks, tokens) = (length / BLOCK_TOKENS, length % BLOCK_TOKENS);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let first_row = (sequence * shape.kv_heads + head) * shape.group + row_group * ROWS;
    let row = (first_row + (lane >> 2)) as usize;
    let begun = warp == 0 && tokens != 0;
    let (keys, values) =
        (KeyTile::<D>::at(layout.tiles, 0), ValueTile::<D>::at(layout.tiles, KeyTile::<D>::WORDS));
    if begun {
        // A resident sequence has no block beyond.
        let slot = cache.resident_slot(sequence, blocks, head).unwrap_or(0);
        let elements = BLOCK_TOKENS as usize * D;
        keys.copy(near, slot as usize * elements, tokens, lane);
        values.copy(near, (scratch.key_slots + slot) as usize * elements, tokens, lane);
        async_copy::commit();
    }
    let query = Query::load::<E, D>(queries, row, present, shape.softmax_scale, lane);
    let mut largest = [0f32; 2];
    let mut index = t;
    while index < blocks {
        let block = table.load_readonly((sequence * shape.max_blocks + index) as usize);
        let own = Annotation::load_norms(annotations, pair(block, shape.kv_heads, head));
        largest = [max(largest[0], own[0]), max(largest[1], own[1])];
        index += THREADS;
    }
    if begun {
        async_copy::wait::<0>();
        warp::sync_warp(FULL_MASK);
        let [of_keys, of_values] = largest_norms::<E, D>(keys, values, lane);
        largest = [max(largest[0], of_values), max(largest[1], of_keys)];
    }
    let largest = largest.map(|x| of_warp(x));
    if lane == 0 {
        unroll!(for i in 0..2 {
            layout.norms.store(2 * warp + i as u32, largest[i]);
        });
    }
    thread::sync_threads();
    if warp != 0 {
        return;
    }
    let of_lane = |i: u32| if lane < WARPS { layout.norms.load(2 * lane + i) } else { 0.0 };
    let largest = [of_warp(of_lane(0)), of_warp(of_lane(1))];
    if present && lane & 3 == 0 {
        let dense = Chain::of_dense::<D>(length, shape.dense_splits);
        let why = rung::DENSE | reason::RESIDENT << 16;
        certificate::<E, D>(&query, shape.softmax_scale, largest, &dense, why).store(certificates, row);
    }
}
