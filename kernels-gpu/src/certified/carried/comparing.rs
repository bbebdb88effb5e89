//! # Mathematics
//! The comparisons of [`audit`](fn@super::super::audit), ahead of a step that makes its list anew: blocks of
//! the list that there is, and others with a fixed probability, are as they were annotated only if
//!
//! ```text
//! |s_t − s^_t| <= Δ_b + δ_F + ε_guard      ‖V_t − V^_t‖ <= η_b      ‖V_t‖ <= ν_b      for its 16 tokens
//! ```
//!
//! for the rows of this step, with Δ_b, (5), and δ_F, (6), of the block's annotation. Where a block fails,
//! all rows of blocks of its sequence are left to the dense rung for good ([`Promoted::changed`]): the pass
//! behind this launch looks at no quantized block of it, nor does any later one.
//!
//! Where there is a scratch, listed blocks are compared with what it has of them: steps by this list, or by
//! those before, have brought it there. What else is listed is left to chance like the blocks that no list
//! has: its originals would take the bus once more in every renewal. Without slots all are compared.
//!
//! # Layout
//! As in [`carry`](fn@super::carry). `looked` [sequences · kv_heads · row groups, 4]: of the row's list the
//! blocks that are compared, those whose keys are, those whose values are, and 0.
//!
//! # Bytes
//! A block that is looked at: 32·D + 48 quantized, 32·D each of its originals. What is in the scratch is read
//! there.
//!
//! # Work split
//! Grid (comparers, kv_heads · row groups, sequences), eight warps a block: a warp a listed block; then a
//! warp for 32 blocks of which some are drawn, by a hash of the sequence's length, row of blocks and block.

use super::super::admit::{Scratch, held};
use super::super::auditing::{audit_layout, drawn, keys_differ, values_differ};
use super::super::layout::{Annotation, Layout, TileLayout, VECTORS};
use super::super::lists::{find_entry, lay_out_lists};
use super::super::marking::{Entry, ListHead};
use super::super::pass::StepShape;
use super::super::policy::{Watch, reason};
use super::super::promote::original_scores;
use super::super::query::{Query, delta, delta_original};
use super::Promoted;
use crate::attention::{BLOCK_TOKENS, GridPlace, Half, ROWS, warps};
use glam::UVec4;
use half::{bf16, f16};
use simt::warp::{FULL_MASK, warp_reduce_add_u32};
use simt::{Global, GlobalMut, Shared, async_copy, kernel, thread, warp};

/// Words of `looked` a row of blocks.
pub const LOOKED: u32 = 4;

