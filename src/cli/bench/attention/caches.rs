//! Caches to measure on: paged, filled on the device.

use super::report::{BlockOrder, Subject};
use super::trace::Trace;
use crate::cli::failure::Failure;
use host::attention::oracle::Sequence;
use host::attention::{BLOCK_TOKENS, BlockTable, PagedPool};
use host::dense::sample::{normal, random};
use host::dense::{DenseElement, Problem};
use host::kv::workload::{AnyInput, Data, Exact, Input, Judged, Outcome, Workload, judge};
use host::{Buffer, Device, Stream};
use rayon::prelude::*;
use std::sync::{Arc, OnceLock};

/// Tiles of the pattern that a pool repeats: a prime, so that neighbouring heads never hold the same, and
/// enough of them that a kernel which reads the wrong one gets other numbers.
const PATTERN_TILES: usize = 4093;
/// Rows of the output that are compared with the formula, of made-up keys and of a trace.
const COMPARED_ROWS: [usize; 2] = [4, 256];

/// Where keys, values and queries come from.
#[derive(Clone, Copy)]
pub enum Material<'a> {
    /// Made up: about N(0, 1), queries multiplied by so much.
    Normal(f32),
    /// Captured.
    Trace(&'a Trace),
}

/// Equal caches, for calls to take in turns, and what attention over them gives.
pub struct Caches<E: DenseElement> {
    /// What they are for.
    pub subject: Subject,
    /// Pools, table and queries.
    pub input: Arc<Input<E>>,
    queries: Vec<E>,
    compared: usize,
    /// Repeated over the pools, in whole tiles.
    keys: Vec<E>,
    values: Vec<E>,
    /// Some rows of the output by the formula, once they were asked for.
    formula: OnceLock<Vec<(usize, Exact)>>,
}

/// What successive queries of a head have in common, on the mean: the cosine of those of neighbouring tokens
/// in the sample dump (2,835 pairs of five layers; the median is 0.88).
const QUERY_CORRELATION: f32 = 0.84;
/// Queries before they come again backwards.
const QUERIES: u64 = 17;

fn numbers<E: DenseElement>(seed: u64, count: usize, scale: f32) -> Vec<E> {
    (0..count as u64).into_par_iter().map(|i| E::from_f32(normal(seed, i) * scale)).collect()
}

/// Queries of steps that follow each other, as like each other as those of a model are: forwards, then back
/// again.
fn queries_of_steps<E: DenseElement>(first: Vec<E>, scale: f32) -> Vec<Vec<E>> {
    let rest = (1.0 - QUERY_CORRELATION * QUERY_CORRELATION).sqrt();
    let mut rows: Vec<Vec<E>> = vec![first];
    for step in 1..QUERIES {
        let next = rows[rows.len() - 1].par_iter().enumerate().map(|(i, x)| {
            let fresh = normal(100 + step, i as u64) * scale;
            E::from_f32(QUERY_CORRELATION * x.to_f32() + rest * fresh)
        });
        rows.push(next.collect());
    }
    let back: Vec<Vec<E>> = rows[1..QUERIES as usize - 1].iter().rev().cloned().collect();
    rows.extend(back);
    rows
}

