//! Caches and queries that a scheme is proven on: ordinary, degenerate, and made to go wrong.

use super::dense::DenseElement;
use super::dense::sample::{normal, random};
use super::{BLOCK_TOKENS, StepProblem};
use crate::{Buffer, Device};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use simt::Global;
use std::fmt;

/// What a sequence holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Input {
    /// About N(0, 1), each channel of the keys with an offset of its own.
    Normal,
    /// The same with queries four times as long: few tokens matter.
    Sharp,
    /// The same with short queries: all tokens matter.
    Diffuse,
    /// One channel of the keys forty times the others, one token's value too.
    Outlier,
    /// Every other channel of the keys never changes.
    Constant,
    /// Blocks that weigh the same but for one part in a thousand, so that the choice between them is
    /// arbitrary.
    Ties,
    /// Scores of thousands and values of thousands.
    Huge,
    /// Nearly all mass on the trailing block, or on the last full one where there is none.
    Trailing,
    /// One token takes nearly all the mass.
    Dominant,
    /// Seven tokens again and again.
    Duplicates,
    /// Keys and values over 20 powers of two.
    Wide,
    /// Keys that all round the wrong way for the query: up in half of the blocks, down in the others, whose
    /// values are the opposite.
    Extremal,
    /// Keys, values and queries of a language model.
    Real,
}

impl Input {
    /// Those that are made up.
    pub const MADE: [Input; 12] = [
        Input::Normal,
        Input::Sharp,
        Input::Diffuse,
        Input::Outlier,
        Input::Constant,
        Input::Ties,
        Input::Huge,
        Input::Trailing,
        Input::Dominant,
        Input::Duplicates,
        Input::Wide,
        Input::Extremal,
    ];

    /// Name in tables and labels.
    pub fn name(self) -> &'static str {
        match self {
            Input::Normal => "normal",
            Input::Sharp => "sharp",
            Input::Diffuse => "diffuse",
            Input::Outlier => "outlier",
            Input::Constant => "constant",
            Input::Ties => "ties",
            Input::Huge => "huge",
            Input::Trailing => "trailing",
            Input::Dominant => "dominant",
            Input::Duplicates => "duplicates",
            Input::Wide => "wide",
            Input::Extremal => "extremal",
            Input::Real => "real",
        }
    }

    /// How long queries are, an element.
    fn query_size(self) -> f32 {
        match self {
            Input::Sharp => 4.0,
            Input::Diffuse => 0.05,
            Input::Huge => 60.0,
            Input::Extremal => 0.5,
            _ => 1.0,
        }
    }
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A batch of one step: a paged cache, and a query token for each sequence.
#[derive(Clone, Debug)]
pub struct Batch<E> {
    /// The extents.
    pub problem: StepProblem,
    /// Tokens of each sequence.
    pub lengths: Vec<u32>,
    /// What each sequence holds.
    pub inputs: Vec<Input>,
    /// [sequences, q_heads, head_dim].
    pub queries: Vec<E>,
    /// [blocks, kv_heads, 16, head_dim]; NaN where no token is.
    pub keys: Vec<E>,
    /// Likewise.
    pub values: Vec<E>,
    /// [sequences, max_blocks]; `u32::MAX` past a sequence's blocks.
    pub table: Vec<u32>,
}

/// A [`Batch`] on a device.
#[derive(Debug)]
pub struct Uploaded<E: DenseElement> {
    /// [sequences, q_heads, head_dim].
    pub queries: Buffer<E>,
    /// [blocks, kv_heads, 16, head_dim].
    pub keys: Buffer<E>,
    /// Likewise.
    pub values: Buffer<E>,
    /// [sequences, max_blocks].
    pub table: Buffer<u32>,
    /// \[sequences\].
    pub lengths: Buffer<u32>,
}

