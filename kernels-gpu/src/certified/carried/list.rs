//! The list in `carry`: which blocks of a split it has, and where they are.

use super::super::admit::{Found, Scratch, find, order};
use super::super::lists::{find_entry, lay_out_lists};
use super::super::marking::{Entry, ListHead};
use super::super::pass::{Rings, StepShape, Tiles, warps_of};
use super::CarriedLayout;
use crate::attention::Chain;
use crate::attention::{BLOCK_TOKENS, Half, Pace, Ring};
use core::cell::Cell;
use glam::UVec4;
use half::f16;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Shared, thread, unroll};

/// An entry of the list, and where its block is.
#[derive(Clone, Copy)]
pub(super) struct Lookup {
    pub(super) entry: Entry,
    /// In the pools.
    pub(super) block: u32,
    /// Its keys, its values.
    pub(super) found: [Found; 2],
}

impl Lookup {
    /// Words of one in shared memory.
    pub(super) const WORDS: u32 = 8;

    #[simt::device]
    fn store(self, memory: Shared<u32>, warp: u32) {
        let Lookup { entry, block, found: [keys, values] } = self;
        memory.store_vector(Self::WORDS * warp, UVec4::new(entry.index, entry.rows, block, keys.tile));
        memory.store_vector(Self::WORDS * warp + 4, UVec4::new(keys.admit, values.tile, values.admit, 0));
    }

    #[simt::device]
    pub(super) fn load(memory: Shared<u32>, warp: u32) -> Self {
        let [index, rows, block, keys] = memory.load_vector::<UVec4>(Self::WORDS * warp).to_array();
        let [admit_keys, values, admit_values, _] =
            memory.load_vector::<UVec4>(Self::WORDS * warp + 4).to_array();
        let found = [Found { tile: keys, admit: admit_keys }, Found { tile: values, admit: admit_values }];
        Lookup { entry: Entry { index, rows }, block, found }
    }
}

/// The list of a row of blocks, and a split of its sequence.
#[derive(Clone, Copy)]
pub(super) struct List<E> {
    pub(super) layout: CarriedLayout,
    pub(super) lists: Global<ListHead>,
    pub(super) entries: Global<Entry>,
    pub(super) keys: Global<E>,
    pub(super) values: Global<E>,
    pub(super) near: GlobalMut<E>,
    pub(super) directory: GlobalMut<u64>,
    pub(super) table: Global<u32>,
    pub(super) shape: StepShape,
    pub(super) scratch: Scratch,
    pub(super) launch_row: u32,
    pub(super) sequence: u32,
    pub(super) head: u32,
    pub(super) first: u32,
    pub(super) end: u32,
    /// Full blocks of the sequence.
    pub(super) blocks: u32,
    /// See [`first_recent`](super::first_recent).
    pub(super) recent: u32,
    /// The warp's first entry.
    pub(super) place: u32,
    pub(super) lane: u32,
    pub(super) warp: u32,
}

impl<E: Half> List<E> {
    /// The block of the pools that the sequence has at `index`.
    #[simt::device]
    pub(super) fn block_of(&self, index: u32) -> u32 {
        self.table.load_readonly((self.sequence * self.shape.max_blocks + index) as usize)
    }

    /// Entry `e`: a warp's work.
    #[simt::device]
    pub(super) fn look(&self, e: u32) -> Lookup {
        let List { layout, shape, launch_row, .. } = *self;
        self.find(find_entry(layout.starts, self.entries, launch_row, shape, e, self.lane))
    }

    /// Where an entry's block is: a warp's work.
    #[simt::device]
    fn find(&self, entry: Entry) -> Lookup {
        let List { shape, launch_row, .. } = *self;
        let none = Found { tile: Scratch::EMPTY, admit: Scratch::EMPTY };
        if entry.index >= self.blocks {
            return Lookup { entry, block: 0, found: [none; 2] };
        }
        let block = self.block_of(entry.index);
        let place = order(launch_row, shape.max_blocks, entry.index);
        let pair = block * shape.kv_heads + self.head;
        Lookup { entry, block, found: find(self.directory, self.scratch, pair, place, self.lane) }
    }

