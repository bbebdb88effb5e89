//! A proof by a scheme's workload alone.

use super::{Counting, Findings, Layer, Trial};
use crate::Stream;
use crate::attention::dense::sample::random;
use crate::attention::inputs::{Batch, Input as Kind};
use crate::attention::oracle::Sequence;
use crate::attention::{BLOCK_TOKENS, BlockTable, PagedPool, StepProblem, page};
use crate::kv::workload::{AnyInput, Data, Input, Opening, Originals, judge};
use crate::kv::{Error, Result};
use crate::{Buffer, Device};
use half::f16;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Extents that batches have, in turn: head_dim, query heads of a KV head, KV heads.
const SHAPES: [(u32, u32, u32); 4] = [(128, 4, 2), (64, 8, 1), (64, 1, 3), (128, 7, 1)];
/// Violations that are described.
const DESCRIBED: usize = 20;

/// Counts of all inputs.
#[derive(Default)]
struct Counts {
    inputs: BTreeMap<Kind, Counting>,
    total: Counting,
    violations: Vec<String>,
    refused: BTreeMap<String, u64>,
    done: u64,
}

/// Steps over made-up caches of every kind, until there are enough, and over real ones, in f16.
///
/// # Errors
/// What the device reports; what the scheme refuses, if it refuses everything.
pub fn prove(trial: &Trial<'_>, progress: &mut dyn FnMut(u64)) -> Result<Findings> {
    let mut counts = Counts::default();
    for layer in trial.layers {
        counts.step(trial, &layer.batch(), 0)?;
        progress(counts.done);
    }
    // Rounds in a row that the scheme has refused.
    let (mut round, mut refused) = (0, 0);
    while counts.done < trial.options.head_steps {
        let seed = random(trial.options.seed, round);
        let long = round % 8 == 7;
        // The long ones have each shape in turn too.
        let (head_dim, group, kv_heads) = SHAPES[(round + round / 8) as usize % SHAPES.len()];
        let max_tokens = if long { trial.options.long_tokens } else { trial.options.max_tokens };
        let sequences: Vec<(Kind, u32)> = match long {
            true => vec![([Kind::Diffuse, Kind::Normal, Kind::Ties][round as usize / 8 % 3], max_tokens)],
            false => Kind::MADE
                .into_iter()
                .enumerate()
                .map(|(i, kind)| (kind, 1 + (random(seed, i as u64) >> 32) as u32 % max_tokens))
                .collect(),
        };
        let problem = StepProblem {
            sequences: sequences.len() as u32,
            q_heads: group * kv_heads,
            kv_heads,
            head_dim,
            max_tokens,
        };
        let before = counts.done;
        counts.step(trial, &Batch::<f16>::new(problem, &sequences, seed, seed), seed)?;
        progress(counts.done);
        round += 1;
        refused = if counts.done == before { refused + 1 } else { 0 };
        // A scheme that takes none of the shapes would never be done. What real caches said stands.
        if refused == 2 * SHAPES.len() {
            if counts.done > 0 {
                break;
            }
            let reason = counts.refused.into_keys().next().unwrap_or_default();
            return Err(Error::Refused(reason.into()));
        }
    }
    let notes =
        counts.refused.into_iter().map(|(reason, times)| format!("{times} batches refused: {reason}"));
    Ok(Findings {
        inputs: counts
            .inputs
            .into_iter()
            .map(|(kind, counting)| (kind.name().to_owned(), counting.finish()))
            .collect(),
        total: counts.total.finish(),
        violations: counts.violations,
        notes: notes.collect(),
        alarms: 0,
    })
}

