//! Weights times activations on slices.

use super::Level;
#[cfg(target_arch = "x86_64")]
use super::simd;
use crate::model::linear::{PackedWeights, WeightKind};
use half::{bf16, f16};
use kernels_gpu::model::fixed::{Record, undo_digits};
use kernels_gpu::model::format::{Codes, Q4_0, Q4_1, Q8_0};
use kernels_gpu::model::product::{MAX_STRANDS, strands};
use rayon::prelude::*;
use simt::math::canonical_nan;

/// Rows of a group.
pub(super) const ROWS: usize = 8;
/// Tokens that share a group's unpacked codes.
pub(super) const TOKENS: usize = 4;
/// Tokens whose records stay in a cache while all rows go by.
const TOKENS_A_ROUND: usize = 32;
/// Bytes of weights below which a task is not worth its start.
const TASK_BYTES: usize = 32 << 10;

/// The most strands.
pub(super) const STRANDS: usize = MAX_STRANDS as usize;

/// Sums of eight rows for a few tokens.
pub(super) type Sums = [[f32; ROWS]; TOKENS];
/// Strands of eight rows for a few tokens.
pub(super) type Strands = [[[f32; ROWS]; STRANDS]; TOKENS];

/// A matrix as the paths see it.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) kind: WeightKind,
    pub(super) blocks: usize,
    pub(super) strands: usize,
    pub(super) codes: &'a [u32],
    pub(super) scales: &'a [u16],
    /// X of every token and channel as f32, where weights are floats.
    pub(super) fixed: &'a [f32],
    pub(super) records: &'a [Record],
}

impl View<'_> {
    /// Codes of a group's tiles.
    #[inline(always)]
    pub(super) fn tiles(&self, group: usize) -> &[u32] {
        let words = self.blocks * self.kind.tile_words();
        &self.codes[group * words..][..words]
    }

    /// Scales of a group's tiles.
    #[inline(always)]
    pub(super) fn group_scales(&self, group: usize) -> &[u16] {
        let halves = self.blocks * self.kind.tile_scales();
        &self.scales[group * halves..][..halves]
    }

    /// Records of a token.
    #[inline(always)]
    pub(super) fn token(&self, token: usize) -> &[Record] {
        &self.records[token * self.blocks..][..self.blocks]
    }
}

/// What a product is added to.
#[derive(Clone, Copy, Debug)]
pub enum Onto<'a> {
    /// Nothing: the output is overwritten.
    Nothing,
    /// A residual [tokens, rows].
    Residual(&'a [f32]),
    /// What the output holds.
    Output,
}

/// `out` [tokens, rows] = W·v + bias + residual, of `records` [tokens, columns / 32].
///
/// # Panics
/// If a slice does not fit.
pub fn product(
    weights: &PackedWeights,
    records: &[Record],
    bias: Option<&[f32]>,
    onto: Onto<'_>,
    out: &mut [f32],
) {
    product_at(Level::best(), weights, records, bias, onto, out);
}

