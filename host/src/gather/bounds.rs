//! The bounds of a layer's gather-blocks, or their means, and the launch that keeps them.

use super::{Error, GatherElement, MOST_TOKENS, Result, Score, Support, cpu, length};
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::cpu::handles::{slice, slice_mut};
use crate::{Buffer, Device, Stream};
use kernels_gpu::gather::{
    FOLD_LANES, FoldShape, SQUEEZE_LANES, TILE_BLOCKS, average, fold, fold_bytes, squeeze, squeeze_bytes,
    summary_words,
};
use simt::{Global, LaunchShape};
use std::marker::PhantomData;

/// The largest and the smallest key of each gather-block of a layer, by sequence, KV head and channel:
/// [sequences, kv_heads, tiles of 16 blocks, 16 · head_dim words], as `kernels_gpu::gather` has it. By
/// [`Score::Codes`] the same in 8 bits, by [`Score::Mean`] the mean key of each: about half as many words.
///
/// A block's first token sets its bounds, so a sequence may start again in a row that another has used.
#[derive(Debug)]
pub struct Bounds<E: GatherElement> {
    words: Buffer<u32>,
    sequences: u32,
    shape: FoldShape,
    score: Score,
    element: PhantomData<E>,
}

/// The arguments of [`Bounds::fold_on`]: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct FoldHandles<E> {
    /// Keys of the pool that holds the new tokens, [blocks, kv_heads, 16, head_dim].
    pub keys: Global<E>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// Positions of the new tokens, [sequences, any]: the first of each sequence is read, and one past the
    /// table is of no sequence.
    pub positions: Global<u32>,
    /// Tokens of each sequence with the new ones, \[sequences\].
    pub lengths: Global<u32>,
}

impl<E: GatherElement> Bounds<E> {
    /// Bounds for the sequences of a problem, in blocks of `support.block` tokens.
    ///
    /// # Errors
    /// Those of [`Support::checked`] and of the problem; [`Error::HeadDim`], [`Error::TooLong`]; out of
    /// memory.
    pub fn new(device: &Device, problem: StepProblem, support: Support) -> Result<Self> {
        Bounds::scored(device, problem, support, Score::Bounds)
    }

