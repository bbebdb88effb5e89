//! A model's keys and values as codes.

use super::prompt::Room;
use super::setting::{RESTORED, STEP};
use super::{Books, Code, Encode, Handles, Plan, Setting, Source, Store, Tables, Turning};
use crate::attention::dense;
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::kv::restored::{Coded, Side};
use crate::kv::{
    Attending, Chunk, Error, Held, KvCache, New, Opening, Prompts, Restored, Result, Rotated, Sequences,
};
use crate::{Buffer, Stream};
use half::f16;

/// What one layer keeps.
#[derive(Debug)]
struct Layer {
    store: Store,
    tables: Tables,
}

/// A cache of codes, the first and the most recent tokens in f16.
///
/// There are no originals: a prompt's chunk sees the tokens of its own chunk, the first ones and the most
/// recent ones before in f16, and the others as they are stored. They are restored in each layer before
/// attention, to a pool that all layers share, and that a cache has from a prompt's first chunk to the next
/// step.
#[derive(Debug)]
pub struct VecInferCache {
    sequences: Sequences,
    layers: Vec<Layer>,
    /// \[sequences\].
    lengths: Buffer<u32>,
    /// One for all layers: steps follow each other in the stream.
    plan: Plan,
    setting: Setting,
    room: Option<Room>,
    prompts: Prompts,
}

impl VecInferCache {
    /// An empty cache, with the codebooks of the selection's file.
    pub(super) fn open(opening: &Opening<'_>) -> Result<Self> {
        if opening.selection.word(STEP, "") == RESTORED {
            return Err(super::Error::Restored.into());
        }
        let setting = Setting::of(opening.selection);
        let mut file = opening.needed_artifact("codes")?;
        let geometry = opening.geometry;
        let heads = [geometry.layers, geometry.kv_heads, geometry.head_dim];
        let books = Books::read(&mut file, setting, heads)?;
        VecInferCache::new(opening, setting, &books)
    }

    /// An empty cache with codebooks that are there.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads or codes that there is no kernel for; out of
    /// memory.
    pub fn new(opening: &Opening<'_>, setting: Setting, books: &Books) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let sequences = Sequences::new(device, geometry, capacity);
        let dense = sequences.step_problem().checked()?;
        let problem = StepProblem::from(dense);
        let plan = Plan::new(device, problem, setting)?;
        let rows = u64::from(dense.sequences) * u64::from(dense.kv_heads) * geometry.layers as u64;
        let codes = u64::from(dense.max_blocks()) * u64::from(setting.tile_bytes(dense.head_dim));
        let window = u64::from(setting.window().slots * BLOCK_TOKENS) * u64::from(4 * dense.head_dim);
        Error::if_too_large(device, capacity, rows.saturating_mul(codes + window))?;
        let layer = |layer| -> Result<Layer> {
            Ok(Layer {
                store: Store::new(device, problem, setting)?,
                tables: Tables::new(device, books, layer)?,
            })
        };
        Ok(VecInferCache {
            layers: (0..geometry.layers).map(layer).collect::<Result<_>>()?,
            lengths: Buffer::zeroed(device, dense.sequences as usize)?,
            plan,
            setting,
            room: None,
            prompts: Prompts::default(),
            sequences,
        })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path.
    pub fn with_kernels(mut self) -> Self {
        self.sequences.simd = false;
        self
    }

    /// KV heads of all layers.
    fn heads(&self) -> u64 {
        (self.sequences.geometry.layers * self.sequences.geometry.kv_heads) as u64
    }

    fn set_length(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        Ok(self.lengths.write(sequence, &[tokens as u32])?)
    }
}

// SAFETY: stores, tables, lengths and the plan for steps are made once; what prompts need is not captured.
unsafe impl KvCache for VecInferCache {
    fn scheme(&self) -> &'static str {
        "vecinfer"
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    /// Codes of all tokens; the windows, codebooks and the prompts' pool as they are.
    fn bytes(&self) -> u64 {
        let dim = self.sequences.geometry.head_dim as u32;
        let codes: f64 = self.held().lengths().map(|n| n as f64 * self.setting.token_bytes(dim)).sum();
        let window = u64::from(self.setting.window().slots * BLOCK_TOKENS * 4 * dim);
        let sequences = self.sequences.held().sequences.len() as u64;
        let tables: usize = self.layers.iter().map(|layer| layer.tables.bytes()).sum();
        let room = self.room.as_ref().map_or(0, Room::bytes);
        self.heads() * (codes.ceil() as u64 + window * sequences) + (tables + room) as u64
    }

