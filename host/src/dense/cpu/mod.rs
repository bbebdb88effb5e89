//! Decode attention on slices: all cores, SIMD, and the bits of [`attend`](kernels_gpu::dense::attend()).
//!
//! What the kernel does on tensor cores is done here sixteen outputs at a time: sixteen tokens of a tile for the scores,
//! sixteen dimensions for the outputs. Threads share out what on a GPU are thread blocks: sequences, KV heads, groups of eight
//! query rows, parts of a sequence. Rows that a group of eight does not have are not computed.
//!
//! There are three paths ([`Level`]), chosen at run time, with the same results: AVX-512, AVX2, and plain Rust. Tiles with an
//! infinity or NaN take the emulator's model of the tensor cores instead, which is slower.

mod lanes;
mod part;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use crate::simd_level::Level;

use super::{Error, Problem, Result};
use crate::attention::{self, BLOCK_TOKENS, Half};
use kernels_gpu::attention::{PartialRow, part_floats};
use part::{Part, Scratch, View, combine, query_row};
use rayon::prelude::*;
use simt::math::{canonical_nan, log2};
use std::cell::RefCell;

/// Tiles of 16 tokens and KV heads below which other threads are not worth waking.
const TILES_ALONE: usize = 8;

/// What attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a, E> {
    /// [sequences, query_tokens, q_heads, head_dim].
    pub queries: &'a [E],
    /// Keys of a pool of blocks, [blocks, kv_heads, 16, head_dim].
    pub keys: &'a [E],
    /// Its values, like the keys.
    pub values: &'a [E],
    /// A sequence's blocks in order, [sequences, max_blocks]; entries that its length does not reach may be anything.
    pub table: &'a [u32],
    /// Tokens of each sequence, those of the query tokens included, \[sequences\].
    pub lengths: &'a [u32],
}

/// Attention of `problem`: `output` [sequences, query_tokens, q_heads, head_dim], zeros for a query token that sees no key, and
/// `lse` [sequences, query_tokens, q_heads], the natural log-sum-exp of the scaled scores, −∞ for one that sees none.
///
/// The bits are those of a [`Plan`](super::Plan) for the same problem. Runs on rayon's current thread pool.
///
/// # Errors
/// Those of [`Problem::checked`]; [`Error::Length`]; a length or a block that table or pool do not have.
pub fn attend<E: Half>(
    problem: Problem,
    slices: Slices<'_, E>,
    output: &mut [f32],
    lse: &mut [f32],
) -> Result<()> {
    attend_at(Level::best(), problem, slices, output, lse)
}

/// [`attend`] on a path, or on the best below it that the machine has.
///
/// # Errors
/// As [`attend`].
pub fn attend_at<E: Half>(
    level: Level,
    problem: Problem,
    slices: Slices<'_, E>,
    output: &mut [f32],
    lse: &mut [f32],
) -> Result<()> {
    let level = level.checked();
    let problem = problem.checked()?;
    check(problem, slices, output, lse)?;
    let shape = problem.shape();
    let head_dim = problem.head_dim as usize;
    let view = View {
        queries: bytemuck::cast_slice(slices.queries),
        keys: bytemuck::cast_slice(slices.keys),
        values: bytemuck::cast_slice(slices.values),
        table: slices.table,
        lengths: slices.lengths,
        shape,
        head_dim,
    };
    let floats = part_floats(problem.head_dim);
    let cuts: Vec<Cut> = slices.lengths.iter().map(|length| Cut::of(*length, shape.splits)).collect();
    let row_groups = shape.row_groups() as usize;
    let mut parts = Vec::new();
    for (sequence, cut) in cuts.iter().enumerate() {
        for head in 0..problem.kv_heads as usize {
            for row_group in 0..row_groups {
                parts.extend((0..cut.used).map(|split| {
                    let first = split * cut.tiles_a_split;
                    let tiles = [first, (first + cut.tiles_a_split).min(cut.tiles)];
                    Part { sequence, head, row_group, tiles }
                }));
            }
        }
    }
    let mut partials = vec![0f32; parts.len() * floats];
    let one = |part: &Part, out: &mut [f32]| {
        thread_local!(static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Scratch::new()));
        SCRATCH.with_borrow_mut(|scratch| compute::<E>(level, view, *part, scratch, out));
    };
    let tiles: usize = parts.iter().map(|part| part.tiles[1] - part.tiles[0]).sum();
    if tiles <= TILES_ALONE {
        parts.iter().zip(partials.chunks_exact_mut(floats)).for_each(|(part, out)| one(part, out));
    } else {
        parts.par_iter().zip(partials.par_chunks_exact_mut(floats)).for_each(|(part, out)| one(part, out));
    }

    let mut first = 0;
    let mut values = vec![0f32; head_dim];
    for (sequence, cut) in cuts.iter().enumerate() {
        for head in 0..problem.kv_heads as usize {
            for row in 0..shape.rows() as usize {
                let (row_group, r) = (row / 8, row % 8);
                let launch_row = (head * row_groups + row_group) * cut.used;
                let parts = &partials[(first + launch_row) * floats..][..cut.used * floats];
                let merged = merged(level, parts, floats, r, &mut values);
                let at = query_row(shape, sequence, head, row);
                lse[at] = finish(merged, &values, &mut output[at * head_dim..][..head_dim]);
            }
        }
        first += problem.kv_heads as usize * row_groups * cut.used;
    }
    Ok(())
}

