//! One layer: its cache, a step by the scheme, the same by dense attention, and both against the formula.

use super::input::{Layer, Tensors};
use super::report::{Bytes, Head, LayerReport, Memory};
use super::{Error, Scheme};
use crate::cli::bench::timing::{Repetition, on_device};
use crate::cli::failure::Failure;
use host::attention::oracle::Sequence;
use host::attention::{BlockTable, PagedPool};
use host::certified::{
    Annotation, Attended, BLOCK_TOKENS, CacheElement, Certificate, Extents, Geometry, Layout, Policy, Rung,
    StepPlan, StepProblem, TieredCache, reasons,
};
use host::{BackendKind, Buffer, Device, Stream, dense};
use std::time::Instant;

const BLOCK: usize = BLOCK_TOKENS as usize;
/// Query heads that share what they read.
const ROW_GROUP: usize = 8;
/// What [`Rung::of`] takes for it.
const DENSE_RUNG: u32 = Rung::Dense as u32;
/// Of a GPU's steps; the emulator's are timed once.
const REPETITION: Repetition = Repetition { seconds: 0.05, least: 10, most: 200 };

/// How a layer is run.
pub struct Setting<'a> {
    /// Where.
    pub device: &'a Device,
    /// Its stream.
    pub stream: &'a Stream,
    /// By what.
    pub scheme: Scheme,
    /// Its thresholds.
    pub policy: &'a Policy,
    /// How its quantized cache is stored.
    pub layout: Layout,
    /// Slots for keys, and as many for values.
    pub scratch: u32,
}

/// What a scheme returned for the chosen query tokens.
struct Returned {
    /// [query tokens, heads, head_dim].
    output: Vec<f32>,
    /// [query tokens, heads]; `None` for `dense`, which has no certificate but a bound.
    certificates: Option<Vec<Certificate>>,
    seconds: f64,
    bytes: Bytes,
    memory: Memory,
}

/// A layer under way.
struct Work<'a, E: CacheElement> {
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
pub fn run<E: CacheElement>(
    setting: &Setting<'_>,
    layer: &Layer,
    data: &Tensors<E>,
    rows: &[usize],
) -> Result<LayerReport, Failure> {
    let work = Work { setting, layer, data, rows };
    let (dense, splits) = work.dense()?;
    let dense_seconds = dense.seconds;
    let dense_output = dense.output.clone();
    let returned = match setting.scheme {
        Scheme::Dense => dense,
        Scheme::Certified | Scheme::Naive => work.certified()?,
    };
    let heads = work.judge(&returned, &dense_output, splits);
    Ok(LayerReport {
        name: layer.name.clone(),
        dtype: layer.dtype.to_string(),
        tokens: layer.tokens,
        kv_heads: layer.kv_heads,
        heads: layer.heads,
        head_dim: layer.head_dim,
        query_tokens: rows.iter().map(|row| layer.first_position + row).collect(),
        step_seconds: returned.seconds,
        dense_seconds,
        bytes: returned.bytes,
        memory: returned.memory,
        rows: heads,
    })
}

