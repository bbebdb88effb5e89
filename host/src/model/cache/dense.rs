//! Keys and values as they are, in f16.

use super::exact::{self, Exact};
use super::{Error, Geometry, KvCache, Result};
use crate::attention::{BLOCK_TOKENS, BlockTable, PagedPool};
use crate::dense::{self, AppendHandles, Handles};
use crate::{BackendKind, Buffer, Device, Stream};
use half::f16;

/// A dense cache of one sequence: a paged pool a layer, and exact attention.
///
/// The capacity decides how attention cuts its work ([`Plan`](dense::Plan)): another one may give other bits. Where it is one
/// part, up to 256 tokens, a chunk gives the bits that its tokens give one by one.
#[derive(Debug)]
pub struct DenseCache {
    geometry: Geometry,
    capacity: usize,
    pools: Vec<PagedPool<f16>>,
    /// All layers have the same: block i holds tokens 16·i to 16·i + 15.
    table: BlockTable,
    tokens: usize,
    /// Tokens of the chunk that was begun.
    chunk: usize,
    decode: Exact,
    /// For chunks of more than one token, all of one length.
    prefill: Option<Exact>,
    /// Whether appending and attention take the CPU's own path in place of the kernels.
    simd: bool,
    device: Device,
}

impl DenseCache {
    /// An empty cache for up to `capacity` tokens.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; out of memory.
    pub fn new(device: &Device, geometry: Geometry, capacity: usize) -> Result<Self> {
        let decode = Exact::new(device, geometry, 1, capacity)?;
        let problem = decode.plan.problem();
        let blocks = problem.max_blocks();
        let bytes = geometry.token_bytes().saturating_mul(u64::from(blocks) * u64::from(BLOCK_TOKENS));
        Error::if_too_large(device, capacity, bytes)?;
        let pool = |_| PagedPool::new(device, blocks, problem.kv_heads, problem.head_dim);
        let mut table = BlockTable::new(device, 1, blocks, blocks)?;
        table.set(0, &(0..blocks).collect::<Vec<_>>(), 0)?;
        Ok(DenseCache {
            geometry,
            capacity,
            pools: (0..geometry.layers).map(pool).collect::<std::result::Result<_, _>>()?,
            table,
            tokens: 0,
            chunk: 0,
            decode,
            prefill: None,
            simd: device.kind() == BackendKind::Cpu,
            device: device.clone(),
        })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path and takes some
    /// hundred times as long.
    pub fn with_kernels(mut self) -> Self {
        self.simd = false;
        self
    }

    /// Whether a call takes the CPU's own path: a graph wants launches.
    fn on_slices(&self, stream: &Stream) -> bool {
        self.simd && !stream.is_capturing()
    }

    /// Tokens of the chunk, if it and the layer are there.
    fn begun(&self, layer: usize) -> Result<usize> {
        super::begun(self.chunk, layer, self.pools.len())
    }
}

// SAFETY: pools, table and the plan for one token are made once; other plans are not captured.
unsafe impl KvCache for DenseCache {
    fn scheme(&self) -> &'static str {
        "dense"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn tokens(&self) -> usize {
        self.tokens
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn bytes(&self) -> u64 {
        self.geometry.token_bytes() * self.tokens as u64
    }

    fn step_bytes(&self) -> u64 {
        self.bytes()
    }

    fn begin(&mut self, _: &Stream, tokens: usize) -> Result<()> {
        super::room(tokens, self.tokens, self.capacity)?;
        if tokens > 1 {
            Exact::for_chunk(&mut self.prefill, &self.device, self.geometry, tokens, self.capacity)?;
        }
        self.chunk = tokens;
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
        let tokens = self.begun(layer)?;
        let simd = self.on_slices(stream);
        stream.device().check_same(&self.device, "the cache")?;
        stream.device().check_same(positions.device(), "the buffer of positions")?;
        stream.device().check_same(keys.device(), "the buffer of keys")?;
        stream.device().check_same(values.device(), "the buffer of values")?;
        let elements = tokens * self.geometry.kv_width();
        let (pool_keys, pool_values) = self.pools[layer].both_mut();
        if simd {
            // Which gives the same, without an emulated launch.
            let Geometry { kv_heads, head_dim, .. } = self.geometry;
            let block_tokens = BLOCK_TOKENS as usize;
            for token in 0..tokens {
                let position = self.tokens + token;
                let (block, place) = (position / block_tokens, position % block_tokens);
                for head in 0..kv_heads {
                    let from = (token * kv_heads + head) * head_dim;
                    let to = ((block * kv_heads + head) * block_tokens + place) * head_dim;
                    stream.copy(keys, from..from + head_dim, pool_keys, to)?;
                    stream.copy(values, from..from + head_dim, pool_values, to)?;
                }
            }
            return Ok(self.table.lengths_mut().write(0, &[(self.tokens + tokens) as u32])?);
        }
        let problem = exact::problem(self.geometry, tokens, self.capacity);
        let handles = AppendHandles {
            new_keys: keys.global_range(..elements)?,
            new_values: values.global_range(..elements)?,
            positions: positions.global_range(..tokens)?,
            table: self.table.blocks().global(),
            lengths: self.table.lengths_mut().global_mut(),
            keys: pool_keys.global_mut(),
            values: pool_values.global_mut(),
        };
        // SAFETY: buffers of this device, long enough as just seen; the table has all blocks of the pools, and what is past
        // it is left out. Equal positions would leave one token's row or the other's. Dropping a buffer waits for the device.
        Ok(unsafe { dense::append(stream, problem, handles) }?)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let chunk = self.begun(layer)?;
        let simd = self.on_slices(stream);
        stream.device().check_same(&self.device, "the cache")?;
        stream.device().check_same(queries.device(), "the buffer of queries")?;
        stream.device().check_same(output.device(), "the output buffer")?;
        let length = chunk * self.geometry.query_width();
        let (queries, output) = (queries.global_range(..length)?, output.global_range_mut(..length)?);
        let pool = &self.pools[layer];
        let exact = match &mut self.prefill {
            Some(prefill) if chunk > 1 => prefill,
            _ => &mut self.decode,
        };
        let handles = Handles {
            queries,
            keys: pool.keys().global(),
            values: pool.values().global(),
            table: self.table.blocks().global(),
            lengths: self.table.lengths().global(),
            wanted: None,
            output,
            lse: exact.lse(),
        };
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; the table's blocks are those of
        // pools of this size. Dropping a buffer waits for the device.
        unsafe { exact.run(stream, simd, handles) }
    }

    fn commit(&mut self) {
        self.tokens += self.chunk;
        self.chunk = 0;
    }
}