/// Calls `add` for each chunk by which sequences grow from nothing: `cuts` says how far each is after it. It
/// gets the most tokens that a sequence gains, where each was, and where each is then.
///
/// # Errors
/// Those of `add`; out of memory.
pub fn in_chunks<X: From<crate::Error>>(
    device: &Device,
    cuts: &[Vec<u32>],
    mut add: impl FnMut(u32, Global<u32>, Global<u32>) -> Result<(), X>,
) -> Result<(), X> {
    let mut from = vec![0; cuts.first().map_or(0, Vec::len)];
    for to in cuts {
        let tokens = to.iter().zip(&from).map(|(to, from)| to - from).max().unwrap_or(0);
        let (positions, lengths) = (Buffer::from_slice(device, &from)?, Buffer::from_slice(device, to)?);
        // Dropping a buffer waits for the device.
        add(tokens, positions.global(), lengths.global())?;
        from.clone_from(to);
    }
    Ok(())
}

/// Half of each sequence's tokens at once, one more, then the rest.
pub fn thrice(lengths: &[u32]) -> [Vec<u32>; 3] {
    [0, 1, 2].map(|cut| {
        let of = |length: &u32| [length / 2, (length / 2 + 1).min(*length), *length][cut];
        lengths.iter().map(of).collect()
    })
}

const TOKENS: usize = BLOCK_TOKENS as usize;

impl<E: DenseElement> Batch<E> {
    /// A batch of made-up sequences; the same on every machine. `order` shuffles the pool and changes nothing
    /// else.
    pub fn new(problem: StepProblem, sequences: &[(Input, u32)], seed: u64, order: u64) -> Self {
        let (heads, dim) = (problem.kv_heads as usize, problem.head_dim as usize);
        let lengths: Vec<u32> = sequences.iter().map(|(_, length)| *length).collect();
        let inputs: Vec<Input> = sequences.iter().map(|(input, _)| *input).collect();
        let blocks: Vec<u32> = lengths.iter().map(|length| length.div_ceil(BLOCK_TOKENS)).collect();
        let total = blocks.iter().sum::<u32>();
        // A few blocks are nobody's.
        let mut places: Vec<u32> = (0..total + 3).collect();
        for i in (1..places.len()).rev() {
            places.swap(i, (random(order, i as u64) % (i as u64 + 1)) as usize);
        }
        let max_blocks = problem.max_tokens.div_ceil(BLOCK_TOKENS) as usize;
        let mut table = vec![u32::MAX; sequences.len() * max_blocks];
        // Of each block of the pool, which sequence's which block it is.
        let mut owners = vec![None; places.len()];
        let mut free = places.iter();
        for (sequence, count) in blocks.iter().enumerate() {
            for (index, place) in free.by_ref().take(*count as usize).enumerate() {
                table[sequence * max_blocks + index] = *place;
                owners[*place as usize] = Some((sequence, index));
            }
        }
        let mut batch = Batch {
            problem,
            lengths,
            inputs,
            queries: Vec::new(),
            keys: vec![E::from_f32(f32::NAN); places.len() * heads * TOKENS * dim],
            values: vec![E::from_f32(f32::NAN); places.len() * heads * TOKENS * dim],
            table,
        };
        batch.renew_queries(seed);
        let (mut keys, mut values) = (std::mem::take(&mut batch.keys), std::mem::take(&mut batch.values));
        let block = heads * TOKENS * dim;
        keys.par_chunks_mut(block).zip(values.par_chunks_mut(block)).zip(&owners).for_each(
            |((keys, values), owner)| {
                let Some((sequence, index)) = *owner else { return };
                for head in 0..heads {
                    let of_head = head * TOKENS * dim..(head + 1) * TOKENS * dim;
                    let block = [&mut keys[of_head.clone()], &mut values[of_head]];
                    batch.fill_block(seed, sequence, head, index, block);
                }
            },
        );
        (batch.keys, batch.values) = (keys, values);
        batch
    }

