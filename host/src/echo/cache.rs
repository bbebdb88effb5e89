//! A cache of rounded keys and values.

use super::run;
use crate::attention::PagedPool;
use crate::kv::{Chunk, Held, KvCache, New, Opening, Paged, Result, Rotated, Sequences};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::echo::{round, rounded};

/// Keys and values of a chunk, rounded.
#[derive(Debug)]
struct Rounded {
    keys: Buffer<f16>,
    values: Buffer<f16>,
}

impl Rounded {
    fn new(device: &Device, elements: usize) -> Result<Self> {
        Ok(Rounded { keys: Buffer::new(device, elements)?, values: Buffer::new(device, elements)? })
    }
}

/// A cache: what is appended is rounded on its way, and attention is exact over that.
#[derive(Debug)]
pub struct EchoCache {
    sequences: Sequences,
    pools: Vec<PagedPool<f16>>,
    paged: Paged,
    dropped: u32,
    /// Of a step: a graph names it, so it stays.
    step: Rounded,
    /// Of the longest chunk of a prompt so far.
    prompt: Option<Rounded>,
}

impl EchoCache {
    /// An empty cache whose numbers have `dropped` bits fewer than f16.
    ///
    /// # Errors
    /// Heads that there is no kernel for; out of memory.
    pub fn new(opening: &Opening<'_>, dropped: u32) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let sequences = Sequences::new(device, geometry, capacity);
        let pools = (0..geometry.layers).map(|_| sequences.pool()).collect::<Result<_>>()?;
        let step = Rounded::new(device, sequences.rows(Chunk::Step) * geometry.kv_width())?;
        Ok(EchoCache { pools, paged: Paged::new(&sequences)?, dropped, step, prompt: None, sequences })
    }
}

// SAFETY: pools, table, the plan for steps and its rounded rows are made once; what prompts need is not
// captured.
unsafe impl KvCache for EchoCache {
    fn scheme(&self) -> &'static str {
        "echo"
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    fn bytes(&self) -> u64 {
        self.sequences.geometry.token_bytes() * self.sequences.tokens() as u64
    }

    fn step_bytes(&self) -> u64 {
        self.bytes()
    }

    fn join(&mut self, _: &Stream) -> Result<usize> {
        self.paged.join(&mut self.sequences)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        self.paged.fork(stream, &mut self.sequences, sequence, self.pools.iter_mut())
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.paged.leave(stream, &mut self.sequences, sequence)
    }

    fn begin(&mut self, _: &Stream, chunk: Chunk) -> Result<()> {
        self.sequences.room(chunk)?;
        self.paged.ready(&self.sequences, chunk)?;
        let elements = self.sequences.rows(chunk) * self.sequences.geometry.kv_width();
        let fits = |prompt: &Rounded| prompt.keys.len() >= elements;
        if chunk != Chunk::Step && !self.prompt.as_ref().is_some_and(fits) {
            self.prompt = Some(Rounded::new(&self.sequences.device, elements)?);
        }
        self.sequences.begin(chunk);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let chunk = self.sequences.begun(layer)?;
        let EchoCache { sequences, pools, paged, dropped, step, prompt } = self;
        let rows = sequences.rows(chunk);
        let new = new.rotated(stream, sequences.geometry, rows)?;
        sequences.check_appended(stream, new)?;
        let Rotated { positions, keys, values } = new;
        let elements = rows * sequences.geometry.kv_width();
        let target = prompt.as_mut().filter(|_| chunk != Chunk::Step).unwrap_or(step);
        if sequences.on_slices(stream) {
            for (from, to) in [(keys, &mut target.keys), (values, &mut target.values)] {
                let mut row = vec![f16::ZERO; elements];
                from.read(0, &mut row)?;
                row.iter_mut().for_each(|x| *x = rounded(*x, *dropped));
                to.write(0, &row)?;
            }
        } else {
            let args = round::Args {
                keys: keys.global_range(..elements)?,
                values: values.global_range(..elements)?,
                rounded_keys: target.keys.global_range_mut(..elements)?,
                rounded_values: target.values.global_range_mut(..elements)?,
                count: elements as u32,
                dropped: *dropped,
            };
            // SAFETY: buffers of this device, as long as just seen. Dropping a buffer waits for the device.
            unsafe { run(stream, args) }?;
        }
        let new = Rotated { positions, keys: &target.keys, values: &target.values };
        paged.append(stream, sequences, &mut pools[layer], New::Rotated(new), chunk)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let attending = self.sequences.attending(stream, layer, queries, output)?;
        self.paged.attend(stream, &self.sequences, &self.pools[layer], attending)
    }

    fn commit(&mut self) {
        self.sequences.commit();
    }
}