/// [`product`] on a path, or on the best below it that the machine has.
///
/// # Panics
/// As [`product`].
pub fn product_at(
    level: Level,
    weights: &PackedWeights,
    records: &[Record],
    bias: Option<&[f32]>,
    onto: Onto<'_>,
    out: &mut [f32],
) {
    let level = level.checked();
    let (rows, blocks) = (weights.rows(), weights.blocks());
    assert!(records.len().is_multiple_of(blocks), "{} records for rows of {blocks}", records.len());
    let tokens = records.len() / blocks;
    assert_eq!(out.len(), tokens * rows, "outputs of {tokens} tokens");
    assert!(bias.is_none_or(|bias| bias.len() == rows), "one bias a row");
    if let Onto::Residual(residual) = onto {
        assert_eq!(residual.len(), out.len(), "a residual for each output");
    }
    let fixed = if weights.kind().is_quantized() { Vec::new() } else { fixed_values(records) };
    let view = View {
        kind: weights.kind(),
        blocks,
        strands: strands(blocks as u32) as usize,
        codes: weights.codes(),
        scales: weights.scales(),
        fixed: &fixed,
        records,
    };
    let groups = rows.div_ceil(ROWS);
    let group_bytes = (weights.bytes() / groups).max(1);
    let few = groups.div_ceil(4 * rayon::current_num_threads());
    let groups_a_task = few.max(TASK_BYTES / group_bytes).max(1);
    let target = Target { out: out.as_mut_ptr(), len: out.len() };
    let tasks = groups.div_ceil(groups_a_task);
    let task = |task: usize| {
        let (mut strands, mut sums) = ([[[0f32; ROWS]; STRANDS]; TOKENS], [[0f32; ROWS]; TOKENS]);
        let own = task * groups_a_task..((task + 1) * groups_a_task).min(groups);
        for round in (0..tokens).step_by(TOKENS_A_ROUND) {
            for group in own.clone() {
                for first in (round..tokens.min(round + TOKENS_A_ROUND)).step_by(TOKENS) {
                    let count = TOKENS.min(tokens - first);
                    sum(level, view, group, [first, count], &mut strands, &mut sums);
                    for (i, sums) in sums.iter().enumerate().take(count) {
                        for (r, sum) in sums.iter().enumerate().take(rows - (group * ROWS).min(rows)) {
                            let row = group * ROWS + r;
                            let at = (first + i) * rows + row;
                            let mut y = *sum;
                            if let Some(bias) = bias {
                                y += bias[row];
                            }
                            match onto {
                                Onto::Nothing => {}
                                Onto::Residual(residual) => y += residual[at],
                                // SAFETY: this task has the rows of its groups to itself.
                                Onto::Output => y += unsafe { target.read(at) },
                            }
                            // SAFETY: as above.
                            unsafe { target.write(at, canonical_nan(y)) };
                        }
                    }
                }
            }
        }
    };
    if tasks == 1 {
        task(0);
    } else {
        (0..tasks).into_par_iter().for_each(task);
    }
}

/// The output, of which each task has rows to itself.
#[derive(Clone, Copy)]
struct Target {
    out: *mut f32,
    len: usize,
}

// SAFETY: tasks read and write different elements, and the borrow behind the pointer outlives them.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Target {
    /// # Safety
    /// No other task writes the element.
    unsafe fn read(&self, at: usize) -> f32 {
        assert!(at < self.len);
        // SAFETY: inside the slice, and by this function's contract.
        unsafe { *self.out.add(at) }
    }

    /// # Safety
    /// No other task reads or writes the element.
    unsafe fn write(&self, at: usize, value: f32) {
        assert!(at < self.len);
        // SAFETY: inside the slice, and by this function's contract.
        unsafe { *self.out.add(at) = value }
    }
}

/// X of every channel as f32, exactly.
fn fixed_values(records: &[Record]) -> Vec<f32> {
    let mut values = Vec::with_capacity(records.len() * 32);
    for part in records.iter().flatten() {
        for i in 0..8 {
            let digits = [part.high[i], part.middle[i], part.low[i]].map(i32::from);
            values.push(undo_digits(digits) as f32);
        }
    }
    values
}

/// Sums of a group's rows for `count` tokens from `first` on; what `strands` holds does not matter.
fn sum(
    level: Level,
    view: View<'_>,
    group: usize,
    [first, count]: [usize; 2],
    strands: &mut Strands,
    sums: &mut Sums,
) {
    #[cfg(target_arch = "x86_64")]
    if level > Level::Portable {
        return simd::sums(level, view, group, [first, count], strands, sums);
    }
    let _ = (level, strands);
    for (i, sums) in sums.iter_mut().enumerate().take(count) {
        *sums = match view.kind {
            WeightKind::Q4_1 => portable::<Q4_1>(view, group, first + i),
            WeightKind::Q4_0 => portable::<Q4_0>(view, group, first + i),
            WeightKind::Q8_0 => portable::<Q8_0>(view, group, first + i),
            _ => portable_floats(view, group, first + i),
        };
    }
}

