//! What stands between a model and the cache of its keys and values.

use super::{Chunk, Geometry, Held, Restored, Result, StepReport, Traffic};
use crate::attention::rope::{Pairing, RopeShape, rotate};
use crate::{Buffer, Stream};
use half::f16;
use kernels_gpu::attention::rotation::rope;

/// A chunk's keys and values on their way into a cache.
#[derive(Debug)]
pub enum New<'a> {
    /// As the product gives them, queries beside them: the cache turns them, or has [`Raw::rotate`] do it.
    Raw(Raw<'a>),
    /// Turned already.
    Rotated(Rotated<'a>),
}

/// Queries, keys and values of a chunk that nobody has rotated.
#[derive(Debug)]
pub struct Raw<'a> {
    /// [tokens, (q_heads + 2·kv_heads)·head_dim].
    pub qkv: &'a Buffer<f32>,
    /// Where each belongs in its sequence, \[tokens\]: [`Held::positions`].
    pub positions: &'a Buffer<u32>,
    /// Radians a position, [rotary / 2].
    pub frequencies: &'a Buffer<f32>,
    /// Which channels turn together.
    pub pairing: Pairing,
    /// Channels of a head that turn.
    pub rotary: u32,
    /// Where the rotated queries go, [tokens, q_heads, head_dim]: a cache that takes them raw writes them.
    pub queries: &'a mut Buffer<f16>,
    /// Room for the rotated keys, [tokens, kv_heads, head_dim].
    pub keys: &'a mut Buffer<f16>,
    /// Room for the values.
    pub values: &'a mut Buffer<f16>,
}

/// Keys and values of a chunk, rotated.
#[derive(Clone, Copy, Debug)]
pub struct Rotated<'a> {
    /// Where each belongs in its sequence, \[tokens\]: [`Held::positions`].
    pub positions: &'a Buffer<u32>,
    /// [tokens, kv_heads, head_dim].
    pub keys: &'a Buffer<f16>,
    /// [tokens, kv_heads, head_dim].
    pub values: &'a Buffer<f16>,
}

impl<'a> Raw<'a> {
    /// The extents of the rotation.
    pub fn shape(&self, geometry: Geometry) -> RopeShape {
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        RopeShape {
            q_heads: narrow(geometry.q_heads),
            kv_heads: narrow(geometry.kv_heads),
            head_dim: narrow(geometry.head_dim),
            rotary: self.rotary,
        }
    }

    /// Turns queries and keys of `tokens` tokens and hands all three on in f16, in one launch.
    ///
    /// # Errors
    /// Buffers that are too short or on another device; extents that cannot be rotated; what the launch
    /// reports.
    pub fn rotate(self, stream: &Stream, geometry: Geometry, tokens: usize) -> Result<Rotated<'a>> {
        let shape = self.shape(geometry);
        self.check_device(stream)?;
        let (query_width, kv_width) = (geometry.query_width(), geometry.kv_width());
        let args = rope::Args {
            qkv: self.qkv.global_range(..tokens * (query_width + 2 * kv_width))?,
            positions: self.positions.global_range(..tokens)?,
            frequencies: self.frequencies.global_range(..self.rotary as usize / 2)?,
            queries: self.queries.global_range_mut(..tokens * query_width)?,
            keys: self.keys.global_range_mut(..tokens * kv_width)?,
            values: self.values.global_range_mut(..tokens * kv_width)?,
            shape,
        };
        // SAFETY: buffers of the stream's device, as long as just seen. Dropping a buffer waits for the
        // device.
        unsafe { rotate(stream, self.pairing, args, tokens) }?;
        Ok(Rotated { positions: self.positions, keys: self.keys, values: self.values })
    }

    /// Says so if something is on another device than the stream.
    ///
    /// # Errors
    /// [`crate::Error::WrongDevice`].
    pub fn check_device(&self, stream: &Stream) -> Result<()> {
        let device = stream.device();
        device.check_same(self.qkv.device(), "the buffer of queries, keys and values")?;
        device.check_same(self.positions.device(), "the buffer of positions")?;
        device.check_same(self.frequencies.device(), "the buffer of frequencies")?;
        device.check_same(self.keys.device(), "the buffer of keys")?;
        device.check_same(self.values.device(), "the buffer of values")?;
        Ok(device.check_same(self.queries.device(), "the buffer of queries")?)
    }
}

impl<'a> New<'a> {
    /// Where each token belongs in its sequence.
    pub fn positions(&self) -> &'a Buffer<u32> {
        match self {
            New::Raw(raw) => raw.positions,
            New::Rotated(rotated) => rotated.positions,
        }
    }

    /// Rotated, by a launch if they are raw.
    ///
    /// # Errors
    /// As [`Raw::rotate`].
    pub fn rotated(self, stream: &Stream, geometry: Geometry, tokens: usize) -> Result<Rotated<'a>> {
        match self {
            New::Raw(raw) => raw.rotate(stream, geometry, tokens),
            New::Rotated(rotated) => Ok(rotated),
        }
    }
}

