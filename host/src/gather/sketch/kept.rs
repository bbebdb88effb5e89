//! How a step attends to what it keeps: to the originals, or to their codes, with a certificate of each head.

use super::super::{Error, Result};
use super::Budget;
use super::elements::SketchElement;
use super::plan::CodeHandles;
use crate::attention::StepProblem;
use crate::attention::dense;
use crate::certified::{AttendedHandles, Certificate, Policy, StepHandles, StepPlan};
use crate::{Buffer, Device, Stream};
use kernels_gpu::attention::dense::split_count;
use kernels_gpu::certified::carried::carried_warps;
use simt::{Global, GlobalMut};
use std::fmt;

/// The policy of codes: nothing is promoted. A head's bounds fail as rarely as those of [`Policy::SOUND`] do:
/// of six events that they rest on certificates count four (docs/certificate.md, "A sketch and codes").
/// Blocks are chosen by sketches of the originals, which know nothing of how codes are rounded, as such
/// bounds ask.
pub(in crate::gather) const OF_CODES: Policy = Policy { risk: Policy::SOUND.risk / 1.5, ..Policy::CODES };

/// The stages of a step by codes that are run: `carry`.
const PASS: usize = 1;

/// The share of the mass that blocks are chosen to leave out, of the budget that heads are judged by. What
/// codes may add to a log-sum-exp is taken off the mass that is attended to, and a head over its budget is
/// read from the originals, over the bus: so with codes less is left out than might be. (Measured over 8,000
/// real tokens: 0.7 % of the heads are over it then, in place of 2.6 %, and 5 % more tokens are kept.)
pub(super) fn chosen_by(budget: Budget) -> f32 {
    if budget.codes && budget.skip < 1.0 { 0.8 * budget.skip } else { budget.skip }
}

/// Rows of blocks from which on what a budget keeps is cut finer.
const UNEVEN_ROWS: u32 = 16;

/// Tiles that a warp of `carry` has of a full list, from which on codes are cut finer (measured: with four a
/// step over real keys takes 7 µs more of 46, with sixteen 2 less of 91).
const CODES_A_WARP: u32 = 8;

/// Parts that attention to what is kept is cut into, `launches` rows of blocks of up to `blocks` of the
/// pool's. Lists that a budget makes are of any length, and the longest row would keep its few
/// multiprocessors busy long after the others: twice as many parts take up to 18 % off a step over real keys
/// (measured). With few rows each has eight multiprocessors or more, and where lists are as long as each
/// other, as those of `k` blocks are, more parts only cost.
fn kept_splits(budget: Budget, launches: u32, blocks: u32, head_dim: u32) -> u32 {
    let [usual, finer] = [launches, launches.div_ceil(2)].map(|launches| split_count(launches, blocks));
    let uneven = budget.skip < 1.0 && launches >= UNEVEN_ROWS;
    let long = !budget.codes || blocks >= finer * carried_warps(head_dim) * CODES_A_WARP;
    if uneven && long { finer } else { usual }
}

/// Each KV head of each sequence is a sequence of its own, of one KV head.
pub(super) enum Kept<E: SketchElement> {
    /// Keys and values as they are, and a buffer of no certificates.
    Originals(Box<dense::Plan<E>>, Buffer<Certificate>),
    /// Keys of 8 bits and values of 4, and the certificates of the last step, [sequences, q_heads].
    Codes(Box<StepPlan<E>>, Buffer<Certificate>),
}

/// What it reads and writes: table and lengths of what is kept.
pub(super) struct OfStep<E> {
    pub queries: Global<E>,
    pub keys: Global<E>,
    pub values: Global<E>,
    pub codes: Option<CodeHandles<E>>,
    pub table: Global<u32>,
    pub lengths: Global<u32>,
    pub output: GlobalMut<f32>,
    pub lse: GlobalMut<f32>,
}

impl<E: SketchElement> Kept<E> {
    /// For a problem whose sequences are KV heads, with `launches` rows of blocks.
    ///
    /// # Errors
    /// Extents that there is no kernel for; out of memory.
    pub fn new(device: &Device, problem: dense::Problem, budget: Budget, launches: u32) -> Result<Self> {
        let splits = kept_splits(budget, launches, problem.max_blocks(), problem.head_dim);
        if !budget.codes {
            let plan = dense::Plan::with_splits(device, problem, [splits; 2])?;
            return Ok(Kept::Originals(Box::new(plan), Buffer::zeroed(device, 0)?));
        }
        let plan = StepPlan::with_splits(device, StepProblem::from(problem), &OF_CODES, splits)?;
        debug_assert_eq!(plan.stages()[..PASS], ["carry"], "nothing is ahead of the pass");
        Ok(Kept::Codes(Box::new(plan), Buffer::zeroed(device, problem.query_rows())?))
    }

    /// Parts that a sequence is cut into, at the most.
    pub fn splits(&self) -> u32 {
        match self {
            Kept::Originals(plan, _) => plan.splits(),
            Kept::Codes(plan, _) => plan.splits(),
        }
    }

    /// What is known of the last step's heads by codes, [sequences, q_heads]; nothing of originals.
    pub fn certificates(&self) -> &Buffer<Certificate> {
        let (Kept::Originals(_, certificates) | Kept::Codes(_, certificates)) = self;
        certificates
    }

    /// Attends. It allocates nothing, waits for nothing and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernels, which gives the same bits.
    ///
    /// # Safety
    /// As [`dense::Plan::attend_on`], or with codes as [`StepPlan::run`].
    ///
    /// # Errors
    /// As these; [`Error::Length`] for codes that are not there.
    pub unsafe fn attend_on(&mut self, stream: &Stream, slices: bool, of: OfStep<E>) -> Result<()> {
        let OfStep { queries, keys, values, codes, table, lengths, output, lse } = of;
        match self {
            Kept::Originals(plan, _) => {
                let handles = dense::Handles {
                    queries,
                    keys,
                    values,
                    table,
                    lengths,
                    wanted: None,
                    near: true,
                    output,
                    lse,
                };
                // SAFETY: this function's contract.
                Ok(unsafe { plan.attend_on(stream, slices, handles) }?)
            }
            Kept::Codes(plan, certificates) => {
                let Some(CodeHandles { tiles, annotations, near }) = codes else {
                    return Err(Error::Length { what: "what is given of codes", got: 0, expected: 1 });
                };
                let handles = StepHandles { queries, tiles, annotations, table, lengths, keys, values, near };
                let out = AttendedHandles { output, lse, certificates: certificates.global_mut() };
                // SAFETY: this function's contract. With one KV head a sequence, tiles, annotations,
                // originals and fresh blocks lie where they are looked for. A head that wants the originals
                // gets them by the plan's rung, in place of what is behind the pass.
                let ran = unsafe {
                    if slices {
                        plan.run_on_slices(&handles, out)
                    } else {
                        plan.run_stages(stream, &handles, out, PASS)
                    }
                };
                Ok(ran?)
            }
        }
    }
}

impl<E: SketchElement> fmt::Debug for Kept<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kept::Originals(..) => "Originals",
            Kept::Codes(..) => "Codes",
        })
    }
}
