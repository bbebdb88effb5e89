//! Batches to try kernels on: ordinary and hostile numbers, put into pools whose every other byte is poison.

use super::bound::{self, Bound};
use super::{Attended, DenseElement, Plan, Problem, Result};
use crate::attention::oracle::{self, Sequence};
use crate::attention::{BLOCK_TOKENS, BlockTable, PagedPool};
use crate::{Buffer, Device, Stream};
use kernels_gpu::mixed;
use std::fmt;

/// What queries, keys and values hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// About N(0, 1).
    Normal,
    /// All keys of a head equal: every score is.
    Equal,
    /// One token that takes nearly all the weight.
    Dominant,
    /// Scores of tens of millions, where neighbours of f32 are further than 1 apart.
    Large,
    /// Scores of thousands of millions.
    Huge,
    /// Subnormal numbers and zeros of both signs.
    Tiny,
    /// −1, −0, 0 and 1.
    Signs,
    /// Values over 24 powers of two.
    Wide,
}

impl Input {
    /// All of them.
    pub const ALL: [Input; 8] = [
        Input::Normal,
        Input::Equal,
        Input::Dominant,
        Input::Large,
        Input::Huge,
        Input::Tiny,
        Input::Signs,
        Input::Wide,
    ];
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Input::Normal => "normal",
            Input::Equal => "equal",
            Input::Dominant => "dominant",
            Input::Large => "large",
            Input::Huge => "huge",
            Input::Tiny => "tiny",
            Input::Signs => "signs",
            Input::Wide => "wide",
        })
    }
}

/// Number `index` of stream `seed`.
pub fn random(seed: u64, index: u64) -> u64 {
    mixed(seed.wrapping_mul(0xd134_2543_de82_ef95), index)
}

/// About N(0, 1): a sum of four uniform numbers.
pub fn normal(seed: u64, index: u64) -> f32 {
    let z = random(seed, index);
    let sum: u64 = (0..4).map(|i| z >> (16 * i) & 0xffff).sum();
    (sum as f32 - 131_070.0) * (3f32.sqrt() / 65536.0)
}

/// A batch: queries, and each sequence's keys and values.
#[derive(Clone, Debug)]
pub struct Sample<E> {
    /// The extents.
    pub problem: Problem,
    /// Tokens of each sequence.
    pub lengths: Vec<u32>,
    /// [sequences, query_tokens, q_heads, head_dim].
    pub queries: Vec<E>,
    /// Of each sequence, [kv_heads, length, head_dim].
    pub keys: Vec<Vec<E>>,
    /// Likewise.
    pub values: Vec<Vec<E>>,
}

/// A sample's keys and values in a pool.
#[derive(Clone, Debug)]
pub struct Paged<E> {
    /// [blocks, kv_heads, 16, head_dim]; NaN where no token is.
    pub keys: Vec<E>,
    /// Likewise.
    pub values: Vec<E>,
    /// The blocks of each sequence.
    pub tables: Vec<Vec<u32>>,
}

impl<E: DenseElement> Sample<E> {
    /// A batch of sequences of these lengths; the same on every machine.
    pub fn new(problem: Problem, lengths: &[u32], input: Input, seed: u64) -> Self {
        let dim = problem.head_dim as usize;
        let one = |stream: u64, index: usize, plain: bool| {
            let z = random(seed ^ stream, index as u64);
            let x = normal(seed ^ stream, index as u64);
            E::from_f32(match input {
                Input::Large if !plain => x.clamp(-1.0, 1.0) * 8192.0,
                Input::Huge if !plain => x.clamp(-1.0, 1.0) * 60000.0,
                Input::Tiny => {
                    (z % 4096) as f32
                        * (E::SUBNORMAL_ERROR as f32 * 0.25)
                        * if z >> 63 == 0 { 1.0 } else { -1.0 }
                }
                Input::Signs => [-1.0, -0.0, 0.0, 1.0][z as usize % 4],
                Input::Wide if plain => x * f32::powi(2.0, (z % 24) as i32 - 12),
                _ => x,
            })
        };
        let queries: Vec<E> = (0..problem.query_rows() * dim).map(|i| one(1 << 60, i, false)).collect();
        let rows = |stream: u64, plain: bool| -> Vec<Vec<E>> {
            let of = |sequence: usize, length: u32| {
                let head = length as usize * dim;
                let at = |i: usize| match input {
                    Input::Equal if !plain => i / head.max(1) * dim + i % dim,
                    _ => i,
                };
                let count = problem.kv_heads as usize * head;
                (0..count).map(|i| one(stream ^ (sequence as u64) << 40, at(i), plain)).collect()
            };
            lengths.iter().enumerate().map(|(sequence, length)| of(sequence, *length)).collect()
        };
        let mut sample = Sample {
            problem,
            lengths: lengths.to_vec(),
            keys: rows(2 << 60, false),
            values: rows(3 << 60, true),
            queries,
        };
        if input == Input::Dominant {
            sample.let_one_dominate();
        }
        sample
    }

