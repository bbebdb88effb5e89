//! What is kept: what the last thread block of `scan` does for a KV head.

use super::masses::Part;
use super::{GROUP, warp_sum};
use kernels_gpu::attention::BLOCK_TOKENS;
use kernels_gpu::attention::PartialRow;
use kernels_gpu::gather::sketch::{
    MASS_BINS, Norms, SHARE, ScanShape, Skipped, Whole, bin_of, edge, heads_of, in_units, joined, level_of,
    units,
};
use kernels_gpu::gather::{Extent, ordered};
use rayon::prelude::*;
use simt::math::{canonical_nan, exp2, exp2_nonpositive, fma, max, maximum};

const BINS: usize = MASS_BINS as usize;
/// Threads of the thread block.
const THREADS: usize = 256;

/// What is written.
pub(in super::super) struct Choice<'a> {
    pub list: &'a mut [u32],
    pub counts: &'a mut [u32],
    pub entries: &'a mut [u32],
    pub kept: &'a mut [u32],
    pub skipped: &'a mut [Skipped],
    pub whole: &'a mut [Whole],
}

/// What is known of a sequence and KV head.
pub(super) struct Totals {
    heads: usize,
    /// [blocks, heads].
    masses: Vec<f32>,
    nus: Vec<f32>,
    /// [parts][heads].
    totals: Vec<Vec<PartialRow>>,
    norms: Norms,
}

impl Totals {
    pub fn new(blocks: usize, heads: usize) -> Self {
        let masses = vec![f32::NEG_INFINITY; blocks * heads];
        let norms = Norms { kappa: 0.0, nu: 0.0 };
        Totals { heads, masses, nus: vec![0.0; blocks], totals: Vec::new(), norms }
    }

    /// What a part has found of the heads from `head` on; its number, and that of its first block.
    pub fn take(&mut self, head: usize, (first, number): (usize, usize), part: Part) {
        for (i, masses) in part.masses.iter().enumerate() {
            self.masses[(first + i) * self.heads + head..][..GROUP].copy_from_slice(masses);
        }
        if !part.nus.is_empty() {
            self.nus[first..][..part.nus.len()].copy_from_slice(&part.nus);
        }
        if self.totals.len() <= number {
            self.totals.resize(number + 1, vec![PartialRow::EMPTY; self.heads]);
        }
        self.totals[number][head..][..GROUP].copy_from_slice(&part.totals);
        self.norms.kappa = max(self.norms.kappa, part.norms.kappa);
        self.norms.nu = max(self.norms.nu, part.norms.nu);
    }

    /// The level of a head.
    fn level(&self, head: usize) -> f32 {
        let mut lanes = [PartialRow::EMPTY; 32];
        for (part, totals) in self.totals.iter().enumerate() {
            lanes[part % 32] = joined(lanes[part % 32], totals[head]);
        }
        let reference = lanes.iter().fold(PartialRow::EMPTY.reference, |most, row| max(most, row.reference));
        let sum = warp_sum(lanes.map(|row| row.sum * exp2_nonpositive(row.reference - reference)));
        level_of(PartialRow { reference, sum })
    }
}

/// Chooses for every row.
pub(super) fn choose(shape: ScanShape, of: (&[u32], &[Extent]), rows: Vec<Totals>, to: Choice<'_>) {
    let (table, extents) = of;
    let (heads, all_heads) = (shape.kv_heads as usize, heads_of(shape.group) as usize);
    let (most, per_block) = (shape.blocks as usize, shape.rule.entries() as usize);
    let outputs = to.list.par_chunks_exact_mut(most);
    let outputs = outputs.zip(to.entries.par_chunks_exact_mut(most * per_block)).zip(to.counts).zip(to.kept);
    let outputs = outputs.zip(to.skipped.par_chunks_exact_mut(all_heads)).zip(to.whole);
    outputs.zip(rows).enumerate().for_each(
        |(row, ((((((list, entries), count), kept), skipped), whole), totals))| {
            let (sequence, head) = (row / heads, row % heads);
            let (extent, chosen) = one(shape, extents[sequence], &totals, skipped);
            let Norms { kappa, nu } = totals.norms;
            *whole = Whole { kappa, nu, tokens: extent.length - extent.kept(shape.rule), reserved: 0 };
            list.fill(u32::MAX);
            let sink = if extent.blocks > 0 { 0..1 } else { 0..0 };
            let all = sink.chain(chosen).chain(extent.local..extent.blocks);
            list.iter_mut().zip(all).for_each(|(to, block)| *to = block);
            *count = extent.kept_blocks();
            *kept = extent.kept(shape.rule);
            for (i, entry) in entries.iter_mut().enumerate() {
                let listed = list[i / per_block];
                let index = listed as usize * per_block + i % per_block;
                let there = listed != u32::MAX && index < extent.length.div_ceil(BLOCK_TOKENS) as usize;
                *entry = if there {
                    table[sequence * shape.max_blocks as usize + index] * shape.kv_heads + head as u32
                } else {
                    u32::MAX
                };
            }
        },
    );
}

