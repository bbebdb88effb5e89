//! The pass over blocks: what a thread block of `attend` does, and one of `carry`, which has a list besides.

use super::gather::{Gather, Rows, Visited, Waiting};
use super::list::{Visit, Visits};
use super::original::{exact_scores, largest_norm, originals};
use super::query::{CONTRACTIONS, Queries};
use super::tile::{Unpacked, add_values};
use crate::attention::Half;
use crate::attention::cpu::lanes::{Floats, Lanes, Row, Sixteens, Tile};
use crate::attention::cpu::pieces::Pieces;
use crate::attention::cpu::softmax::{
    MAX_ROWS, Running, TOKENS, WarpResult, of_lane, of_lanes, rescale, split,
};
use crate::attention::cpu::{Work, a_finite_row, padded};
use half::f16;
use kernels_gpu::certified::carried::gather::{Bounds, Moments};
use kernels_gpu::certified::carried::likely::Noise;
use kernels_gpu::certified::carried::sight::{self, SIGHTED};
use kernels_gpu::certified::layout::{Annotation, Layout, TileLayout, pair};
use kernels_gpu::certified::query::{LOG2_E, delta};
use kernels_gpu::certified::{Entry, Record, StepShape};
use std::marker::PhantomData;
use std::sync::{Mutex, PoisonError};

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
    pub(super) layout: Layout,
    /// As the thresholds have it.
    pub(super) log_odds: f32,
    pub(super) deviations: f32,
}

impl<'a> View<'a> {
    /// The block of the pools that a sequence has at `index`.
    #[inline(always)]
    pub(super) fn block(&self, sequence: usize, index: usize) -> u32 {
        self.table[sequence * self.shape.max_blocks as usize + index]
    }

    /// A quantized tile.
    #[inline(always)]
    pub(super) fn tile<const D: usize>(&self, block: u32, head: usize) -> &'a [u32] {
        let words = TileLayout::new(D as u32, self.layout).bytes as usize / 4;
        &self.tiles[pair(block, self.shape.kv_heads, head as u32) * words..][..words]
    }

    /// Asks for what a visit to a block of the group reads.
    #[inline(always)]
    pub(super) fn prefetch<L: Lanes, const D: usize>(&self, group: RowGroup, entry: Entry) {
        let block = self.block(group.sequence, entry.index as usize);
        let wanted = entry.wants();
        for (originals, wanted) in originals::<D>(self, group, block).into_iter().zip(wanted) {
            if wanted {
                L::prefetch(originals);
            }
        }
        if wanted != [true; 2] {
            L::prefetch(bytemuck::cast_slice(self.tile::<D>(block, group.head)));
        }
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

impl RowGroup {
    /// Which it is of all.
    pub(super) fn index(&self, shape: StepShape) -> usize {
        let pair = self.sequence * shape.kv_heads as usize + self.head;
        let of_head = self.first_row - pair * shape.group as usize;
        pair * shape.row_groups() as usize + of_head / MAX_ROWS
    }
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

    /// Products of the rows with a block's original keys, before any scaling.
    #[inline(always)]
    pub(super) fn original_scores<E: Half, L: Lanes, const D: usize>(
        &mut self,
        keys: &[u16],
    ) -> [Floats; MAX_ROWS] {
        L::keys::<E, Sixteens>(keys, D, &mut self.keys);
        let mut scores = [[0f32; TOKENS]; MAX_ROWS];
        let rows = self.queries.rows;
        exact_scores::<E, L, D>(&self.queries, |r| r, &self.keys, &mut scores[..rows]);
        scores
    }

    /// Bounds of the norms of keys and of values.
    #[inline(always)]
    fn largest_norms<E: Half, L: Lanes, const D: usize>(&mut self, blocks: [&[u16]; 2]) -> [f32; 2] {
        let mut largest = [0f32; 2];
        // No closure: it would not have the instructions of `L`.
        for (largest, rows) in largest.iter_mut().zip(blocks) {
            L::keys::<E, Sixteens>(rows, D, &mut self.keys);
            *largest = largest_norm::<E, L, D>(&self.keys);
        }
        largest
    }
}

/// What the pass notes of a block for what follows.
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

/// No block is promoted on sight.
pub(super) const NEVER: Rows = [sight::NEVER; MAX_ROWS];

/// Some warps of a thread block.
pub(super) struct Pass<'a, E, const D: usize> {
    pub(super) view: View<'a>,
    pub(super) group: RowGroup,
    /// What its warps visit.
    pub(super) visits: Visits<'a>,
    pub(super) pieces: Pieces,
    pub(super) piece: usize,
    /// From which score on a block is promoted on sight, row by row.
    pub(super) least: Rows,
    /// Such blocks, of all warps.
    pub(super) sighted: &'a Mutex<Vec<Entry>>,
    /// What is noted of the blocks that the piece's warps visit, as [`Visits::deal`] has it, if anybody asks.
    pub(super) notes: Vec<Option<&'a mut Note>>,
    /// What is gathered for certificates, of each of the piece's warps, if anybody asks.
    pub(super) gathered: &'a mut [Gather],
    pub(super) scratch: &'a mut Scratch,
    pub(super) results: &'a mut [WarpResult],
    pub(super) element: PhantomData<E>,
}

