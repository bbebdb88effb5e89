//! Keys and values as they are, in f16.

use super::{Error, Geometry, KvCache, Result};
use crate::attention::{BLOCK_TOKENS, BlockTable, PagedPool};
use crate::dense::{self, Handles, Plan, Problem};
use crate::{BackendKind, Buffer, Device, Stream};
use half::f16;

/// A dense cache of one sequence: a paged pool a layer, and exact attention.
///
/// The capacity decides how attention cuts its work ([`Plan`]): another one may give other bits. Where it is one part, up to 256
/// tokens, a chunk gives the bits that its tokens give one by one.
#[derive(Debug)]
pub struct DenseCache {
    geometry: Geometry,
    capacity: usize,
    pools: Vec<PagedPool<f16>>,
    /// All layers have the same: block i holds tokens 16·i to 16·i + 15.
    table: BlockTable,
    blocks: Vec<u32>,
    tokens: usize,
    /// Tokens of the chunk that was begun.
    chunk: usize,
    decode: Attention,
    /// For chunks of more than one token, all of one length.
    prefill: Option<Attention>,
    /// Whether attention takes the CPU's SIMD path in place of the kernels.
    simd: bool,
    device: Device,
}

/// A plan and what it writes besides the output.
#[derive(Debug)]
struct Attention {
    plan: Plan<f16>,
    lse: Buffer<f32>,
}

impl Attention {
    fn new(device: &Device, geometry: Geometry, query_tokens: usize, capacity: usize) -> Result<Self> {
        let Geometry { q_heads, kv_heads, head_dim, .. } = geometry;
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let problem = Problem {
            sequences: 1,
            q_heads: narrow(q_heads),
            kv_heads: narrow(kv_heads),
            head_dim: narrow(head_dim),
            query_tokens: narrow(query_tokens),
            max_tokens: narrow(capacity),
        };
        let plan = Plan::new(device, problem)?;
        Ok(Attention { plan, lse: Buffer::new(device, query_tokens * q_heads)? })
    }
}

impl DenseCache {
    /// An empty cache for up to `capacity` tokens.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; out of memory.
    pub fn new(device: &Device, geometry: Geometry, capacity: usize) -> Result<Self> {
        let decode = Attention::new(device, geometry, 1, capacity)?;
        let problem = decode.plan.problem();
        let blocks = problem.max_blocks();
        let bytes = token_bytes(geometry).saturating_mul(u64::from(blocks) * u64::from(BLOCK_TOKENS));
        if let Some(memory) = device.info().memory_bytes.filter(|memory| bytes > *memory) {
            let device = device.info().name.clone();
            return Err(Error::Memory { tokens: capacity, bytes, device, memory });
        }
        let pool = |_| PagedPool::new(device, blocks, problem.kv_heads, problem.head_dim);
        Ok(DenseCache {
            geometry,
            capacity,
            pools: (0..geometry.layers).map(pool).collect::<std::result::Result<_, _>>()?,
            table: BlockTable::new(device, 1, blocks, blocks)?,
            blocks: (0..blocks).collect(),
            tokens: 0,
            chunk: 0,
            decode,
            prefill: None,
            simd: device.kind() == BackendKind::Cpu,
            device: device.clone(),
        })
    }

    /// Attention through the kernels on every device: on the CPU the emulator, which gives the bits of the SIMD path and takes
    /// some hundred times as long.
    pub fn with_kernels(mut self) -> Self {
        self.simd = false;
        self
    }

    fn layer(&mut self, layer: usize) -> Result<&mut PagedPool<f16>> {
        if self.chunk == 0 {
            return Err(Error::Order {
                what: "the chunk's number of tokens",
                value: 0,
                limit: "begin one first",
            });
        }
        let limit = "the cache was made for fewer layers";
        self.pools.get_mut(layer).ok_or(Error::Order { what: "the layer", value: layer, limit })
    }
}

/// Bytes of a token in all layers.
fn token_bytes(geometry: Geometry) -> u64 {
    2 * size_of::<f16>() as u64 * geometry.layers as u64 * geometry.kv_width() as u64
}