/// The distant blocks of a row that are kept, in order; what is left out goes to `skipped`.
fn one(shape: ScanShape, extent: Extent, row: &Totals, skipped: &mut [Skipped]) -> (Extent, Vec<u32>) {
    let heads = row.heads;
    let levels: Vec<f32> = (0..heads).map(|head| row.level(head)).collect();
    let relative = |block: u32, head: usize| row.masses[block as usize * heads + head] - levels[head];
    let mut bins = vec![[0u32; BINS]; heads];
    let mut blocks = [0u32; BINS];
    let scale = units(extent.distant());
    let distant = 1..extent.local.max(1);
    let ranks: Vec<u32> = distant
        .clone()
        .map(|block| {
            let rank = (0..heads).fold(f32::NEG_INFINITY, |rank, head| maximum(rank, relative(block, head)));
            let below = rank - shape.budget_log2;
            if below < 0.0 {
                let bin = bin_of(below);
                blocks[bin as usize] += 1;
                for (head, bins) in bins.iter_mut().enumerate() {
                    bins[bin as usize] += in_units(relative(block, head) - shape.budget_log2, bin, scale);
                }
            }
            ordered(rank)
        })
        .collect();
    let bounded = shape.budget_log2 < 0.0;
    let dispensable = if bounded { dispensable(&bins, &blocks, scale) } else { extent.distant() };
    let wanted = extent.chosen.max(extent.distant() - dispensable);
    let extent = Extent { chosen: wanted, ..extent };
    let rank = |block: &u32| (std::cmp::Reverse(ranks[*block as usize - 1]), *block);
    let mut chosen: Vec<u32> = distant.clone().collect();
    let mut left_out = Vec::new();
    if extent.ranked() {
        chosen.select_nth_unstable_by_key(wanted as usize, rank);
        chosen.truncate(wanted as usize);
        let last = chosen.iter().map(|block| ranks[*block as usize - 1]).min().expect("one is wanted");
        let of =
            |blocks: &mut dyn Iterator<Item = u32>| blocks.filter(|b| ranks[*b as usize - 1] == last).count();
        // Blocks that tie at the cut count as left out.
        let all_ties = of(&mut distant.clone()) == of(&mut chosen.iter().copied());
        let keeps = |rank: u32| rank > last || all_ties && rank == last;
        left_out.extend(distant.filter(|block| !keeps(ranks[*block as usize - 1])));
        chosen.sort_unstable();
    }
    for (head, to) in skipped.iter_mut().enumerate() {
        let (mut mass, mut moment) = ([0f32; THREADS], [0f32; THREADS]);
        let mut largest = 0f32;
        for block in &left_out {
            let (thread, nu) = ((*block as usize - 1) % THREADS, row.nus[*block as usize]);
            let weight = exp2(relative(*block, head));
            mass[thread] += weight;
            moment[thread] = fma(weight, nu, moment[thread]);
            largest = maximum(largest, nu);
        }
        let sum =
            |x: &[f32; THREADS]| x.as_chunks::<32>().0.iter().fold(0f32, |sum, lanes| sum + warp_sum(*lanes));
        *to = Skipped {
            mass: canonical_nan(sum(&mass)),
            moment: canonical_nan(sum(&moment)),
            level: levels[head],
            nu_rest: canonical_nan(largest),
        };
    }
    (extent, chosen)
}

/// Distant blocks that can go within the budget.
fn dispensable(bins: &[[u32; BINS]], blocks: &[u32; BINS], scale: f32) -> u32 {
    let mut fits = [true; BINS];
    for bins in bins {
        let sums = prefix(std::array::from_fn(|bin| {
            bins[bin] as f32 * (exp2_nonpositive(edge(bin as u32)) / scale)
        }));
        fits.iter_mut().zip(sums).for_each(|(fits, sum)| *fits &= sum <= SHARE);
    }
    let mut count = 0;
    let counts = blocks.map(|blocks| {
        count += blocks;
        count
    });
    fits.iter().zip(counts).filter(|(fits, _)| **fits).map(|(_, count)| count).max().unwrap_or(0)
}

/// Sums up to each bin, in the order in which the kernel's warps have them.
fn prefix(mut x: [f32; BINS]) -> [f32; BINS] {
    let warps = x.as_chunks_mut::<32>().0;
    for lanes in warps.iter_mut() {
        for step in 0..5 {
            let before = *lanes;
            for lane in 1 << step..32 {
                lanes[lane] = before[lane] + before[lane - (1 << step)];
            }
        }
    }
    let lasts: Vec<f32> = warps.iter().map(|lanes| lanes[31]).collect();
    for (warp, lanes) in warps.iter_mut().enumerate() {
        for last in &lasts[..warp] {
            lanes.iter_mut().for_each(|sum| *sum += last);
        }
    }
    x
}
