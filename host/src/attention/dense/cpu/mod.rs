//! Decode attention on slices: all cores, SIMD, and the bits of
//! [`attend`](kernels_gpu::attention::dense::attend()).
//!
//! What the kernel does on tensor cores is done here sixteen outputs at a time: sixteen tokens of a tile for
//! the scores, sixteen dimensions for the outputs. Threads share out what on a GPU are thread blocks:
//! sequences, KV heads, groups of eight query rows, parts of a sequence; where there are too few of those,
//! also their warps. Rows that a group of eight does not have are not computed.
//!
//! There are three paths ([`Level`]), chosen at run time, with the same results: AVX-512, AVX2, and plain
//! Rust. Tiles with an infinity or NaN take the emulator's model of the tensor cores instead, which is
//! slower.

mod part;

pub use crate::simd_level::Level;

use super::{Error, Problem, Result};
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::pieces::{Memory, Pieces, with_memory};
use crate::attention::cpu::softmax::{MergeParts, WarpResult};
use crate::attention::cpu::{TILES_ALONE, Work, run};
use crate::attention::{self, BLOCK_TOKENS, Half};
use kernels_gpu::attention::dense::DenseShape;
use kernels_gpu::attention::{PartialRow, Parts, part_floats, warps};
use part::{Part, Scratch, View};
use rayon::prelude::*;
use simt::math::{canonical_nan, log2};
use std::cell::RefCell;
use std::marker::PhantomData;

/// What attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a, E> {
    /// [sequences, query_tokens, q_heads, head_dim].
    pub queries: &'a [E],
    /// Keys of a pool of blocks, [blocks, kv_heads, 16, head_dim].
    pub keys: &'a [E],
    /// Its values, like the keys.
    pub values: &'a [E],
    /// A sequence's blocks in order, [sequences, max_blocks]; entries that its length does not reach may be
    /// anything.
    pub table: &'a [u32],
    /// Tokens of each sequence, those of the query tokens included, \[sequences\].
    pub lengths: &'a [u32],
}

/// Attention of `problem`: `output` [sequences, query_tokens, q_heads, head_dim], zeros for a query token
/// that sees no key, and `lse` [sequences, query_tokens, q_heads], the natural log-sum-exp of the scaled
/// scores, −∞ for one that sees none.
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
    attend_rows(level, problem, [problem.checked()?.shape().splits; 2], slices, None, output, lse)
}

/// [`attend_at`] for the rows that `wanted` asks for, as [`Handles::wanted`](super::Handles::wanted) does;
/// the others stay as they are. Those of many are cut into as many parts as the first of `splits` says,
/// others into the second.
pub(crate) fn attend_rows<E: Half>(
    level: Level,
    problem: Problem,
    [splits, few_splits]: [u32; 2],
    slices: Slices<'_, E>,
    wanted: Option<&[u32]>,
    output: &mut [f32],
    lse: &mut [f32],
) -> Result<()> {
    let level = level.checked();
    let problem = problem.checked()?;
    check(problem, slices, output, lse)?;
    let shape = DenseShape { splits, few_splits, ..problem.shape() };
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
    // Groups of rows that somebody wants, and their parts.
    let mut groups = Vec::new();
    let mut parts = Vec::new();
    for (sequence, length) in slices.lengths.iter().enumerate() {
        for head in 0..problem.kv_heads as usize {
            for row_group in 0..shape.row_groups() as usize {
                let launch_row =
                    (sequence * problem.kv_heads as usize + head) * shape.row_groups() as usize + row_group;
                let wanted = wanted.map_or(u32::MAX, |wanted| wanted[launch_row]);
                if wanted == 0 {
                    continue;
                }
                let cut = Parts::of(*length, shape.splits_of(wanted));
                let first = parts.len();
                let end = shape.visible_tiles(*length, row_group as u32);
                parts.extend((0..cut.used).map(|split| {
                    let tiles = cut.tiles_of(split).map(|tile| tile.min(end) as usize);
                    Part { sequence, head, row_group, tiles }
                }));
                groups.push((wanted, first..parts.len()));
            }
        }
    }
    let mut partials = vec![0f32; parts.len() * floats];
    let pieces = Pieces::of(parts.len(), warps(problem.head_dim) as usize);
    let one = |part: &Part, out: &mut [f32], pieces: Pieces| {
        let extent = [part.rows(shape), head_dim];
        pieces.share(level, vec![(); pieces.count], extent, out, |piece, (), results| {
            thread_local!(static SCRATCH: Memory<Scratch> = const { RefCell::new(Vec::new()) });
            with_memory(&SCRATCH, Scratch::new, |scratch| {
                let element = PhantomData;
                run(level, Compute::<E> { view, part: *part, pieces, piece, scratch, results, element });
            });
            None::<()>
        });
    };
    let tiles: usize = parts.iter().map(|part| part.tiles[1] - part.tiles[0]).sum();
    if tiles <= TILES_ALONE {
        let alone = Pieces { count: 1, ..pieces };
        parts.iter().zip(partials.chunks_exact_mut(floats)).for_each(|(part, out)| one(part, out, alone));
    } else {
        let tasks = parts.par_iter().zip(partials.par_chunks_exact_mut(floats));
        tasks.for_each(|(part, out)| one(part, out, pieces));
    }

    let mut values = vec![0f32; head_dim];
    for (wanted, range) in groups {
        let Part { sequence, head, row_group, .. } = parts[range.start];
        let partials = &partials[range.start * floats..range.end * floats];
        let rows = (shape.rows() as usize - 8 * row_group).min(8);
        for r in (0..rows).filter(|r| wanted >> r & 1 != 0) {
            let merged = run(level, MergeParts { parts: partials, floats, r, values: &mut values });
            let at = shape.query_row(sequence as u32, head as u32, (8 * row_group + r) as u32) as usize;
            lse[at] = finish(merged, &values, &mut output[at * head_dim..][..head_dim]);
        }
    }
    Ok(())
}

/// Whether everything is as long as the problem says, and every block that a length reaches is in the pool.
pub(crate) fn check<E: Half>(
    problem: Problem,
    slices: Slices<'_, E>,
    output: &[f32],
    lse: &[f32],
) -> Result<()> {
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

/// [`part::compute`].
struct Compute<'a, E> {
    view: View<'a>,
    part: Part,
    pieces: Pieces,
    piece: usize,
    scratch: &'a mut Scratch,
    results: &'a mut [WarpResult],
    element: PhantomData<E>,
}

impl<E: Half> Work for Compute<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Compute { view, part, pieces, piece, scratch, results, .. } = self;
        part::compute::<E, L>(view, part, pieces, piece, scratch, results);
    }
}
