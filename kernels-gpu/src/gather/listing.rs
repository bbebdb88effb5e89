//! A list of gather-blocks, and the block table of it.

use super::rule::{Extent, Rule};
use crate::attention::BLOCK_TOKENS;
use simt::{Global, GlobalMut, thread, unroll};

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
}
