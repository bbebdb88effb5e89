//! What the checks after a step need: of the order of blocks, and of what is stored.

use crate::certified::Result;
use crate::{Buffer, Device, Stream};
use kernels_gpu::attention::ROWS;
use kernels_gpu::certified::{Exact, Watch};

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
}

impl Watching {
    /// For `heads` query heads of all sequences, and lists of `places`.
    pub(super) fn new(device: &Device, watch: Watch, heads: usize, places: usize) -> Result<Self> {
        let ranked = if watch.depth > 0 { places * ROWS as usize } else { 0 };
        Ok(Watching {
            watch,
            masses: Buffer::new(device, ranked)?,
            flags: Buffer::zeroed(device, heads)?,
            exacts: Buffer::new(device, heads)?,
            clock: Buffer::zeroed(device, 1)?,
        })
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        of(&self.masses) + of(&self.flags) + of(&self.exacts) + of(&self.clock)
    }

    /// Fills what no kernel reads before another has written it.
    pub(super) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<()> {
        stream.fill_u8(&mut self.masses, .., byte)?;
        Ok(stream.fill_u8(&mut self.exacts, .., byte)?)
    }

    /// All of it, word by word.
    pub(super) fn between(&self) -> Result<[(&'static str, Vec<u32>); 4]> {
        Ok([
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
