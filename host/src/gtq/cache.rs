//! A cache of codes.

use super::{
    AppendHandles, Books, Encoder, Error, Handles, Order, Places, Plan, RawHandles, Settings, Window, rows,
};
use crate::attention::BLOCK_TOKENS;
use crate::kv::restored::Coded;
use crate::kv::{
    self, Attending, Chunk, Held, KvCache, New, Opening, Paged, Restored, Result, Rows, Sequences,
};
use crate::{Buffer, Stream};
use kernels_gpu::gtq::Side;
use rayon::prelude::*;
use std::ops::Range;

/// A plan and what it writes besides the output.
#[derive(Debug)]
struct Attention {
    plan: Plan,
    lse: Buffer<f32>,
}

impl Attention {
    fn new(sequences: &Sequences, books: &Books, chunk: Chunk) -> Result<Self> {
        let plan = Plan::new(&sequences.device, sequences.problem_of(chunk), books.clone())?;
        let rows = plan.problem().query_rows();
        Ok(Attention { plan, lse: Buffer::new(&sequences.device, rows)? })
    }
}

/// A cache of codes. There are no originals: a chunk's attention, a prompt's too, sees what is stored.
#[derive(Debug)]
pub struct GtqCache {
    sequences: Sequences,
    encoder: Encoder,
    /// Tiles of each layer, [blocks, kv_heads].
    pools: Vec<Buffer<u32>>,
    /// The window of each layer, [sequences, kv_heads] slots.
    near: Vec<Buffer<u32>>,
    /// The order of each layer's channels, [kv_heads, head_dim]; empty of whole keys.
    orders: Vec<Buffer<u8>>,
    /// Of each layer the first key and the first value that could not be stored.
    problems: Vec<Buffer<u32>>,
    /// Table and lengths.
    paged: Paged,
    step: Attention,
    /// For a prompt's chunks: all but the last of a prompt are of one length.
    prompt: Option<Attention>,
}

impl GtqCache {
    /// An empty cache of whole keys.
    ///
    /// # Errors
    /// [`kv::Error::Memory`] if the device can never hold it; heads that there is no kernel for; out of
    /// memory.
    pub fn new(opening: &Opening<'_>, settings: Settings) -> Result<Self> {
        let none = Order { layers: vec![Vec::new(); opening.geometry.layers] };
        GtqCache::in_order(opening, Settings { blocks: false, ..settings }, &none)
    }

    /// An empty cache; `order` is that of keys in parts.
    ///
    /// # Errors
    /// As [`new`](Self::new); an order of other heads.
    pub fn in_order(opening: &Opening<'_>, settings: Settings, order: &Order) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let sequences = Sequences::new(device, geometry, capacity);
        let problem = sequences.step_problem();
        let books = Books::new(problem.head_dim, settings)?;
        let problem = problem.checked()?;
        let tiles = u64::from(problem.sequences * problem.max_blocks()) * u64::from(problem.kv_heads);
        let bytes = tiles * u64::from(books.layout.bytes());
        let window = books.window_words(problem);
        let of_layer = bytes + 4 * window as u64;
        kv::Error::if_too_large(device, capacity, of_layer.saturating_mul(geometry.layers as u64))?;
        super::length("the list of orders", order.layers.len(), geometry.layers)?;
        for layer in &order.layers {
            super::length("a layer's order", layer.len(), books.order_bytes(problem.kv_heads))?;
            if let Some(channel) = layer.iter().find(|channel| u32::from(**channel) >= problem.head_dim) {
                let (channel, head_dim) = (*channel, problem.head_dim);
                return Err(Error::Channel { channel, head_dim }.into());
            }
        }
        let orders = order.layers.iter().map(|layer| Buffer::from_slice(device, layer));
        let pools = (0..geometry.layers).map(|_| Buffer::new(device, bytes as usize / 4));
        // Numbers of tokens that are not there are read with those that are.
        let near = (0..geometry.layers).map(|_| Buffer::zeroed(device, window));
        let problems = (0..geometry.layers).map(|_| Buffer::from_slice(device, &[u32::MAX; 2]));
        Ok(GtqCache {
            pools: pools.collect::<crate::Result<_>>()?,
            near: near.collect::<crate::Result<_>>()?,
            orders: orders.collect::<crate::Result<_>>()?,
            problems: problems.collect::<crate::Result<_>>()?,
            paged: Paged::new(&sequences)?,
            step: Attention::new(&sequences, &books, Chunk::Step)?,
            prompt: None,
            encoder: Encoder::new(device, books)?,
            sequences,
        })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path.
    pub fn with_kernels(mut self) -> Self {
        self.sequences.simd = false;
        self
    }

    /// How it quantizes, and where codes lie.
    pub fn books(&self) -> &Books {
        self.encoder.books()
    }

    /// The tiles of a layer, [blocks, kv_heads].
    pub fn tiles(&self, layer: usize) -> &Buffer<u32> {
        &self.pools[layer]
    }

    /// The window of a layer, [sequences, kv_heads] slots.
    pub fn near(&self, layer: usize) -> &Buffer<u32> {
        &self.near[layer]
    }

    /// The words of a window that are about some sequences.
    fn of_window(&self, sequences: Range<usize>) -> Range<usize> {
        let all = self.sequences.step_problem().sequences as usize;
        let of_each = self.near.first().map_or(0, Buffer::len) / all;
        sequences.start * of_each..sequences.end * of_each
    }

    /// The blocks of a sequence, in order.
    pub fn blocks(&self, sequence: usize) -> &[u32] {
        self.paged.blocks(sequence)
    }
}

/// The sequences that a chunk is about, of `all`.
fn sequences_of(chunk: Chunk, all: usize) -> Range<usize> {
    match chunk {
        Chunk::Step => 0..all,
        Chunk::Prompt { sequence, .. } => sequence..sequence + 1,
    }
}

// SAFETY: pools, windows, orders, words of problems, levels, table and the plan for steps are made once; what
// prompts need is not captured.
unsafe impl KvCache for GtqCache {
    fn scheme(&self) -> &'static str {
        if self.books().settings.blocks { super::BLOCKS } else { "gtq" }
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    fn bytes(&self) -> u64 {
        let geometry = self.sequences.geometry;
        let of_sequence = 4 * self.of_window(0..1).len() * geometry.layers;
        let windows = self.sequences.held().sequences.len() * of_sequence;
        let orders: usize = self.orders.iter().map(Buffer::bytes).sum();
        let token = u64::from(self.books().layout.token_bytes()) * geometry.kv_heads as u64;
        token * geometry.layers as u64 * self.sequences.tokens() as u64 + (windows + orders) as u64
    }