    /// Sequences of these lengths, with these contents in turns.
    pub fn in_turns(problem: StepProblem, inputs: &[Input], lengths: &[u32], seed: u64, order: u64) -> Self {
        let kinds: Vec<(Input, u32)> = inputs.iter().copied().cycle().zip(lengths.iter().copied()).collect();
        Batch::new(StepProblem { sequences: lengths.len() as u32, ..problem }, &kinds, seed, order)
    }

    /// The batch on a device.
    ///
    /// # Errors
    /// Out of memory; what the device reports.
    pub fn upload(&self, device: &Device) -> crate::Result<Uploaded<E>> {
        Ok(Uploaded {
            queries: Buffer::from_slice(device, &self.queries)?,
            keys: Buffer::from_slice(device, &self.keys)?,
            values: Buffer::from_slice(device, &self.values)?,
            table: Buffer::from_slice(device, &self.table)?,
            lengths: Buffer::from_slice(device, &self.lengths)?,
        })
    }

    /// Other queries over the same cache.
    pub fn renew_queries(&mut self, seed: u64) {
        let StepProblem { q_heads, head_dim, .. } = self.problem;
        let row = (q_heads * head_dim) as usize;
        self.queries = (0..self.lengths.len() * row)
            .into_par_iter()
            .map(|i| {
                let input = self.inputs[i / row];
                E::from_f32(normal(seed ^ 0x51, i as u64) * input.query_size())
            })
            .collect();
    }

    /// Query head `q_head` of a sequence.
    pub fn query(&self, sequence: usize, q_head: usize) -> &[E] {
        let (heads, dim) = (self.problem.q_heads as usize, self.problem.head_dim as usize);
        &self.queries[(sequence * heads + q_head) * dim..][..dim]
    }

    /// The first element of a token's row in the pool.
    pub fn row(&self, sequence: usize, kv_head: usize, token: usize) -> usize {
        let (heads, dim) = (self.problem.kv_heads as usize, self.problem.head_dim as usize);
        let max_blocks = self.problem.max_tokens.div_ceil(BLOCK_TOKENS) as usize;
        let block = self.table[sequence * max_blocks + token / TOKENS] as usize;
        ((block * heads + kv_head) * TOKENS + token % TOKENS) * dim
    }

    /// Blocks of the pool.
    pub fn blocks(&self) -> usize {
        self.keys.len() / (self.problem.kv_heads as usize * TOKENS * self.problem.head_dim as usize)
    }

    /// Blocks of the pool that are full for some sequence, in order, and their places in it.
    pub fn full_blocks(&self) -> Vec<(u32, u32)> {
        let max_blocks = self.problem.max_tokens.div_ceil(BLOCK_TOKENS) as usize;
        let rows = self.table.chunks(max_blocks).zip(&self.lengths);
        let of_row = |(row, length): (&'_ [u32], &u32)| -> Vec<(u32, u32)> {
            row[..(length / BLOCK_TOKENS) as usize].iter().copied().zip(0..).collect()
        };
        let mut full: Vec<(u32, u32)> = rows.flat_map(of_row).collect();
        full.sort_unstable();
        full.dedup_by_key(|(block, _)| *block);
        full
    }

    /// The tokens of one block of a sequence and head.
    fn fill_block(
        &self,
        seed: u64,
        sequence: usize,
        head: usize,
        index: usize,
        [keys, values]: [&mut [E]; 2],
    ) {
        let dim = self.problem.head_dim as usize;
        let length = self.lengths[sequence] as usize;
        let stream = |kind: u64| random(seed ^ kind << 56, (sequence * 4096 + head) as u64);
        let group = (self.problem.q_heads / self.problem.kv_heads) as usize;
        // What keys are made against: one query of the head, another for every sequence.
        let query = self.query(sequence, head * group + sequence % group);
        let maker = Maker {
            input: self.inputs[sequence],
            length,
            dim,
            streams: [stream(1), stream(2), stream(3)],
            query: query.iter().map(|x| x.to_f32()).collect(),
        };
        let (mut key, mut value) = (vec![0f32; dim], vec![0f32; dim]);
        for token in index * TOKENS..length.min((index + 1) * TOKENS) {
            maker.row(token, &mut key, &mut value);
            let at = token % TOKENS * dim;
            for c in 0..dim {
                keys[at + c] = E::from_f32(key[c]);
                values[at + c] = E::from_f32(value[c]);
            }
        }
    }
}