/// How a sequence is cut: `Parts` of the kernel.
struct Cut {
    tiles: usize,
    tiles_a_split: usize,
    used: usize,
}

impl Cut {
    fn of(length: u32, splits: u32) -> Self {
        let tiles = length.div_ceil(BLOCK_TOKENS);
        let tiles_a_split = tiles.div_ceil(splits).max(1);
        let used = tiles.div_ceil(tiles_a_split).max(1);
        Cut { tiles: tiles as usize, tiles_a_split: tiles_a_split as usize, used: used as usize }
    }
}

fn check<E: Half>(problem: Problem, slices: Slices<'_, E>, output: &[f32], lse: &[f32]) -> Result<()> {
    let length = |what: &'static str, got: usize, expected: usize| {
        if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected }) }
    };
    let (rows, head_dim) = (problem.query_rows(), problem.head_dim as usize);
    let (sequences, max_blocks) = (problem.sequences as usize, problem.max_blocks());
    length("the slice of queries", slices.queries.len(), rows * head_dim)?;
    length("the output", output.len(), rows * head_dim)?;
    length("the slice of log-sums", lse.len(), rows)?;
    length("the slice of lengths", slices.lengths.len(), sequences)?;
    length("the block table", slices.table.len(), sequences * max_blocks as usize)?;
    length("the slice of values", slices.values.len(), slices.keys.len())?;
    let block = (BLOCK_TOKENS * problem.kv_heads) as usize * head_dim;
    let blocks = slices.keys.len() / block;
    length("the slice of keys", slices.keys.len(), blocks * block)?;
    for (row, length) in slices.table.chunks_exact(max_blocks as usize).zip(slices.lengths) {
        let used = length.div_ceil(BLOCK_TOKENS) as usize;
        let Some(row) = row.get(..used) else {
            let blocks = max_blocks as usize;
            return Err(attention::Error::Tokens { length: *length, blocks }.into());
        };
        if let Some(block) = row.iter().copied().find(|block| *block as usize >= blocks) {
            return Err(attention::Error::Block { block, blocks: blocks as u32 }.into());
        }
    }
    Ok(())
}

/// `Target::finish` of the kernel: the log-sum-exp, and a row of the output.
fn finish(row: PartialRow, values: &[f32], output: &mut [f32]) -> f32 {
    let PartialRow { reference, sum } = row;
    if sum == 0.0 {
        output.fill(0.0);
        return f32::NEG_INFINITY;
    }
    for (output, x) in output.iter_mut().zip(values) {
        *output = canonical_nan(x / sum);
    }
    canonical_nan((reference + log2(sum)) * std::f32::consts::LN_2)
}

/// Row `r` over the parts of a sequence. A single part is the result.
#[inline(always)]
fn merged_here(parts: &[f32], floats: usize, r: usize, values: &mut [f32]) -> PartialRow {
    let head_dim = values.len();
    if parts.len() == floats {
        values.copy_from_slice(&parts[r * head_dim..][..head_dim]);
        let at = 8 * head_dim + 2 * r;
        return PartialRow { reference: parts[at], sum: parts[at + 1] };
    }
    combine(parts, floats, r, head_dim, values)
}

/// [`merged_here`] with the machine's fused multiply-add.
fn merged(level: Level, parts: &[f32], floats: usize, r: usize, values: &mut [f32]) -> PartialRow {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2(parts: &[f32], floats: usize, r: usize, values: &mut [f32]) -> PartialRow {
            merged_here(parts, floats, r, values)
        }
        if level >= Level::Avx2 {
            // SAFETY: the machine has the level's instructions (`Level::checked`).
            return unsafe { avx2(parts, floats, r, values) };
        }
    }
    let _ = level;
    merged_here(parts, floats, r, values)
}

/// [`part::compute`] on a path.
fn compute<E: Half>(level: Level, view: View<'_>, part: Part, scratch: &mut Scratch, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<E: Half>(view: View<'_>, part: Part, scratch: &mut Scratch, out: &mut [f32]) {
            part::compute::<E, x86::Avx2>(view, part, scratch, out);
        }
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
        fn avx512<E: Half>(view: View<'_>, part: Part, scratch: &mut Scratch, out: &mut [f32]) {
            part::compute::<E, x86::Avx512>(view, part, scratch, out);
        }
        match level {
            // SAFETY: the machine has the level's instructions (`Level::checked`).
            Level::Avx512 => return unsafe { avx512::<E>(view, part, scratch, out) },
            // SAFETY: as above.
            Level::Avx2 => return unsafe { avx2::<E>(view, part, scratch, out) },
            Level::Portable => {}
        }
    }
    let _ = level;
    part::compute::<E, lanes::Portable>(view, part, scratch, out);
}
