//! A workload of any scheme, by its cache alone: for those that have nothing quicker to offer.

use super::{Fact, Input, Memory, Opening, Outcome, Workload};
use crate::attention::BLOCK_TOKENS;
use crate::kv::{self, Capacity, Chunk, Error, HeadReport, KvCache, New, Result, Rotated};
use crate::{Buffer, Stream};
use half::f16;
use std::sync::Arc;

const BLOCK: usize = BLOCK_TOKENS as usize;
/// Tokens that are appended at a time.
const CHUNK: usize = 512;

/// A cache of one layer, and where its steps read and write.
struct Set {
    cache: Box<dyn KvCache>,
    /// [sequences, q_heads, head_dim], both.
    queries: Buffer<f16>,
    output: Buffer<f32>,
}

/// Caches of the batch: a step attends in one of them.
struct ThroughCache {
    /// One for each of the input's pools.
    sets: Vec<Set>,
    outcome: Outcome,
    facts: Vec<Fact>,
}

/// Opens a cache of one layer and the batch's sequences for each set, appends the input's keys and values,
/// and attends.
///
/// A step is the attention of tokens that are there: nothing is appended.
///
/// # Errors
/// bf16; what the scheme refuses; an empty sequence; out of memory.
pub fn open(opening: &Opening<'_>) -> Result<Box<dyn Workload>> {
    open_with(opening, Vec::new(), |opening| {
        let kv::Opening { device, geometry, rope, capacity, selection } = *opening;
        selection.open(device, geometry, rope, capacity)
    })
}