/// Makes the rows of one sequence and head.
struct Maker {
    input: Input,
    length: usize,
    dim: usize,
    streams: [u64; 3],
    query: Vec<f32>,
}

impl Maker {
    fn row(&self, token: usize, key: &mut [f32], value: &mut [f32]) {
        let dim = self.dim;
        let [keys, values, offsets] = self.streams;
        // Of which token the row is a copy.
        let source = match self.input {
            Input::Duplicates => token % 7,
            Input::Ties => token % TOKENS,
            _ => token,
        };
        for c in 0..dim {
            let at = (source * dim + c) as u64;
            let offset = normal(offsets, c as u64);
            key[c] = normal(keys, at) + offset;
            value[c] = normal(values, at) + 0.3 * offset;
        }
        match self.input {
            Input::Outlier => {
                key[dim / 3] *= 40.0;
                if token == self.length / 2 {
                    value.iter_mut().for_each(|x| *x *= 40.0);
                }
            }
            Input::Constant => {
                (0..dim).step_by(2).for_each(|c| key[c] = normal(offsets, c as u64));
            }
            Input::Ties => {
                for c in 0..dim {
                    let at = (token * dim + c) as u64;
                    key[c] += normal(!keys, at) / 1024.0;
                    value[c] = normal(values, at);
                }
            }
            Input::Huge => {
                key.iter_mut().for_each(|x| *x *= 20.0);
                value.iter_mut().for_each(|x| *x *= 1000.0);
            }
            Input::Trailing if token >= (self.length - 1) / TOKENS * TOKENS => self.attract(key, 14.0),
            Input::Dominant if token == self.length / 3 => self.attract(key, 18.0),
            Input::Wide => {
                for c in 0..dim {
                    let z = random(offsets, (token * dim + c) as u64);
                    key[c] *= f32::powi(2.0, (z % 20) as i32 - 16);
                    value[c] *= f32::powi(2.0, (z / 32 % 20) as i32 - 16);
                }
            }
            Input::Extremal => self.round_the_wrong_way(token, key, value),
            _ => {}
        }
    }

    /// Moves a key along the query so that its logit grows by `by`.
    fn attract(&self, key: &mut [f32], by: f32) {
        let square: f32 = self.query.iter().map(|x| x * x).sum();
        let along = by * (self.dim as f32).sqrt() / square.max(1e-6);
        key.iter_mut().zip(&self.query).for_each(|(k, q)| *k += along * q);
    }

    /// In each channel one token of the block has 0 and one 255 steps; the others lie 7/16 of a step from the
    /// code that they are rounded to.
    fn round_the_wrong_way(&self, token: usize, key: &mut [f32], value: &mut [f32]) {
        const STEP: f32 = 1.0 / 64.0;
        let (block, place) = (token / TOKENS, token % TOKENS);
        let up = random(self.streams[2], block as u64) >> 63 == 0;
        for c in 0..self.dim {
            let ends = random(self.streams[0], (block * self.dim + c) as u64);
            let low = (ends % 16) as usize;
            let high = (low + 1 + (ends >> 8) as usize % 15) % 16;
            let whole = (random(self.streams[0], (token * self.dim + c) as u64) % 8) as f32 + 60.0;
            let fraction = if (self.query[c] > 0.0) == up { 7.0 / 16.0 } else { 9.0 / 16.0 };
            key[c] = match place {
                p if p == low => 0.0,
                p if p == high => 255.0,
                _ => whole + fraction,
            } * STEP;
            let toward = normal(self.streams[2], c as u64 + 7).signum();
            value[c] = if up { toward } else { -toward };
        }
    }
}
