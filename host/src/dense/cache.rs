//! Keys and values as they are, in f16.

use crate::attention::rope::rotate_and_append;
use crate::attention::{BLOCK_TOKENS, PagedPool};
use crate::kv::{Error, Geometry, Held, KvCache, New, Paged, Raw, Result, Sequence};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::attention::rotation::rope_append;

/// A cache of one sequence in f16: a paged pool a layer, and exact attention.
///
/// The capacity decides how attention cuts its work ([`Plan`](crate::attention::dense::Plan)): another one
/// may give other bits. Where it is one part, up to 256 tokens, a chunk gives the bits that its tokens give
/// one by one.
#[derive(Debug)]
pub struct DenseCache {
    sequence: Sequence,
    pools: Vec<PagedPool<f16>>,
    /// All layers have the same table.
    paged: Paged,
}

impl DenseCache {
    /// An empty cache for up to `capacity` tokens.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; out of memory.
    pub fn new(device: &Device, geometry: Geometry, capacity: usize) -> Result<Self> {
        let sequence = Sequence::new(device, geometry, capacity);
        let blocks = u64::from(sequence.problem(1).checked()?.max_blocks());
        let bytes = geometry.token_bytes().saturating_mul(blocks * u64::from(BLOCK_TOKENS));
        Error::if_too_large(device, capacity, bytes)?;
        let pools = (0..geometry.layers).map(|_| sequence.pool()).collect::<Result<_>>()?;
        Ok(DenseCache { pools, paged: Paged::new(&sequence)?, sequence })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path and
    /// takes some hundred times as long.
    pub fn with_kernels(mut self) -> Self {
        self.sequence.simd = false;
        self
    }

    /// Adds keys and values that are not rotated yet, with the rotation, in one launch.
    fn rotate_and_append(
        &mut self,
        stream: &Stream,
        layer: usize,
        new: Raw<'_>,
        tokens: usize,
    ) -> Result<()> {
        let DenseCache { sequence, pools, paged } = self;
        stream.device().check_same(&sequence.device, "the cache")?;
        new.check_device(stream)?;
        let (geometry, shape) = (sequence.geometry, new.shape(sequence.geometry));
        let width = geometry.query_width() + 2 * geometry.kv_width();
        let (keys, values) = pools[layer].both_mut();
        let args = rope_append::Args {
            qkv: new.qkv.global_range(..tokens * width)?,
            positions: new.positions.global_range(..tokens)?,
            frequencies: new.frequencies.global_range(..new.rotary as usize / 2)?,
            queries: new.queries.global_range_mut(..tokens * geometry.query_width())?,
            table: paged.table.blocks().global(),
            lengths: paged.table.lengths_mut().global_mut(),
            keys: keys.global_mut(),
            values: values.global_mut(),
            shape,
            max_blocks: paged.table.max_blocks(),
        };
        // SAFETY: buffers of this device, long enough as just seen; the table has all blocks of the pools,
        // and what is past it is left out. Dropping a buffer waits for the device.
        Ok(unsafe { rotate_and_append(stream, new.pairing, args, tokens) }?)
    }
}

// SAFETY: pools, table and the plan for one token are made once; other plans are not captured.
unsafe impl KvCache for DenseCache {
    fn scheme(&self) -> &'static str {
        "dense"
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
        self.sequence.begin(tokens);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let tokens = self.sequence.begun(layer)?;
        match new {
            New::Raw(raw) if !self.sequence.on_slices(stream) => {
                self.rotate_and_append(stream, layer, raw, tokens)
            }
            new => {
                let rotated = new.rotated(stream, self.sequence.geometry, tokens)?;
                self.paged.append(stream, &self.sequence, &mut self.pools[layer], rotated, tokens)
            }
        }
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