impl<E: Half, const D: usize> Work for Pass<'_, E, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Pass { view, group, visits, pieces, piece, least, notes, gathered, scratch, results, .. } = self;
        // The first block comes while the queries are loaded.
        if let Some(first) = visits.of(piece).next() {
            view.prefetch::<L, D>(group, first.entry);
        }
        scratch.queries.load::<E, L, D>(view.rows::<D>(group), view.shape.softmax_scale);
        let (noted, gathers) = (!notes.is_empty(), !gathered.is_empty());
        let mut notes = notes.into_iter();
        let mut gathered = gathered.iter_mut();
        for (warp, result) in pieces.warps_of(piece).zip(results) {
            let mut state = Warp::begin::<D>(scratch, noted, gathers);
            let mut own = visits.of(warp).peekable();
            let mut sighted = Vec::new();
            while let Some(Visit { entry, by_itself }) = own.next() {
                let after = match own.peek() {
                    Some(after) => Some(*after),
                    None => visits.of(warp + pieces.count).next(),
                };
                if let Some(after) = after {
                    view.prefetch::<L, D>(group, after.entry);
                }
                let mut note = notes.next().flatten();
                let room = by_itself && sighted.len() < SIGHTED as usize;
                let least = if room { &least } else { &NEVER };
                if state.visit::<E, L, D>(&view, group, entry, note.as_deref_mut(), least, scratch) {
                    let entry = Entry { rows: 0xffff, ..entry };
                    sighted.push((entry, note));
                    self.sighted.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
                }
            }
            for (entry, note) in sighted {
                state.visit::<E, L, D>(&view, group, entry, note, &NEVER, scratch);
            }
            for (r, running) in state.running.iter().enumerate().take(group.rows) {
                result.keep(r, running, &scratch.outputs[..D / 16]);
            }
            if let Some(gathered) = gathered.next() {
                let references = state.references();
                *gathered = state.waiting.gathered(group.rows, &references);
            }
        }
    }
}

/// A warp on its way.
struct Warp {
    running: [Running; MAX_ROWS],
    waiting: Waiting,
    /// Whether somebody asks for records, and for what is gathered.
    noted: bool,
    gathers: bool,
    /// Rows of the eight that there are not vote as well, with scores of 0: once.
    absent_vote: bool,
    /// Before a warp's first block there are zeros.
    begun: bool,
}

impl Warp {
    #[inline(always)]
    fn begin<const D: usize>(scratch: &mut Scratch, noted: bool, gathers: bool) -> Self {
        let running = scratch.clear::<D>();
        let absent_vote = scratch.queries.rows < MAX_ROWS;
        Warp { running, waiting: Waiting::NONE, noted, gathers, absent_vote, begun: false }
    }

    /// What the rows' weights are relative to.
    #[inline(always)]
    fn references(&self) -> Rows {
        self.running.map(|running| running.reference)
    }

    /// Raises references where scores are too large for them. `of_zeros`: whether scores of rows of zeros are
    /// numbers.
    #[inline(always)]
    fn raise(
        &mut self,
        scores: &[Floats],
        of_zeros: impl FnOnce() -> bool,
        outputs: &mut [[[Floats; 2]; MAX_ROWS]],
    ) {
        let mut vote = self.absent_vote && of_zeros();
        self.absent_vote &= !vote;
        for (running, scores) in self.running.iter().zip(scores) {
            vote |= running.votes(scores);
        }
        if vote {
            for (r, (running, scores)) in self.running.iter_mut().zip(scores).enumerate() {
                let factor = running.raise(&[scores]);
                if factor != 1.0 && self.begun {
                    rescale(outputs, r, factor);
                }
            }
        }
        self.begun = true;
    }