    /// Makes one token of each sequence and KV head look like a query of that head.
    fn let_one_dominate(&mut self) {
        let Problem { query_tokens, q_heads, kv_heads, .. } = self.problem;
        let dim = self.problem.head_dim as usize;
        for (sequence, length) in self.lengths.iter().enumerate() {
            let length = *length as usize;
            for head in (0..kv_heads as usize).filter(|_| length != 0) {
                let row = sequence * (query_tokens * q_heads) as usize + head * self.problem.group() as usize;
                let token = length / 3;
                for d in 0..dim {
                    let x = self.queries[row * dim + d].to_f32() * 4.0;
                    self.keys[sequence][(head * length + token) * dim + d] = E::from_f32(x);
                }
            }
        }
    }

    /// Puts keys and values into a pool of as many blocks as needed and `spare` more, in an order that `seed`
    /// says. What no token fills is NaN: unused blocks and the rest of last blocks.
    pub fn paged(&self, seed: u64, spare: u32) -> Paged<E> {
        let Problem { kv_heads, head_dim, .. } = self.problem;
        let (heads, dim, block) = (kv_heads as usize, head_dim as usize, BLOCK_TOKENS as usize);
        let counts: Vec<u32> = self.lengths.iter().map(|length| length.div_ceil(BLOCK_TOKENS)).collect();
        let total = counts.iter().sum::<u32>() + spare;
        let mut order: Vec<u32> = (0..total).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, (random(seed, i as u64) % (i as u64 + 1)) as usize);
        }
        let poison = E::from_f32(f32::NAN);
        let mut keys = vec![poison; total as usize * heads * block * dim];
        let mut values = keys.clone();
        let mut tables = Vec::new();
        let mut free = order.into_iter();
        for (sequence, length) in self.lengths.iter().enumerate() {
            let table: Vec<u32> = free.by_ref().take(counts[sequence] as usize).collect();
            for head in 0..heads {
                for token in 0..*length as usize {
                    let target =
                        ((table[token / block] as usize * heads + head) * block + token % block) * dim;
                    let source = (head * *length as usize + token) * dim;
                    keys[target..target + dim].copy_from_slice(&self.keys[sequence][source..source + dim]);
                    values[target..target + dim]
                        .copy_from_slice(&self.values[sequence][source..source + dim]);
                }
            }
            tables.push(table);
        }
        Paged { keys, values, tables }
    }

    /// One sequence as the oracle sees it.
    pub fn sequence(&self, sequence: usize) -> Sequence {
        Sequence {
            length: self.lengths[sequence] as usize,
            query_tokens: self.problem.query_tokens as usize,
            q_heads: self.problem.q_heads as usize,
            kv_heads: self.problem.kv_heads as usize,
            head_dim: self.problem.head_dim as usize,
            scale: self.problem.scale(),
        }
    }

    /// The formula in f64 for one sequence, and how far `splits` splits may be from it.
    pub fn truth(&self, sequence: usize, splits: u32) -> (oracle::Attended, Bound) {
        let wide = |values: &[E]| values.iter().map(|x| f64::from(x.to_f32())).collect::<Vec<f64>>();
        let of = self.sequence(sequence);
        let per_sequence = of.query_tokens * of.q_heads * of.head_dim;
        let queries = wide(&self.queries[sequence * per_sequence..(sequence + 1) * per_sequence]);
        let (keys, values) = (wide(&self.keys[sequence]), wide(&self.values[sequence]));
        let key = oracle::rows(&keys, of.length, of.head_dim);
        let value = oracle::rows(&values, of.length, of.head_dim);
        let bound = bound::of::<E>(&of, splits, &queries, &key, &value);
        (of.attend(&queries, key, value), bound)
    }

    /// Runs the batch from these pools: output and log-sums.
    ///
    /// # Errors
    /// What plan, pool and table report.
    pub fn run(&self, device: &Device, paged: &Paged<E>) -> Result<(Vec<f32>, Vec<f32>)> {
        let stream = Stream::new(device)?;
        let Problem { sequences, kv_heads, head_dim, .. } = self.problem;
        let mut plan = Plan::<E>::new(device, self.problem)?;
        let pool = PagedPool::from_slices(device, kv_heads, head_dim, &paged.keys, &paged.values)?;
        let mut table = BlockTable::new(device, sequences, self.problem.max_blocks(), pool.blocks())?;
        for (sequence, blocks) in paged.tables.iter().enumerate() {
            table.set(sequence as u32, blocks, self.lengths[sequence])?;
        }
        let queries = Buffer::from_slice(device, &self.queries)?;
        let Attended { mut output, mut lse } = plan.allocate()?;
        // Not one bit of a right result.
        stream.fill_u8(&mut output, .., 0xff)?;
        stream.fill_u8(&mut lse, .., 0xff)?;
        let mut out = Attended { output, lse };
        plan.run(&stream, &queries, &pool, &table, &mut out)?;
        stream.synchronize()?;
        Ok((out.output.to_vec()?, out.lse.to_vec()?))
    }
}