/// Compares listed and drawn blocks with their originals.
#[kernel(
    system = certified,
    instances((f16, 64), (f16, 128), (bf16, 64), (bf16, 128)),
    max_threads = 256,
    min_blocks = 1,
    overlaps = in_turn
)]
pub fn canary<E: Half, const D: usize>(
    queries: Global<E>,
    tiles: Global<u32>,
    annotations: Global<Annotation>,
    table: Global<u32>,
    lengths: Global<u32>,
    keys: Global<E>,
    values: Global<E>,
    near: Global<E>,
    directory: Global<u64>,
    lists: Global<ListHead>,
    entries: Global<Entry>,
    promoted: GlobalMut<Promoted>,
    looked: GlobalMut<u32>,
    shape: StepShape,
    watch: Watch,
    scratch: Scratch,
) {
    let GridPlace { split: comparer, sequence, head, row_group, launch_row } =
        GridPlace::of(shape.row_groups());
    let length = lengths.load(sequence as usize);
    let blocks = length / BLOCK_TOKENS;
    let layout = audit_layout::<f16, D>();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let query_row = (sequence * shape.kv_heads + head) * shape.group + in_group;
    let query = Query::load::<E, D>(queries, query_row as usize, present, shape.softmax_scale, lane);
    let listed = lay_out_lists(layout.starts, lists, launch_row, shape, lane, warp);
    let near_pairs = NearPairs { table, directory, scratch, shape, sequence, head };
    // A warp that has the least to compare.
    if comparer + 1 == thread::grid_dim_x() && warp + 1 == warps(D as u32) {
        near_pairs.note(looked, layout.starts, entries, launch_row, blocks, lane);
    }

    let memory = layout.of_warp::<f16, D>(warp);
    let stride = thread::grid_dim_x() * warps(D as u32);
    let first = comparer * warps(D as u32) + warp;
    let (mut e, mut word, mut left) = (first, first, 0u32);
    let words = if watch.draw != 0 { blocks.div_ceil(32) } else { 0 };
    loop {
        // The list, then what is drawn.
        let of_list = e < listed;
        let entry = if of_list {
            let entry = find_entry(layout.starts, entries, launch_row, shape, e, lane);
            e += stride;
            entry
        } else {
            while left == 0 && word < words {
                let index = 32 * word + lane;
                let look = index < blocks && drawn(watch.draw, length, launch_row, index);
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
        // Of a sequence that was longer.
        if entry.index >= blocks {
            continue;
        }
        let (pair, slots) = near_pairs.find(entry.index);
        let [wants_keys, wants_values] =
            if of_list { at_hand(entry.wants(), slots, scratch) } else { entry.wants() };
        if !(wants_keys || wants_values) {
            continue;
        }
        let elements = BLOCK_TOKENS as usize * D;
        let source = |slot: u32, originals: Global<E>| match slot {
            Scratch::EMPTY => (originals, pair as usize * elements),
            slot => (near, slot as usize * elements),
        };
        // The last round's tiles are read.
        warp::sync_warp(FULL_MASK);
        if wants_keys {
            let (from, at) = source(slots[0], keys);
            memory.keys.copy(from, at, BLOCK_TOKENS, lane);
        }
        if wants_values {
            let (from, at) = source(slots[1], values);
            memory.values.copy(from, at, BLOCK_TOKENS, lane);
        }
        let bytes = TileLayout::new(D as u32, Layout::Compact).bytes as usize;
        memory.tile.copy(tiles, pair as usize * bytes, lane);
        async_copy::commit();
        let vectors =
            [0, 1, 2].map(|i| annotations.cast::<UVec4>().load(VECTORS as usize * pair as usize + i));
        let annotation: Annotation = bytemuck::cast(vectors);
        async_copy::wait::<0>();
        warp::sync_warp(FULL_MASK);

        let mut found = 0;
        if wants_keys {
            let exact = original_scores::<E, D>(&query, memory.keys, lane);
            let (quantized, x) = memory.tile.products(&query, lane);
            let of_quantized = delta::<f16, D>(&query, x, annotation);
            let allowed =
                of_quantized + delta_original::<D>(&query, annotation.eps + annotation.zeta) + watch.guard;
            let differs = present && keys_differ(&query, exact, quantized, allowed);
            if warp::warp_vote_any(FULL_MASK, differs) {
                found = reason::KEY_CANARY;
            }
        }
        if wants_values {
            let [eta, nu] = [annotation.eta, annotation.nu];
            if values_differ::<E, D>(memory.values, memory.tile.values(lane), eta, nu, lane) {
                found |= reason::VALUE_CANARY;
            }
        }
        if found != 0 {
            let rows = shape.kv_heads * shape.row_groups();
            let mut row = lane;
            while row < rows {
                Promoted::changed(promoted, sequence * rows + row, found);
                row += 32;
            }
        }
    }
}

/// Where blocks of a sequence and KV head are.
#[derive(Clone, Copy)]
struct NearPairs {
    table: Global<u32>,
    directory: Global<u64>,
    scratch: Scratch,
    shape: StepShape,
    sequence: u32,
    head: u32,
}

impl NearPairs {
    /// Block `index` of the sequence: its pair, and the tiles of the near pool that hold its keys and values.
    #[inline(always)]
    fn find(&self, index: u32) -> (u32, [u32; 2]) {
        let block = self.table.load_readonly((self.sequence * self.shape.max_blocks + index) as usize);
        let pair = block * self.shape.kv_heads + self.head;
        (pair, held(self.directory, self.scratch, pair))
    }

    /// Notes what is compared of a row's list: a warp's work.
    #[simt::device]
    fn note(
        &self,
        looked: GlobalMut<u32>,
        starts: Shared<u32>,
        entries: Global<Entry>,
        launch_row: u32,
        blocks: u32,
        lane: u32,
    ) {
        let mut counts = [0u32; 3];
        let mut part = 0;
        while part < self.shape.parts {
            let list = (launch_row * self.shape.parts + part) * self.shape.places();
            let count = starts.load(part + 1) - starts.load(part);
            let mut e = lane;
            while e < count {
                let entry = entries.load((list + e) as usize);
                if entry.index < blocks {
                    let (_, slots) = self.find(entry.index);
                    let [keys, values] = at_hand(entry.wants(), slots, self.scratch);
                    counts[0] += (keys || values) as u32;
                    counts[1] += keys as u32;
                    counts[2] += values as u32;
                }
                e += 32;
            }
            part += 1;
        }
        let [either, keys, values] = counts.map(|count| warp_reduce_add_u32(FULL_MASK, count));
        if lane == 0 {
            looked.cast::<UVec4>().store(launch_row as usize, UVec4::new(either, keys, values, 0));
        }
    }
}

/// What of the keys and values that are wanted is compared: what `slots` of the scratch hold, and where there
/// is none for them, all.
#[inline(always)]
fn at_hand(wants: [bool; 2], slots: [u32; 2], scratch: Scratch) -> [bool; 2] {
    let [keys, values] = wants;
    [
        keys && (scratch.key_slots == 0 || slots[0] != Scratch::EMPTY),
        values && (scratch.value_slots == 0 || slots[1] != Scratch::EMPTY),
    ]
}

const _: () = assert!(VECTORS == 3 && LOOKED == 4);