    /// Takes a block in: keys and values each from the originals, if the entry wants them, or quantized. Not
    /// if a score is as large as its row's `least`: whether that is so.
    #[inline(always)]
    fn visit<E: Half, L: Lanes, const D: usize>(
        &mut self,
        view: &View<'_>,
        group: RowGroup,
        entry: Entry,
        note: Option<&mut Note>,
        least: &Rows,
        scratch: &mut Scratch,
    ) -> bool {
        let rows = group.rows;
        let length = view.lengths[group.sequence] as usize;
        let index = entry.index as usize;
        let block = view.block(group.sequence, index);
        let tokens = (length - index * TOKENS).min(TOKENS);
        let tile = view.tile::<D>(block, group.head);
        let [wants_keys, wants_values] = entry.wants();
        let [mut keys, mut values] = originals::<D>(view, group, block);
        let (mut key_rows, mut value_rows) = (Vec::new(), Vec::new());
        let mut of_trailing = [0f32; 2];
        if tokens < TOKENS {
            (key_rows, value_rows) =
                (std::mem::take(&mut scratch.key_rows), std::mem::take(&mut scratch.value_rows));
            // Rows that there are not are not read.
            keys = padded(keys, tokens * D, &mut key_rows);
            values = padded(values, tokens * D, &mut value_rows);
            if self.gathers {
                of_trailing = scratch.largest_norms::<E, L, D>([keys, values]);
            }
        }

        let bounded = self.noted || self.gathers;
        let (mut scores, sigma, of_zeros) = if wants_keys {
            (scratch.original_scores::<E, L, D>(keys), None, true)
        } else {
            let wanted = [bounded, self.gathers && view.log_odds > 0.0];
            let products = scratch.tile.products::<L, D>(view.layout, tile, &scratch.queries, wanted);
            (products.scores, Some((products.sigma, products.squares)), products.of_zeros)
        };
        for (r, scores) in scores.iter_mut().enumerate().take(rows) {
            let to_log2 = scratch.queries.heads[r].scale * LOG2_E;
            for score in scores.iter_mut() {
                *score *= to_log2;
            }
            scores[tokens..].fill(f32::NEG_INFINITY);
        }
        if scores.iter().zip(least).take(rows).any(|(scores, least)| scores.iter().any(|x| x >= least)) {
            return true;
        }
        let finite = scratch.keys.finite;
        let of_zeros =
            || if wants_keys { finite || a_finite_row::<E>(&keys[..tokens * D], D) } else { of_zeros };
        self.raise(&scores[..rows], of_zeros, &mut scratch.outputs[..D / 16]);

        let mut annotation = Annotation::NONE;
        if tokens == TOKENS {
            annotation = view.annotations[pair(block, view.shape.kv_heads, group.head as u32)];
        }
        let by_chance = self.gathers && view.log_odds > 0.0;
        let (mut masses, mut deltas): (Rows, Rows) = ([0.0; MAX_ROWS], [0.0; MAX_ROWS]);
        let mut moments = [Moments::default(); MAX_ROWS];
        let mut noise = [Noise { variance: 0.0, growth: 0.0 }; MAX_ROWS];
        let sizes = [0, 1, 2, 3].map(|q| annotation.sizes_of_lane(q));
        for (r, running) in self.running.iter_mut().enumerate().take(rows) {
            let p = L::exp2(&scores[r], running.reference);
            let mut sums = [0f32; 4];
            let mut of_moments = [[0f32; 4]; 3];
            for (q, sum) in sums.iter_mut().enumerate() {
                let [a, b, c, d] = of_lane(&p, q);
                *sum = (a + b) + (c + d);
                if by_chance {
                    let own = Moments::of_weights([a, b, c, d], sizes[q]);
                    of_moments.iter_mut().zip(own).for_each(|(of, own)| of[q] = own);
                }
                running.sums[q] += *sum;
            }
            masses[r] = of_lanes(sums);
            let [sized, squares, sized_squares] = of_moments.map(of_lanes);
            moments[r] = Moments::new([masses[r], sized, squares, sized_squares]);
            if let (true, Some((sigma, of_keys))) = (bounded, &sigma) {
                let query = &scratch.queries.heads[r];
                let x = sigma[MAX_ROWS + r];
                deltas[r] = match view.layout {
                    Layout::Compact => delta::<f16, D>(query, x, annotation),
                    Layout::Paper => delta::<f32, D>(query, x, annotation),
                };
                if by_chance {
                    noise[r] = Noise::of_keys::<D>(query, of_keys[r], deltas[r], view.deviations, annotation);
                }
            }
            if wants_values {
                split::<E, L>(&p, &mut scratch.weights[r]);
            } else {
                split::<f16, L>(&p, &mut scratch.weights[r]);
            }
        }
        if self.gathers {
            let mut bounds = Bounds::of(annotation, None, !wants_values, by_chance);
            if tokens < TOKENS {
                [bounds.kappa, bounds.nu] = of_trailing;
            }
            let references = self.references();
            let noise = sigma.filter(|_| by_chance).map(|_| noise);
            let visited = Visited { references, moments, deltas: sigma.map(|_| deltas), noise, bounds };
            self.waiting.leave(rows, visited, &references);
        }
        if let Some(note) = note {
            for (r, running) in self.running.iter().enumerate().take(rows) {
                note.records[r] = Record::new(masses[r], running.reference, deltas[r], annotation);
            }
            if !self.gathers {
                note.scores[..rows].copy_from_slice(&scores[..rows]);
            }
        }
        let weights = &scratch.weights[..rows];
        if wants_values {
            L::values::<E>(values, D, &mut scratch.values);
            add_values::<E, L, D>(weights, &scratch.values, values, &mut scratch.outputs);
        } else {
            scratch.tile.restore::<L, D>(view.layout, tile);
            scratch.tile.add_values::<L, D>(weights, &mut scratch.outputs);
        }
        if tokens < TOKENS {
            (scratch.key_rows, scratch.value_rows) = (key_rows, value_rows);
        }
        false
    }
}
