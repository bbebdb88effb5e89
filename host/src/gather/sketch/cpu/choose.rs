//! What is kept: what `decide` does for a KV head.

use super::masses::Part;
use super::{GROUP, warp_sum};
use kernels_gpu::attention::BLOCK_TOKENS;
use kernels_gpu::attention::PartialRow;
use kernels_gpu::gather::sketch::{
    MASS_BINS, Norms, SHARE, STEPS, ScanShape, Skipped, Whole, bin_of, heads_of, in_units, inverse_of,
    joined, level_of, most_of, octave_unit, ratio_of, reference_of, scale_of, step_of, top_of, unit_of,
    units,
};
use kernels_gpu::gather::{Extent, ordered, score_of};
use rayon::prelude::*;
use simt::math::{canonical_nan, exp2_nonpositive, max, maximum};

const BINS: usize = MASS_BINS as usize;

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

/// What is counted of some blocks.
struct Counted {
    /// Masses and moments of each head, [heads][bins].
    sums: [Vec<[u32; BINS]>; 2],
    blocks: [u32; BINS],
    /// The largest norm of a value of each bin, as its bits.
    nus: [u32; BINS],
}

impl Counted {
    fn new(heads: usize) -> Self {
        let none = vec![[0; BINS]; heads];
        Counted { sums: [none.clone(), none], blocks: [0; BINS], nus: [0; BINS] }
    }

    /// Takes a block in: masses relative to the reference.
    fn count(&mut self, bin: u32, relative: impl Iterator<Item = f32>, (nu, ratio): (f32, f32), units: f32) {
        let at = bin as usize;
        self.blocks[at] += 1;
        self.nus[at] = self.nus[at].max(nu.to_bits());
        for (head, x) in relative.enumerate() {
            let [mass, moment] = in_units(x, ratio, bin, units);
            self.sums[0][head][at] += mass;
            self.sums[1][head][at] += moment;
        }
    }
}

/// The distant blocks of a row that are kept, in order; what is left out goes to `skipped`.
fn one(shape: ScanShape, extent: Extent, row: &Totals, skipped: &mut [Skipped]) -> (Extent, Vec<u32>) {
    let heads = row.heads;
    let levels: Vec<f32> = (0..heads).map(|head| row.level(head)).collect();
    let top = levels.iter().enumerate().fold(f32::NEG_INFINITY, |top, (head, level)| {
        let masses = row.masses.iter().skip(head).step_by(heads);
        top_of(top, masses.fold(f32::NEG_INFINITY, |most, mass| most_of(most, *mass)), *level)
    });
    let reference = reference_of(shape.budget_log2, top);
    let relative = |block: u32, head: usize| row.masses[block as usize * heads + head] - levels[head];
    let inverse = inverse_of(row.norms.nu);
    let units = units(extent.distant());
    let mut all = Counted::new(heads);
    let take = |to: &mut Counted, block: u32, bin: u32| {
        let nu = row.nus[block as usize];
        let of_heads = (0..heads).map(|head| relative(block, head) - reference);
        to.count(bin, of_heads, (nu, ratio_of(nu, inverse)), units);
    };
    let distant = 1..extent.local.max(1);
    let ranks: Vec<u32> = distant
        .clone()
        .map(|block| {
            let rank = (0..heads).fold(f32::NEG_INFINITY, |rank, head| maximum(rank, relative(block, head)));
            let bin = bin_of(rank - reference);
            if bin < MASS_BINS {
                take(&mut all, block, bin);
            }
            ordered(rank)
        })
        .collect();
    let mut counts = all.blocks;
    (1..BINS).for_each(|bin| counts[bin] += counts[bin - 1]);
    let fitting = all.sums[0].iter().map(|bins| fitting(bins, units)).min().unwrap_or(BINS);
    let within = if fitting > 0 { counts[fitting - 1] } else { 0 };
    let dispensable = if shape.budget_log2 < 0.0 { within } else { extent.distant() };
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
    // Bins that go as a whole, and of the one behind them some.
    let out = extent.distant() - extent.chosen;
    let whole = counts.iter().filter(|count| **count <= out).count();
    let before = if whole > 0 { counts[whole - 1] } else { 0 };
    let mut rest = Counted::new(heads);
    for block in left_out {
        if whole < BINS && bin_of(score_of(ranks[block as usize - 1]) - reference) == whole as u32 {
            take(&mut rest, block, whole as u32);
        }
    }
    let some = whole.min(BINS - 1);
    let nu_rest = all.nus[..whole].iter().chain(&rest.nus[some..=some]).copied().max().unwrap_or(0);
    for (head, to) in skipped.iter_mut().enumerate() {
        let sum = |kind: usize| {
            let whole_bins = sum_of(&all.sums[kind][head][..whole], units);
            let rest = rest.sums[kind][head][some] as f32 * unit_of(some as u32, units);
            // Of what is in no bin nothing is known.
            let known = out == before || whole < BINS;
            if known { canonical_nan((whole_bins + rest) * scale_of(reference)) } else { f32::NAN }
        };
        *to = Skipped {
            mass: sum(0),
            moment: canonical_nan(sum(1) * row.norms.nu),
            level: levels[head],
            nu_rest: f32::from_bits(nu_rest),
        };
    }
    (extent, chosen)
}

/// What so many in each bin of an octave are, from the lowest one on.
fn weights(bins: &[u32]) -> impl Iterator<Item = f32> {
    (0..STEPS).zip(bins).map(|(step, own)| *own as f32 * step_of(step))
}

/// The sum of what is in the first bins, in the order in which a warp of the kernel has it.
fn sum_of(bins: &[u32], units: f32) -> f32 {
    let mut lanes = [0.0; 32];
    for (octave, bins) in bins.chunks(STEPS as usize).enumerate() {
        lanes[octave] = weights(bins).fold(0.0, |sum, x| sum + x) * octave_unit(octave as u32, units);
    }
    warp_sum(lanes)
}

/// How many bins, from the lowest on, can go within the budget, summed up as the kernel does.
fn fitting(bins: &[u32; BINS], units: f32) -> usize {
    let sums: [[f32; STEPS as usize]; 32] = std::array::from_fn(|octave| {
        let (mut sum, unit) = (0.0, octave_unit(octave as u32, units));
        let mut weights = weights(&bins[STEPS as usize * octave..]);
        std::array::from_fn(|_| {
            sum += weights.next().expect("a bin");
            sum * unit
        })
    });
    let mut upto = sums.map(|sums| sums[STEPS as usize - 1]);
    for step in 0..5 {
        let before = upto;
        for lane in 1 << step..32 {
            upto[lane] = before[lane] + before[lane - (1 << step)];
        }
    }
    let lower = |octave: usize| if octave > 0 { upto[octave - 1] } else { 0.0 };
    let all = (0..BINS).map(|bin| (bin / STEPS as usize, bin % STEPS as usize));
    all.take_while(|(octave, step)| lower(*octave) + sums[*octave][*step] <= SHARE).count()
}
