//! One layer: its pool, a step by the scheme, the same by exact attention, and both against the formula.

use super::Error;
use super::report::{Head, LayerReport};
use crate::cli::failure::Failure;
use crate::cli::layers::{Layer, Tensors};
use crate::cli::scheme;
use crate::cli::timing::{Repetition, on_device};
use host::attention::dense::{DenseElement, Problem};
use host::attention::oracle::Sequence;
use host::attention::{BLOCK_TOKENS, BlockTable, PagedPool, page};
use host::kv::workload::{AnyInput, Data, Input, Opening, Originals, Outcome, Workload, judge};
use host::kv::{self, Selection, Source};
use host::{BackendKind, Buffer, Device, Stream};
use std::sync::Arc;
use std::time::Instant;

const BLOCK: usize = BLOCK_TOKENS as usize;
/// Of a GPU's steps; the emulator's are timed once.
const REPETITION: Repetition = Repetition { seconds: 0.05, least: 10, most: 200 };

/// How a layer is run.
pub struct Setting<'a> {
    /// Where.
    pub device: &'a Device,
    /// Its stream.
    pub stream: &'a Stream,
    /// By what.
    pub kv: &'a Selection,
    /// Blocks of a KV head whose original keys the device keeps, and as many for values.
    pub scratch: u32,
}

/// A layer under way.
struct Work<'a, E: DenseElement> {
    setting: &'a Setting<'a>,
    layer: &'a Layer,
    data: &'a Tensors<E>,
    /// The chosen rows of queries.
    rows: &'a [usize],
}

/// Attends with the chosen `rows` of queries, each over the tokens that it sees.
///
/// # Errors
/// Extents without a kernel; out of memory; what the device reports.
pub fn run<E: DenseElement>(
    setting: &Setting<'_>,
    layer: &Layer,
    data: &Tensors<E>,
    rows: &[usize],
) -> Result<LayerReport, Failure>
where
    Arc<Input<E>>: Into<AnyInput>,
{
    let work = Work { setting, layer, data, rows };
    let input = work.input()?;
    let named = |source: kv::Error| Error::Scheme { layer: layer.name.clone(), source };
    let open = |selection: &Selection| {
        let originals = Originals::Host { scratch: setting.scratch };
        let opening = Opening { input: input.clone().into(), selection, originals, layer: layer.number() };
        (selection.scheme().workload)(&opening).map_err(named)
    };
    let mut workload = open(setting.kv)?;
    let outcome = workload.outcome().map_err(named)?;
    let mut exact = match scheme::dense() {
        Some(dense) => open(&dense)?,
        None => open(setting.kv)?,
    };
    let exactly = exact.outcome().map_err(named)?;
    let mut exact_outputs = workload.exact_outputs(setting.stream).map_err(named)?;
    if exact_outputs.is_empty() {
        exact_outputs.push(exactly.output.clone());
    }
    Ok(LayerReport {
        name: layer.name.clone(),
        dtype: layer.dtype.to_string(),
        tokens: layer.tokens,
        kv_heads: layer.kv_heads,
        heads: layer.heads,
        head_dim: layer.head_dim,
        query_tokens: rows.iter().map(|row| layer.first_position + row).collect(),
        step_seconds: work.seconds(&mut *workload)?,
        dense_seconds: work.seconds(&mut *exact)?,
        read_bytes: workload.read_bytes(),
        dense_read_bytes: exact.read_bytes(),
        memory: workload.memory(),
        facts: workload.facts().map_err(named)?,
        rows: work.judge(&*workload, &outcome, &exactly.output, &exact_outputs),
    })
}