impl KvCache for DenseCache {
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
        token_bytes(self.geometry) * self.tokens as u64
    }

    fn begin(&mut self, _: &Stream, tokens: usize) -> Result<()> {
        let (held, capacity) = (self.tokens, self.capacity);
        if tokens > capacity - held {
            return Err(Error::Full { tokens, held, capacity });
        }
        if tokens > 1 && self.prefill.as_ref().is_none_or(|p| p.plan.problem().query_tokens != tokens as u32)
        {
            self.prefill = Some(Attention::new(&self.device, self.geometry, tokens, capacity)?);
        }
        self.table.set(0, &self.blocks, (held + tokens) as u32)?;
        self.chunk = tokens;
        Ok(())
    }

    fn append(
        &mut self,
        stream: &Stream,
        layer: usize,
        keys: &Buffer<f16>,
        values: &Buffer<f16>,
    ) -> Result<()> {
        let (first, tokens) = (self.tokens, self.chunk);
        let Geometry { kv_heads, head_dim, .. } = self.geometry;
        let (pool_keys, pool_values) = self.layer(layer)?.both_mut();
        let block_tokens = BLOCK_TOKENS as usize;
        for token in 0..tokens {
            let (block, place) = ((first + token) / block_tokens, (first + token) % block_tokens);
            for head in 0..kv_heads {
                let from = (token * kv_heads + head) * head_dim;
                let to = ((block * kv_heads + head) * block_tokens + place) * head_dim;
                stream.copy(keys, from..from + head_dim, pool_keys, to)?;
                stream.copy(values, from..from + head_dim, pool_values, to)?;
            }
        }
        Ok(())
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let chunk = self.chunk;
        self.layer(layer)?;
        stream.device().check_same(&self.device, "the cache")?;
        stream.device().check_same(queries.device(), "the buffer of queries")?;
        stream.device().check_same(output.device(), "the output buffer")?;
        let length = chunk * self.geometry.query_width();
        let (queries, output) = (queries.global_range(..length)?, output.global_range_mut(..length)?);
        let pool = &self.pools[layer];
        let attention = match &mut self.prefill {
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
            lse: attention.lse.global_mut(),
        };
        if self.simd {
            // The emulator's streams have done what they were told when a call returns.
            // SAFETY: buffers of the CPU backend are host memory, and this cache holds them all or borrows them; nothing else
            // writes them meanwhile.
            return unsafe { attend_slices(attention.plan.problem(), handles) };
        }
        // SAFETY: buffers of this device, long enough as just seen; the table checked its blocks against pools of this size.
        // Dropping a buffer waits for the device.
        unsafe { run(&mut attention.plan, stream, handles) }
    }

    fn commit(&mut self) {
        self.tokens += self.chunk;
        self.chunk = 0;
    }
}

/// Attention of one chunk in one layer.
///
/// # Safety
/// As [`Plan::run_on`].
unsafe fn run(plan: &mut Plan<f16>, stream: &Stream, handles: Handles<f16>) -> Result<()> {
    // SAFETY: the caller's word.
    Ok(unsafe { plan.run_on(stream, handles) }?)
}

/// The same on the CPU, by its SIMD path.
///
/// # Safety
/// The handles are host memory of their lengths, output and log-sums written by nobody else.
unsafe fn attend_slices(problem: Problem, handles: Handles<f16>) -> Result<()> {
    unsafe fn slice<'a, T: simt::Pod>(handle: simt::Global<T>) -> &'a [T] {
        if handle.is_empty() {
            return &[];
        }
        // SAFETY: the caller's word; the backend aligns what it allocates.
        unsafe { std::slice::from_raw_parts(handle.address() as *const T, handle.len()) }
    }
    unsafe fn slice_mut<'a, T: simt::Pod>(handle: simt::GlobalMut<T>) -> &'a mut [T] {
        if handle.is_empty() {
            return &mut [];
        }
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(handle.address() as *mut T, handle.len()) }
    }
    // SAFETY: the caller's word.
    let (slices, output, lse) = unsafe {
        let Handles { queries, keys, values, table, lengths, output, lse, .. } = handles;
        let slices = dense::cpu::Slices {
            queries: slice(queries),
            keys: slice(keys),
            values: slice(values),
            table: slice(table),
            lengths: slice(lengths),
        };
        (slices, slice_mut(output), slice_mut(lse))
    };
    Ok(dense::cpu::attend(problem, slices, output, lse)?)
}
