//! The bounds on blocks' masses: what a thread block of `scan` does.

use super::super::elements::SketchElement;
use super::{GROUP, Scanning, TOKENS};
use crate::attention::cpu::lanes::{Floats, Lanes, Order, Row, Sixteens, Tile, multiply_each};
use crate::attention::cpu::pieces::{Memory, with_memory};
use crate::attention::cpu::query::{CONTRACTIONS, head};
use crate::attention::cpu::softmax::of_lanes;
use crate::attention::cpu::{Work, run};
use crate::attention::{BLOCK_TOKENS, Half};
use crate::simd_level::Level;
use half::f16;
use kernels_gpu::attention::PartialRow;
use kernels_gpu::attention::query::{LOG2_E, LOG2_E_ABOVE, Query};
use kernels_gpu::gather::Extent;
use kernels_gpu::gather::sketch::{
    Annotation, Deal, Norms, ScanShape, code_unit, code_words, delta, estimated, joined, mass_above, moved,
    place, raised_by, sketch_words, tiles_of,
};
use simt::math::{exp2_nonpositive, fma, max};
use std::cell::RefCell;
use std::marker::PhantomData;

/// Warps of a thread block.
const WARPS: usize = 8;
/// Tokens that are multiplied at once.
const COLUMNS: usize = 16;
/// Tiles whose zeros and scales are multiplied at once: two columns each.
const AT_ONCE: usize = COLUMNS / 2;

/// What a thread block finds.
pub(super) struct Part {
    /// Of its blocks, in order: the logarithm of the mass of each head.
    pub masses: Vec<[f32; GROUP]>,
    /// The largest norm of a value of each.
    pub nus: Vec<f32>,
    pub totals: [PartialRow; GROUP],
    pub norms: Norms,
}

/// The masses of a part's blocks for a group of eight heads: `[row, group, part]`.
pub(super) fn masses<E: SketchElement>(
    level: Level,
    (bits, parts, dim): (u32, u32, usize),
    shape: ScanShape,
    from: Scanning<'_, E>,
    extent: Extent,
    [row, group, part]: [usize; 3],
) -> Part {
    thread_local!(static SCRATCH: Memory<Scratch> = const { RefCell::new(Vec::new()) });
    let (first, heads) = (group * GROUP, shape.group as usize);
    let present = (heads - first).min(GROUP);
    let queries = &from.queries[(row * heads + first) * dim..][..present * dim];
    let work = Masses::<E> {
        queries: bytemuck::cast_slice(queries),
        sketches: from.sketches,
        shape,
        extent,
        bits,
        dim,
        row: row * tiles_of(shape.max_blocks * BLOCK_TOKENS) as usize,
        deal: Deal::of(extent.length, shape.rule, parts),
        part,
        element: PhantomData,
    };
    with_memory(&SCRATCH, Scratch::new, |scratch| {
        if dim == 64 {
            run(level, At::<E, 64> { work, scratch })
        } else {
            run(level, At::<E, 128> { work, scratch })
        }
    })
}

/// A thread's memory, used again and again.
struct Scratch {
    /// Codes of half a tile, or zeros and scales of several, [16, D].
    rows: [u16; COLUMNS * 16 * CONTRACTIONS],
    tile: Tile,
    columns: Tile,
}

impl Scratch {
    fn new() -> Box<Self> {
        Box::new(Scratch { rows: [0; COLUMNS * 16 * CONTRACTIONS], tile: Tile::ZERO, columns: Tile::ZERO })
    }
}

struct Masses<'a, E> {
    /// Of the heads that there are.
    queries: &'a [u16],
    sketches: &'a [u32],
    shape: ScanShape,
    extent: Extent,
    bits: u32,
    dim: usize,
    /// The first tile of the sequence and KV head.
    row: usize,
    deal: Deal,
    part: usize,
    element: PhantomData<E>,
}

struct At<'a, 's, E, const D: usize> {
    work: Masses<'a, E>,
    scratch: &'s mut Scratch,
}