/// Adds the strands one after another.
fn add_strands(strands: &[[f32; ROWS]]) -> [f32; ROWS] {
    let mut total = strands[0];
    for strand in &strands[1..] {
        for (total, x) in total.iter_mut().zip(strand) {
            *total += x;
        }
    }
    total
}

/// d and m of row `r` of a tile.
pub(super) fn scale(kind: WeightKind, scales: &[u16], block: usize, r: usize) -> [f32; 2] {
    let value = |at: usize| f16::from_bits(scales[at]).to_f32();
    match kind {
        WeightKind::Q4_1 => [value(2 * (block * ROWS + r)), value(2 * (block * ROWS + r) + 1)],
        WeightKind::Q4_0 => {
            let d = value(block * ROWS + r);
            [d, -8.0 * d]
        }
        _ => [value(block * ROWS + r), 0.0],
    }
}

/// Eight rows of integer codes for one token.
fn portable<F: Codes>(view: View<'_>, group: usize, token: usize) -> [f32; ROWS] {
    let mut strand_sums = [[0f32; ROWS]; STRANDS];
    let words = view.kind.tile_words();
    let eight_bits = view.kind == WeightKind::Q8_0;
    let tiles = view.tiles(group).chunks_exact(words);
    for (block, (tile, record)) in tiles.zip(view.token(token)).enumerate() {
        for (r, sum) in strand_sums[block % view.strands].iter_mut().enumerate() {
            let mut planes = [0i32; 3];
            for (j, part) in record.iter().enumerate() {
                let codes: [i32; 8] = if eight_bits {
                    let halves = [tile[8 * j + r], tile[32 + 8 * j + r]].map(u32::to_le_bytes);
                    std::array::from_fn(|i| i32::from(halves[i / 4][i % 4] as i8))
                } else {
                    let bytes = tile[8 * j + r].to_le_bytes();
                    std::array::from_fn(|i| i32::from(bytes[i % 4] >> (i / 4 * 4) & 15))
                };
                for (plane_sum, plane) in planes.iter_mut().zip([&part.high, &part.middle, &part.low]) {
                    *plane_sum += codes.iter().zip(plane).map(|(code, x)| code * i32::from(*x)).sum::<i32>();
                }
            }
            let scale = scale(view.kind, view.group_scales(group), block, r);
            let dot = F::combine(planes[0], (planes[1] << 7) + planes[2]);
            *sum = F::finish(*sum, scale, dot, record[0].step, record[0].sum);
        }
    }
    add_strands(&strand_sums[..view.strands])
}

/// A float weight by its place in a group's tiles.
fn float(kind: WeightKind, tiles: &[u32], at: usize) -> f32 {
    let half = || (tiles[at / 2] >> (at % 2 * 16)) as u16;
    match kind {
        WeightKind::F32 => f32::from_bits(tiles[at]),
        WeightKind::Bf16 => bf16::from_bits(half()).to_f32(),
        _ => f16::from_bits(half()).to_f32(),
    }
}

/// Eight rows of float weights for one token.
fn portable_floats(view: View<'_>, group: usize, token: usize) -> [f32; ROWS] {
    let mut strand_sums = [[0f32; ROWS]; STRANDS];
    let tiles = view.tiles(group);
    let fixed = &view.fixed[token * view.blocks * 32..][..view.blocks * 32];
    for (block, x) in fixed.chunks_exact(32).enumerate() {
        for (r, sum) in strand_sums[block % view.strands].iter_mut().enumerate() {
            let mut chains = [0f32; 8];
            for (k, x) in x.iter().enumerate() {
                let weight = float(view.kind, tiles, (block * 32 + k) * ROWS + r);
                chains[k % 8] = weight.mul_add(*x, chains[k % 8]);
            }
            let c = chains;
            let dot = ((c[0] + c[4]) + (c[2] + c[6])) + ((c[1] + c[5]) + (c[3] + c[7]));
            *sum = view.token(token)[block][0].step.mul_add(dot, *sum);
        }
    }
    add_strands(&strand_sums[..view.strands])
}