    fn step_bytes(&self) -> u64 {
        let dim = self.sequences.geometry.head_dim as u32;
        let of_head: f64 = self.held().lengths().map(|n| self.setting.step_bytes(dim, n as u64)).sum();
        self.heads() * of_head.ceil() as u64
    }

    fn restored(&self, stream: &Stream, layer: usize, sequence: usize) -> Result<Option<Restored>> {
        stream.synchronize()?;
        let tokens = self.sequences.length(sequence)?;
        let Layer { store, tables } = &self.layers[layer];
        let [keys, values] = store.restored(tables, sequence, tokens)?;
        let dim = self.sequences.geometry.head_dim as u32;
        let coded = Coded::outside(self.setting.window());
        let side = |rows, code: Code| {
            let bytes = f64::from(code.tile_bytes(dim)) / f64::from(BLOCK_TOKENS);
            Side { rows, bytes, coded }
        };
        let Setting { keys: key_code, values: value_code, .. } = self.setting;
        Ok(Some(Restored { keys: side(keys, key_code), values: side(values, value_code) }))
    }

    fn check(&mut self, stream: &Stream) -> Result<()> {
        for (index, layer) in self.layers.iter().enumerate() {
            layer.store.check(stream, index)?;
        }
        Ok(())
    }

    fn join(&mut self, stream: &Stream) -> Result<usize> {
        let sequence = self.sequences.vacant()?;
        stream.synchronize()?;
        self.set_length(sequence, 0)?;
        self.sequences.enter(sequence, 0);
        Ok(sequence)
    }

    /// What is copied are the codes: an eighth of the original bytes at 2 bits.
    fn fork(&mut self, stream: &Stream, source: usize) -> Result<usize> {
        let (tokens, sequence) = (self.sequences.length(source)?, self.sequences.vacant()?);
        stream.synchronize()?;
        for layer in &mut self.layers {
            layer.store.copy(stream, source, sequence, tokens)?;
        }
        self.set_length(sequence, tokens)?;
        self.sequences.enter(sequence, tokens);
        Ok(sequence)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.sequences.length(sequence)?;
        stream.synchronize()?;
        self.set_length(sequence, 0)?;
        self.sequences.leave(sequence)
    }

