//! The pass over the quantized blocks: what a thread block of `attend` does.

use super::query::{CONTRACTIONS, Queries};
use super::tile::Unpacked;
use crate::attention::Half;
use crate::attention::cpu::Work;
use crate::attention::cpu::lanes::{Floats, Lanes, Row, Tile};
use crate::attention::cpu::pieces::Pieces;
use crate::attention::cpu::softmax::{
    MAX_ROWS, Running, TOKENS, WarpResult, of_lane, of_lanes, rescale, split,
};
use kernels_gpu::certified::layout::{Annotation, TileLayout, pair};
use kernels_gpu::certified::query::{LOG2_E, delta};
use kernels_gpu::certified::{Record, StepShape};
use std::marker::PhantomData;

/// What a step reads; elements as bits.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) queries: &'a [u16],
    pub(super) tiles: &'a [u32],
    pub(super) annotations: &'a [Annotation],
    pub(super) keys: &'a [u16],
    pub(super) values: &'a [u16],
    pub(super) table: &'a [u32],
    pub(super) lengths: &'a [u32],
    pub(super) shape: StepShape,
}

impl View<'_> {
    /// The block of the pools that a sequence has at `index`.
    #[inline(always)]
    pub(super) fn block(&self, sequence: usize, index: usize) -> u32 {
        self.table[sequence * self.shape.max_blocks as usize + index]
    }

    /// A quantized tile.
    #[inline(always)]
    pub(super) fn tile<const D: usize>(&self, block: u32, head: usize) -> &[u32] {
        let words = TileLayout::new(D as u32).bytes as usize / 4;
        &self.tiles[pair(block, self.shape.kv_heads, head as u32) * words..][..words]
    }

    /// The queries of a group of eight rows.
    #[inline(always)]
    pub(super) fn rows<const D: usize>(&self, group: RowGroup) -> &[u16] {
        &self.queries[group.first_row * D..][..group.rows * D]
    }
}

/// A group of up to eight query heads of a KV head: what the kernels call a row of blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowGroup {
    pub(super) sequence: usize,
    /// KV head.
    pub(super) head: usize,
    /// The first of its rows among all [sequences, q_heads].
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// A thread's memory, used again and again.
pub(super) struct Scratch {
    pub(super) queries: Queries,
    pub(super) tile: Unpacked,
    /// Originals as operands.
    pub(super) keys: Tile,
    pub(super) values: Tile,
    /// Rows that a sequence does not have are zeros: [16, D] of the trailing block.
    pub(super) key_rows: Vec<u16>,
    pub(super) value_rows: Vec<u16>,
    /// Σ p·v of rounded weights, and of what rounding cut off: [D / 16, rows, 2].
    pub(super) outputs: [[[Floats; 2]; MAX_ROWS]; CONTRACTIONS],
    /// A tile's weights rounded, and what rounding cut off: [rows, 2].
    pub(super) weights: [[Row; 2]; MAX_ROWS],
}

impl Scratch {
    pub(super) fn new() -> Box<Self> {
        Box::new(Scratch {
            queries: Queries::EMPTY,
            tile: Unpacked::EMPTY,
            keys: Tile::ZERO,
            values: Tile::ZERO,
            key_rows: Vec::new(),
            value_rows: Vec::new(),
            outputs: [[[[0.0; 16]; 2]; MAX_ROWS]; CONTRACTIONS],
            weights: [[Row::ZERO; 2]; MAX_ROWS],
        })
    }

    /// A warp begins: nothing is accumulated.
    #[inline(always)]
    pub(super) fn clear<const D: usize>(&mut self) -> [Running; MAX_ROWS] {
        for chunk in &mut self.outputs[..D / 16] {
            chunk[..self.queries.rows].fill([[0.0; 16]; 2]);
        }
        [Running::EMPTY; MAX_ROWS]
    }
}

/// What the pass notes of a block for the kernels that follow.
#[derive(Clone, Copy)]
pub(super) struct Note {
    /// Records of the group's rows.
    pub(super) records: [Record; MAX_ROWS],
    /// Scores in log2 units, which `replace` computes again.
    pub(super) scores: [[f32; TOKENS]; MAX_ROWS],
}

