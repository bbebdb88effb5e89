//! A workload of any scheme, by its cache alone: for those that have nothing quicker to offer.

use super::{Input, Memory, Opening, Outcome, Workload};
use crate::attention::BLOCK_TOKENS;
use crate::kv::{Error, Geometry, HeadReport, KvCache, New, Result, Rotated};
use crate::{Buffer, Stream};
use half::f16;
use std::sync::Arc;

const BLOCK: usize = BLOCK_TOKENS as usize;
/// Tokens that are appended at a time.
const CHUNK: usize = 512;

/// A cache of one layer and one sequence, and where its steps read and write.
struct Sequence {
    cache: Box<dyn KvCache>,
    queries: Buffer<f16>,
    output: Buffer<f32>,
}

/// Caches of one sequence each: a step attends in all of them.
struct ThroughCache {
    /// For each of the input's pools, its sequences.
    sets: Vec<Vec<Sequence>>,
    outcome: Outcome,
}

/// Opens a cache of one layer for each sequence and set, appends the input's keys and values, and attends.
///
/// A step is the attention of a token that is there: nothing is appended. Sequences follow each other, so
/// that a batch costs as much as its sequences do one by one.
///
/// # Errors
/// bf16; what the scheme refuses; an empty sequence; out of memory.
pub fn open(opening: &Opening<'_>) -> Result<Box<dyn Workload>> {
    let input = opening.f16()?;
    let stream = Stream::new(&input.device)?;
    let open_set = |set: usize| -> Result<Vec<Sequence>> {
        (0..input.lengths.len()).map(|sequence| fill(opening, &input, &stream, set, sequence)).collect()
    };
    let mut sets = (0..input.pools.len()).map(open_set).collect::<Result<Vec<_>>>()?;
    let mut outcome = Outcome { output: Vec::new(), lse: Vec::new(), heads: Vec::new() };
    for sequence in &mut sets[0] {
        // The step that counts as one, for a report is of a committed token; then one that a capture can
        // repeat.
        sequence.attend(&stream)?;
        sequence.cache.commit();
        stream.synchronize()?;
        let report = sequence.cache.report()?;
        outcome.output.extend(sequence.output.to_vec()?);
        let heads = input.problem.q_heads as usize;
        match report.heads.len() {
            0 => outcome.heads.extend(vec![HeadReport::STORED; heads]),
            _ => outcome.heads.extend(report.heads),
        }
        sequence.cache.begin(&stream, 1)?;
    }
    Ok(Box::new(ThroughCache { sets, outcome }))
}

/// The cache of one sequence, with all of its tokens and the last of them begun.
fn fill(
    opening: &Opening<'_>,
    input: &Arc<Input<f16>>,
    stream: &Stream,
    set: usize,
    sequence: usize,
) -> Result<Sequence> {
    let problem = input.problem;
    let (heads, dim) = (problem.kv_heads as usize, problem.head_dim as usize);
    let geometry = Geometry { layers: 1, q_heads: problem.q_heads as usize, kv_heads: heads, head_dim: dim };
    let length = input.lengths[sequence] as usize;
    if length == 0 {
        let limit = "a cache needs a token to attend to";
        return Err(Error::Order { what: "the sequence's length", value: 0, limit });
    }
    // One more, for the chunk that is begun and never appended.
    let mut cache = opening.selection.open(&input.device, geometry, None, length + 1)?;
    let (keys, values) = (gather(input, set, sequence, true)?, gather(input, set, sequence, false)?);
    let width = heads * dim;
    let chunks = (0..length - 1).step_by(CHUNK).map(|first| first..(length - 1).min(first + CHUNK));
    for tokens in chunks.chain(std::iter::once(length - 1..length)) {
        let part =
            |data: &[f16]| Buffer::from_slice(&input.device, &data[tokens.start * width..tokens.end * width]);
        let positions: Vec<u32> = tokens.clone().map(|token| token as u32).collect();
        let positions = Buffer::from_slice(&input.device, &positions)?;
        let (keys, values) = (part(&keys)?, part(&values)?);
        cache.begin(stream, tokens.len())?;
        let new = Rotated { positions: &positions, keys: &keys, values: &values };
        cache.append(stream, 0, New::Rotated(new))?;
        stream.synchronize()?;
        if tokens.end < length {
            cache.commit();
        }
    }
    cache.check(stream)?;
    let row = geometry.query_width();
    let mut queries = vec![f16::ZERO; row];
    input.queries[0].read(sequence * row, &mut queries)?;
    Ok(Sequence {
        cache,
        queries: Buffer::from_slice(&input.device, &queries)?,
        output: Buffer::zeroed(&input.device, row)?,
    })
}

/// The keys, or values, of a sequence in the order of its tokens.
fn gather(input: &Input<f16>, set: usize, sequence: usize, keys: bool) -> Result<Vec<f16>> {
    let pool = &input.pools[set];
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

impl Sequence {
    fn attend(&mut self, stream: &Stream) -> Result<()> {
        self.cache.attend(stream, 0, &self.queries, &mut self.output)
    }
}

impl Workload for ThroughCache {
    fn stages(&self) -> &'static [&'static str] {
        &["attend"]
    }

    fn enqueue(&mut self, stream: &Stream, set: usize, _: usize) -> Result<()> {
        self.sets[set].iter_mut().try_for_each(|sequence| sequence.attend(stream))
    }

    fn period(&self) -> usize {
        self.sets[0].iter().map(|sequence| sequence.cache.period()).max().unwrap_or(1)
    }

    fn read_bytes(&self) -> u64 {
        self.sets[0].iter().map(|sequence| sequence.cache.step_bytes()).sum()
    }

    fn memory(&self) -> Memory {
        let sum =
            |of: fn(&dyn KvCache) -> u64| self.sets[0].iter().map(|sequence| of(&*sequence.cache)).sum();
        Memory { device: sum(|cache| cache.bytes()), host: sum(|cache| cache.host_bytes()) }
    }

    fn outcome(&self) -> Result<Outcome> {
        Ok(self.outcome.clone())
    }
}