    /// The `i`th of the blocks that are newer than the list.
    #[simt::device]
    pub(super) fn look_recent(&self, i: u32) -> Lookup {
        let index = self.recent + i;
        let block = self.block_of(index);
        let none = Found { tile: Scratch::EMPTY, admit: Scratch::EMPTY };
        Lookup { entry: Entry { index, rows: 0xffff }, block, found: [none; 2] }
    }

    /// The trailing block.
    #[simt::device]
    pub(super) fn look_trailing(&self) -> Lookup {
        let block = self.block_of(self.blocks);
        // Fresh blocks are the sequences', in their order.
        let fresh = self.sequence * self.shape.kv_heads + self.head;
        let found = [0, 1].map(|kind| Found::fresh(self.scratch, kind, fresh));
        Lookup { entry: Entry { index: self.blocks, rows: u32::MAX }, block, found }
    }

    /// Looks the warp's first entry up and asks for its originals.
    #[simt::device]
    fn look_ahead<const D: usize>(&self) {
        if self.place >= self.layout.starts.load(self.shape.parts) {
            return;
        }
        let [index, rows, ..] = self.layout.ahead.load_vector::<UVec4>(Lookup::WORDS * self.warp).to_array();
        let look = self.find(Entry { index, rows });
        warp::sync_warp(FULL_MASK);
        if self.lane == 0 {
            look.store(self.layout.ahead, self.warp);
        }
        let pair = look.block * self.shape.kv_heads + self.head;
        let elements = BLOCK_TOKENS as usize * D;
        let wants = look.entry.wants();
        unroll!(for kind in 0..2 {
            let (from, at) = match look.found[kind].tile {
                Scratch::EMPTY => (if kind == 0 { self.keys } else { self.values }, pair as usize * elements),
                tile => (self.near.as_const(), tile as usize * elements),
            };
            let wanted = wants[kind] && look.entry.index < self.blocks && self.lane == 0;
            from.prefetch(at, 2 * elements as u32, wanted);
        });
    }

    /// Whether a block of the split is listed.
    #[simt::device]
    fn has(&self, block: u32) -> bool {
        let at = block - self.first;
        self.layout.listed.load(at / 32) >> (at % 32) & 1 != 0
    }

    /// Marks the split's blocks that are listed, counts the entries, and leaves each warp its first one: all
    /// warps' work, at a place that all of them pass.
    #[simt::device]
    fn read(&self) {
        let List { layout, shape, .. } = *self;
        let t = thread::thread_idx_x();
        let mut word = t;
        while word < (self.end.saturating_sub(self.first)).div_ceil(32) {
            layout.listed.store(word, 0);
            word += thread::block_dim_x();
        }
        if t < 2 {
            layout.promoted.store(t, self.blocks - self.recent);
        }
        if t == 2 {
            let first = 4 * (self.launch_row * shape.parts) as usize;
            layout.promoted.store(2, self.lists.cast::<u32>().load(first + 3));
        }
        lay_out_lists(layout.starts, self.lists, self.launch_row, shape, self.lane, self.warp);
        let newer = self.recent + t;
        if newer < self.blocks && newer >= self.first && newer < self.end {
            layout.listed.atomic_or((newer - self.first) / 32, 1 << ((newer - self.first) % 32));
        }
        let mut promoted = [0u32; 2];
        let (count, own) = (layout.starts.load(shape.parts), self.place - self.warp);
        // All at once: each thread looks for the part that its entry is of.
        let mut e = t;
        while e < count {
            let (mut part, mut past) = (0, shape.parts);
            while past - part > 1 {
                let middle = (part + past) / 2;
                if layout.starts.load(middle) <= e {
                    part = middle;
                } else {
                    past = middle;
                }
            }
            let from = (self.launch_row * shape.parts + part) as usize * shape.places() as usize;
            let entry = self.entries.load(from + (e - layout.starts.load(part)) as usize);
            let [keys, values] = entry.wants();
            if entry.index < self.blocks {
                promoted[0] += keys as u32;
                promoted[1] += values as u32;
            }
            if entry.index >= self.first && entry.index < self.end {
                let at = entry.index - self.first;
                layout.listed.atomic_or(at / 32, 1 << (at % 32));
            }
            if e >= own && e - own < thread::block_dim_x() / 32 {
                layout
                    .ahead
                    .store_vector(Lookup::WORDS * (e - own), UVec4::new(entry.index, entry.rows, 0, 0));
            }
            e += thread::block_dim_x();
        }
        unroll!(for kind in 0..2 {
            let of_warp = warp::warp_reduce_add_u32(FULL_MASK, promoted[kind]);
            if self.lane == 0 && of_warp != 0 {
                layout.promoted.atomic_add(kind as u32, of_warp);
            }
        });
        thread::sync_threads();
    }
}

