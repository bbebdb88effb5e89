//! # Mathematics
//! What was stored is compared with what it was made from. A block of keys, its scores s^ by the tile and s
//! by the originals, is as it was annotated only if, for every row,
//!
//! ```text
//! |s_t − s^_t| <= Δ_b + δ_F + ε_guard      ‖V_t − V^_t‖ <= η_b      ‖V_t‖ <= ν_b      for its 16 tokens
//! ```
//!
//! The first is the paper's score-consistency canary with the rounding of both scores, (5) and (6), in it:
//! sound data never raise it. Looked at are the blocks that the step has promoted, and others with a fixed
//! probability, drawn anew each step. Of promoted keys the exact masses are noted, for
//! [`rank`](fn@super::rank).
//!
//! # Layout
//! `lists` and `entries` as `mark` leaves them; `masses` f32 [places of all lists, 8], relative to the row's
//! reference over all quantized blocks; `flags` [sequences, query heads] of [`reason`], or-ed to; `exacts`
//! [sequences, query heads]. `clock` \[1\] counts steps.
//!
//! # Bytes
//! A block that is looked at: 32·D of keys; where they are compared, 32·D quantized (36·D in the paper's
//! layout) and 32·D of values besides. What is in the scratch is read there; the rest comes from the
//! originals a second time.
//!
//! # Work split
//! That of `replace`: a warp a listed block; then a warp for 32 blocks of which some are drawn.