    fn begin(&mut self, stream: &Stream, chunk: Chunk) -> Result<()> {
        self.sequences.room(chunk)?;
        self.prompts.ready(&self.sequences, chunk)?;
        // One sequence has all of its prompt before its steps: its room is what the codes of eight layers
        // take in 2 bits, and no step needs it. Of several, prompts come between steps.
        if chunk == Chunk::Step && self.sequences.held().sequences.len() == 1 && !stream.is_capturing() {
            self.room = None;
        }
        if let Chunk::Prompt { tokens: rows, .. } = chunk {
            let longest = self.sequences.held().longest_after(chunk) as u32;
            let elements = rows * self.sequences.geometry.query_width();
            if !self.room.as_ref().is_some_and(|room| room.fits(longest, elements)) {
                // The old one goes before the new one comes, and that lasts for a while.
                let before = self.room.take().map_or([0; 2], |room| {
                    [(room.pool.blocks() * BLOCK_TOKENS) as usize, room.queries.len()]
                });
                let capacity = self.sequences.capacity.tokens;
                let tokens = capacity.min((longest as usize).max(2 * before[0]));
                let width = self.sequences.geometry.query_width();
                let rows = rows.max(before[1] / width);
                let problem = self.plan.problem();
                self.room = Some(Room::new(&self.sequences.device, problem, tokens as u32, rows)?);
            }
        }
        if let Some(room) = &mut self.room {
            room.layer = None;
        }
        self.sequences.begin(chunk);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let chunk = self.sequences.begun(layer)?;
        let VecInferCache { sequences, layers, lengths, room, .. } = self;
        let (rows, geometry) = (sequences.rows(chunk), sequences.geometry);
        let slices = sequences.on_slices(stream);
        let Layer { store, tables } = &mut layers[layer];
        let new = match new {
            New::Raw(raw) if chunk == Chunk::Step && !slices && store.turns() => {
                stream.device().check_same(&sequences.device, "the cache")?;
                raw.check_device(stream)?;
                let (query_width, kv_width) = (geometry.query_width(), geometry.kv_width());
                let turning = Turning {
                    qkv: raw.qkv.global_range(..rows * (query_width + 2 * kv_width))?,
                    frequencies: raw.frequencies.global_range(..raw.rotary as usize / 2)?,
                    rotary: raw.rotary,
                    pairing: raw.pairing,
                    queries: raw.queries.global_range_mut(..rows * query_width)?,
                    positions: raw.positions.global_range(..rows)?,
                    lengths: lengths.global_range_mut(..rows)?,
                };
                // SAFETY: as below.
                return Ok(unsafe { store.rotate_and_encode(stream, tables, turning) }?);
            }
            new => new.rotated(stream, geometry, rows)?,
        };
        sequences.check_appended(stream, new)?;
        let Rotated { positions, keys, values } = new;
        let elements = rows * geometry.kv_width();
        let (sequence, counts, pool) = match chunk {
            Chunk::Step => (0, [rows as u32, 1], None),
            Chunk::Prompt { sequence, tokens } => {
                let before = sequences.length(sequence)? as u32;
                let room = room.as_mut().ok_or(NOT_BEGUN)?;
                let (pool_keys, pool_values) = room.pool.both_mut();
                let pool = [pool_keys.global_mut(), pool_values.global_mut()];
                if before > 0 {
                    // SAFETY: buffers of this device, host memory on the CPU; the pool was made for more.
                    unsafe { store.restore_on(stream, slices, tables, (sequence as u32, before), pool) }?;
                }
                room.layer = Some(layer);
                (sequence, [1, tokens as u32], Some(pool))
            }
        };
        let encode = Encode {
            sequence: sequence as u32,
            counts,
            source: Source::Rows,
            keys: keys.global_range(..elements)?,
            values: values.global_range(..elements)?,
            positions: positions.global_range(..rows)?,
            lengths: lengths.global_range_mut(sequence..sequence + counts[0] as usize)?,
            pool,
        };
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; rows without a
        // sequence have positions past the room, and are left out. Dropping a buffer waits for the device.
        Ok(unsafe { store.encode_on(stream, slices, tables, encode) }?)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let Attending { chunk, queries, output } =
            self.sequences.attending(stream, layer, queries, output)?;
        let VecInferCache { sequences, layers, lengths, plan, room, prompts, .. } = self;
        let slices = sequences.on_slices(stream);
        let Layer { store, tables } = &layers[layer];
        let Chunk::Prompt { sequence, .. } = chunk else {
            let handles = Handles { queries, lengths: lengths.global(), output };
            // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen. Dropping a
            // buffer waits for the device.
            return Ok(unsafe { plan.run_on(stream, slices, store, tables, handles) }?);
        };
        let (room, exact) = room.as_mut().zip(prompts.of(chunk)).ok_or(NOT_BEGUN)?;
        if room.layer != Some(layer) {
            let limit = "a prompt attends in the layer that was appended to last";
            return Err(Error::Order { what: "the layer", value: layer, limit });
        }
        // SAFETY: as above.
        unsafe { room.turn(stream, slices, tables, plan.problem(), store.shape(), queries) }?;
        let handles = dense::Handles {
            queries: room.queries.global_range(..queries.len())?,
            keys: room.pool.keys().global(),
            values: room.pool.values().global(),
            table: room.table.global(),
            lengths: lengths.global_range(sequence..sequence + 1)?,
            wanted: None,
            near: true,
            output,
            lse: exact.lse(),
        };
        // SAFETY: as above; block t of the pool is tile t, and it has as many as the sequence has tiles.
        unsafe { exact.run(stream, slices, handles) }
    }

    fn commit(&mut self) {
        self.sequences.commit();
    }
}

/// A chunk of a prompt that nothing was made ready for.
const NOT_BEGUN: Error =
    Error::Order { what: "the chunk's number of tokens", value: 0, limit: "begin one first" };