impl<E: DenseElement> Work<'_, E> {
    fn longest(&self) -> usize {
        self.rows.last().map_or(0, |row| self.layer.visible(*row))
    }

    /// Queries of a chosen row, [heads, head_dim].
    fn queries(&self, row: usize) -> &[E] {
        let stride = self.layer.heads * self.layer.head_dim;
        &self.data.queries[row * stride..(row + 1) * stride]
    }

    /// A sequence for each chosen query token, of different lengths, all over one pool.
    fn input(&self) -> Result<Arc<Input<E>>, Failure> {
        let device = self.setting.device;
        let Layer { kv_heads, heads, head_dim, .. } = *self.layer;
        let problem = Problem {
            sequences: self.rows.len() as u32,
            q_heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            query_tokens: 1,
            max_tokens: self.longest() as u32,
        };
        let named = |source: kv::Error| Error::Scheme { layer: self.layer.name.clone(), source };
        let problem = problem.checked().map_err(|error| named(error.into()))?;
        let blocks = self.longest().div_ceil(BLOCK);
        let ids: Vec<u32> = (0..blocks as u32).collect();
        let paged = |data: &[E]| {
            let mut pool = vec![E::zeroed(); blocks * kv_heads * BLOCK * head_dim];
            let rows = &data[..self.longest() * kv_heads * head_dim];
            page(rows, [kv_heads, head_dim], &ids, &mut pool);
            pool
        };
        let (keys, values) = (paged(&self.data.keys), paged(&self.data.values));
        let pool = PagedPool::from_slices(device, kv_heads as u32, head_dim as u32, &keys, &values);
        let pool = pool.map_err(|error| named(error.into()))?;
        let table = BlockTable::new(device, problem.sequences, problem.max_blocks(), pool.blocks());
        let mut table = table.map_err(|error| named(error.into()))?;
        let (mut lengths, mut rows) = (Vec::new(), Vec::new());
        for (sequence, row) in self.rows.iter().enumerate() {
            let length = self.layer.visible(*row);
            let own = &ids[..length.div_ceil(BLOCK)];
            table.set(sequence as u32, own, length as u32).map_err(|error| named(error.into()))?;
            lengths.push(length as u32);
            rows.push(own.to_vec());
        }
        let queries: Vec<E> = self.rows.iter().flat_map(|row| self.queries(*row)).copied().collect();
        let queries = vec![Buffer::from_slice(device, &queries)?];
        Ok(Arc::new(Input {
            device: device.clone(),
            problem,
            lengths,
            pools: vec![pool],
            table,
            blocks: rows,
            queries,
            seen: Vec::new(),
        }))
    }

    /// Seconds of a step: on a GPU of a graph's replays, else of one.
    fn seconds(&self, workload: &mut dyn Workload) -> Result<f64, Failure> {
        let stages = workload.stages().len();
        if self.setting.device.kind() == BackendKind::Cpu {
            let start = Instant::now();
            workload.enqueue(self.setting.stream, 0, stages)?;
            self.setting.stream.synchronize()?;
            return Ok(start.elapsed().as_secs_f64());
        }
        let period = workload.period();
        // SAFETY: the workload is borrowed until this returns.
        let timing = unsafe {
            on_device(self.setting.stream, period, REPETITION, |stream, _| {
                workload.enqueue(stream, 0, stages).map_err(Failure::from)
            })
        }?;
        Ok(timing.median_us * 1e-6)
    }

    /// Every head beside the formula in f64. A head of an exact fallback has the bits of one of
    /// `exact_outputs`.
    fn judge(
        &self,
        workload: &dyn Workload,
        outcome: &Outcome,
        exactly: &[f32],
        exact_outputs: &[Vec<f32>],
    ) -> Vec<Head> {
        let Layer { kv_heads, heads, head_dim: dim, .. } = *self.layer;
        let wide = |data: &[E]| data.iter().map(|x| f64::from(x.to_f32())).collect::<Vec<f64>>();
        let (keys, values) = (wide(&self.data.keys), wide(&self.data.values));
        let row_of = |data: &[f64], kv_head: usize, token: usize, row: &mut [f64]| {
            let first = (token * kv_heads + kv_head) * dim;
            row.copy_from_slice(&data[first..first + dim]);
        };
        let key = |kv_head: usize, token: usize, row: &mut [f64]| row_of(&keys, kv_head, token, row);
        let value = |kv_head: usize, token: usize, row: &mut [f64]| row_of(&values, kv_head, token, row);
        let mut judged = Vec::new();
        for (token, row) in self.rows.iter().enumerate() {
            let sequence = Sequence::decode(self.layer.visible(*row), heads, kv_heads, dim);
            let query = wide(self.queries(*row));
            for q_head in 0..heads {
                let at = token * heads + q_head;
                let data = Data { sequence, q_head, query: &query, key: &key, value: &value };
                let exact = data.exact();
                let (own, exactly) = (&outcome.output[at * dim..][..dim], &exactly[at * dim..][..dim]);
                let found = judge(&exact, &workload.promise(at, &data), own, outcome.lse.get(at).copied());
                let beside = judge(&exact, &kv::workload::Promise::Nothing, exactly, None);
                let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let report = outcome.heads[at];
                judged.push(Head {
                    token: self.layer.first_position + row,
                    head: q_head,
                    kv_head: sequence.kv_head(q_head),
                    bound: found.bound,
                    error: found.error,
                    ratio: found.bound.filter(|_| found.error > 0.0).map(|bound| bound / found.error),
                    holds: found.holds(),
                    dense_error: beside.error,
                    output_norm: found.norm,
                    source: report.source,
                    original_keys: report.original_keys,
                    original_values: report.original_values,
                    skipped: report.skipped,
                    bits_of_dense: (report.source == Source::Originals).then(|| {
                        let same = |all: &Vec<f32>| bits(own) == bits(&all[at * dim..][..dim]);
                        exact_outputs.iter().any(same)
                    }),
                    facts: workload.row_facts(at),
                });
            }
        }
        judged
    }
}