/// Query heads as the kernel has them.
struct Heads {
    queries: [Query; GROUP],
    /// Normalised elements, [heads, contractions].
    floats: [[Floats; CONTRACTIONS]; GROUP],
    /// These and their magnitudes as operands, [contractions, 2 · heads].
    rows: [[Row; 2 * GROUP]; CONTRACTIONS],
}

/// The four lanes of a head.
#[derive(Clone, Copy)]
struct Mass {
    reference: f32,
    above: [f32; 4],
    estimates: [PartialRow; 4],
    /// A block begins.
    fresh: bool,
}

impl Mass {
    const NONE: Mass = Mass {
        reference: PartialRow::EMPTY.reference,
        above: [0.0; 4],
        estimates: [PartialRow::EMPTY; 4],
        fresh: true,
    };

    fn close(&mut self) -> f32 {
        self.fresh = true;
        mass_above(self.reference, of_lanes(std::mem::take(&mut self.above)))
    }

    fn estimate(&self) -> PartialRow {
        let [a, b, c, d] = self.estimates;
        joined(joined(a, b), joined(c, d))
    }
}

impl<E: Half, const D: usize> Work for At<'_, '_, E, D> {
    type Output = Part;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Part {
        let At { work, scratch } = self;
        let Masses { shape, extent, deal, .. } = work;
        let present = work.queries.len() / D;
        let heads = load::<E, L, D>(work.queries, shape.softmax_scale);
        let (per_block, tiles) = (shape.rule.tiles() as usize, (extent.length as usize).div_ceil(TOKENS));
        let halves = (shape.rule.block as usize) < TOKENS;
        let mut part = Part {
            masses: Vec::new(),
            nus: Vec::new(),
            totals: [PartialRow::EMPTY; GROUP],
            norms: Norms { kappa: 0.0, nu: 0.0 },
        };
        for warp in 0..WARPS {
            let run = deal.of_warp as usize;
            let first = ((work.part * WARPS + warp) * run).min(tiles);
            let end = (first + run).min(tiles);
            let mut state = [Mass::NONE; GROUP];
            let mut nu = 0f32;
            for start in (first..end).step_by(AT_ONCE) {
                let some = start..end.min(start + AT_ONCE);
                let chains = columns::<L, D>(&work, &heads, present, some.clone(), scratch);
                for (place, tile) in some.enumerate() {
                    let annotation = work.annotation(tile);
                    let products = codes::<L, D>(&work, &heads, present, tile, scratch);
                    let tokens = (extent.length as usize - tile * TOKENS).min(TOKENS);
                    part.norms.kappa = max(part.norms.kappa, annotation.zeta + annotation.eps);
                    // What there is of a tile, or of its halves, as tokens, its ν and whether a block ends.
                    let [of_first, of_second] = annotation.nu;
                    let ends = tile + 1 == end || (tile + 1).is_multiple_of(per_block);
                    let pieces = if halves {
                        [(0..tokens.min(TOKENS / 2), of_first, true), (TOKENS / 2..tokens, of_second, true)]
                    } else {
                        [(0..tokens, max(of_first, of_second), ends), (0..0, 0.0, false)]
                    };
                    for (tokens, of_piece, ends) in
                        pieces.into_iter().filter(|(tokens, ..)| !tokens.is_empty())
                    {
                        for r in 0..present {
                            let query = &heads.queries[r];
                            let (z, x) = (chains[r][2 * place], chains[GROUP + r][2 * place + 1]);
                            let delta = delta::<D>(query, x, annotation.eps, annotation.zeta) * LOG2_E_ABOVE;
                            let to_log2 = query.scale * LOG2_E;
                            let mut scores = [f32::NEG_INFINITY; TOKENS];
                            for token in tokens.clone() {
                                let unit = code_unit(work.bits, token as u32);
                                let [product, rest] =
                                    [r, GROUP + r].map(|r| products[token / COLUMNS][r][token % COLUMNS]);
                                scores[token] = fma(product + rest, unit, z) * to_log2;
                            }
                            add::<L>(&mut state[r], scores, delta);
                        }
                        nu = max(nu, of_piece);
                        if ends {
                            let mut masses = [f32::NEG_INFINITY; GROUP];
                            for (mass, state) in masses[..present].iter_mut().zip(&mut state) {
                                *mass = state.close();
                            }
                            part.masses.push(masses);
                            part.nus.push(nu);
                            part.norms.nu = max(part.norms.nu, nu);
                            nu = 0.0;
                        }
                    }
                }
            }
            for (all, own) in part.totals.iter_mut().zip(&state[..present]) {
                *all = joined(*all, own.estimate());
            }
        }
        part
    }
}