    fn step_bytes(&self) -> u64 {
        let geometry = self.sequences.geometry;
        let (settings, dim) = (self.books().settings, geometry.head_dim as u32);
        let of_head: u64 = self.held().lengths().map(|n| settings.step_bytes(dim, n as u64)).sum();
        of_head * (geometry.kv_heads * geometry.layers) as u64
    }

    fn restored(&self, stream: &Stream, layer: usize, sequence: usize) -> Result<Option<Restored>> {
        stream.synchronize()?;
        let tokens = self.sequences.length(sequence)?;
        let (heads, dim) = (self.sequences.geometry.kv_heads, self.sequences.geometry.head_dim);
        let (tiles, order) = (self.pools[layer].to_vec()?, self.orders[layer].to_vec()?);
        let tiles: &[u8] = bytemuck::cast_slice(&tiles);
        let (books, blocks) = (self.books(), self.blocks(sequence));
        let coded = Coded::outside(Window::of(books.settings.sink, books.settings.recent));
        // The scales of a window's key, and that of its value.
        let scales = books.layout.slot().token_bytes() - 4 * books.layout.head_dim;
        let side = |side: Side| {
            let mut rows = vec![0f32; tokens * heads * dim];
            rows.par_chunks_exact_mut(dim).enumerate().for_each(|(row, out)| {
                let (token, head) = (row / heads, row % heads);
                let block = blocks[token / BLOCK_TOKENS as usize] as usize;
                let bytes = books.layout.bytes() as usize;
                let tile = &tiles[(block * heads + head) * bytes..][..bytes];
                let order = order.get(head * dim..(head + 1) * dim).unwrap_or_default();
                let x = rows::restored(tile, books, side, token as u32 % BLOCK_TOKENS, order);
                out.iter_mut().zip(x).for_each(|(out, x)| *out = x as f32);
            });
            let layout = books.layout;
            let bytes = f64::from(layout.head_dim * layout.bits(side)) / 8.0;
            let bytes = bytes + f64::from(layout.norm_bytes(side));
            let of_value = size_of::<f32>() as u32;
            let extra = if side == Side::Key { scales - of_value } else { of_value };
            kv::restored::Side { rows, bytes, coded: Coded { extra, ..coded } }
        };
        Ok(Some(Restored { keys: side(Side::Key), values: side(Side::Value) }))
    }

    /// Says which row could not be stored, if one could not.
    fn check(&mut self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        for (layer, problems) in self.problems.iter().enumerate() {
            for (what, problem) in ["key", "value"].into_iter().zip(problems.to_vec()?) {
                if problem != u32::MAX {
                    let heads = self.sequences.geometry.kv_heads as u32;
                    let (position, head) = (problem / heads, problem % heads);
                    return Err(Error::Row { layer, head, what, position }.into());
                }
            }
        }
        Ok(())
    }

