//! The same on slices, written to be obvious: a list of slots in the order of their last use.

use crate::attention::BLOCK_TOKENS;
use kernels_gpu::gather::{CarryShape, Extent, StagingShape};
use rayon::prelude::*;

const NONE: u32 = u32::MAX;

/// What [`place`](kernels_gpu::gather::place()) reads.
#[derive(Clone, Copy)]
pub(super) struct Listed<'a> {
    pub list: &'a [u32],
    pub entries: &'a [u32],
    pub lengths: &'a [u32],
}

/// What it writes.
pub(super) struct Placed<'a> {
    pub directory: &'a mut [u32],
    pub at: &'a mut [u32],
    pub missed: &'a mut [u32],
    pub misses: &'a mut [u32],
    pub staged: &'a mut [u32],
    pub tally: &'a mut [u64],
}

/// What [`place`](kernels_gpu::gather::place()) does: the same arguments.
pub(super) fn place(shape: StagingShape, from: Listed<'_>, to: Placed<'_>) {
    let (most, per_block) = (shape.most as usize, shape.rule.entries() as usize);
    let (blocks, slots) = (shape.blocks() as usize, shape.slots as usize);
    for row in 0..to.misses.len() {
        let (sequence, head) = (row as u32 / shape.kv_heads, row as u32 % shape.kv_heads);
        let length = from.lengths[sequence as usize].min(shape.max_blocks * BLOCK_TOKENS);
        let far = shape.far(Extent::of(length, shape.rule)) as usize;
        let list = &from.list[row * most..][..most];
        let at = &mut to.at[row * most..][..most];
        let (slot_of, rest) = to.directory[row * shape.words()..][..shape.words()].split_at_mut(blocks);
        let (held, order) = rest.split_at_mut(slots);
        let missed: Vec<usize> = (0..far).filter(|i| slot_of[list[*i] as usize] == NONE).collect();
        let wanted = |slot: &u32| list[..far].contains(&held[*slot as usize]);
        let unused: Vec<u32> = order.iter().copied().filter(|slot| !wanted(slot)).collect();
        let (taken, left) = unused.split_at(missed.len());
        for (slot, i) in taken.iter().zip(&missed) {
            let before = std::mem::replace(&mut held[*slot as usize], list[*i]);
            if before != NONE {
                slot_of[before as usize] = NONE;
            }
            slot_of[list[*i] as usize] = *slot;
        }
        for i in 0..far {
            at[i] = slot_of[list[i] as usize];
        }
        let used = left.iter().chain(&at[..far]).copied();
        order.iter_mut().zip(used).for_each(|(to, slot)| *to = slot);
        for (to, i) in to.missed[row * most..].iter_mut().zip(&missed) {
            *to = *i as u32;
        }
        to.misses[row] = missed.len() as u32;
        let entries = from.entries[row * most * per_block..].iter();
        let staged = to.staged[row * most * per_block..].iter_mut().take(most * per_block);
        for (i, (staged, entry)) in staged.zip(entries).enumerate() {
            let (listed, tile) = (i / per_block, (i % per_block) as u32);
            *staged = if *entry == NONE {
                NONE
            } else if listed < far {
                shape.entry(sequence, head, shape.rule.local + at[listed], tile)
            } else {
                shape.entry(sequence, head, shape.near_slot(list[listed]), tile)
            };
        }
        let step = [(far - missed.len()) as u64, missed.len() as u64];
        for (i, count) in step.into_iter().enumerate() {
            to.tally[4 * row + i] += count;
            to.tally[4 * row + 2 + i] = count;
        }
    }
}

/// What [`fetch`](kernels_gpu::gather::fetch()) reads besides the pools.
#[derive(Clone, Copy)]
pub(super) struct Missing<'a> {
    pub entries: &'a [u32],
    pub at: &'a [u32],
    pub missed: &'a [u32],
    pub misses: &'a [u32],
    pub table: &'a [u32],
    pub lengths: &'a [u32],
}

/// What [`fetch`](kernels_gpu::gather::fetch()) does: the same arguments.
pub(super) fn fetch(shape: StagingShape, from: Missing<'_>, host: [&mut [u32]; 2], pool: [&mut [u32]; 2]) {
    let (heads, most, per_block) = (shape.kv_heads, shape.most as usize, shape.rule.entries());
    let row_words = shape.head_dim as usize / 2;
    let tile_words = BLOCK_TOKENS as usize * row_words;
    // Keys and values by two threads.
    host.into_par_iter().zip(pool).for_each(|(host, pool)| {
        for (row, misses) in from.misses.iter().enumerate() {
            let (sequence, head) = (row as u32 / heads, row as u32 % heads);
            for listed in &from.missed[row * most..][..*misses as usize] {
                let listed = row * most + *listed as usize;
                let slot = shape.rule.local + from.at[listed];
                for tile in 0..per_block {
                    let entry = from.entries[listed * per_block as usize + tile as usize] as usize;
                    let to = shape.entry(sequence, head, slot, tile) as usize;
                    let source = &host[entry * tile_words..][..tile_words];
                    pool[to * tile_words..][..tile_words].copy_from_slice(source);
                }
            }
            let length = from.lengths[sequence as usize].min(shape.max_blocks * BLOCK_TOKENS);
            if length == 0 {
                continue;
            }
            let (tile, place) = ((length - 1) / BLOCK_TOKENS, (length - 1) % BLOCK_TOKENS);
            let slot = shape.near_slot(tile / per_block);
            let entry = shape.entry(sequence, head, slot, tile % per_block) as usize;
            let home = (from.table[(sequence * shape.max_blocks + tile) as usize] * heads + head) as usize;
            let at = |entry: usize| entry * tile_words + place as usize * row_words;
            host[at(home)..][..row_words].copy_from_slice(&pool[at(entry)..][..row_words]);
        }
    });
}

/// What [`carry`](kernels_gpu::gather::carry()) does: pools and tables of the same arguments.
pub(super) fn carry(
    shape: CarryShape,
    (from, from_table): ([&[u32]; 2], &[u32]),
    (to, to_table): ([&mut [u32]; 2], &[u32]),
) {
    let heads = shape.kv_heads as usize;
    let row_words = shape.head_dim as usize / 2;
    let tokens = BLOCK_TOKENS as usize;
    let (begin, end) = (shape.begin as usize, shape.end as usize);
    from.into_par_iter().zip(to).for_each(|(from, to)| {
        for tile in begin / tokens..end.div_ceil(tokens) {
            let (first, last) = (begin.max(tile * tokens), end.min((tile + 1) * tokens));
            for head in 0..heads {
                let at = |table: &[u32]| {
                    ((table[tile] as usize * heads + head) * tokens + first % tokens) * row_words
                };
                let words = (last - first) * row_words;
                to[at(to_table)..][..words].copy_from_slice(&from[at(from_table)..][..words]);
            }
        }
    });
}
