//! Bounds, choice and output, by the kernels on the emulator and by the CPU's own path, judged by the oracle.

mod audit;
mod bounds;
mod choice;
mod output;
mod ranking;
mod ranks;
pub(super) mod scheme;
mod staging;
mod tiles;

use super::{Bounds, FoldHandles, GatherElement, Handles, List, Plan, Ranking, Ranks, Score, Support};
use crate::attention::inputs::{Batch, Input, in_chunks};
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::{Buffer, Device, Stream};
use simt::emu::EmuOptions;

const PROBLEM: StepProblem =
    StepProblem { sequences: 1, q_heads: 8, kv_heads: 2, head_dim: 64, max_tokens: 400 };

pub(super) fn device() -> Device {
    Device::cpu(EmuOptions::default())
}

/// A batch of sequences of these lengths, all of one kind.
pub(super) fn batch<E: GatherElement>(
    problem: StepProblem,
    input: Input,
    lengths: &[u32],
    seed: u64,
) -> Batch<E> {
    Batch::in_turns(problem, &[input], lengths, seed, seed + 1)
}

/// Bounds of a batch whose tokens came in chunks: `cuts` says how far each sequence is after each of them.
fn bounds<E: GatherElement>(
    batch: &Batch<E>,
    support: Support,
    cuts: &[Vec<u32>],
    slices: bool,
) -> Bounds<E> {
    scored(batch, support, Score::Bounds, cuts, slices)
}

/// The same of what blocks are scored by.
fn scored<E: GatherElement>(
    batch: &Batch<E>,
    support: Support,
    score: Score,
    cuts: &[Vec<u32>],
    slices: bool,
) -> Bounds<E> {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let mut bounds = Bounds::scored(&device, batch.problem, support, score).expect("bounds");
    let at = batch.upload(&device).expect("buffers");
    let folded = in_chunks(&device, cuts, |tokens, positions, lengths| {
        let handles = FoldHandles { keys: at.keys.global(), table: at.table.global(), positions, lengths };
        // SAFETY: buffers of the emulator, whose table is of this pool.
        unsafe { bounds.fold_on(&stream, (0, tokens), slices, handles) }
    });
    folded.expect("folded");
    bounds
}

/// What a step chose and gave.
#[derive(Debug, PartialEq)]
struct Stepped {
    list: Vec<u32>,
    counts: Vec<u32>,
    entries: Vec<u32>,
    kept: Vec<u32>,
    /// Bits.
    output: Vec<u32>,
    lse: Vec<u32>,
}

/// A step over a batch, its plan with it.
fn step<E: GatherElement>(batch: &Batch<E>, support: Support, slices: bool) -> (Stepped, Plan<E>) {
    step_by(batch, support, Ranking::default(), slices)
}

/// The same with blocks ranked in any way.
fn step_by<E: GatherElement>(
    batch: &Batch<E>,
    support: Support,
    ranking: Ranking,
    slices: bool,
) -> (Stepped, Plan<E>) {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let bounds = scored(batch, support, ranking.score, std::slice::from_ref(&batch.lengths), slices);
    let at = batch.upload(&device).expect("buffers");
    let rows = batch.problem.dense().query_rows();
    let mut output = Buffer::<f32>::new(&device, batch.queries.len()).expect("a buffer");
    let mut lse = Buffer::<f32>::new(&device, rows).expect("a buffer");
    let mut plan = Plan::<E>::ranked(&device, batch.problem, support, ranking).expect("a plan");
    let handles = Handles {
        queries: at.queries.global(),
        keys: at.keys.global(),
        values: at.values.global(),
        bounds: bounds.words().global(),
        table: at.table.global(),
        lengths: at.lengths.global(),
        output: output.global_mut(),
        lse: lse.global_mut(),
    };
    // SAFETY: buffers of the emulator, whose table is of this pool.
    unsafe {
        plan.step_on(&stream, slices, &handles).expect("a step");
    }
    let read = |buffer: &Buffer<u32>| buffer.to_vec().expect("read");
    let bits = |buffer: &Buffer<f32>| buffer.to_vec().expect("read").iter().map(|x| x.to_bits()).collect();
    let chosen = plan.chosen();
    let stepped = Stepped {
        list: read(&chosen.list),
        counts: read(&chosen.counts),
        entries: read(&chosen.entries),
        kept: read(&chosen.kept),
        output: bits(&output),
        lse: bits(&lse),
    };
    (stepped, plan)
}

/// A sequence's list of a KV head, or of a query head, where these have lists.
fn list<E: GatherElement>(batch: &Batch<E>, stepped: &Stepped, sequence: usize, head: usize) -> Vec<usize> {
    let row = sequence * stepped.counts.len() / batch.lengths.len() + head;
    let most = stepped.list.len() / stepped.counts.len();
    let (list, rest) = stepped.list[row * most..][..most].split_at(stepped.counts[row] as usize);
    assert!(rest.iter().all(|block| *block == u32::MAX), "what is not used is marked");
    list.iter().map(|block| *block as usize).collect()
}

/// Keys or values of a token in f64.
pub(super) fn read<E: GatherElement>(
    batch: &Batch<E>,
    pool: &[E],
    sequence: usize,
    head: usize,
    token: usize,
    row: &mut [f64],
) {
    let at = batch.row(sequence, head, token);
    row.iter_mut().zip(&pool[at..]).for_each(|(to, x)| *to = f64::from(x.to_f32()));
}

/// The queries of a sequence and KV head, each in f64.
fn queries<E: GatherElement>(batch: &Batch<E>, sequence: usize, head: usize) -> Vec<Vec<f64>> {
    let group = (batch.problem.q_heads / batch.problem.kv_heads) as usize;
    let wide = |q: usize| batch.query(sequence, head * group + q).iter().map(|x| f64::from(x.to_f32()));
    (0..group).map(|q| wide(q).collect()).collect()
}

/// A block's bounds by the oracle.
fn of_block<E: GatherElement>(
    batch: &Batch<E>,
    block: u32,
    sequence: usize,
    head: usize,
    index: usize,
) -> [Vec<f64>; 2] {
    let (length, block) = (batch.lengths[sequence] as usize, block as usize);
    let tokens = index * block..length.min((index + 1) * block);
    let key = |token: usize, row: &mut [f64]| read(batch, &batch.keys, sequence, head, token, row);
    super::oracle::bounds(batch.problem.head_dim as usize, tokens, key)
}
