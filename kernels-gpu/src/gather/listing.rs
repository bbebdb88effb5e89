//! A list of gather-blocks, and the block table of it.

use super::rule::{Extent, Rule};
use crate::attention::BLOCK_TOKENS;
use glam::UVec4;
use simt::{Global, GlobalMut, bits, thread, unroll};

/// What is in the list, and in the table, behind the last block.
pub(super) const NONE: u32 = u32::MAX;

/// Where the list of a sequence and KV head goes.
#[derive(Clone, Copy)]
pub(super) struct Listing {
    /// Of the cache, [sequences, max_blocks].
    pub table: Global<u32>,
    /// [sequences, kv_heads, most]; the chosen ones are there, from the second place on.
    pub list: GlobalMut<u32>,
    /// [sequences, kv_heads].
    pub counts: GlobalMut<u32>,
    /// [sequences · kv_heads, most · block / 16].
    pub entries: GlobalMut<u32>,
    /// [sequences · kv_heads].
    pub kept: GlobalMut<u32>,
    pub rule: Rule,
    pub most: u32,
    pub max_blocks: u32,
    pub kv_heads: u32,
    pub row: u32,
    pub head: u32,
    pub sequence: u32,
}

impl Listing {
    /// Adds what is kept besides the chosen blocks, and writes count, tokens and table. The whole thread
    /// block calls it.
    #[simt::device]
    pub fn complete(self, extent: Extent) {
        let (t, threads) = (thread::thread_idx_x(), thread::block_dim_x());
        let first = self.row as usize * self.most as usize;
        let count = extent.kept_blocks();
        // The sink, and the blocks behind the distant ones; all of them where nothing was ranked.
        let ranked = if extent.ranked() { extent.chosen } else { 0 };
        let left_out = extent.blocks - count;
        let mut i = t;
        while i < self.most {
            if i == 0 || i > ranked {
                let block = if i == 0 { 0 } else { i + left_out };
                self.list.store(first + i as usize, if i < count { block } else { NONE });
            }
            i += threads;
        }
        if t == 0 {
            self.counts.store(self.row as usize, count);
            self.kept.store(self.row as usize, extent.kept(self.rule));
        }
        thread::sync_threads();
        let per_block = self.rule.entries();
        let (width, per_block_log2) = (self.most * per_block, per_block.trailing_zeros());
        let (table, to) = (self.sequence * self.max_blocks, self.row as usize * width as usize);
        let mut start = t;
        while start < width {
            // Loads that wait for each other are on their way for eight entries at once.
            let (mut index, mut entry) = ([NONE; 8], [NONE; 8]);
            unroll!(for i in 0..8 {
                let place = (start + i as u32 * threads) >> per_block_log2;
                if place < count {
                    index[i] = self.list.load(first + place as usize);
                }
            });
            unroll!(for i in 0..8 {
                let within = (start + i as u32 * threads) & (per_block - 1);
                let index = index[i].wrapping_mul(per_block).wrapping_add(within);
                let place = (start + i as u32 * threads) >> per_block_log2;
                if place < count && index < extent.length.div_ceil(BLOCK_TOKENS) {
                    let block = self.table.load_readonly((table + index) as usize);
                    entry[i] = block * self.kv_heads + self.head;
                }
            });
            unroll!(for i in 0..8 {
                let at = start + i as u32 * threads;
                if at < width {
                    self.entries.store(to + at as usize, entry[i]);
                }
            });
            start += 8 * threads;
        }
    }

    /// Writes what is behind the last block to one of `parts` shares of list and table, as if there were
    /// none. The whole thread block calls it.
    #[simt::device]
    pub fn clear(self, part: u32, parts: u32) {
        let (t, threads) = (thread::thread_idx_x(), thread::block_dim_x());
        // Places are a multiple of 16.
        let share = bits::div_u32(self.most / 4 + parts - 1, parts);
        let first = (self.row * self.most) as usize;
        let (width, begin) = (self.rule.entries(), part * share);
        let end = (begin + share).min(self.most / 4);
        let mut four = begin + t;
        while four < end {
            self.list.store_vector(first + 4 * four as usize, UVec4::splat(NONE));
            four += threads;
        }
        let mut four = begin * width + t;
        while four < end * width {
            self.entries.store_vector(first * width as usize + 4 * four as usize, UVec4::splat(NONE));
            four += threads;
        }
    }

    /// The same as [`complete`](Self::complete) where all of list and table is cleared; `chosen` says which
    /// block is at a place of those that were chosen.
    #[simt::device]
    pub fn complete_cleared(self, extent: Extent, chosen: impl Fn(u32) -> u32) {
        let (t, threads) = (thread::thread_idx_x(), thread::block_dim_x());
        let first = self.row as usize * self.most as usize;
        let count = extent.kept_blocks();
        let ranked = if extent.ranked() { extent.chosen } else { 0 };
        let left_out = extent.blocks - count;
        let mut i = t;
        while i + ranked < count {
            let (place, block) = if i == 0 { (0, 0) } else { (i + ranked, i + ranked + left_out) };
            self.list.store(first + place as usize, block);
            i += threads;
        }
        if t == 0 {
            self.counts.store(self.row as usize, count);
            self.kept.store(self.row as usize, extent.kept(self.rule));
        }
        let per_block = self.rule.entries();
        let per_block_log2 = per_block.trailing_zeros();
        let (table, to) = (self.sequence * self.max_blocks, first * per_block as usize);
        let mut start = t;
        while start < count * per_block {
            // Loads are on their way for four entries at once.
            let mut entry = [NONE; 4];
            unroll!(for i in 0..4 {
                let at = start + i as u32 * threads;
                let (place, within) = (at >> per_block_log2, at & (per_block - 1));
                if place < count {
                    let block = if place == 0 {
                        0
                    } else if place <= ranked {
                        chosen(place)
                    } else {
                        place + left_out
                    };
                    let index = block * per_block + within;
                    if index < extent.length.div_ceil(BLOCK_TOKENS) {
                        let block = self.table.load_readonly((table + index) as usize);
                        entry[i] = block * self.kv_heads + self.head;
                    }
                }
            });
            unroll!(for i in 0..4 {
                let at = start + i as u32 * threads;
                if at < count * per_block {
                    self.entries.store(to + at as usize, entry[i]);
                }
            });
            start += 4 * threads;
        }
    }
}