impl Counts {
    /// One step over a batch, judged head by head.
    fn step(&mut self, trial: &Trial<'_>, batch: &Batch<f16>, seed: u64) -> Result<()> {
        let input = AnyInput::F16(Arc::new(to_device(trial.device, batch)?));
        let opening =
            Opening { input, selection: trial.selection, originals: Originals::Device, layer: None };
        let workload = match (trial.selection.scheme().workload)(&opening) {
            Ok(workload) => workload,
            Err(error) if error.is_refusal() => {
                *self.refused.entry(error.to_string()).or_default() += 1;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        Stream::new(trial.device)?.synchronize()?;
        let outcome = workload.outcome()?;
        let (heads, dim) = (batch.problem.q_heads as usize, batch.problem.head_dim as usize);
        let rows = batch.lengths.len() * heads;
        let exact: Vec<_> =
            (0..rows).into_par_iter().map(|row| with_data(batch, row, |data| data.exact())).collect();
        for (row, exact) in exact.iter().enumerate() {
            let promise = with_data(batch, row, |data| workload.promise(row, data));
            let judged =
                judge(exact, &promise, &outcome.output[row * dim..][..dim], outcome.lse.get(row).copied());
            let (kind, report) = (batch.inputs[row / heads], outcome.heads[row]);
            // A promise of each element is one of the norm too; where an element breaks it, the norm may not.
            let error = if judged.holds() { judged.error } else { f64::NAN };
            self.total.add(report.source, error, judged.bound, judged.norm);
            let own = self.inputs.entry(kind).or_default();
            if !own.add(report.source, error, judged.bound, judged.norm) && self.violations.len() < DESCRIBED
            {
                self.violations.push(format!(
                    "error {:.4e}, promised {:.4e}; {kind}, head_dim {dim}, {} tokens, sequence {} head {}, seed {seed}",
                    judged.error,
                    judged.bound.unwrap_or(f64::NAN),
                    batch.lengths[row / heads],
                    row / heads,
                    row % heads,
                ));
            }
        }
        self.done += rows as u64;
        Ok(())
    }
}

/// Gives `what` a row of the output: what it is attention over.
fn with_data<R>(batch: &Batch<f16>, row: usize, what: impl FnOnce(&Data<'_>) -> R) -> R {
    let StepProblem { q_heads, kv_heads, head_dim, .. } = batch.problem;
    let (heads, dim) = (q_heads as usize, head_dim as usize);
    let sequence = row / heads;
    let query: Vec<f64> =
        batch.queries[sequence * heads * dim..][..heads * dim].iter().map(|x| x.to_f64()).collect();
    let read = |pool: &[f16], head: usize, token: usize, to: &mut [f64]| {
        let at = batch.row(sequence, head, token);
        to.iter_mut().zip(&pool[at..at + dim]).for_each(|(to, x)| *to = x.to_f64());
    };
    let key = |head: usize, token: usize, to: &mut [f64]| read(&batch.keys, head, token, to);
    let value = |head: usize, token: usize, to: &mut [f64]| read(&batch.values, head, token, to);
    let length = batch.lengths[sequence] as usize;
    let of_sequence = Sequence::decode(length, heads, kv_heads as usize, dim);
    what(&Data { sequence: of_sequence, q_head: row % heads, query: &query, key: &key, value: &value })
}

/// The batch as workloads take it.
pub(crate) fn to_device(device: &Device, batch: &Batch<f16>) -> Result<Input<f16>> {
    let problem = batch.problem.dense().checked()?;
    let pool =
        PagedPool::from_slices(device, problem.kv_heads, problem.head_dim, &batch.keys, &batch.values)?;
    let mut table = BlockTable::new(device, problem.sequences, problem.max_blocks(), pool.blocks())?;
    let mut blocks = Vec::new();
    let rows = batch.table.chunks(problem.max_blocks() as usize).zip(&batch.lengths);
    for (sequence, (row, length)) in rows.enumerate() {
        let own = &row[..length.div_ceil(BLOCK_TOKENS) as usize];
        table.set(sequence as u32, own, *length)?;
        blocks.push(own.to_vec());
    }
    let queries = vec![Buffer::from_slice(device, &batch.queries)?];
    Ok(Input {
        device: device.clone(),
        problem,
        lengths: batch.lengths.clone(),
        pools: vec![pool],
        table,
        blocks,
        queries,
        seen: Vec::new(),
    })
}

impl Layer {
    /// One sequence for each query token, all over the same blocks.
    pub(crate) fn batch(&self) -> Batch<f16> {
        let (heads, dim) = (self.kv_heads as usize, self.head_dim as usize);
        let max_blocks = self.tokens.div_ceil(BLOCK_TOKENS);
        let block = BLOCK_TOKENS as usize;
        let ids: Vec<u32> = (0..max_blocks).collect();
        let mut pools =
            [&self.keys, &self.values].map(|_| vec![f16::NAN; max_blocks as usize * heads * block * dim]);
        for (pool, source) in pools.iter_mut().zip([&self.keys, &self.values]) {
            page(&source[..self.tokens as usize * heads * dim], [heads, dim], &ids, pool);
        }
        let [keys, values] = pools;
        Batch {
            problem: StepProblem {
                sequences: self.query_tokens,
                q_heads: self.q_heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                max_tokens: self.tokens,
            },
            lengths: (1..=self.query_tokens).map(|i| self.tokens - self.query_tokens + i).collect(),
            inputs: vec![Kind::Real; self.query_tokens as usize],
            queries: self.queries.clone(),
            keys,
            values,
            table: (0..self.query_tokens).flat_map(|_| 0..max_blocks).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::proof::{self, Options};
    use crate::kv::{Scheme, Selection};
    use simt::emu::EmuOptions;

    #[derive(Debug, thiserror::Error)]
    #[error("it takes no heads of any size")]
    struct NoHeads;

    static PICKY: Scheme = Scheme {
        name: "picky",
        about: "refuses every shape",
        presets: &[],
        options: &[],
        step_bytes: |_, _, _| 0.0,
        calibrate: None,
        check: |_| Ok(()),
        open: |_| Err(Error::refused(NoHeads)),
        workload: |_| Err(Error::refused(NoHeads)),
        proof: proof::by_workload,
    };

    /// It ends, and says why, in place of drawing batches for ever.
    #[test]
    fn a_scheme_that_refuses_every_shape_is_an_error_with_its_reason() {
        let selection = Selection::of(&PICKY);
        let device = Device::cpu(EmuOptions::default());
        let options = Options { head_steps: 100, max_tokens: 32, long_tokens: 32, seed: 1 };
        let trial = Trial { device: &device, selection: &selection, options, layers: &[] };
        let error = prove(&trial, &mut |_| ()).expect_err("nothing was tried");
        assert!(error.to_string().contains("no heads of any size"), "{error}");
    }
}