/// A warp's quantized tiles, of which a list has some: they are skipped.
pub(super) struct Listed<E, const D: usize, R> {
    pub(super) tiles: Tiles<f16, D, R>,
    /// Whether the list was read.
    pub(super) read: Cell<bool>,
    /// Stages of the ring whose blocks are listed: bit s of stage s. They are not asked for once that is
    /// known, and passed over.
    pub(super) skipped: Cell<u32>,
    pub(super) list: List<E>,
    pub(super) pace: Pace,
    /// Whether there is a list.
    pub(super) exists: bool,
    /// Tokens of the sequence.
    pub(super) length: u32,
}

impl<E: Half, const D: usize, R: Rings> Listed<E, D, R> {
    /// Notes in [`skipped`](Self::skipped) whether a tile is listed, and says so.
    #[simt::device]
    fn mark(&self, tile: u32, stage: u32) -> bool {
        let listed = self.list.has(tile);
        self.skipped.set(self.skipped.get() & !(1 << stage) | (listed as u32) << stage);
        listed
    }

    /// Entries of the list: once it was read.
    #[simt::device]
    pub(super) fn listed(&self) -> u32 {
        let List { layout, shape, .. } = self.list;
        if self.exists { layout.starts.load(shape.parts) } else { 0 }
    }

    /// The same with the blocks that are newer and the trailing block, which follow in this order.
    #[simt::device]
    pub(super) fn entries(&self) -> u32 {
        self.listed() + self.list.blocks - self.list.recent + self.trailing() as u32
    }

    /// Whether a trailing block comes behind the entries.
    #[inline(always)]
    pub(super) fn trailing(&self) -> bool {
        !self.length.is_multiple_of(BLOCK_TOKENS)
    }

    /// What the certificates will want to know of sums: the last warp's work, which lists keep less busy than
    /// the first.
    #[simt::device]
    fn chains(&self) {
        let List { layout, shape, lane, warp, .. } = self.list;
        if warp + 1 == warps_of::<R>(D as u32) && lane == 0 {
            let listed = self.entries() - self.trailing() as u32;
            let step = Chain::of_carried::<D>(self.length, shape.splits, listed).words();
            let dense = Chain::of_dense::<D>(self.length, shape.rung_splits).words();
            layout.chains.store_vector(0, UVec4::new(step[0], step[1], dense[0], dense[1]));
        }
    }
}

impl<E: Half, const D: usize, R: Rings> Ring for Listed<E, D, R> {
    const STAGES: u32 = <Tiles<f16, D, R> as Ring>::STAGES;
    const STRIDE: u32 = <Tiles<f16, D, R> as Ring>::STRIDE;
    const LOOKS_AHEAD: bool = <Tiles<f16, D, R> as Ring>::LOOKS_AHEAD;

    #[inline(always)]
    fn end(&self) -> u32 {
        self.tiles.end()
    }

    #[simt::device]
    fn block(&self, tile: u32) -> u32 {
        self.tiles.block(tile)
    }

    /// While the first tiles are on their way, which takes several microseconds for all warps, the list is
    /// read, and where its blocks are.
    #[simt::device]
    fn begun(&self) {
        if self.exists {
            self.list.read();
            self.read.set(true);
            unroll!(for s in 0..4 {
                let tile = self.list.first + self.list.warp + Self::STRIDE * s as u32;
                if (s as u32) < Self::STAGES - 1 && tile < self.tiles.end() {
                    self.mark(tile, s as u32);
                }
            });
            self.list.look_ahead::<D>();
        }
        if self.tiles.annotated {
            self.chains();
        }
    }

    #[simt::device]
    fn turn(&self) {
        self.pace.turn();
    }

    #[simt::device]
    fn start(&self, tile: u32, block: u32, stage: u32) {
        if !self.read.get() || !self.mark(tile, stage) {
            self.tiles.start(tile, block, stage);
        }
    }
}
