//! What the checks of a step need: of the order of blocks, and of what is stored.

use super::Checked;
use crate::certified::{BLOCK_TOKENS, Result};
use crate::{Buffer, Device, Stream};
use kernels_gpu::attention::ROWS;
use kernels_gpu::certified::auditing::drawn;
use kernels_gpu::certified::carried::LOOKED;
use kernels_gpu::certified::{Exact, ListHead, StepShape, Watch};

/// What is checked, and the buffers for it.
pub(super) struct Watching {
    pub(super) watch: Watch,
    /// Exact masses of listed blocks, [places of the lists, 8].
    pub(super) masses: Buffer<f32>,
    /// What was found of each query head; 0 between steps.
    pub(super) flags: Buffer<u32>,
    /// What a head's certificate is on the dense rung.
    pub(super) exacts: Buffer<Exact>,
    /// Steps so far.
    pub(super) clock: Buffer<u32>,
    /// Of steps by a carried list: what of each row's list was compared, as `canary` notes it.
    pub(super) looked: Buffer<u32>,
}

impl Watching {
    /// After steps that choose for themselves: for `heads` query heads of all sequences, and lists of
    /// `places`.
    pub(super) fn after(device: &Device, watch: Watch, heads: usize, places: usize) -> Result<Self> {
        let ranked = if watch.depth > 0 { places * ROWS as usize } else { 0 };
        Watching::new(device, watch, [ranked, heads, 1, 0])
    }

    /// Ahead of steps by a carried list: for so many rows of blocks.
    pub(super) fn ahead(device: &Device, watch: Watch, rows: usize) -> Result<Self> {
        Watching::new(device, watch, [0, 0, 0, rows])
    }

    fn new(device: &Device, watch: Watch, [masses, heads, clocks, rows]: [usize; 4]) -> Result<Self> {
        Ok(Watching {
            watch,
            masses: Buffer::new(device, masses)?,
            flags: Buffer::zeroed(device, heads)?,
            exacts: Buffer::new(device, heads)?,
            clock: Buffer::zeroed(device, clocks)?,
            looked: Buffer::zeroed(device, rows * LOOKED as usize)?,
        })
    }

    /// What the last step has read for its checks: of these lists, and of what was drawn in sequences of
    /// these lengths.
    pub(super) fn checked(&self, lists: &[ListHead], lengths: &[u32], shape: StepShape) -> Result<Checked> {
        let compares = self.watch.compares();
        let mut checked = Checked::default();
        for list in lists {
            checked.key_tiles += u64::from(list.key_tiles);
            if compares {
                checked.quantized_tiles += u64::from(list.entries);
                checked.value_tiles += u64::from(list.value_tiles);
            }
        }
        // The clock was advanced when the step was over.
        let step = self.clock.to_vec()?[0].wrapping_sub(1);
        checked.add(self.drawn(lengths, shape, |_| step));
        Ok(checked)
    }

    /// What the last step by a carried list has read for its checks, if there were any: of the list that
    /// there was, and of what was drawn.
    pub(super) fn compared(&self, lengths: &[u32], shape: StepShape) -> Result<Checked> {
        let mut checked = self.drawn(lengths, shape, |length| length);
        for row in self.looked.to_vec()?.chunks_exact(LOOKED as usize) {
            checked.quantized_tiles += u64::from(row[0]);
            checked.key_tiles += u64::from(row[1]);
            checked.value_tiles += u64::from(row[2]);
        }
        Ok(checked)
    }

    /// What was drawn in sequences of these lengths, by `key` of each.
    fn drawn(&self, lengths: &[u32], shape: StepShape, key: impl Fn(u32) -> u32) -> Checked {
        let mut checked = Checked::default();
        let rows = shape.kv_heads * shape.row_groups();
        for (sequence, length) in lengths.iter().enumerate() {
            for row in sequence as u32 * rows..(sequence as u32 + 1) * rows {
                let looked = |block: &u32| drawn(self.watch.draw, key(*length), row, *block);
                let count = (0..length / BLOCK_TOKENS).filter(looked).count() as u64;
                checked.add(Checked { quantized_tiles: count, key_tiles: count, value_tiles: count });
            }
        }
        checked
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        of(&self.masses) + of(&self.flags) + of(&self.exacts) + of(&self.clock) + of(&self.looked)
    }

    /// Fills what no kernel reads before another has written it.
    pub(super) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<()> {
        stream.fill_u8(&mut self.masses, .., byte)?;
        stream.fill_u8(&mut self.looked, .., byte)?;
        Ok(stream.fill_u8(&mut self.exacts, .., byte)?)
    }

    /// All of it, word by word.
    pub(super) fn between(&self) -> Result<Vec<(&'static str, Vec<u32>)>> {
        if !self.looked.is_empty() {
            return Ok(vec![("looked", words(&self.looked)?)]);
        }
        Ok(vec![
            ("masses", words(&self.masses)?),
            ("flags", words(&self.flags)?),
            ("exacts", words(&self.exacts)?),
            ("clock", words(&self.clock)?),
        ])
    }
}

/// Bytes of a buffer.
pub(super) fn of<T: simt::Pod>(buffer: &Buffer<T>) -> usize {
    buffer.len() * size_of::<T>()
}

/// A buffer word by word.
pub(super) fn words<T: simt::Pod>(buffer: &Buffer<T>) -> Result<Vec<u32>> {
    Ok(bytemuck::cast_slice(&buffer.to_vec()?).to_vec())
}
