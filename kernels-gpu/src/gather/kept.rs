//! What thread blocks of [`attend_chosen`](fn@super::attend_chosen) attend to.

use super::choice::WARPS;
use crate::attention::dense::{Layout, stages};
use crate::attention::{BLOCK_TOKENS, Half, KeyTile, Ring, ValueTile};
use simt::{Global, Shared, thread};

/// Where the tiles of what is kept lie: 16 tokens each, in the order of the list.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    pub table: Global<u32>,
    /// The chosen blocks, in order.
    pub chosen: Shared<u32>,
    /// Tiles of a gather-block, as a power of two.
    pub shift: u32,
    /// How many blocks were chosen; none where nothing was ranked.
    pub ranked: u32,
    /// Blocks that are not kept.
    pub left_out: u32,
    /// Where the sequence's row of the cache's table begins.
    pub start: u32,
    pub kv_heads: u32,
    pub head: u32,
}

impl Kept {
    /// Where tile `tile` of what is kept lies, in the pool seen as [blocks · kv_heads, 1, 16, D].
    #[simt::device]
    pub fn entry(self, tile: u32) -> u32 {
        let place = tile >> self.shift;
        // What is kept in any case is known without the list.
        let block = if place == 0 {
            0
        } else if place <= self.ranked {
            self.chosen.load(place - 1)
        } else {
            place + self.left_out
        };
        let index = (block << self.shift) + (tile & ((1 << self.shift) - 1));
        self.table.load_readonly((self.start + index) as usize) * self.kv_heads + self.head
    }

    /// Asks the L2 cache for a tile's keys, and for its values.
    #[simt::device]
    fn fetch<E: Half, const D: usize>(
        self,
        keys: Global<E>,
        values: Global<E>,
        entry: u32,
        of_keys: bool,
        of_values: bool,
    ) {
        let elements = BLOCK_TOKENS * D as u32;
        let from = entry as usize * elements as usize;
        keys.prefetch(from, 2 * elements, of_keys);
        values.prefetch(from, 2 * elements, of_values);
    }

    /// Asks the L2 cache for a tile by an old list, for its keys on even lanes and its values on odd ones: a
    /// hint, ahead of the wait.
    #[simt::device]
    pub fn ask_old<E: Half, const D: usize>(
        self,
        (keys, values): (Global<E>, Global<E>),
        old: Old,
        tile: u32,
        wanted: bool,
        lane: u32,
    ) {
        let Old { list, first, pool_blocks, max_blocks } = old;
        let place = tile >> self.shift;
        let listed = wanted & (place >= 1) & (place <= self.ranked);
        let old = list.peek(first + if listed { place as usize } else { 0 }, listed);
        let block = if place == 0 {
            0
        } else if listed {
            old
        } else {
            place + self.left_out
        };
        let index = (block << self.shift) + (tile & ((1 << self.shift) - 1));
        let there = wanted & (block <= max_blocks) & (index < max_blocks);
        let entry = self.table.peek((self.start + if there { index } else { 0 }) as usize, there);
        let there = there & (entry < pool_blocks);
        let entry = if there { entry * self.kv_heads + self.head } else { 0 };
        self.fetch::<E, D>(keys, values, entry, there & (lane & 1 == 0), there & (lane & 1 != 0));
    }
}

/// What was chosen when the plan's last step was, of the same row.
#[derive(Clone, Copy)]
pub(super) struct Old {
    pub list: Global<u32>,
    /// Where the row's list begins.
    pub first: usize,
    /// Blocks of the pool.
    pub pool_blocks: u32,
    /// Entries of a row of the table.
    pub max_blocks: u32,
}

/// A warp's tiles of keys and values.
pub(super) struct Tiles<E, const D: usize> {
    pub layout: Layout,
    pub keys: Global<E>,
    pub values: Global<E>,
    pub kept: Kept,
    /// Tokens that are kept.
    pub length: u32,
    pub warp: u32,
    pub lane: u32,
    pub end: u32,
}

impl<E: Half, const D: usize> Tiles<E, D> {
    #[inline(always)]
    pub fn stage(&self, stage: u32) -> (KeyTile<D>, ValueTile<D>) {
        let words = KeyTile::<D>::WORDS;
        let start = self.warp * self.layout.ring_words + stage * 2 * words;
        (KeyTile::at(self.layout.ring, start), ValueTile::at(self.layout.ring, start + words))
    }
}

impl<E: Half, const D: usize> Ring for Tiles<E, D> {
    const STAGES: u32 = stages(D as u32);
    const STRIDE: u32 = WARPS;
    const LOOKS_AHEAD: bool = true;

    #[inline(always)]
    fn end(&self) -> u32 {
        self.end
    }

    #[simt::device]
    fn block(&self, tile: u32) -> u32 {
        if tile < self.end { self.kept.entry(tile) } else { 0 }
    }

    #[simt::device]
    fn start(&self, tile: u32, block: u32, stage: u32) {
        let (k, v) = self.stage(stage);
        let from = block as usize * (BLOCK_TOKENS as usize * D);
        let rows = self.length - tile * BLOCK_TOKENS;
        k.copy_once(self.keys, from, rows, self.lane);
        v.copy_once(self.values, from, rows, self.lane);
        // What comes behind this launch asks for its bytes behind these, while the rest is added up.
        if tile + WARPS >= self.end {
            thread::let_next_start();
        }
    }
}
