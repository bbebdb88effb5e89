//! A model's keys and values as codes.

use super::prompt::Room;
use super::{Encode, Handles, Plan, Setting, Side, Store};
use crate::attention::StepProblem;
use crate::attention::dense;
use crate::kv::restored::{self, Coded};
use crate::kv::{
    Attending, Chunk, Error, Held, KvCache, New, Opening, Prompts, Restored, Result, Rotated, Sequences,
};
use crate::{Buffer, Stream};
use half::f16;

/// A cache of codes, the most recent tokens in f16.
///
/// There are no originals: a prompt's chunk sees the tokens of its own chunk and the most recent ones before
/// in f16, and the others as they are stored. They are restored in each layer before attention, to a pool
/// that all layers share, and that a cache which has seen no prompt does not have.
#[derive(Debug)]
pub struct KiviCache {
    sequences: Sequences,
    layers: Vec<Store>,
    /// \[sequences\].
    lengths: Buffer<u32>,
    /// One for all layers: steps follow each other in the stream.
    plan: Plan,
    setting: Setting,
    room: Option<Room>,
    prompts: Prompts,
}

impl KiviCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads or settings that there is no kernel for; out
    /// of memory.
    pub fn new(opening: &Opening<'_>, setting: Setting) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let sequences = Sequences::new(device, geometry, capacity);
        let dense = sequences.step_problem().checked()?;
        let problem = StepProblem::from(dense);
        let plan = Plan::new(device, problem, setting)?;
        let shape = setting.shape(problem);
        let rows = u64::from(dense.sequences) * u64::from(dense.kv_heads) * geometry.layers as u64;
        let codes = 4 * u64::from(shape.groups) * u64::from(shape.layout.group_words());
        let ring = u64::from(shape.slots() * setting.group) * u64::from(4 * dense.head_dim);
        Error::if_too_large(device, capacity, rows.saturating_mul(codes + ring))?;
        let layers = (0..geometry.layers).map(|_| Store::new(device, problem, setting));
        Ok(KiviCache {
            layers: layers.collect::<super::Result<_>>()?,
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

    /// What a layer holds.
    pub fn layer(&self, layer: usize) -> &Store {
        &self.layers[layer]
    }

    /// KV heads of all layers.
    fn heads(&self) -> u64 {
        (self.sequences.geometry.layers * self.sequences.geometry.kv_heads) as u64
    }

    fn set_length(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        Ok(self.lengths.write(sequence, &[tokens as u32])?)
    }
}

// SAFETY: stores, lengths and the plan for steps are made once; what prompts need is not captured.
unsafe impl KvCache for KiviCache {
    fn scheme(&self) -> &'static str {
        "kivi"
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    /// Codes of whole groups; the rings and the prompts' pool as they are.
    fn bytes(&self) -> u64 {
        let geometry = self.sequences.geometry;
        let group = u64::from(self.setting.group);
        let of_group = 4 * u64::from(self.setting.layout(geometry.head_dim as u32).group_words());
        let codes: u64 = self.held().lengths().map(|n| n as u64 / group * of_group).sum();
        let rings: usize = self.layers.iter().flat_map(Store::recent).map(Buffer::bytes).sum();
        self.heads() * codes + (rings + self.room.as_ref().map_or(0, Room::bytes)) as u64
    }

    fn step_bytes(&self) -> u64 {
        let dim = self.sequences.geometry.head_dim as u32;
        let of_head: f64 = self.held().lengths().map(|n| self.setting.step_bytes(dim, n as u64)).sum();
        self.heads() * of_head as u64
    }

    fn restored(&self, stream: &Stream, layer: usize, sequence: usize) -> Result<Option<Restored>> {
        stream.synchronize()?;
        let tokens = self.sequences.length(sequence)?;
        let [keys, values] = self.layers[layer].restored(sequence, tokens)?;
        let dim = self.sequences.geometry.head_dim as u32;
        let Setting { group, residual, .. } = self.setting;
        let coded = Coded { block: group as usize, kept: (residual / group) as usize, front: 0, extra: 0 };
        let side = |rows, side: Side| {
            let bits = self.setting.layout(dim).bits(side);
            let bytes = f64::from(dim * bits) / 8.0 + f64::from(4 * dim) / f64::from(group);
            restored::Side { rows, bytes, coded }
        };
        Ok(Some(Restored { keys: side(keys, Side::Key), values: side(values, Side::Value) }))
    }

    fn check(&mut self, stream: &Stream) -> Result<()> {
        for (index, layer) in self.layers.iter().enumerate() {
            layer.check(stream, index)?;
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

    /// What is copied are codes and rings.
    fn fork(&mut self, stream: &Stream, source: usize) -> Result<usize> {
        let (tokens, sequence) = (self.sequences.length(source)?, self.sequences.vacant()?);
        stream.synchronize()?;
        for layer in &mut self.layers {
            layer.copy(stream, source, sequence, tokens)?;
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

    fn begin(&mut self, _: &Stream, chunk: Chunk) -> Result<()> {
        self.sequences.room(chunk)?;
        self.prompts.ready(&self.sequences, chunk)?;
        if chunk != Chunk::Step {
            let longest = self.sequences.held().longest_after(chunk);
            if !self.room.as_ref().is_some_and(|room| room.fits(longest as u32)) {
                // The old one goes before the new one comes, and that lasts for a while.
                let before = self.room.take().map_or(0, |room| room.pool.blocks() as usize * 16);
                let tokens = self.sequences.capacity.tokens.min(longest.max(2 * before));
                let problem = self.sequences.step_problem();
                self.room = Some(Room::new(&self.sequences.device, problem, tokens as u32)?);
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
        let KiviCache { sequences, layers, lengths, room, .. } = self;
        let rows = sequences.rows(chunk);
        let new = new.rotated(stream, sequences.geometry, rows)?;
        sequences.check_appended(stream, new)?;
        let Rotated { positions, keys, values } = new;
        let elements = rows * sequences.geometry.kv_width();
        let slices = sequences.on_slices(stream);
        let store = &mut layers[layer];
        let (keys, values) = (keys.global_range(..elements)?, values.global_range(..elements)?);
        let positions = positions.global_range(..rows)?;
        let (sequence, counts) = match chunk {
            Chunk::Step => (0, [rows as u32, 1]),
            Chunk::Prompt { sequence, tokens } => {
                let before = sequences.length(sequence)? as u32;
                let room = room.as_mut().ok_or(NOT_BEGUN)?;
                let (pool_keys, pool_values) = room.pool.both_mut();
                let pool = [pool_keys.global_mut(), pool_values.global_mut()];
                if before > 0 {
                    // SAFETY: buffers of this device, host memory on the CPU; the pool was made for more.
                    unsafe { store.restore_on(stream, slices, (sequence as u32, before), pool) }?;
                }
                let problem = (sequences.problem_of(chunk), before);
                let length = lengths.global_range_mut(sequence..sequence + 1)?;
                // SAFETY: as above; blocks of the table are those of the pool.
                unsafe { room.append(stream, slices, problem, [keys, values], positions, length) }?;
                room.layer = Some(layer);
                (sequence, [1, tokens as u32])
            }
        };
        let lengths = lengths.global_range_mut(sequence..sequence + counts[0] as usize)?;
        let encode = Encode { sequence: sequence as u32, counts, keys, values, positions, lengths };
        // SAFETY: as above; rows without a sequence have positions past the room, and are left out. Dropping
        // a buffer waits for the device.
        Ok(unsafe { store.encode_on(stream, slices, encode) }?)
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
        let KiviCache { sequences, layers, lengths, plan, room, prompts, .. } = self;
        let slices = sequences.on_slices(stream);
        let Chunk::Prompt { sequence, .. } = chunk else {
            let handles = Handles { queries, lengths: lengths.global(), output };
            // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen. Dropping a
            // buffer waits for the device.
            return Ok(unsafe { plan.run_on(stream, slices, &layers[layer], handles) }?);
        };
        let (room, exact) = room.as_mut().zip(prompts.of(chunk)).ok_or(NOT_BEGUN)?;
        if room.layer != Some(layer) {
            let limit = "a prompt attends in the layer that was appended to last";
            return Err(Error::Order { what: "the layer", value: layer, limit });
        }
        let handles = dense::Handles {
            queries,
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