impl<E: DenseElement> Caches<E>
where
    Arc<Input<E>>: Into<AnyInput>,
{
    /// `count` equal caches.
    ///
    /// # Errors
    /// Out of memory, or what the device reports.
    pub fn new(device: &Device, subject: Subject, count: usize, of: Material<'_>) -> Result<Self, Failure> {
        let problem =
            subject.shape.problem(subject.batch, subject.context).checked().map_err(host::kv::Error::from)?;
        let (heads, dim) = (problem.kv_heads as usize, problem.head_dim as usize);
        let blocks = problem.max_blocks() * problem.sequences;
        let tile = BLOCK_TOKENS as usize * dim;

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

        let mut seen = Vec::new();
        let (keys, values, queries) = match of {
            Material::Normal(query_scale) => {
                let tiles = (blocks as usize * heads).min(PATTERN_TILES);
                let keys = numbers(1, tiles * tile, 1.0);
                let queries = numbers(3, problem.query_rows() * dim, query_scale);
                (keys, numbers(2, tiles * tile, 1.0), queries_of_steps(queries, query_scale))
            }
            Material::Trace(trace) => {
                let pool = |keys: bool| {
                    let mut pool = vec![E::zeroed(); blocks as usize * heads * tile];
                    for (layer, row) in tables.iter().enumerate() {
                        trace.fill(layer, keys, problem.max_tokens, row, &mut pool);
                    }
                    pool
                };
                let (queries, tokens): (Vec<_>, Vec<_>) =
                    trace.queries(tables.len(), problem.max_tokens).into_iter().unzip();
                for tokens in tokens {
                    seen.push(Buffer::from_slice(device, &vec![tokens; tables.len()])?);
                }
                (pool(true), pool(false), queries)
            }
        };

        let stream = Stream::new(device)?;
        let (key_pattern, value_pattern) =
            (Buffer::from_slice(device, &keys)?, Buffer::from_slice(device, &values)?);
        let mut pools = Vec::with_capacity(count);
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
            pools.push(pool);
        }
        stream.synchronize()?;
        let input = Arc::new(Input {
            device: device.clone(),
            problem,
            lengths: vec![problem.max_tokens; problem.sequences as usize],
            pools,
            table,
            blocks: tables,
            queries: queries.iter().map(|step| Buffer::from_slice(device, step)).collect::<Result<_, _>>()?,
            seen,
        });
        let compared = COMPARED_ROWS[usize::from(matches!(of, Material::Trace(_)))];
        let queries = queries.into_iter().next().unwrap_or_default();
        Ok(Caches { subject, input, queries, compared, keys, values, formula: OnceLock::new() })
    }

    /// A token's row in the pattern.
    fn row(&self, pattern: &[E], sequence: usize, kv_head: usize, token: usize, row: &mut [f64]) {
        let problem = self.input.problem;
        let (block, dim) = (BLOCK_TOKENS as usize, problem.head_dim as usize);
        let tile = self.input.blocks[sequence][token / block] as usize * problem.kv_heads as usize + kv_head;
        let at = (tile * block + token % block) * dim % pattern.len();
        for (to, from) in row.iter_mut().zip(&pattern[at..at + dim]) {
            *to = f64::from(from.to_f32());
        }
    }

    /// Gives `what` a row of the output: what it is attention over.
    fn with_data<R>(&self, row: usize, what: impl FnOnce(&Data<'_>) -> R) -> R {
        let Problem { q_heads, kv_heads, head_dim, max_tokens, .. } = self.input.problem;
        let (heads, dim) = (q_heads as usize, head_dim as usize);
        let sequence = row / heads;
        let query: Vec<f64> = self.queries[sequence * heads * dim..][..heads * dim]
            .iter()
            .map(|x| f64::from(x.to_f32()))
            .collect();
        let of = |pattern| move |head, token, to: &mut [f64]| self.row(pattern, sequence, head, token, to);
        let (key, value) = (of(&self.keys), of(&self.values));
        let of_sequence = Sequence::decode(max_tokens as usize, heads, kv_heads as usize, dim);
        what(&Data { sequence: of_sequence, q_head: row % heads, query: &query, key: &key, value: &value })
    }

    /// Some rows by the formula: over sequences and heads, the first and the last row among them.
    fn formula(&self) -> &[(usize, Exact)] {
        self.formula.get_or_init(|| {
            let rows = self.input.problem.query_rows();
            let compared = rows.min(self.compared);
            let exact = |i: usize| {
                let row = if compared == 1 { 0 } else { i * (rows - 1) / (compared - 1) };
                (row, self.with_data(row, |data| data.exact()))
            };
            (0..compared).into_par_iter().map(exact).collect()
        })
    }

    /// Some rows of what a workload has returned beside the formula, each as it was promised.
    pub fn judge(&self, workload: &dyn Workload, outcome: &Outcome) -> Vec<Judged> {
        let dim = self.input.problem.head_dim as usize;
        let rows = self.formula().iter().map(|(row, exact)| {
            let promise = self.with_data(*row, |data| workload.promise(*row, data));
            judge(exact, &promise, &outcome.output[row * dim..][..dim], outcome.lse.get(*row).copied())
        });
        rows.collect()
    }
}

fn cache(error: host::attention::Error) -> Failure {
    host::kv::Error::from(error).into()
}
