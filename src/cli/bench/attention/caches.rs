//! Caches to measure on: paged, filled on the device.

use super::report::{BlockOrder, Subject};
use crate::cli::failure::Failure;
use host::attention::oracle::{Sequence, softmax};
use host::attention::{BLOCK_TOKENS, BlockTable, PagedPool};
use host::dense::sample::{normal, random};
use host::dense::{DenseElement, Problem, bound};
use host::{Buffer, Device, Stream};
use rayon::prelude::*;
use std::sync::OnceLock;

/// Tiles of the pattern that a pool repeats: a prime, so that neighbouring heads never hold the same, and enough of them that
/// a kernel which reads the wrong one gets other numbers.
const PATTERN_TILES: usize = 4093;
/// Rows of the output that are compared with the formula.
const COMPARED_ROWS: usize = 4;

/// One cache and what is asked of it.
pub struct Set<E: DenseElement> {
    /// [sequences, q_heads, head_dim].
    pub queries: Buffer<E>,
    /// Keys and values.
    pub pool: PagedPool<E>,
}

/// Equal caches, for calls to take in turns.
pub struct Caches<E: DenseElement> {
    /// Where they are.
    pub device: Device,
    /// What they are for.
    pub subject: Subject,
    /// The same as extents.
    pub problem: Problem,
    /// The caches.
    pub sets: Vec<Set<E>>,
    /// Which block holds which tokens: the same for all.
    pub table: BlockTable,
    /// The blocks of each sequence.
    tables: Vec<Vec<u32>>,
    queries: Vec<E>,
    query_scale: f32,
    /// Repeated over the pools, in whole tiles.
    keys: Vec<E>,
    values: Vec<E>,
    /// Some rows of the output by the formula, once they were asked for.
    formula: OnceLock<Vec<Exact>>,
}

/// A row of the output by the formula in f64.
struct Exact {
    /// Its place in [sequences, q_heads].
    row: usize,
    output: Vec<f64>,
    lse: f64,
}

/// What successive queries of a head have in common, on the mean: the cosine of those of neighbouring tokens in the sample dump (2,835
/// pairs of five layers; the median is 0.88).
const QUERY_CORRELATION: f32 = 0.84;
/// Queries before they come again backwards.
const QUERIES: u64 = 17;

impl<E: DenseElement> Caches<E> {
    /// Queries of steps that follow each other, as like each other as those of a model are: forwards, then back again. The first are
    /// those of the caches.
    ///
    /// # Errors
    /// Out of memory.
    pub fn queries_of_steps(&self) -> Result<Vec<Buffer<E>>, Failure> {
        let rest = (1.0 - QUERY_CORRELATION * QUERY_CORRELATION).sqrt();
        let mut rows: Vec<Vec<E>> = vec![self.queries.clone()];
        for step in 1..QUERIES {
            let last = &rows[rows.len() - 1];
            let next = last.par_iter().enumerate().map(|(i, x)| {
                let fresh = normal(100 + step, i as u64) * self.query_scale;
                E::from_f32(QUERY_CORRELATION * x.to_f32() + rest * fresh)
            });
            rows.push(next.collect());
        }
        let back = (1..QUERIES as usize - 1).rev();
        let order = (0..QUERIES as usize).chain(back);
        Ok(order.map(|i| Buffer::from_slice(&self.device, &rows[i])).collect::<Result<_, _>>()?)
    }

    /// `count` caches; `query_scale` multiplies queries that are about N(0, 1).
    ///
    /// # Errors
    /// Out of memory, or what the device reports.
    pub fn new(device: &Device, subject: Subject, count: usize, query_scale: f32) -> Result<Self, Failure> {
        let problem = subject.shape.problem(subject.batch, subject.context).checked()?;
        let (heads, dim) = (problem.kv_heads as usize, problem.head_dim as usize);
        let blocks = problem.max_blocks() * problem.sequences;
        let tile = BLOCK_TOKENS as usize * dim;
        let tiles = (blocks as usize * heads).min(PATTERN_TILES);
        let numbers = |seed: u64, count: usize, scale: f32| -> Vec<E> {
            (0..count as u64).into_par_iter().map(|i| E::from_f32(normal(seed, i) * scale)).collect()
        };
        let (keys, values) = (numbers(1, tiles * tile, 1.0), numbers(2, tiles * tile, 1.0));
        let queries = numbers(3, problem.query_rows() * dim, query_scale);

        let mut order: Vec<u32> = (0..blocks).collect();
        if subject.blocks == BlockOrder::Shuffled {
            for i in (1..order.len()).rev() {
                order.swap(i, (random(4, i as u64) % (i as u64 + 1)) as usize);
            }
        }
        let tables: Vec<Vec<u32>> =
            order.chunks(problem.max_blocks() as usize).map(<[u32]>::to_vec).collect();
        let mut table =
            BlockTable::new(device, problem.sequences, problem.max_blocks(), blocks).map_err(cache)?;
        for (sequence, row) in tables.iter().enumerate() {
            table.set(sequence as u32, row, problem.max_tokens).map_err(cache)?;
        }

        let stream = Stream::new(device)?;
        let (key_pattern, value_pattern) =
            (Buffer::from_slice(device, &keys)?, Buffer::from_slice(device, &values)?);
        let mut sets = Vec::with_capacity(count);
        for _ in 0..count {
            let mut pool =
                PagedPool::new(device, blocks, problem.kv_heads, problem.head_dim).map_err(cache)?;
            let (to_keys, to_values) = pool.both_mut();
            for (from, to) in [(&key_pattern, to_keys), (&value_pattern, to_values)] {
                for start in (0..to.len()).step_by(from.len()) {
                    let part = from.len().min(to.len() - start);
                    stream.copy(from, ..part, to, start)?;
                }
            }
            sets.push(Set { queries: Buffer::from_slice(device, &queries)?, pool });
        }
        stream.synchronize()?;
        Ok(Caches {
            device: device.clone(),
            subject,
            problem,
            sets,
            table,
            tables,
            queries,
            query_scale,
            keys,
            values,
            formula: OnceLock::new(),
        })
    }