    /// The same, or what else blocks are scored by.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn scored(device: &Device, problem: StepProblem, support: Support, score: Score) -> Result<Self> {
        let (support, problem) = (support.checked()?, score.checked(problem)?);
        let tiles = problem.max_tokens.div_ceil(support.block).div_ceil(TILE_BLOCKS);
        let shape = FoldShape {
            stride: 1,
            kv_heads: problem.kv_heads,
            head_dim: problem.head_dim,
            max_blocks: problem.max_tokens.div_ceil(BLOCK_TOKENS),
            block: support.block,
            tiles,
        };
        let rows = problem.sequences as usize * problem.kv_heads as usize;
        let tile = summary_words(score.summary(), problem.head_dim) as usize;
        let words = Buffer::zeroed(device, rows * tiles as usize * tile)?;
        Ok(Bounds { words, sequences: problem.sequences, shape, score, element: PhantomData })
    }

    /// Where they are.
    pub fn device(&self) -> &Device {
        self.words.device()
    }

    /// The words.
    pub fn words(&self) -> &Buffer<u32> {
        &self.words
    }

    /// Bytes of the bounds of `blocks` gather-blocks of a sequence.
    pub fn bytes_of(&self, blocks: u32) -> u64 {
        let FoldShape { kv_heads, head_dim, .. } = self.shape;
        let words = summary_words(self.score.summary(), head_dim) / TILE_BLOCKS;
        4 * u64::from(blocks) * u64::from(kv_heads) * u64::from(words)
    }

    /// Makes the bounds of the first `tokens` tokens of sequence `to` those of sequence `from`, another
    /// one: a copy a KV head, of the tiles that have a token. It allocates nothing, waits for nothing and can
    /// be captured.
    ///
    /// # Errors
    /// [`Error::Length`] for sequences or tokens that there are not; what the device reports.
    pub fn copy(&mut self, stream: &Stream, from: usize, to: usize, tokens: usize) -> Result<()> {
        let FoldShape { kv_heads, head_dim, block, .. } = self.shape;
        let tile = summary_words(self.score.summary(), head_dim) as usize;
        let tiles = tokens.div_ceil((block * TILE_BLOCKS) as usize);
        Rows { sequences: self.sequences, kv_heads }.copy(stream, &mut self.words, (from, to), tiles * tile)
    }

    /// Takes the tokens of some sequences, `row` the first of them and as many as there are lengths, from
    /// their first positions to before their lengths into the bounds; they are in the pool already, and are
    /// up to `tokens`, one behind another. It allocates nothing, waits for nothing and can be captured.
    /// Tokens past the table are left out, and with them sequences whose positions are.
    ///
    /// With `slices` on the CPU's own path in place of the kernel, which gives the same bits.
    ///
    /// # Safety
    /// Until the launch has finished (for a capture: until each run of the graph has):
    /// - the memory behind every handle is there, reached by the stream's device, and written by nothing
    ///   else; with `slices` it is host memory;
    /// - a sequence's new tokens are at most `tokens`, and the table's entries up to its length are blocks of
    ///   the pool, which for means holds all keys of the blocks that the new tokens are in.
    ///
    /// # Errors
    /// [`Error::Length`] for handles of another problem; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub unsafe fn fold_on(
        &mut self,
        stream: &Stream,
        (row, tokens): (usize, u32),
        slices: bool,
        handles: FoldHandles<E>,
    ) -> Result<()> {
        stream.device().check_same(self.device(), "the bounds")?;
        let FoldHandles { keys, table, positions, lengths } = handles;
        let (sequences, kv_heads) = (lengths.len() as u32, self.shape.kv_heads);
        if lengths.is_empty() || row + lengths.len() > self.sequences as usize {
            return length("the buffer of lengths", row + lengths.len(), self.sequences as usize);
        }
        length("the block table", table.len(), sequences as usize * self.shape.max_blocks as usize)?;
        let stride = positions.len() / sequences as usize;
        length("the buffer of positions", positions.len(), stride.max(1) * sequences as usize)?;
        let block = (BLOCK_TOKENS * kv_heads) as usize * self.shape.head_dim as usize;
        length("the buffer of keys", keys.len(), keys.len() / block * block)?;
        let shape = FoldShape { stride: stride as u32, ..self.shape };
        let of_each = self.words.len() / self.sequences as usize;
        let bounds = self.words.global_range_mut(row * of_each..(row + lengths.len()) * of_each)?;
        if slices {
            // SAFETY: the caller's word; the emulator's streams have done what they were told when a call
            // returns.
            unsafe {
                let (keys, table, bounds) = (slice(keys), slice(table), slice_mut(bounds));
                let (positions, lengths) = (slice(positions), slice(lengths));
                match self.score {
                    Score::Bounds => cpu::fold::<E>(shape, keys, table, positions, lengths, bounds),
                    Score::Codes => cpu::squeeze::<E>(shape, keys, table, positions, lengths, bounds),
                    Score::Mean => cpu::average::<E>(shape, keys, table, positions, lengths, bounds),
                }
            }
            return Ok(());
        }
        // The last token may be the first of its block.
        let touched = (tokens.max(1) - 1).div_ceil(self.shape.block) + 1;
        let (threads, bytes) = match self.score {
            Score::Codes => (SQUEEZE_LANES * shape.head_dim / 4, squeeze_bytes()),
            Score::Bounds | Score::Mean => (FOLD_LANES * shape.head_dim / 2, fold_bytes()),
        };
        let launch = LaunchShape::new((touched, kv_heads, sequences), threads).shared(bytes);
        // SAFETY: lengths as just checked, what is past the table is left out, every word belongs to one
        // thread of the grid, and the rest is this function's contract.
        unsafe {
            match self.score {
                Score::Bounds => {
                    let args = fold::Args { keys, table, positions, lengths, bounds, shape };
                    stream.launch(&E::fold_kernel(), launch, args)?;
                }
                Score::Codes => {
                    let args = squeeze::Args { keys, table, positions, lengths, bounds, shape };
                    stream.launch(&E::squeeze_kernel(), launch, args)?;
                }
                Score::Mean => {
                    let args = average::Args { keys, table, positions, lengths, means: bounds, shape };
                    stream.launch(&E::average_kernel(), launch, args)?;
                }
            }
        }
        Ok(())
    }
}

/// What a buffer [sequences, kv_heads, words] holds.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub sequences: u32,
    pub kv_heads: u32,
}

impl Rows {
    /// Copies the first `used` words of each KV head of a sequence to those of another.
    pub fn copy(
        self,
        stream: &Stream,
        words: &mut Buffer<u32>,
        (from, to): (usize, usize),
        used: usize,
    ) -> Result<()> {
        let (sequences, heads) = (self.sequences as usize, self.kv_heads as usize);
        let row = words.len() / (sequences * heads).max(1);
        if from.max(to) >= sequences {
            return length("what belongs to sequences", from.max(to) + 1, sequences);
        }
        if used > row {
            return length("what belongs to tokens", used, row);
        }
        (0..heads).try_for_each(|head| {
            let [from, to] = [from, to].map(|sequence| (sequence * heads + head) * row);
            Ok(stream.copy_within(words, from..from + used, to)?)
        })
    }
}

/// A problem that `what` has kernels for, which take so many channels.
pub(super) fn checked(
    problem: StepProblem,
    what: &'static str,
    takes: &'static [u32],
) -> Result<StepProblem> {
    let StepProblem { head_dim, max_tokens: tokens, .. } = problem;
    problem.dense().checked()?;
    if !takes.contains(&head_dim) {
        return Err(Error::HeadDim { what, head_dim, takes });
    }
    if tokens > MOST_TOKENS {
        return Err(Error::TooLong { tokens });
    }
    Ok(problem)
}