impl<'a, E> Masses<'a, E> {
    /// The words of a tile.
    #[inline(always)]
    fn sketch(&self, tile: usize) -> &'a [u32] {
        let words = sketch_words(self.dim as u32, self.bits) as usize;
        &self.sketches[(self.row + tile) * words..][..words]
    }

    #[inline(always)]
    fn metadata(&self) -> usize {
        code_words(self.dim as u32, self.bits) as usize
    }

    /// σ, or z, of a tile: two channels a word.
    #[inline(always)]
    fn channels(&self, tile: usize, part: usize) -> &'a [u32] {
        &self.sketch(tile)[self.metadata() + part * self.dim / 2..][..self.dim / 2]
    }

    #[inline(always)]
    fn annotation(&self, tile: usize) -> Annotation {
        let words: [u32; 4] =
            *self.sketch(tile)[self.metadata() + self.dim..].first_chunk().expect("an annotation");
        bytemuck::cast(words)
    }
}

#[inline(always)]
fn load<E: Half, L: Lanes, const D: usize>(rows: &[u16], softmax_scale: f32) -> Heads {
    let none = Query { pairs: [0; 32], scale: 0.0, norm: 0.0, finite: true };
    let mut heads = Heads {
        queries: [none; GROUP],
        floats: [[[0.0; 16]; CONTRACTIONS]; GROUP],
        rows: [[Row::ZERO; 2 * GROUP]; CONTRACTIONS],
    };
    for (r, row) in rows.chunks_exact(D).enumerate() {
        let (query, x) = head::<E, L, D>(row, softmax_scale);
        heads.queries[r] = query;
        let mut elements = [0u16; 16 * CONTRACTIONS];
        for (to, x) in elements.as_chunks_mut::<16>().0.iter_mut().zip(x.as_chunks::<16>().0) {
            *to = L::round::<f16>(x);
        }
        for contraction in 0..D / 16 {
            let own: [u16; 16] = std::array::from_fn(|step| elements[Sixteens::dimension(contraction, step)]);
            L::widen::<f16>(&own, &mut heads.floats[r][contraction]);
            heads.rows[contraction][r].set::<f16, L>(own);
            heads.rows[contraction][GROUP + r].set::<f16, L>(own.map(|x| x & 0x7fff));
        }
    }
    heads
}

/// The chains over zeros and scales of some tiles: of each a column of z and one of σ, of the queries and,
/// from row eight on, of their magnitudes.
#[inline(always)]
fn columns<L: Lanes, const D: usize>(
    work: &Masses<'_, impl Half>,
    heads: &Heads,
    present: usize,
    tiles: std::ops::Range<usize>,
    scratch: &mut Scratch,
) -> [Floats; 2 * GROUP] {
    let rows = &mut scratch.rows[..COLUMNS * D];
    rows.fill(0);
    for (place, tile) in tiles.enumerate() {
        for (kind, part) in [1, 0].into_iter().enumerate() {
            let row = &mut rows[(2 * place + kind) * D..][..D];
            for (to, pair) in row.as_chunks_mut::<2>().0.iter_mut().zip(work.channels(tile, part)) {
                *to = [*pair as u16, (*pair >> 16) as u16];
            }
        }
    }
    L::keys::<f16, Sixteens>(rows, D, &mut scratch.columns);
    let mut sums = [[0f32; 16]; 2 * GROUP];
    for contraction in 0..D / 16 {
        let chunk = scratch.columns.of_keys(contraction);
        let (low, high) = sums.split_at_mut(GROUP);
        let rows = &heads.rows[contraction];
        multiply_each::<f16, L>(|r| &rows[r], chunk, &mut low[..present]);
        multiply_each::<f16, L>(|r| &rows[GROUP + r], chunk, &mut high[..present]);
    }
    sums
}