    /// A token's row in the pattern.
    fn row(&self, pattern: &[E], sequence: usize, kv_head: usize, token: usize, row: &mut [f64]) {
        let (block, dim) = (BLOCK_TOKENS as usize, self.problem.head_dim as usize);
        let tile = self.tables[sequence][token / block] as usize * self.problem.kv_heads as usize + kv_head;
        let at = (tile * block + token % block) * dim % pattern.len();
        for (to, from) in row.iter_mut().zip(&pattern[at..at + dim]) {
            *to = f64::from(from.to_f32());
        }
    }

    fn key(&self, sequence: usize) -> impl Fn(usize, usize, &mut [f64]) + '_ {
        move |head, token, to| self.row(&self.keys, sequence, head, token, to)
    }

    fn value(&self, sequence: usize) -> impl Fn(usize, usize, &mut [f64]) + '_ {
        move |head, token, to| self.row(&self.values, sequence, head, token, to)
    }

    fn sequence(&self) -> Sequence {
        let Problem { q_heads, kv_heads, head_dim, max_tokens, .. } = self.problem;
        Sequence::decode(max_tokens as usize, q_heads as usize, kv_heads as usize, head_dim as usize)
    }

    /// Where a row of the output is: its sequence, its query head, and the sequence's queries.
    fn place(&self, row: usize) -> (usize, usize, Vec<f64>) {
        let (heads, dim) = (self.problem.q_heads as usize, self.problem.head_dim as usize);
        let queries = &self.queries[row / heads * heads * dim..][..heads * dim];
        (row / heads, row % heads, queries.iter().map(|x| f64::from(x.to_f32())).collect())
    }

    /// Some rows by the formula: over sequences and heads, the first and the last row among them.
    fn formula(&self) -> &[Exact] {
        self.formula.get_or_init(|| {
            let rows = self.problem.query_rows();
            let compared = rows.min(COMPARED_ROWS);
            let of = self.sequence();
            let exact = |i: usize| {
                let row = if compared == 1 { 0 } else { i * (rows - 1) / (compared - 1) };
                let (sequence, q_head, queries) = self.place(row);
                let (weights, lse) = softmax(&of.logits(&queries, self.key(sequence), 0, q_head));
                let mut output = vec![0.0; of.head_dim];
                let mut of_token = vec![0.0; of.head_dim];
                for (token, weight) in weights.iter().enumerate() {
                    self.value(sequence)(of.kv_head(q_head), token, &mut of_token);
                    output.iter_mut().zip(&of_token).for_each(|(o, v)| *o += weight * v);
                }
                Exact { row, output, lse }
            };
            (0..compared).into_par_iter().map(exact).collect()
        })
    }

    /// Compares some rows of what `splits` splits of dense attention have made with the formula: the largest error as a part
    /// of its bound; above 1 it is wrong, and so is NaN.
    pub fn compare(&self, output: &[f32], lse: &[f32], splits: u32) -> f64 {
        let of = self.sequence();
        let parts = self.formula().par_iter().map(|exact| {
            let (sequence, q_head, queries) = self.place(exact.row);
            let (key, value) = (self.key(sequence), self.value(sequence));
            let (bounds, lse_bound) = bound::row::<E>(&of, splits, &queries, key, value, 0, q_head);
            let got = &output[exact.row * of.head_dim..][..of.head_dim];
            let part = |got: f32, want: f64, bound: f64| (f64::from(got) - want).abs() / bound;
            let first = part(lse[exact.row], exact.lse, lse_bound);
            let errors = got.iter().zip(&exact.output).zip(&bounds);
            errors.map(|((got, want), bound)| part(*got, *want, *bound)).fold(first, worse)
        });
        parts.reduce(|| 0.0, worse)
    }

    /// The same where the bound of each row is on its error's Euclidean norm.
    pub fn compare_norms(&self, output: &[f32], bounds: &[f64]) -> f64 {
        let parts = self.formula().iter().map(|exact| {
            let got = &output[exact.row * exact.output.len()..][..exact.output.len()];
            let squares = got.iter().zip(&exact.output).map(|(got, want)| (f64::from(*got) - want).powi(2));
            squares.sum::<f64>().sqrt() / bounds[exact.row]
        });
        parts.fold(0.0, worse)
    }
}

/// The larger; NaN if one is.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

fn cache(error: host::attention::Error) -> Failure {
    host::dense::Error::from(error).into()
}
