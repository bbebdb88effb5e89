//! A cache of rounded keys and values.

use super::run;
use crate::attention::PagedPool;
use crate::kv::{Held, KvCache, New, Opening, Paged, Result, Rotated, Sequence};
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

/// A cache of one sequence: what is appended is rounded on its way, and attention is exact over that.
#[derive(Debug)]
pub struct EchoCache {
    sequence: Sequence,
    pools: Vec<PagedPool<f16>>,
    paged: Paged,
    dropped: u32,
    /// Of a step of one token: a graph names it, so it stays.
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
        let sequence = Sequence::new(device, geometry, capacity);
        let pools = (0..geometry.layers).map(|_| sequence.pool()).collect::<Result<_>>()?;
        let (paged, step) = (Paged::new(&sequence)?, Rounded::new(device, geometry.kv_width())?);
        Ok(EchoCache { pools, paged, dropped, step, prompt: None, sequence })
    }
}

// SAFETY: pools, table, the plan for one token and its rounded row are made once; what prompts need is not
// captured.
unsafe impl KvCache for EchoCache {
    fn scheme(&self) -> &'static str {
        "echo"
    }

    fn held(&self) -> Held {
        self.sequence.held()
    }

    fn bytes(&self) -> u64 {
        self.sequence.geometry.token_bytes() * self.sequence.tokens as u64
    }

    fn step_bytes(&self) -> u64 {
        self.bytes()
    }

    fn begin(&mut self, _: &Stream, tokens: usize) -> Result<()> {
        self.sequence.room(tokens)?;
        self.paged.ready(&self.sequence, tokens)?;
        let elements = tokens * self.sequence.geometry.kv_width();
        if tokens > 1 && self.prompt.as_ref().is_none_or(|prompt| prompt.keys.len() < elements) {
            self.prompt = Some(Rounded::new(&self.sequence.device, elements)?);
        }
        self.sequence.begin(tokens);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let tokens = self.sequence.begun(layer)?;
        let EchoCache { sequence, pools, paged, dropped, step, prompt } = self;
        let new = new.rotated(stream, sequence.geometry, tokens)?;
        sequence.check_appended(stream, new)?;
        let Rotated { positions, keys, values } = new;
        let elements = tokens * sequence.geometry.kv_width();
        let target = prompt.as_mut().filter(|_| tokens > 1).unwrap_or(step);
        if sequence.on_slices(stream) {
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
        paged.append(stream, sequence, &mut pools[layer], new, tokens)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        self.sequence.begun(layer)?;
        self.paged.attend(stream, &self.sequence, &self.pools[layer], queries, output)
    }

    fn commit(&mut self) {
        self.sequence.commit();
    }
}