/// Keys and values of one sequence or several, in all layers of a model, on a device.
///
/// A model's step is the same for every scheme: [`begin`](Self::begin) with what is to come, then for each
/// layer [`append`](Self::append) and [`attend`](Self::attend), then [`commit`](Self::commit). A prompt's
/// chunk may go without `attend`, if nobody wants what it gives; a step may not, for some schemes finish
/// there what they have appended. What attention gives is f32. Buffers may be longer than the chunk needs:
/// its tokens are the first rows. After an error of `append`, `attend` or [`check`](Self::check) some layers
/// may hold what others do not: the cache is not to be used further.
///
/// # Sequences
/// They have numbers below the cache's capacity. A new cache has sequence 0, empty; others
/// [`join`](Self::join), [`fork`](Self::fork) one that is there, and [`leave`](Self::leave), between chunks.
/// A prompt's chunk is of one sequence, a step is of all. After an error of one of the three that is not
/// [`NoRoom`](super::Error::NoRoom) or [`NoSequence`](super::Error::NoSequence) the cache is not to be used
/// further either.
///
/// What a sequence gets has the same bits whoever is beside it, and whoever was there before it, as long as
/// there is room for more than one and sequences join when a step of the first kind comes
/// ([`period`](Self::period)). With room for one, a first step may be like none that follows: a second text
/// in the same cache can get other bits.
///
/// # Graphs
/// The launches of a step can be captured once and replayed: `begin` and `commit` are the host's affair and
/// happen around each replay, `append` and `attend` put nothing but launches into the stream, and where the
/// token goes they find in the device's memory. A graph is of the [regime](KvCache::regime) in which it was
/// captured, and is not to be replayed where the next step is of another one.
///
/// # Safety
/// The memory that appending and `attend` of a step name in a capture stays where it is as long as the
/// cache is there, whatever is called on it: replays of the graph use it.
pub unsafe trait KvCache: Send {
    /// What the scheme is called on the command line.
    fn scheme(&self) -> &'static str;

    /// What it is for, and how far it has come.
    fn held(&self) -> Held<'_>;

    /// Heads and layers that it is for.
    fn geometry(&self) -> Geometry {
        self.held().geometry
    }

    /// Tokens that are committed, of all sequences.
    fn tokens(&self) -> usize {
        self.held().tokens()
    }

    /// Tokens that fit, of each sequence.
    fn capacity(&self) -> usize {
        self.held().capacity.tokens
    }

    /// Bytes that its committed tokens take in all layers, and what is set aside for using them: the device's
    /// memory.
    fn bytes(&self) -> u64;

    /// Bytes of keys and values that a step of decoding reads at least, in all layers.
    fn step_bytes(&self) -> u64;

    /// Bytes of the host's memory that they take beside.
    fn host_bytes(&self) -> u64 {
        0
    }

    /// What is known of the attention of the last token: bounds, what was skipped, what came from originals.
    /// Empty, if the scheme says nothing or the last chunk was a prompt's. Waits for the device.
    ///
    /// # Errors
    /// What the device reports.
    fn report(&self) -> Result<StepReport> {
        Ok(StepReport::default())
    }

    /// Originals that all steps so far have used, and where they were found; `None` for a scheme that keeps
    /// none. Apart from [`report`](Self::report), since every layer is asked. Waits for the stream.
    ///
    /// # Errors
    /// What the device reports.
    fn traffic(&self, _: &Stream) -> Result<Option<Traffic>> {
        Ok(None)
    }

    /// What the committed keys and values of a layer and sequence stand for, restored from codes; `None` for
    /// a scheme whose steps read originals. Waits for the stream.
    ///
    /// # Errors
    /// [`Error::NoSequence`](super::Error::NoSequence); what the device reports.
    fn restored(&self, _: &Stream, _layer: usize, _sequence: usize) -> Result<Option<Restored>> {
        Ok(None)
    }

    /// Waits for the stream, and says whether everything that was appended is held.
    ///
    /// # Errors
    /// The first key or value that the scheme does not take; what the device reports.
    fn check(&mut self, _: &Stream) -> Result<()> {
        Ok(())
    }

    /// After how many steps of decoding what they launch is the same again. Where it is more than one, graphs
    /// of so many steps take turns, captured when a first step was launched.
    fn period(&self) -> usize {
        1
    }

    /// Which kind of steps the next one is of: where it is another than that of the one before, graphs that
    /// were captured are of no use any more, and turns are counted anew.
    fn regime(&self) -> u32 {
        0
    }

    /// A sequence more, empty; its number, the lowest that is free. What was begun is forgotten.
    ///
    /// # Errors
    /// [`Error::NoRoom`](super::Error::NoRoom), and nothing changes; what the device reports.
    fn join(&mut self, stream: &Stream) -> Result<usize>;

    /// A sequence more, with the tokens of one that is there, whose memory both use as far as they can. What
    /// was begun is forgotten.
    ///
    /// # Errors
    /// [`Error::NoSequence`](super::Error::NoSequence); as [`join`](Self::join); of a cache that refuses
    /// tokens what [`check`](Self::check) finds.
    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize>;

    /// Forgets a sequence: its number and its memory are free. What was begun is forgotten.
    ///
    /// # Errors
    /// [`Error::NoSequence`](super::Error::NoSequence), and nothing changes; what the device reports.
    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()>;

    /// Makes ready for a chunk that follows what is committed. A chunk that was begun, and of which nothing
    /// was appended, is forgotten. For a step nothing happens on the device, but that memory which prompts
    /// alone need may be given back, or the [regime](Self::regime) changes, which waits for it.
    ///
    /// # Errors
    /// [`Error::Full`](super::Error::Full), [`Error::NoSequence`](super::Error::NoSequence), before anything
    /// changes; what the device reports.
    fn begin(&mut self, stream: &Stream, chunk: Chunk) -> Result<()>;

    /// Adds the chunk's keys and values to a layer. Of [`New::Raw`] the rotated queries are written too.
    ///
    /// # Errors
    /// [`Error::Order`](super::Error::Order); buffers that are too short; what the device reports.
    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()>;

    /// Causal attention of the chunk's `queries` to `output`, both [rows, q_heads, head_dim], in a layer
    /// that has its keys and values.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()>;

    /// The chunk is in all layers: from now on it counts.
    fn commit(&mut self);
}