impl Note {
    pub(super) fn zeroed() -> Note {
        Note { records: [bytemuck::Zeroable::zeroed(); MAX_ROWS], scores: [[0.0; TOKENS]; MAX_ROWS] }
    }
}

/// Some warps of a thread block: blocks of a stretch of a sequence's full ones.
pub(super) struct Pass<'a, E, const D: usize> {
    pub(super) view: View<'a>,
    pub(super) group: RowGroup,
    /// From the first block to before the last.
    pub(super) blocks: [usize; 2],
    pub(super) pieces: Pieces,
    pub(super) piece: usize,
    /// What is noted of each of the piece's blocks, as [`Pieces::deal`] has it, if anybody asks.
    pub(super) notes: Vec<&'a mut Note>,
    pub(super) scratch: &'a mut Scratch,
    pub(super) results: &'a mut [WarpResult],
    pub(super) element: PhantomData<E>,
}

impl<E: Half, const D: usize> Work for Pass<'_, E, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Pass { view, group, blocks: [first, end], pieces, piece, notes, scratch, results, .. } = self;
        // The first block comes while the queries are loaded.
        if first + piece < end {
            let tile = view.tile::<D>(view.block(group.sequence, first + piece), group.head);
            L::prefetch(bytemuck::cast_slice(tile));
        }
        scratch.queries.load::<E, L, D>(view.rows::<D>(group), view.shape.softmax_scale);
        let rows = group.rows;
        let noted = !notes.is_empty();
        let mut notes = notes.into_iter();
        for (warp, result) in pieces.warps_of(piece).zip(results) {
            let mut running = scratch.clear::<D>();
            // Rows of the eight that there are not vote as well, with scores of 0.
            let mut absent_vote = rows < MAX_ROWS;
            for index in (first + warp..end).step_by(pieces.warps) {
                let block = view.block(group.sequence, index);
                let after = index + pieces.warps;
                let after = if after < end { after } else { first + warp + pieces.count };
                if after < end {
                    let tile = view.tile::<D>(view.block(group.sequence, after), group.head);
                    L::prefetch(bytemuck::cast_slice(tile));
                }
                let tile = view.tile::<D>(block, group.head);
                let mut products = scratch.tile.products::<L, D>(tile, &scratch.queries, noted);
                let mut vote = absent_vote && products.of_zeros;
                absent_vote &= !vote;
                for (r, running) in running.iter().enumerate().take(rows) {
                    let to_log2 = scratch.queries.heads[r].scale * LOG2_E;
                    for score in &mut products.scores[r] {
                        *score *= to_log2;
                    }
                    vote |= running.votes(&products.scores[r]);
                }
                if vote {
                    for (r, running) in running.iter_mut().enumerate().take(rows) {
                        let factor = running.raise(&[&products.scores[r]]);
                        // Before a warp's first tile there are zeros.
                        if factor != 1.0 && index != first + warp {
                            rescale(&mut scratch.outputs[..D / 16], r, factor);
                        }
                    }
                }
                let annotation = view.annotations[pair(block, view.shape.kv_heads, group.head as u32)];
                let mut note = notes.next();
                for (r, running) in running.iter_mut().enumerate().take(rows) {
                    let p = L::exp2(&products.scores[r], running.reference);
                    let mut sums = [0f32; 4];
                    for (q, sum) in sums.iter_mut().enumerate() {
                        let [a, b, c, d] = of_lane(&p, q);
                        *sum = (a + b) + (c + d);
                        running.sums[q] += *sum;
                    }
                    split::<half::f16, L>(&p, &mut scratch.weights[r]);
                    if let Some(note) = &mut note {
                        let query = &scratch.queries.heads[r];
                        let x = products.sigma[MAX_ROWS + r];
                        let delta = delta::<D>(query, x, annotation.eps, annotation.zeta);
                        note.records[r] = Record::new(of_lanes(sums), running.reference, delta, annotation);
                        note.scores[r] = products.scores[r];
                    }
                }
                scratch.tile.restore::<L, D>(tile);
                scratch.tile.add_values::<L, D>(&scratch.weights[..rows], &mut scratch.outputs);
            }
            for (r, running) in running.iter().enumerate().take(rows) {
                result.keep(r, running, &scratch.outputs[..D / 16]);
            }
        }
    }
}