/// The same with caches that the scheme opens in a way of its own, and with facts.
///
/// # Errors
/// Likewise.
pub(crate) fn open_with(
    opening: &Opening<'_>,
    facts: Vec<Fact>,
    cache: impl Fn(&kv::Opening<'_>) -> Result<Box<dyn KvCache>>,
) -> Result<Box<dyn Workload>> {
    let input = opening.f16()?;
    let stream = Stream::new(&input.device)?;
    let mut sets = fill(opening, &input, &stream, cache)?;
    let first = &mut sets[0];
    // The step that counts as one, for a report is of committed tokens; then one that a capture can repeat.
    first.attend(&stream)?;
    first.cache.commit();
    stream.synchronize()?;
    let report = first.cache.report()?;
    let heads = input.problem.q_heads as usize * input.lengths.len();
    let outcome = Outcome {
        output: first.output.to_vec()?,
        lse: Vec::new(),
        heads: match report.heads.len() {
            0 => vec![HeadReport::STORED; heads],
            _ => report.heads,
        },
    };
    first.cache.begin(&stream, Chunk::Step)?;
    Ok(Box::new(ThroughCache { sets, outcome, facts }))
}

/// A cache for each of the input's pools, with all tokens of all sequences, the last of each begun. Pools are
/// equal: they are read once.
fn fill(
    opening: &Opening<'_>,
    input: &Arc<Input<f16>>,
    stream: &Stream,
    cache: impl Fn(&kv::Opening<'_>) -> Result<Box<dyn KvCache>>,
) -> Result<Vec<Set>> {
    let geometry = input.geometry();
    if input.lengths.contains(&0) {
        let limit = "a cache needs a token to attend to";
        return Err(Error::Order { what: "the sequence's length", value: 0, limit });
    }
    let longest = input.lengths.iter().max().map_or(1, |longest| *longest as usize);
    // One more, for the chunk that is begun and never appended.
    let capacity = Capacity { tokens: longest + 1, sequences: input.lengths.len() };
    let (device, selection) = (&input.device, opening.selection);
    let open = || cache(&kv::Opening { device, geometry, rope: None, capacity, selection });
    let mut caches = (0..input.pools.len()).map(|_| open()).collect::<Result<Vec<_>>>()?;
    let width = geometry.kv_width();
    let most = CHUNK.max(input.lengths.len());
    let mut chunks = Rows {
        keys: Buffer::new(device, most * width)?,
        values: Buffer::new(device, most * width)?,
        positions: Buffer::new(device, most)?,
    };
    let [mut last_keys, mut last_values] = [Vec::new(), Vec::new()];
    for (sequence, length) in input.lengths.iter().enumerate() {
        let last = *length as usize - 1;
        let (keys, values) = (gather(input, sequence, true)?, gather(input, sequence, false)?);
        for cache in &mut caches {
            if sequence > 0 {
                cache.join(stream)?;
            }
            for first in (0..last).step_by(CHUNK) {
                let tokens = first..last.min(first + CHUNK);
                let rows = tokens.start * width..tokens.end * width;
                let chunk = Chunk::Prompt { sequence, tokens: tokens.len() };
                chunks.append(&mut **cache, stream, chunk, &keys[rows.clone()], &values[rows])?;
                cache.commit();
            }
        }
        last_keys.extend_from_slice(&keys[last * width..]);
        last_values.extend_from_slice(&values[last * width..]);
    }
    let rows = input.lengths.len() * geometry.query_width();
    let mut queries = vec![f16::ZERO; rows];
    input.queries[0].read(0, &mut queries)?;
    let set = |mut cache: Box<dyn KvCache>| {
        chunks.append(&mut *cache, stream, Chunk::Step, &last_keys, &last_values)?;
        cache.check(stream)?;
        Ok(Set {
            cache,
            queries: Buffer::from_slice(device, &queries)?,
            output: Buffer::zeroed(device, rows)?,
        })
    };
    caches.into_iter().map(set).collect()
}

/// Where the rows of a chunk are on their way into a cache.
struct Rows {
    /// [tokens, kv_heads, head_dim], both; a chunk's tokens are the first rows.
    keys: Buffer<f16>,
    values: Buffer<f16>,
    positions: Buffer<u32>,
}

impl Rows {
    /// Begins a chunk and appends it.
    fn append(
        &mut self,
        cache: &mut dyn KvCache,
        stream: &Stream,
        chunk: Chunk,
        keys: &[f16],
        values: &[f16],
    ) -> Result<()> {
        stream.upload(keys, &mut self.keys, 0)?;
        stream.upload(values, &mut self.values, 0)?;
        stream.upload(&cache.held().positions(chunk), &mut self.positions, 0)?;
        cache.begin(stream, chunk)?;
        let new = Rotated { positions: &self.positions, keys: &self.keys, values: &self.values };
        cache.append(stream, 0, New::Rotated(new))?;
        // Before the rows are others.
        Ok(stream.synchronize()?)
    }
}

/// The keys, or values, of a sequence in the order of its tokens.
fn gather(input: &Input<f16>, sequence: usize, keys: bool) -> Result<Vec<f16>> {
    let pool = &input.pools[0];
    let pool = if keys { pool.keys() } else { pool.values() };
    let (heads, dim) = (input.problem.kv_heads as usize, input.problem.head_dim as usize);
    let length = input.lengths[sequence] as usize;
    let mut rows = vec![f16::ZERO; length * heads * dim];
    let mut block = vec![f16::ZERO; heads * BLOCK * dim];
    for (index, number) in input.blocks[sequence].iter().enumerate().take(length.div_ceil(BLOCK)) {
        pool.read(*number as usize * block.len(), &mut block)?;
        for place in 0..BLOCK.min(length - index * BLOCK) {
            for head in 0..heads {
                let to = ((index * BLOCK + place) * heads + head) * dim;
                rows[to..to + dim].copy_from_slice(&block[(head * BLOCK + place) * dim..][..dim]);
            }
        }
    }
    Ok(rows)
}

impl Set {
    fn attend(&mut self, stream: &Stream) -> Result<()> {
        self.cache.attend(stream, 0, &self.queries, &mut self.output)
    }
}

impl Workload for ThroughCache {
    fn stages(&self) -> &'static [&'static str] {
        &["attend"]
    }

    fn enqueue(&mut self, stream: &Stream, set: usize, _: usize) -> Result<()> {
        self.sets[set].attend(stream)
    }

    fn period(&self) -> usize {
        self.sets[0].cache.period()
    }

    fn read_bytes(&self) -> u64 {
        self.sets[0].cache.step_bytes()
    }

    fn memory(&self) -> Memory {
        let cache = &self.sets[0].cache;
        Memory { device: cache.bytes(), host: cache.host_bytes() }
    }

    fn outcome(&self) -> Result<Outcome> {
        Ok(self.outcome.clone())
    }

    fn facts(&self) -> Result<Vec<Fact>> {
        Ok(self.facts.clone())
    }
}