/// The chains over the codes of each half of a tile: of q·σ rounded, and from row eight on of what that lost.
#[inline(always)]
fn codes<L: Lanes, const D: usize>(
    work: &Masses<'_, impl Half>,
    heads: &Heads,
    present: usize,
    tile: usize,
    scratch: &mut Scratch,
) -> [[Floats; 2 * GROUP]; 2] {
    let (words, mask) = (work.sketch(tile), (1u32 << work.bits) - 1);
    let scales = work.channels(tile, 0);
    let mut rows = [[Row::ZERO; 2 * GROUP]; CONTRACTIONS];
    for (contraction, rows) in rows[..D / 16].iter_mut().enumerate() {
        let scale: Floats = {
            let own: [u16; 16] = std::array::from_fn(|step| {
                let d = Sixteens::dimension(contraction, step);
                (scales[d / 2] >> (16 * (d % 2))) as u16
            });
            let mut scale = [0f32; 16];
            L::widen::<f16>(&own, &mut scale);
            scale
        };
        for r in 0..present {
            let mut product: Floats = [0.0; 16];
            for (product, (q, s)) in product.iter_mut().zip(heads.floats[r][contraction].iter().zip(&scale)) {
                *product = q * s;
            }
            rows[r].set::<f16, L>(L::round_f16(&product));
            for (product, rounded) in product.iter_mut().zip(&rows[r].floats) {
                *product -= rounded;
            }
            rows[GROUP + r].set::<f16, L>(L::round_f16(&product));
        }
    }
    let mut sums = [[[0f32; 16]; 2 * GROUP]; 2];
    for (half, sums) in sums.iter_mut().enumerate() {
        for (place_of, row) in scratch.rows[..COLUMNS * D].chunks_exact_mut(D).enumerate() {
            let token = (COLUMNS * half + place_of) as u32;
            let raised_by = raised_by(work.bits, token);
            for (channel, to) in row.iter_mut().enumerate() {
                let (word, bit) = place(work.bits, token, channel as u32);
                *to = ((words[word as usize] >> bit & mask) * raised_by) as u16;
            }
        }
        L::keys::<f16, Sixteens>(&scratch.rows[..COLUMNS * D], D, &mut scratch.tile);
        for (contraction, rows) in rows[..D / 16].iter().enumerate() {
            let chunk = scratch.tile.of_keys(contraction);
            let (low, high) = sums.split_at_mut(GROUP);
            multiply_each::<f16, L>(|r| &rows[r], chunk, &mut low[..present]);
            multiply_each::<f16, L>(|r| &rows[GROUP + r], chunk, &mut high[..present]);
        }
    }
    sums
}

/// Takes a tile of a head in.
#[inline(always)]
fn add<L: Lanes>(mass: &mut Mass, scores: [f32; TOKENS], delta: f32) {
    let above = scores.map(|s| s + delta);
    let largest = above.into_iter().fold(f32::NEG_INFINITY, max);
    let reference = moved(mass.reference, largest, mass.fresh);
    if reference != mass.reference && !mass.fresh {
        let factor = exp2_nonpositive(mass.reference - reference);
        mass.above = mass.above.map(|x| x * factor);
    }
    (mass.reference, mass.fresh) = (reference, false);
    let [low, high] = [0, 1].map(|half| {
        let half: &[f32; COLUMNS] = above[half * COLUMNS..].first_chunk().expect("half a tile");
        L::exp2(half, reference)
    });
    for lane in 0..4 {
        let at = 2 * lane;
        let of = |p: &Floats| (p[at] + p[at + 1]) + (p[at + 8] + p[at + 9]);
        let weight = of(&low) + of(&high);
        mass.above[lane] += weight;
        mass.estimates[lane] = estimated(mass.estimates[lane], reference, weight, delta);
    }
}
