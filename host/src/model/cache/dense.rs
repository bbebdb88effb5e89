//! Keys and values as they are, in f16.

use super::paged::Paged;
use super::sequence::Sequence;
use super::{Error, Geometry, KvCache, Result, Unrotated};
use crate::attention::{BLOCK_TOKENS, PagedPool};
use crate::dense::{self, AppendHandles, Problem};
use crate::model::kernels::rotate_and_append;
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::model::rope_append;
use kernels_gpu::model::rotation::RopeShape;

/// A dense cache of one sequence: a paged pool a layer, and exact attention.
///
/// The capacity decides how attention cuts its work ([`Plan`](dense::Plan)): another one may give other bits. Where it is one
/// part, up to 256 tokens, a chunk gives the bits that its tokens give one by one.
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

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path and takes some
    /// hundred times as long.
    pub fn with_kernels(mut self) -> Self {
        self.sequence.simd = false;
        self
    }
}

// SAFETY: pools, table and the plan for one token are made once; other plans are not captured.
unsafe impl KvCache for DenseCache {
    fn scheme(&self) -> &'static str {
        "dense"
    }

    fn geometry(&self) -> Geometry {
        self.sequence.geometry
    }

    fn tokens(&self) -> usize {
        self.sequence.tokens
    }

    fn capacity(&self) -> usize {
        self.sequence.capacity
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

    fn append(
        &mut self,
        stream: &Stream,
        layer: usize,
        positions: &Buffer<u32>,
        keys: &Buffer<f16>,
        values: &Buffer<f16>,
    ) -> Result<()> {
        let DenseCache { sequence, pools, paged } = self;
        let tokens = sequence.begun(layer)?;
        sequence.check_appended(stream, positions, keys, values)?;
        let elements = tokens * sequence.geometry.kv_width();
        let (pool_keys, pool_values) = pools[layer].both_mut();
        if sequence.on_slices(stream) {
            // Which gives the same, without an emulated launch.
            let Geometry { kv_heads, head_dim, .. } = sequence.geometry;
            let block_tokens = BLOCK_TOKENS as usize;
            for token in 0..tokens {
                let position = sequence.tokens + token;
                let (block, place) = (position / block_tokens, position % block_tokens);
                for head in 0..kv_heads {
                    let from = (token * kv_heads + head) * head_dim;
                    let to = ((block * kv_heads + head) * block_tokens + place) * head_dim;
                    stream.copy(keys, from..from + head_dim, pool_keys, to)?;
                    stream.copy(values, from..from + head_dim, pool_values, to)?;
                }
            }
            return Ok(paged.table.lengths_mut().write(0, &[(sequence.tokens + tokens) as u32])?);
        }
        let problem = sequence.problem(tokens);
        let handles = AppendHandles {
            new_keys: keys.global_range(..elements)?,
            new_values: values.global_range(..elements)?,
            positions: positions.global_range(..tokens)?,
            table: paged.table.blocks().global(),
            lengths: paged.table.lengths_mut().global_mut(),
            keys: pool_keys.global_mut(),
            values: pool_values.global_mut(),
        };
        // SAFETY: buffers of this device, long enough as just seen; the table has all blocks of the pools, and what is past
        // it is left out. Equal positions would leave one token's row or the other's. Dropping a buffer waits for the device.
        Ok(unsafe { dense::append(stream, problem, handles) }?)
    }

    fn rotate_and_append(
        &mut self,
        stream: &Stream,
        layer: usize,
        new: Unrotated<'_>,
        queries: &mut Buffer<f16>,
    ) -> Result<bool> {
        let DenseCache { sequence, pools, paged } = self;
        let tokens = sequence.begun(layer)?;
        if sequence.on_slices(stream) {
            return Ok(false);
        }
        let Unrotated { qkv, positions, frequencies, pairing, rotary } = new;
        stream.device().check_same(&sequence.device, "the cache")?;
        stream.device().check_same(qkv.device(), "the buffer of queries, keys and values")?;
        stream.device().check_same(positions.device(), "the buffer of positions")?;
        stream.device().check_same(frequencies.device(), "the buffer of frequencies")?;
        stream.device().check_same(queries.device(), "the buffer of queries")?;
        let geometry = sequence.geometry;
        let Problem { q_heads, kv_heads, head_dim, .. } = sequence.problem(tokens);
        let width = geometry.query_width() + 2 * geometry.kv_width();
        let (keys, values) = pools[layer].both_mut();
        let args = rope_append::Args {
            qkv: qkv.global_range(..tokens * width)?,
            positions: positions.global_range(..tokens)?,
            frequencies: frequencies.global_range(..rotary as usize / 2)?,
            queries: queries.global_range_mut(..tokens * geometry.query_width())?,
            table: paged.table.blocks().global(),
            lengths: paged.table.lengths_mut().global_mut(),
            keys: keys.global_mut(),
            values: values.global_mut(),
            shape: RopeShape { q_heads, kv_heads, head_dim, rotary },
            max_blocks: paged.table.blocks().len() as u32,
        };
        // SAFETY: as in `append`.
        unsafe { rotate_and_append(stream, pairing, args, tokens) }?;
        Ok(true)
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
