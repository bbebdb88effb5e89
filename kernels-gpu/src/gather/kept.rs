//! What thread blocks of [`step`](fn@super::step) wait for, and where the tiles lie that they attend to.

use super::choice::WARPS;
use super::listing::NONE;
use crate::attention::dense::{Layout, stages};
use crate::attention::{BLOCK_TOKENS, Half, KeyTile, Ring, ValueTile};
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Shared, thread, unroll};

/// A warp's wait for the maxima of a row: of every eighth 32 tiles.
pub(super) struct Wait {
    pub maxima: GlobalMut<u32>,
    pub here: Shared<u32>,
    pub first_maximum: usize,
    pub tiles: u32,
    /// The first tile that is not known to be there.
    pub next: u32,
    /// Looks at which one was missing. Patience that is gone does not come back: who has not begun by then
    /// has not begun for the next tile either.
    pub looks: u32,
    pub lane: u32,
}

impl Wait {
    /// Looks for the next tiles, a lane for four of them at once: one wait for the L2 cache. The first one
    /// that is missing, or [`NONE`] if these are all there; then it goes on to the next ones.
    #[simt::device]
    pub fn look(&mut self) -> u32 {
        let mine = |i: usize| self.next + 32 * WARPS * i as u32 + self.lane;
        let mut found = [NONE; 4];
        unroll!(for i in 0..4 {
            if mine(i) < self.tiles {
                found[i] = self.maxima.atomic_load(self.first_maximum + 1 + mine(i) as usize);
            }
        });
        let mut missing = NONE;
        unroll!(for i in 0..4 {
            missing = if found[3 - i] == 0 { mine(3 - i) } else { missing };
        });
        let missing = warp::warp_reduce_min_u32(FULL_MASK, missing);
        if missing == NONE {
            unroll!(for i in 0..4 {
                if mine(i) < self.tiles && mine(i) < self.here.len() {
                    self.here.store(mine(i), found[i]);
                }
            });
            self.next += 4 * 32 * WARPS;
        }
        missing
    }
}

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

    /// Asks the L2 cache for a distant block that may well be chosen: the best one that a thread block has
    /// scored itself. A warp's work; none if `block` is 0.
    #[simt::device]
    pub fn ask<E: Half, const D: usize>(self, keys: Global<E>, values: Global<E>, block: u32, lane: u32) {
        let tile = lane / 2;
        let there = (block != 0) & (tile >> self.shift == 0);
        let index = (block << self.shift) + if there { tile } else { 0 };
        let entry = self.table.load_readonly((self.start + index) as usize) * self.kv_heads + self.head;
        self.fetch::<E, D>(keys, values, entry, there & (lane & 1 == 0), there & (lane & 1 != 0));
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

    /// Asks the L2 cache for a share of the tiles that are kept in any case, of `tiles` that are kept: a lane
    /// of one warp of each of the row's thread blocks has one, or none.
    #[simt::device]
    pub fn ask_known<E: Half, const D: usize>(
        self,
        keys: Global<E>,
        values: Global<E>,
        tiles: u32,
        [index, blocks, lane]: [u32; 3],
    ) {
        let chosen = self.ranked << self.shift;
        let mine = index + blocks * lane;
        let there = mine < tiles - chosen;
        let mine = if there { mine } else { 0 };
        let tile = if mine >> self.shift == 0 { mine } else { mine + chosen };
        self.fetch::<E, D>(keys, values, self.entry(tile), there, there);
    }
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

    /// As in `attend`: what comes behind this launch asks for its bytes behind these tiles.
    #[inline(always)]
    fn begun(&self) {
        thread::let_next_start();
    }

    #[simt::device]
    fn start(&self, tile: u32, block: u32, stage: u32) {
        let (k, v) = self.stage(stage);
        let from = block as usize * (BLOCK_TOKENS as usize * D);
        let rows = self.length - tile * BLOCK_TOKENS;
        k.copy_once(self.keys, from, rows, self.lane);
        v.copy_once(self.values, from, rows, self.lane);
    }
}