    fn join(&mut self, _: &Stream) -> Result<usize> {
        self.paged.join(&mut self.sequences)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        let tokens = self.sequences.length(sequence)?;
        let fork = self.paged.fork(stream, &mut self.sequences, sequence, std::iter::empty())?;
        let full = tokens / BLOCK_TOKENS as usize;
        if !tokens.is_multiple_of(BLOCK_TOKENS as usize) {
            let (from, to) = (self.paged.blocks(sequence)[full], self.paged.blocks(fork)[full]);
            let words = self.books().layout.bytes() as usize / 4 * self.sequences.geometry.kv_heads;
            let mut block = vec![0u32; words];
            for pool in &mut self.pools {
                stream.download(pool, from as usize * words, &mut block)?;
                stream.upload(&block, pool, to as usize * words)?;
            }
        }
        let [from, to] = [sequence, fork].map(|sequence| self.of_window(sequence..sequence + 1));
        let mut own = vec![0u32; from.len()];
        for window in self.near.iter_mut().filter(|_| !from.is_empty()) {
            stream.download(window, from.start, &mut own)?;
            stream.upload(&own, window, to.start)?;
        }
        Ok(fork)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.paged.leave(stream, &mut self.sequences, sequence)
    }

    fn begin(&mut self, _: &Stream, chunk: Chunk) -> Result<()> {
        self.sequences.room(chunk)?;
        if let Chunk::Prompt { tokens, .. } = chunk {
            let planned = self.prompt.as_ref().map(|prompt| prompt.plan.problem().query_tokens as usize);
            if planned != Some(tokens) {
                // The old scratch goes before the new one comes.
                self.prompt = None;
                self.prompt = Some(Attention::new(&self.sequences, self.encoder.books(), chunk)?);
            }
        }
        self.sequences.begin(chunk);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let chunk = self.sequences.begun(layer)?;
        let own = self.of_window(sequences_of(chunk, self.sequences.step_problem().sequences as usize));
        let GtqCache { sequences, encoder, pools, near, orders, problems, paged, .. } = self;
        let (rows, geometry) = (sequences.rows(chunk), sequences.geometry);
        let slices = sequences.on_slices(stream);
        let Rows { table, lengths, .. } = paged.rows(chunk)?;
        let places = Places {
            positions: new.positions().global_range(..rows)?,
            table,
            order: orders[layer].global(),
            lengths,
            tiles: pools[layer].global_mut(),
            near: near[layer].global_range_mut(own)?,
            problems: problems[layer].global_mut(),
        };
        let new = match new {
            New::Raw(raw) if !slices => {
                stream.device().check_same(&sequences.device, "the cache")?;
                raw.check_device(stream)?;
                let width = geometry.query_width() + 2 * geometry.kv_width();
                let handles = RawHandles {
                    qkv: raw.qkv.global_range(..rows * width)?,
                    frequencies: raw.frequencies.global_range(..raw.rotary as usize / 2)?,
                    rotary: raw.rotary,
                    pairing: raw.pairing,
                    queries: raw.queries.global_range_mut(..rows * geometry.query_width())?,
                    places,
                };
                // SAFETY: as below.
                return Ok(unsafe { encoder.rotate_and_run(stream, sequences.problem_of(chunk), handles) }?);
            }
            new => new.rotated(stream, geometry, rows)?,
        };
        sequences.check_appended(stream, new)?;
        let elements = rows * geometry.kv_width();
        let handles = AppendHandles {
            new_keys: new.keys.global_range(..elements)?,
            new_values: new.values.global_range(..elements)?,
            places,
        };
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; a row of the
        // table has all blocks of its sequence, and what is past it is left out, as are rows without a
        // sequence. The order's channels are the head's, as the cache saw when it was made. Dropping a buffer
        // waits for the device.
        Ok(unsafe { encoder.run_on(stream, sequences.problem_of(chunk), slices, handles) }?)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<half::f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let attending = self.sequences.attending(stream, layer, queries, output)?;
        let Attending { chunk, queries, output } = attending;
        let own = self.of_window(sequences_of(chunk, self.sequences.step_problem().sequences as usize));
        let GtqCache { sequences, pools, near, orders, paged, step, prompt, .. } = self;
        let Rows { table, lengths, .. } = paged.rows(chunk)?;
        let attention = prompt.as_mut().filter(|_| chunk != Chunk::Step).unwrap_or(step);
        let handles = Handles {
            queries,
            tiles: pools[layer].global(),
            near: near[layer].global_range(own)?,
            table,
            order: orders[layer].global(),
            lengths: lengths.as_const(),
            output,
            lse: attention.lse.global_mut(),
        };
        let slices = sequences.on_slices(stream);
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; the table's
        // blocks are those of the pool, the order's channels the head's. Dropping a buffer waits for the
        // device.
        Ok(unsafe { attention.plan.run_on(stream, slices, handles) }?)
    }

    fn commit(&mut self) {
        self.sequences.commit();
    }
}
