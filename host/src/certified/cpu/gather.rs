//! What the certificates of a carried step add up over its blocks: `carried::waiting` of the kernels, eight
//! rows side by side.

use crate::attention::cpu::Work;
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::pieces::Pieces;
use crate::attention::cpu::softmax::{MAX_ROWS, MAX_WARPS};
use kernels_gpu::attention::PartialRow;
use kernels_gpu::certified::carried::gather::{Bounds, Gathered, Moments};
use kernels_gpu::certified::carried::likely::Noise;
use kernels_gpu::certified::carried::waiting::WAITING;
use simt::math::{exp2_nonpositive, max};

/// [`Gathered`] word by word.
type Words = [f32; Gathered::WORDS as usize];

/// A number for each of eight rows.
pub(super) type Rows = [f32; MAX_ROWS];

/// [`Gathered`] of eight rows, and what it is relative to.
#[derive(Clone, Copy)]
pub(super) struct Gather {
    references: Rows,
    rows: [Gathered; MAX_ROWS],
}

impl Gather {
    /// No block.
    pub(super) const NONE: Gather =
        Gather { references: [PartialRow::EMPTY.reference; MAX_ROWS], rows: [Gathered::NONE; MAX_ROWS] };

    /// Adds up some parts in their order, relative to the largest reference: over warps, and over splits.
    #[inline(always)]
    pub(super) fn merge<'a>(parts: impl Iterator<Item = &'a Gather> + Clone) -> Gather {
        let mut all = Gather::NONE;
        for part in parts.clone() {
            for (reference, own) in all.references.iter_mut().zip(part.references) {
                *reference = max(*reference, own);
            }
        }
        for part in parts {
            for (r, all_of_row) in all.rows.iter_mut().enumerate() {
                let weight = exp2_nonpositive(part.references[r] - all.references[r]);
                *all_of_row = part.rows[r].merged_with(*all_of_row, weight);
            }
        }
        all
    }

    /// What a row's certificate follows from.
    pub(super) fn of_row(&self, r: usize) -> Gathered {
        self.rows[r]
    }
}

/// What is known of a block that a warp has visited.
#[derive(Clone, Copy)]
pub(super) struct Visited {
    /// What its weights are relative to, row by row.
    pub(super) references: Rows,
    pub(super) moments: [Moments; MAX_ROWS],
    /// Δ, if its keys are quantized.
    pub(super) deltas: Option<Rows>,
    /// Of such keys, if anybody asks.
    pub(super) noise: Option<[Noise; MAX_ROWS]>,
    /// But for Δ.
    pub(super) bounds: Bounds,
}

/// What a warp has gathered, and the blocks that wait for their part.
#[derive(Clone)]
pub(super) struct Waiting {
    gather: Gather,
    blocks: [Option<Visited>; WAITING as usize],
    count: usize,
}

impl Waiting {
    /// No block.
    pub(super) const NONE: Waiting =
        Waiting { gather: Gather::NONE, blocks: [None; WAITING as usize], count: 0 };

    /// Takes a block in, which waits until four are there; `references` are those of the first `rows` rows.
    #[inline(always)]
    pub(super) fn leave(&mut self, rows: usize, visited: Visited, references: &Rows) {
        self.blocks[self.count] = Some(visited);
        self.count += 1;
        if self.count == self.blocks.len() {
            self.add_up(rows, references);
        }
    }

    /// What is gathered, relative to `references`.
    #[inline(always)]
    pub(super) fn gathered(mut self, rows: usize, references: &Rows) -> Gather {
        if self.count != 0 {
            self.add_up(rows, references);
        }
        Gather { references: *references, ..self.gather }
    }

    #[inline(always)]
    fn add_up(&mut self, rows: usize, references: &Rows) {
        let Gather { references: before, rows: sums } = &mut self.gather;
        for (r, sum) in sums.iter_mut().enumerate().take(rows) {
            let reference = references[r];
            let [a, b, c, d] = self.blocks.map(|block| match block {
                Some(block) => block.adds(r, reference).words(),
                None => Gathered::NONE.words(),
            });
            let factor = exp2_nonpositive(before[r] - reference);
            let both = |a: Words, b: Words| -> Words {
                core::array::from_fn(|i| Gathered::both(i as u32, a[i], b[i]))
            };
            let four = both(both(a, c), both(b, d));
            *sum = sum.merged_with(Gathered::of_words(four), factor);
            before[r] = reference;
        }
        self.blocks = [None; WAITING as usize];
        self.count = 0;
    }
}

impl Visited {
    /// What it adds to the sums of row `r`, relative to `reference`.
    #[inline(always)]
    fn adds(&self, r: usize, reference: f32) -> Gathered {
        let delta = self.deltas.map(|deltas| deltas[r]);
        let noise = self.noise.map(|noise| noise[r]);
        let moments = self.moments[r].times(exp2_nonpositive(self.references[r] - reference));
        Gathered::of_block(moments, noise, Bounds { delta, ..self.bounds })
    }
}

/// Adds up what the warps of a thread block have gathered, in the order of [`Pieces`].
pub(super) struct MergeWarps<'a> {
    pub(super) of_warps: &'a [Gather; MAX_WARPS],
    pub(super) pieces: Pieces,
}

impl Work for MergeWarps<'_> {
    type Output = Gather;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Gather {
        let MergeWarps { of_warps, pieces } = self;
        Gather::merge((0..pieces.warps).map(|warp| &of_warps[pieces.place(warp)]))
    }
}
