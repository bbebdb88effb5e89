//! The sketches of a layer's keys, and the launch that writes them.

use super::super::bounds::Rows;
use super::super::{Error, GatherElement, Result, length};
use super::elements::SketchElement;
use super::{Budget, cpu};
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::cpu::handles::{slice, slice_mut};
use crate::{Buffer, Device, Stream};
use kernels_gpu::gather::sketch::{
    SKETCH_LANES, SketchShape, TILE_TOKENS, sketch, sketch_bytes, sketch_words, tiles_of,
};
use simt::{Global, LaunchShape};
use std::marker::PhantomData;

/// Sketches of the keys of a layer by sequence and KV head, [sequences, kv_heads, tiles of 32 tokens, words],
/// as `kernels_gpu::gather::sketch` has them. A tile has what its sequence has of it, so each sequence has
/// its own, whatever blocks of the pool it shares with others.
#[derive(Debug)]
pub struct Sketches<E: GatherElement> {
    words: Buffer<u32>,
    sequences: u32,
    bits: u32,
    shape: SketchShape,
    element: PhantomData<E>,
}

/// The arguments of [`Sketches::sketch_on`]: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct SketchHandles<E> {
    /// Keys of the pool that holds the new tokens, [blocks, kv_heads, 16, head_dim].
    pub keys: Global<E>,
    /// Its values, like the keys.
    pub values: Global<E>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// Positions of the new tokens, [sequences, any]: the first of each sequence is read, and one past the
    /// table is of no sequence.
    pub positions: Global<u32>,
    /// Tokens of each sequence with the new ones, \[sequences\].
    pub lengths: Global<u32>,
}

impl<E: SketchElement> Sketches<E> {
    /// For the sequences of a problem.
    ///
    /// # Errors
    /// Those of [`Budget::checked`] and of the problem; [`Error::HeadDim`], [`Error::TooLong`]; out of
    /// memory.
    pub fn new(device: &Device, problem: StepProblem, budget: Budget) -> Result<Self> {
        let (budget, problem) = (budget.checked()?, super::checked(problem)?);
        let StepProblem { kv_heads, head_dim, max_tokens, .. } = problem;
        let shape =
            SketchShape { stride: 1, kv_heads, head_dim, max_blocks: max_tokens.div_ceil(BLOCK_TOKENS) };
        let tiles = problem.sequences as usize * kv_heads as usize * tiles_of(max_tokens) as usize;
        let words = Buffer::zeroed(device, tiles * sketch_words(head_dim, budget.bits) as usize)?;
        let (sequences, bits) = (problem.sequences, budget.bits);
        Ok(Sketches { words, sequences, bits, shape, element: PhantomData })
    }

    /// Where they are.
    pub fn device(&self) -> &Device {
        self.words.device()
    }

    /// The words.
    pub fn words(&self) -> &Buffer<u32> {
        &self.words
    }

    /// Bytes of the sketches of so many tokens.
    pub fn bytes_of(&self, tokens: u32) -> u64 {
        let words = sketch_words(self.shape.head_dim, self.bits);
        4 * u64::from(tiles_of(tokens)) * u64::from(self.shape.kv_heads) * u64::from(words)
    }

    /// Makes the sketches of the first `tokens` tokens of sequence `to` those of sequence `from`, another
    /// one: a copy a KV head, of the tiles that have a token. It allocates nothing, waits for nothing and can
    /// be captured.
    ///
    /// # Errors
    /// [`Error::Length`] for sequences or tokens that there are not; what the device reports.
    pub fn copy(&mut self, stream: &Stream, from: usize, to: usize, tokens: usize) -> Result<()> {
        let tile = sketch_words(self.shape.head_dim, self.bits) as usize;
        let rows = Rows { sequences: self.sequences, kv_heads: self.shape.kv_heads };
        rows.copy(stream, &mut self.words, (from, to), tokens.div_ceil(TILE_TOKENS as usize) * tile)
    }

    /// Sketches the tiles that the tokens of some sequences are in, `row` the first of these and as many as
    /// there are lengths, from their first positions to before their lengths; they are in the pool already,
    /// and are up to `tokens`, one behind another. It allocates nothing, waits for nothing and can be
    /// captured. Tokens past the table are left out, and with them sequences whose positions are.
    ///
    /// With `slices` on the CPU's own path in place of the kernel, which gives the same bits.
    ///
    /// # Safety
    /// Until the launch has finished (for a capture: until each run of the graph has):
    /// - the memory behind every handle is there, reached by the stream's device, and written by nothing
    ///   else; with `slices` it is host memory;
    /// - a sequence's new tokens are at most `tokens`, and the table's entries up to its length are blocks of
    ///   the pool, which holds all keys and values of the tiles that the new tokens are in.
    ///
    /// # Errors
    /// [`Error::Length`] for handles of another problem; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub unsafe fn sketch_on(
        &mut self,
        stream: &Stream,
        (row, tokens): (usize, u32),
        slices: bool,
        handles: SketchHandles<E>,
    ) -> Result<()> {
        stream.device().check_same(self.device(), "the sketches")?;
        let SketchHandles { keys, values, table, positions, lengths } = handles;
        let (sequences, kv_heads) = (lengths.len() as u32, self.shape.kv_heads);
        if lengths.is_empty() || row + lengths.len() > self.sequences as usize {
            return length("the buffer of lengths", row + lengths.len(), self.sequences as usize);
        }
        length("the block table", table.len(), sequences as usize * self.shape.max_blocks as usize)?;
        let stride = positions.len() / sequences as usize;
        length("the buffer of positions", positions.len(), stride.max(1) * sequences as usize)?;
        let block = (BLOCK_TOKENS * kv_heads) as usize * self.shape.head_dim as usize;
        length("the buffer of keys", keys.len(), keys.len() / block * block)?;
        length("the buffer of values", values.len(), keys.len())?;
        let shape = SketchShape { stride: stride as u32, ..self.shape };
        let of_each = self.words.len() / self.sequences as usize;
        let sketches = self.words.global_range_mut(row * of_each..(row + lengths.len()) * of_each)?;
        if slices {
            // SAFETY: the caller's word; the emulator's streams have done what they were told when a call
            // returns.
            unsafe {
                let tokens = cpu::Tokens {
                    keys: slice(keys),
                    values: slice(values),
                    table: slice(table),
                    positions: slice(positions),
                    lengths: slice(lengths),
                };
                cpu::sketch::<E>(self.bits, shape, tokens, slice_mut(sketches));
            }
            return Ok(());
        }
        let kernel = E::sketch_kernel(self.bits).ok_or(Error::Bits { bits: self.bits })?;
        // The last token may be the first of its tile.
        let touched = (tokens.max(1) - 1).div_ceil(TILE_TOKENS) + 1;
        let launch = LaunchShape::new((touched, kv_heads, sequences), SKETCH_LANES * shape.head_dim / 2)
            .shared(sketch_bytes());
        let args = sketch::Args { keys, values, table, positions, lengths, sketches, shape };
        // SAFETY: lengths as just checked, what is past the table is left out, every word belongs to one
        // thread block of the grid, and the rest is this function's contract.
        Ok(unsafe { stream.launch(&kernel, launch, args) }?)
    }
}