use super::admit::{Scratch, held};
use super::judge::Exact;
use super::layout::TileLayout;
use super::lists::{STARTS, find_place, lay_out_lists};
use super::marking::{Entry, ListHead};
use super::metadata::KeyMetadata;
use super::pass::{Record, StepShape};
use super::policy::{Watch, reason};
use super::promote::original_scores;
use super::quantizer::mixed;
use super::query::{LOG2_E, Query, delta_original};
use super::tile::{Int4Values, Tile};
use super::weighing::Weighed;
use crate::attention::{
    BLOCK_TOKENS, Chain, GridPlace, Half, KeyTile, ROWS, ValueTile, Values, warps, width,
};
use glam::UVec4;
use half::{bf16, f16};
use simt::math::{abs, exp2, fma, max, sqrt};
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, bits, kernel, thread, unroll, warp};

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct AuditLayout {
    /// A key tile, a value tile and a quantized tile for each warp.
    tiles: Shared<u32>,
    pub(super) starts: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// A warp's memory for a block: what it is made of, and what it was made from.
#[derive(Clone, Copy)]
pub(super) struct Compared<M: KeyMetadata, const D: usize> {
    pub(super) keys: KeyTile<D>,
    pub(super) values: ValueTile<D>,
    pub(super) tile: Tile<M, D>,
}

impl AuditLayout {
    /// That of a warp.
    #[inline(always)]
    pub(super) fn of_warp<M: KeyMetadata, const D: usize>(&self, warp: u32) -> Compared<M, D> {
        let start = bits::renewed(warp * warp_words::<M, D>());
        let keys = KeyTile::<D>::at(self.tiles, start);
        let values = ValueTile::<D>::at(self.tiles, start + KeyTile::<D>::WORDS);
        let tile = Tile::<M, D>::at(self.tiles, start + KeyTile::<D>::WORDS + ValueTile::<D>::WORDS);
        Compared { keys, values, tile }
    }
}

/// Words of a warp's tiles.
const fn warp_words<M: KeyMetadata, const D: usize>() -> u32 {
    KeyTile::<D>::WORDS + ValueTile::<D>::WORDS + Tile::<M, D>::WORDS
}

/// Lays out the shared memory of an instance.
pub const fn audit_layout<M: KeyMetadata, const D: usize>() -> AuditLayout {
    let mut plan = SharedPlan::new();
    let tiles = plan.array(warps(D as u32) * warp_words::<M, D>());
    let starts = plan.array(STARTS);
    AuditLayout { tiles, starts, bytes: plan.bytes() }
}

/// Whether a step looks at a block that nobody has promoted: `draw` of 2^32 times, by a hash of step, row of
/// blocks (sequence, KV head and group of eight query heads) and block.
#[inline(always)]
pub fn drawn(draw: u64, step: u32, launch_row: u32, block: u32) -> bool {
    let mut hash = 0x9e37_79b9u32;
    unroll!(for i in 0..3 {
        hash = mixed(hash ^ [step, launch_row, block][i]);
    });
    (hash as u64) < draw
}

/// Compares promoted and drawn blocks with their originals.
#[kernel(
    system = certified,
    instances(
        (f16, 64, f16), (f16, 128, f16), (bf16, 64, f16), (bf16, 128, f16),
        (f16, 64, f32), (f16, 128, f32), (bf16, 64, f32), (bf16, 128, f32),
    ),
    max_threads = 256,
    min_blocks = 1,
    overlaps = in_turn
)]
pub fn audit<E: Half, const D: usize, M: KeyMetadata>(
    queries: Global<E>,
    tiles: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    keys: Global<E>,
    values: Global<E>,
    near: Global<E>,
    directory: Global<u64>,
    records: Global<Record>,
    lists: Global<ListHead>,
    entries: Global<Entry>,
    weighed: Global<Weighed>,
    norms: Global<f32>,
    clock: Global<u32>,
    masses: GlobalMut<f32>,
    flags: GlobalMut<u32>,
    exacts: GlobalMut<Exact>,
    shape: StepShape,
    watch: Watch,
    scratch: Scratch,
) {
    let GridPlace { split: auditor, sequence, head, row_group, launch_row } =
        GridPlace::of(shape.row_groups());
    let length = lengths.load(sequence as usize);
    let blocks = length / BLOCK_TOKENS;
    let layout = audit_layout::<M, D>();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let query_row = (sequence * shape.kv_heads + head) * shape.group + in_group;
    let query = Query::load::<E, D>(queries, query_row as usize, present, shape.softmax_scale, lane);
    let listed = lay_out_lists(layout.starts, lists, launch_row, shape, lane, warp);
    let mut reference = 0.0;
    if present {
        let of_row = Weighed::load(weighed, query_row as usize);
        reference = of_row.choice.reference;
        if auditor == 0 && warp == 0 && lane & 3 == 0 {
            let trailing = !length.is_multiple_of(BLOCK_TOKENS);
            let norm = |kind: usize| if trailing { norms.load(2 * launch_row as usize + kind) } else { 0.0 };
            let (kappa, nu) = (max(of_row.sums.kappa, norm(0)), max(of_row.sums.nu, norm(1)));
            let dense = Chain::of_dense::<D>(length, shape.rung_splits);
            let exact = Exact::new::<E, D>(&query, shape.softmax_scale, nu, kappa, &dense);
            let words: UVec4 = bytemuck::cast(exact);
            exacts.cast::<UVec4>().store(query_row as usize, words);
        }
    }

    let step = clock.load(0);
    let stride = thread::grid_dim_x() * warps(D as u32);
    let first = auditor * warps(D as u32) + warp;
    let (mut e, mut word, mut left) = (first, first, 0u32);
    let words = if watch.draw != 0 { blocks.div_ceil(32) } else { 0 };
    loop {
        // The lists, then what is drawn.
        let mut place = usize::MAX;
        let entry = if e < listed {
            place = find_place(layout.starts, launch_row, shape, e, lane);
            e += stride;
            entries.load(place)
        } else {
            while left == 0 && word < words {
                let index = 32 * word + lane;
                let look = index < blocks && drawn(watch.draw, step, launch_row, index);
                left = warp::warp_vote_ballot(FULL_MASK, look);
                word += stride;
            }
            if left == 0 {
                break;
            }
            let index = 32 * (word - stride) + left.trailing_zeros();
            left &= left - 1;
            Entry { index, rows: u32::MAX }
        };
        let [wants_keys, wants_values] = entry.wants();
        let wants_values = wants_values && watch.compares();
        if !wants_keys && !wants_values {
            continue;
        }
        let Compared { keys: key_tile, values: value_tile, tile } = layout.of_warp::<M, D>(warp);
        let block = table.load_readonly((sequence * shape.max_blocks + entry.index) as usize);
        let pair = block * shape.kv_heads + head;
        let elements = BLOCK_TOKENS as usize * D;
        let slots = held(directory, scratch, pair);
        let source = |slot: u32, originals: Global<E>| match slot {
            Scratch::EMPTY => (originals, pair as usize * elements),
            slot => (near, slot as usize * elements),
        };
        // The last round's tiles are read.
        warp::sync_warp(FULL_MASK);
        if wants_keys {
            let (from, at) = source(slots[0], keys);
            key_tile.copy(from, at, BLOCK_TOKENS, lane);
        }
        if wants_values {
            let (from, at) = source(slots[1], values);
            value_tile.copy(from, at, BLOCK_TOKENS, lane);
        }
        if watch.compares() {
            tile.copy(tiles, pair as usize * TileLayout::new(D as u32, M::LAYOUT).bytes as usize, lane);
        }
        async_copy::commit();
        // Of a row that is not there that of the first: its query is 0.
        let of_row = query_row - if present { 0 } else { lane >> 2 };
        let record = records.load(shape.record(of_row, entry.index));
        async_copy::wait::<0>();
        warp::sync_warp(FULL_MASK);

        let mut found = 0;
        if wants_keys {
            let exact = original_scores::<E, D>(&query, key_tile, lane);
            let mut differs = false;
            // All lanes multiply, whatever their rows' queries are.
            if watch.compares() {
                let quantized = tile.products(&query, lane).0;
                let allowed = record.delta() + delta_original::<D>(&query, record.kappa()) + watch.guard;
                differs = keys_differ(&query, exact, quantized, allowed);
            }
            let of_rows = warp::warp_vote_ballot(FULL_MASK, differs);
            if of_rows >> (lane & !3) & 0xf != 0 {
                found = reason::KEY_CANARY;
            }
            if watch.depth != 0 && place != usize::MAX {
                let to_log2 = query.scale * LOG2_E;
                let mut mass = 0f32;
                unroll!(for i in 0..4 {
                    mass += exp2(fma(exact[i / 2][i % 2], to_log2, -reference));
                });
                mass += warp_shuffle_xor(FULL_MASK, mass, 1, 32);
                mass += warp_shuffle_xor(FULL_MASK, mass, 2, 32);
                if lane & 3 == 0 {
                    masses.store(place * ROWS as usize + (lane >> 2) as usize, mass);
                }
            }
        }
        if wants_values && values_differ::<E, D>(value_tile, tile.values(lane), record.eta(), record.nu, lane)
        {
            found |= reason::VALUE_CANARY;
        }
        if found != 0 && present && lane & 3 == 0 {
            flags.atomic_or(query_row as usize, found);
        }
    }
}