impl<E: CacheElement> Work<'_, E> {
    fn longest(&self) -> usize {
        self.rows.last().map_or(0, |row| self.layer.visible(*row))
    }

    /// Queries of a chosen row, [heads, head_dim].
    fn queries(&self, row: usize) -> &[E] {
        let stride = self.layer.heads * self.layer.head_dim;
        &self.data.queries[row * stride..(row + 1) * stride]
    }

    /// Certified errors, with the layer that they are of.
    fn named<T>(&self, result: host::certified::Result<T>) -> Result<T, Failure> {
        result.map_err(|source| Error::Certified { layer: self.layer.name.clone(), source }.into())
    }

    fn named_dense<T>(&self, result: dense::Result<T>) -> Result<T, Failure> {
        result.map_err(|source| Error::Dense { layer: self.layer.name.clone(), source }.into())
    }

    /// Seconds of a step: on the GPU of a graph's replays, else of the one that was run.
    fn seconds(
        &self,
        once: f64,
        mut record: impl FnMut(&Stream) -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        if self.setting.device.kind() == BackendKind::Cpu {
            return Ok(once);
        }
        // SAFETY: what `record` captures is borrowed until this returns.
        let timing = unsafe { on_device(self.setting.stream, 1, REPETITION, |stream, _| record(stream)) }?;
        Ok(timing.median_us * 1e-6)
    }

    /// Dense attention: sequences of different lengths over one pool of blocks. The second result is its splits.
    fn dense(&self) -> Result<(Returned, u32), Failure> {
        let Setting { device, stream, .. } = *self.setting;
        let Layer { kv_heads, heads, head_dim, .. } = *self.layer;
        let problem = dense::Problem {
            sequences: self.rows.len() as u32,
            q_heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            query_tokens: 1,
            max_tokens: self.longest() as u32,
        };
        let mut plan = self.named_dense(dense::Plan::<E>::new(device, problem))?;
        let blocks = self.longest().div_ceil(BLOCK);
        let paged = |data: &[E]| {
            let mut pool = vec![E::zeroed(); blocks * kv_heads * BLOCK * head_dim];
            for (at, row) in data.chunks_exact(head_dim).take(self.longest() * kv_heads).enumerate() {
                let (token, head) = (at / kv_heads, at % kv_heads);
                let to = ((token / BLOCK * kv_heads + head) * BLOCK + token % BLOCK) * head_dim;
                pool[to..to + head_dim].copy_from_slice(row);
            }
            pool
        };
        let (keys, values) = (paged(&self.data.keys), paged(&self.data.values));
        let pool = PagedPool::from_slices(device, kv_heads as u32, head_dim as u32, &keys, &values);
        let pool = self.named_dense(pool.map_err(Into::into))?;
        let table = BlockTable::new(device, problem.sequences, problem.max_blocks(), pool.blocks());
        let mut table = self.named_dense(table.map_err(Into::into))?;
        let ids: Vec<u32> = (0..pool.blocks()).collect();
        for (sequence, row) in self.rows.iter().enumerate() {
            let length = self.layer.visible(*row);
            let set = table.set(sequence as u32, &ids[..length.div_ceil(BLOCK)], length as u32);
            self.named_dense(set.map_err(Into::into))?;
        }
        let queries: Vec<E> = self.rows.iter().flat_map(|row| self.queries(*row)).copied().collect();
        let queries = Buffer::from_slice(device, &queries)?;
        let mut out = plan.allocate()?;
        let start = Instant::now();
        plan.run(stream, &queries, &pool, &table, &mut out)?;
        stream.synchronize()?;
        let once = start.elapsed().as_secs_f64();
        let output = out.output.to_vec()?;
        let seconds =
            self.seconds(once, |stream| Ok(plan.run(stream, &queries, &pool, &table, &mut out)?))?;
        let bytes = Bytes { dense: self.dense_bytes(|_, _| true), ..Bytes::default() };
        let gpu = 2 * size_of_val(&keys[..]);
        let memory = Memory { gpu, host: 0 };
        Ok((Returned { output, certificates: None, seconds, bytes, memory }, plan.splits()))
    }

    /// Bytes that dense attention reads for the groups of query heads of which one is wanted.
    fn dense_bytes(&self, wanted: impl Fn(usize, usize) -> bool) -> u64 {
        let Layer { kv_heads, heads, head_dim, .. } = *self.layer;
        let group = heads / kv_heads;
        let mut bytes = 0;
        for (token, row) in self.rows.iter().enumerate() {
            for kv_head in 0..kv_heads {
                let own: Vec<usize> = (kv_head * group..(kv_head + 1) * group).collect();
                let read =
                    own.chunks(ROW_GROUP).filter(|heads| heads.iter().any(|head| wanted(token, *head)));
                bytes += (read.count() * self.layer.visible(*row) * 4 * head_dim) as u64;
            }
        }
        bytes
    }

    /// Certified attention over a cache in two tiers: a sequence for each query token, each a fork of the one before.
    fn certified(&self) -> Result<Returned, Failure> {
        let Setting { device, stream, policy, layout, scratch, .. } = *self.setting;
        let Layer { kv_heads, heads, head_dim, .. } = *self.layer;
        let sequences = self.rows.len() as u32;
        let problem = StepProblem {
            sequences,
            q_heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            max_tokens: self.longest() as u32,
        };
        let geometry = self.named(Geometry::new(problem.kv_heads, problem.head_dim))?.with_layout(layout);
        let mut plan = self.named(StepPlan::<E>::with_layout(device, problem, policy, layout))?;
        let extents = Extents {
            geometry,
            // Full blocks are shared; each sequence may have one of its own that is not full.
            blocks: problem.max_tokens.div_ceil(BLOCK_TOKENS) + sequences,
            sequences,
            max_tokens: problem.max_tokens,
            key_slots: scratch,
            value_slots: scratch,
        };
        let mut cache = self.named(TieredCache::<E>::new(device, extents))?;
        let stride = kv_heads * head_dim;
        let mut places = Vec::new();
        let (mut previous, mut filled) = (None, 0);
        for row in self.rows {
            let length = self.layer.visible(*row);
            let sequence = match previous {
                None => cache.start_sequence(),
                Some(before) => cache.fork(stream, before),
            };
            let sequence = self.named(sequence)?;
            let new = |data: &[E]| Buffer::from_slice(device, &data[filled * stride..length * stride]);
            let (keys, values) = (new(&self.data.keys)?, new(&self.data.values)?);
            self.named(cache.prefill(stream, sequence, &keys, &values))?;
            places.push(sequence.row() as usize);
            (previous, filled) = (Some(sequence), length);
        }
        self.named(cache.check(stream))?;

        let width = heads * head_dim;
        let mut queries = vec![E::zeroed(); self.rows.len() * width];
        for (place, row) in places.iter().zip(self.rows) {
            queries[place * width..(place + 1) * width].copy_from_slice(self.queries(*row));
        }
        let queries = Buffer::from_slice(device, &queries)?;
        let mut out = self.named(plan.allocate())?;
        let start = Instant::now();
        self.named(cache.attend(stream, &mut plan, &queries, &mut out))?;
        stream.synchronize()?;
        let once = start.elapsed().as_secs_f64();
        let first = self.named(cache.traffic(stream))?[0];
        let mut lengths = vec![0; places.len()];
        for (place, row) in places.iter().zip(self.rows) {
            lengths[*place] = self.layer.visible(*row) as u32;
        }
        let checked = self.named(plan.checked(&lengths))?.bytes(geometry.layout());
        let (output, certificates) = self.by_token(&out, &places)?;
        let seconds =
            self.seconds(once, |stream| Ok(cache.attend(stream, &mut plan, &queries, &mut out)?))?;
        let last = self.named(cache.traffic(stream))?[0];

        // Quantized, and original keys or values.
        let (quantized, tile) = (u64::from(geometry.layout().bytes), 32 * head_dim as u64);
        let groups = (kv_heads * (heads / kv_heads).div_ceil(ROW_GROUP)) as u64;
        let full: u64 = self.rows.iter().map(|row| (self.layer.visible(*row) / BLOCK) as u64).sum();
        let partial = self.rows.iter().filter(|row| !self.layer.visible(**row).is_multiple_of(BLOCK)).count();
        let dense =
            |token: usize, head: usize| Rung::of(certificates[token * heads + head].rung()).is_dense();
        let bytes = Bytes {
            quantized: groups * full * (quantized + size_of::<Annotation>() as u64),
            // What is taken out again, to make room for the originals.
            replaced: (first.key_hits + first.key_misses) * quantized,
            trailing: 2 * groups * partial as u64 * tile,
            scratch: (first.key_hits + first.value_hits) * tile,
            host_promoted: first.bytes(head_dim as u32),
            host_dense: self.dense_bytes(dense),
            host_promoted_warm: (device.kind() == BackendKind::Cuda).then(|| last.bytes(head_dim as u32)),
            checked,
            dense: self.dense_bytes(|_, _| true),
        };
        let memory = Memory { gpu: cache.memory().gpu(), host: cache.memory().host };
        Ok(Returned { output, certificates: Some(certificates), seconds, bytes, memory })
    }

    /// Outputs and certificates in the order of the query tokens, of a batch in the order of the sequences.
    fn by_token(&self, out: &Attended, places: &[usize]) -> Result<(Vec<f32>, Vec<Certificate>), Failure> {
        let heads = self.layer.heads;
        let width = heads * self.layer.head_dim;
        let (output, certificates) = (out.output.to_vec()?, out.certificates.to_vec()?);
        let ordered = places.iter().flat_map(|place| &output[place * width..(place + 1) * width]).copied();
        let judged = places.iter().flat_map(|place| &certificates[place * heads..(place + 1) * heads]);
        Ok((ordered.collect(), judged.copied().collect()))
    }

    /// Every head beside the formula in f64.
    fn judge(&self, returned: &Returned, dense: &[f32], splits: u32) -> Vec<Head> {
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
            let truth = sequence.attend(&query, key, value);
            for head in 0..heads {
                let exact = &truth.output[head * dim..(head + 1) * dim];
                let at = (token * heads + head) * dim;
                let distance =
                    |output: &[f32]| norm(output.iter().zip(exact).map(|(o, t)| f64::from(*o) - t));
                let (own, exactly) = (&returned.output[at..at + dim], &dense[at..at + dim]);
                let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let certificate = match &returned.certificates {
                    Some(certificates) => certificates[token * heads + head],
                    None => {
                        let (bounds, _) =
                            dense::bound::row::<E>(&sequence, splits, &query, key, value, 0, head);
                        dense_certificate(norm(bounds.into_iter()))
                    }
                };
                let rung = Rung::of(certificate.rung());
                let bound = f64::from(certificate.e_key)
                    + f64::from(certificate.e_val)
                    + f64::from(certificate.e_round);
                let error = distance(own);
                judged.push(Head {
                    token: self.layer.first_position + row,
                    head,
                    kv_head: sequence.kv_head(head),
                    bound,
                    e_key: certificate.e_key,
                    e_val: certificate.e_val,
                    e_round: certificate.e_round,
                    error,
                    ratio: (error > 0.0).then(|| bound / error),
                    holds: error <= bound,
                    dense_error: distance(exactly),
                    output_norm: norm(exact.iter().copied()),
                    tail_mass: certificate.tail_mass,
                    delta: certificate.delta,
                    promoted_keys: certificate.promoted_keys,
                    promoted_values: certificate.promoted_values,
                    rung,
                    reasons: reasons(certificate.reason()),
                    bits_of_dense: bits(own) == bits(exactly),
                });
            }
        }
        judged
    }
}

/// Of a head that `dense` computed, whose bound is all rounding.
fn dense_certificate(bound: f64) -> Certificate {
    Certificate {
        e_key: 0.0,
        e_val: 0.0,
        e_round: (bound as f32).next_up(),
        tail_mass: 0.0,
        delta: 0.0,
        promoted_keys: 0,
        promoted_values: 0,
        rung_and_reason: DENSE_RUNG,
    }
}

/// The Euclidean norm.
fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}