/// Whether a difference is larger than it may be: what is not a number is beyond a number, and nothing is
/// beyond what is none.
// Hence `!(x <= y)`.
#[allow(clippy::neg_cmp_op_on_partial_ord)]
#[inline(always)]
pub fn beyond(x: f32, allowed: f32) -> bool {
    allowed < f32::INFINITY && !(x <= allowed)
}

/// Whether scores of a row, products of its normalised query, are further apart than they may be: of a lane's
/// four tokens. Nothing is said of a query that is not finite.
#[inline(always)]
pub(super) fn keys_differ(
    query: &Query,
    exact: [[f32; 2]; 2],
    quantized: [[f32; 2]; 2],
    allowed: f32,
) -> bool {
    let mut differs = false;
    unroll!(for i in 0..4 {
        let difference = abs(exact[i / 2][i % 2] - quantized[i / 2][i % 2]) * query.scale;
        differs |= query.finite && beyond(difference, allowed);
    });
    differs
}

/// At most the norm whose square this is, as a sum of up to 256 squares: 150 roundings of the sum, and the
/// root's.
#[inline(always)]
pub fn norm_below(squares: f32) -> f32 {
    sqrt(squares) * (1.0 - 1.0 / 4096.0)
}

/// Whether a value is further from its quantized form than η, or longer than ν: a warp's work, the same in
/// all lanes.
#[simt::device]
pub(super) fn values_differ<E: Half, const D: usize>(
    originals: ValueTile<D>,
    quantized: Int4Values<D>,
    eta: f32,
    nu: f32,
    lane: u32,
) -> bool {
    // Of this lane's four tokens, over its dimensions.
    let (mut errors, mut sizes) = ([0f32; 4], [0f32; 4]);
    unroll!(for s in 0..(D / 8 / width::<D>()), at_most 8 {
        let (exact, restored) = (originals.operands(s as u32, lane), quantized.operands(s as u32, lane));
        unroll!(for e in 0..(width::<D>()), at_most 8 {
            unroll!(for half in 0..2 {
                let (v, v_hat) = (E::unpack(exact[e][half]), <f16 as Half>::unpack(restored[e][half]));
                unroll!(for i in 0..2 {
                    let error = v[i] - v_hat[i];
                    errors[2 * half + i] = fma(error, error, errors[2 * half + i]);
                    sizes[2 * half + i] = fma(v[i], v[i], sizes[2 * half + i]);
                });
            });
        });
    });
    let mut differs = false;
    unroll!(for i in 0..4 {
        unroll!(for k in 2..5 {
            errors[i] += warp_shuffle_xor(FULL_MASK, errors[i], 1 << k, 32);
            sizes[i] += warp_shuffle_xor(FULL_MASK, sizes[i], 1 << k, 32);
        });
        differs |= beyond(norm_below(errors[i]), eta) || beyond(norm_below(sizes[i]), nu);
    });
    warp::warp_vote_any(FULL_MASK, differs)
}
