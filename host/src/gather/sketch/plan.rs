//! Plan and run: what a step launches, and its scratch.

use super::super::plan::head_by_head;
use super::super::{Chosen, Error, FEW_HEAD_DIMS, MOST_COUNTED, Result, Support, length};
use super::cpu::{self, Scanning, Settling};
use super::elements::{Scan, Settle, SketchElement};
use super::kept::{Kept, OfStep};
use super::{Budget, WHAT};
use crate::attention::dense;
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::certified::{Annotation, Layout, Near, TileLayout};
use crate::check::poisoned;
use crate::cpu::handles::{slice, slice_mut};
use crate::simd_level::Level;
use crate::{Buffer, Device, Stream};
use kernels_gpu::attention::ROWS;
use kernels_gpu::gather::TILE_BLOCKS;
use kernels_gpu::gather::sketch::{
    DECIDE_THREADS, MASS_BINS, Norms, SCAN_THREADS, SETTLE_THREADS, ScanShape, SettleShape, Skipped, Total,
    Verdict, Whole, decide, decide_bytes, decide_parts, heads_of, kinds_of, scan, scan_parts, settle,
    settle_bytes, sketch_words, tiles_of,
};
use simt::{Global, GlobalMut, LaunchShape};

/// The arguments of a step: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct Handles<E> {
    /// [sequences, q_heads, head_dim].
    pub queries: Global<E>,
    /// The pool's keys, [blocks, kv_heads, 16, head_dim].
    pub keys: Global<E>,
    /// Its values, like the keys.
    pub values: Global<E>,
    /// [`Sketches::words`](super::Sketches::words) of the same sequences.
    pub sketches: Global<u32>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// \[sequences\].
    pub lengths: Global<u32>,
    /// Like the queries.
    pub output: GlobalMut<f32>,
    /// Natural log-sum-exp over what was attended to, [sequences, q_heads].
    pub lse: GlobalMut<f32>,
    /// What is known of each head, [sequences, q_heads].
    pub verdicts: GlobalMut<Verdict>,
    /// What a plan reads of the kept blocks whose budget asks for [codes](Budget::codes); nothing otherwise.
    /// Keys and values above are then for heads over their budget alone, and for the last block of 16 tokens
    /// where `near` does not have it.
    pub codes: Option<CodeHandles<E>>,
}

/// Codes of the pool, as [`StepHandles`](crate::certified::StepHandles) has them.
#[derive(Clone, Copy, Debug)]
pub struct CodeHandles<E> {
    /// Quantized blocks, [blocks, kv_heads] of tiles in the compact layout.
    pub tiles: Global<u32>,
    /// Their annotations, [blocks, kv_heads].
    pub annotations: Global<Annotation>,
    /// Originals in the GPU's memory.
    pub near: Near<E>,
}

/// The launches of a step, [`step_on`](Self::step_on): [`scan_on`](Self::scan_on),
/// [`attend_on`](Self::attend_on), then [`settle_on`](Self::settle_on).
///
/// One step at a time: scratch and choice are the plan's. Steps in one stream follow each other anyway.
#[derive(Debug)]
pub struct Plan<E: SketchElement> {
    device: Device,
    problem: StepProblem,
    budget: Budget,
    kernel: Scan<E>,
    launch: LaunchShape,
    decide: LaunchShape,
    settle: Settle<E>,
    shape: SettleShape,
    scratch: Scratch,
    chosen: Chosen,
    kept: Kept<E>,
    rung: dense::Plan<E>,
}

/// What the launches of a step tell each other.
#[derive(Debug)]
struct Scratch {
    masses: Buffer<f32>,
    nus: Buffer<f32>,
    totals: Buffer<Total>,
    norms: Buffer<Norms>,
    ranks: Buffer<u32>,
    /// What is counted of a row, [sequences, kv_heads, kinds, bins]; 0 between launches.
    bins: Buffer<u32>,
    /// How many thread blocks of a row have come; 0 between launches.
    counters: Buffer<u32>,
    skipped: Buffer<Skipped>,
    whole: Buffer<Whole>,
    /// Heads that the rung takes, [sequences, kv_heads · row groups].
    wanted: Buffer<u32>,
}

/// Bytes that a plan sets aside, but for what is as small as a query: of every gather-block that there is
/// room for masses, a norm, a rank, its place in the list and its entries in the table; and a row's bins.
pub(super) fn scratch_bytes(problem: StepProblem, budget: Budget) -> u64 {
    let Support { block, .. } = budget.support;
    let blocks = u64::from(problem.max_tokens.div_ceil(block.max(1)).next_multiple_of(TILE_BLOCKS));
    let rows = u64::from(problem.sequences) * u64::from(problem.kv_heads);
    let heads = heads_of(problem.dense().group());
    let words = u64::from(heads + 3 + block / BLOCK_TOKENS);
    let bins = u64::from(kinds_of(heads) * MASS_BINS);
    rows.saturating_mul(blocks.saturating_mul(words).saturating_add(bins)).saturating_mul(4)
}

impl<E: SketchElement> Plan<E> {
    /// The stages of a step, in order.
    pub const STAGES: &[&str] = &["scan", "attend", "settle"];

    /// A plan for a problem: `max_tokens` is what a sequence may grow to.
    ///
    /// # Errors
    /// Those of [`Budget::checked`] and of the problem; [`Error::HeadDim`], [`Error::TooLong`],
    /// [`Error::TooManyBlocks`]; out of memory for the scratch.
    pub fn new(device: &Device, problem: StepProblem, budget: Budget) -> Result<Self> {
        let (budget, problem) = (budget.checked()?, super::checked(problem)?);
        let StepProblem { sequences, kv_heads, head_dim, max_tokens, .. } = problem;
        let group = problem.dense().group();
        let none = || Error::HeadDim { what: WHAT, head_dim, takes: &FEW_HEAD_DIMS };
        let most = device.info().max_shared_bytes;
        let (kernel, shared) = E::scan_kernel(head_dim, budget.bits, most).ok_or_else(none)?;
        let settle = E::settle_kernel(head_dim).ok_or_else(none)?;
        let block = budget.support.block;
        let blocks = max_tokens.div_ceil(block).next_multiple_of(TILE_BLOCKS);
        if blocks > MOST_COUNTED {
            return Err(Error::TooManyBlocks { tokens: max_tokens, block });
        }
        let rows = sequences * kv_heads;
        let groups = group.div_ceil(ROWS);
        // Any number of blocks may have to be kept.
        let of_kept = head_by_head(problem, blocks * block);
        let kept = Kept::new(device, of_kept, budget, rows * groups)?;
        let rung = dense::Plan::new(device, problem.dense())?;
        let parts = scan_parts(rows * groups, max_tokens, budget.support.rule());
        let launch = LaunchShape::new((parts, kv_heads * groups, sequences), SCAN_THREADS).shared(shared);
        device.prepare(&kernel, launch)?;
        let decide = LaunchShape::new((decide_parts(rows, blocks), kv_heads, sequences), DECIDE_THREADS)
            .shared(decide_bytes());
        let scan = ScanShape {
            rule: budget.support.rule(),
            group,
            kv_heads,
            max_blocks: max_tokens.div_ceil(BLOCK_TOKENS),
            blocks,
            softmax_scale: 1.0 / (head_dim as f32).sqrt(),
            budget_log2: simt::math::log2(super::kept::chosen_by(budget)),
        };
        let splits = [kept.splits(), rung.splits()];
        let shape = SettleShape { scan, budget: budget.skip, splits, codes: budget.codes as u32 };
        let heads = heads_of(group) as usize;
        let (rows, all) = (rows as usize, rows as usize * blocks as usize);
        let parts = rows * parts as usize;
        let scratch = Scratch {
            masses: Buffer::new(device, all * heads)?,
            // Norms of blocks that there are not, and ranks of those without one, are read four at a time
            // with those that there are, and not used.
            nus: Buffer::zeroed(device, all)?,
            totals: Buffer::new(device, parts * heads)?,
            norms: Buffer::new(device, parts)?,
            ranks: Buffer::zeroed(device, all)?,
            bins: Buffer::zeroed(device, rows * (kinds_of(heads_of(group)) * MASS_BINS) as usize)?,
            counters: Buffer::zeroed(device, rows)?,
            skipped: Buffer::zeroed(device, rows * heads)?,
            whole: Buffer::zeroed(device, rows)?,
            wanted: Buffer::zeroed(device, rows * groups as usize)?,
        };
        let chosen = Chosen::new(device, of_kept, blocks)?;
        let device = device.clone();
        Ok(Plan {
            device,
            problem,
            budget,
            kernel,
            launch,
            decide,
            settle,
            shape,
            scratch,
            chosen,
            kept,
            rung,
        })
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    /// What it keeps, and what it may leave out.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Parts that attention to what is kept is cut into at the most, and those of the dense rung.
    pub fn splits(&self) -> [u32; 2] {
        self.shape.splits
    }

    /// What the last step chose.
    pub fn chosen(&self) -> &Chosen {
        &self.chosen
    }

    /// The same, to be filled before a case.
    pub(super) fn chosen_mut(&mut self) -> &mut Chosen {
        &mut self.chosen
    }

    /// Fills what a step writes for every head with what no step writes.
    pub(super) fn poison(&mut self, stream: &Stream) -> crate::Result<()> {
        let Scratch { masses, skipped, whole, wanted, .. } = &mut self.scratch;
        *masses = poisoned(stream, masses.len())?;
        (*skipped, *whole) = (poisoned(stream, skipped.len())?, poisoned(stream, whole.len())?);
        *wanted = poisoned(stream, wanted.len())?;
        Ok(())
    }

    /// What the last step's codes are known to be off by, [sequences, q_heads]; none where there are none.
    #[cfg(test)]
    pub(super) fn certificates(&self) -> &Buffer<crate::certified::Certificate> {
        self.kept.certificates()
    }

    /// Judges by another budget than is chosen by.
    #[cfg(test)]
    pub(super) fn judge_by(&mut self, skip: f32) {
        self.shape.budget = skip;
    }

    /// Shares the work of deciding among so many thread blocks a row, in place of as many as suit the GPU.
    #[cfg(test)]
    pub(super) fn decide_by(&mut self, shares: u32) {
        self.decide.grid.x = shares;
    }

    /// What the last step left out, [sequences, kv_heads, query heads rounded up to a multiple of eight].
    pub fn skipped(&self) -> &Buffer<Skipped> {
        &self.scratch.skipped
    }

    /// What holds for all heads of a KV head, [sequences, kv_heads].
    pub fn whole(&self) -> &Buffer<Whole> {
        &self.scratch.whole
    }

    /// log2 of the blocks' masses, rounded up, [sequences, kv_heads, blocks, heads].
    pub(super) fn masses(&self) -> &Buffer<f32> {
        &self.scratch.masses
    }

    /// Heads that went to the rung, [sequences, kv_heads · row groups], a bit each.
    pub fn wanted(&self) -> &Buffer<u32> {
        &self.scratch.wanted
    }

    /// Chooses, attends and judges. It allocates nothing, waits for nothing and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernels, which gives the same bits.
    ///
    /// # Safety
    /// As [`scan_on`](Self::scan_on); and nothing else touches what is written.
    ///
    /// # Errors
    /// As [`scan_on`](Self::scan_on).
    pub unsafe fn step_on(&mut self, stream: &Stream, slices: bool, handles: &Handles<E>) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.stages_on(stream, slices, handles, Self::STAGES.len()) }
    }

    /// The first `stages` of the step's [`STAGES`](Self::STAGES).
    ///
    /// # Safety
    /// As [`step_on`](Self::step_on).
    ///
    /// # Errors
    /// As [`scan_on`](Self::scan_on).
    pub unsafe fn stages_on(
        &mut self,
        stream: &Stream,
        slices: bool,
        handles: &Handles<E>,
        stages: usize,
    ) -> Result<()> {
        // SAFETY: this function's contract, and the order of the stages.
        unsafe {
            self.scan_on(stream, slices, handles)?;
            if stages > 1 {
                self.attend_on(stream, slices, handles)?;
            }
            if stages > 2 {
                self.settle_on(stream, slices, handles)?;
            }
        }
        Ok(())
    }

    /// Chooses, in two launches. It allocates nothing, waits for nothing and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernels, which choose the same.
    ///
    /// # Safety
    /// Until the launch has finished (for a capture: until each run of the graph has):
    /// - the memory behind every handle is there, reached by the stream's device, and written by nothing
    ///   else; with `slices` it is host memory;
    /// - each length is at most the problem's `max_tokens`, and each table entry that a length reaches is a
    ///   block of the pool;
    /// - codes are of the same blocks, in the compact layout, and those of the table that are full are
    ///   quantized.
    ///
    /// # Errors
    /// [`Error::Length`] for handles of another problem; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub unsafe fn scan_on(&mut self, stream: &Stream, slices: bool, handles: &Handles<E>) -> Result<()> {
        self.check(stream, handles)?;
        let Handles { queries, sketches, table, lengths, .. } = *handles;
        let Scratch { masses, nus, totals, norms, ranks, bins, counters, skipped, whole, .. } =
            &mut self.scratch;
        let Chosen { list, counts, entries, kept } = &mut self.chosen;
        let shape = self.shape.scan;
        if slices {
            // SAFETY: the caller's word, and the plan's own memory; the emulator's streams have done what
            // they were told when a call returns.
            unsafe {
                let scanning =
                    Scanning { queries: slice(queries), sketches: slice(sketches), lengths: slice(lengths) };
                let (list, counts) = (slice_mut(list.global_mut()), slice_mut(counts.global_mut()));
                let (entries, kept) = (slice_mut(entries.global_mut()), slice_mut(kept.global_mut()));
                let (skipped, whole) = (slice_mut(skipped.global_mut()), slice_mut(whole.global_mut()));
                let choice = cpu::Choice { list, counts, entries, kept, skipped, whole };
                let parts = self.launch.grid.x;
                let to = (slice(table), choice);
                cpu::scan(Level::best(), (self.budget.bits, parts), shape, scanning, to);
            }
            return Ok(());
        }
        let args = scan::Args {
            queries,
            sketches,
            lengths,
            masses: masses.global_mut(),
            nus: nus.global_mut(),
            totals: totals.global_mut(),
            norms: norms.global_mut(),
            shape,
        };
        // SAFETY: lengths as just checked and scratch made for this shape; the rest is this function's
        // contract. Every word that is written belongs to one warp of the grid.
        unsafe { stream.launch(&self.kernel, self.launch, args) }?;
        let args = decide::Args {
            table,
            lengths,
            masses: masses.global(),
            nus: nus.global(),
            totals: totals.global(),
            norms: norms.global(),
            ranks: ranks.global_mut(),
            bins: bins.global_mut(),
            counters: counters.global_mut(),
            list: list.global_mut(),
            counts: counts.global_mut(),
            entries: entries.global_mut(),
            kept: kept.global_mut(),
            skipped: skipped.global_mut(),
            whole: whole.global_mut(),
            scan_parts: self.launch.grid.x,
            shape,
        };
        // SAFETY: the same. Thread blocks of a row meet in `counters` and in `bins` only, by atomics; the one
        // that comes last, behind a fence, reads and clears the bins and reads the others' ranks.
        Ok(unsafe { stream.launch(&decide::kernel(), self.decide, args) }?)
    }

    /// Attends over what [`scan_on`](Self::scan_on) chose last. It allocates nothing, waits for nothing and
    /// can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernel, which gives the same bits.
    ///
    /// # Safety
    /// As [`scan_on`](Self::scan_on), which came before with the same table and lengths; and nothing else
    /// touches what is written.
    ///
    /// # Errors
    /// As [`scan_on`](Self::scan_on).
    pub unsafe fn attend_on(&mut self, stream: &Stream, slices: bool, handles: &Handles<E>) -> Result<()> {
        self.check(stream, handles)?;
        let Handles { queries, keys, values, output, lse, codes, .. } = *handles;
        let (table, lengths) = (self.chosen.entries.global(), self.chosen.kept.global());
        let of_step = OfStep { queries, keys, values, codes, table, lengths, output, lse };
        // SAFETY: what was chosen are blocks of the sequences, in the pool by the caller's word, and their
        // tokens, of which all but the last block of 16 are full; the rest is this function's contract.
        unsafe { self.kept.attend_on(stream, slices, of_step) }
    }

    /// Judges every head of [`attend_on`](Self::attend_on), and attends to all of the sequence for those over
    /// their budget. It allocates nothing, waits for nothing and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernels, which gives the same bits.
    ///
    /// # Safety
    /// As [`attend_on`](Self::attend_on), which came before with the same arguments.
    ///
    /// # Errors
    /// As [`scan_on`](Self::scan_on).
    pub unsafe fn settle_on(&mut self, stream: &Stream, slices: bool, handles: &Handles<E>) -> Result<()> {
        self.check(stream, handles)?;
        let Handles { queries, keys, values, table, lengths, output, lse, verdicts, .. } = *handles;
        let Scratch { skipped, whole, wanted, .. } = &mut self.scratch;
        let (skipped, whole) = (skipped.global(), whole.global());
        let certificates = self.kept.certificates().global();
        let rung = dense::Handles {
            queries,
            keys,
            values,
            table,
            lengths,
            wanted: Some(wanted.global()),
            // With codes they are the host's, as a rule.
            near: !self.budget.codes,
            output,
            lse,
        };
        if slices {
            // SAFETY: the caller's word, and the plan's own memory; the emulator's streams have done what
            // they were told when a call returns.
            unsafe {
                let settling = Settling {
                    queries: slice(queries),
                    output: slice(output.as_const()),
                    lse: slice(lse.as_const()),
                    certificates: slice(certificates),
                    lengths: slice(lengths),
                    skipped: slice(skipped),
                    whole: slice(whole),
                };
                let wanted = slice_mut(wanted.global_mut());
                cpu::settle(self.problem.head_dim, self.shape, settling, slice_mut(verdicts), wanted);
            }
        } else {
            let args = settle::Args {
                queries,
                output: output.as_const(),
                lse: lse.as_const(),
                certificates,
                lengths,
                skipped,
                whole,
                verdicts,
                wanted: wanted.global_mut(),
                shape: self.shape,
            };
            let groups = self.shape.scan.row_groups();
            let grid = (self.problem.kv_heads * groups, 1, self.problem.sequences);
            let launch = LaunchShape::new(grid, SETTLE_THREADS).shared(settle_bytes());
            // SAFETY: lengths as just checked; every head's verdict belongs to one warp; the rest is this
            // function's contract.
            unsafe { stream.launch(&self.settle, launch, args) }?;
        }
        // SAFETY: this function's contract.
        Ok(unsafe { self.rung.attend_on(stream, slices, rung) }?)
    }

    fn check(&self, stream: &Stream, handles: &Handles<E>) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        let StepProblem { sequences, kv_heads, head_dim, .. } = self.problem;
        let (sequences, kv_heads, dim) = (sequences as usize, kv_heads as usize, head_dim as usize);
        let rows = self.problem.dense().query_rows();
        length("the buffer of queries", handles.queries.len(), rows * dim)?;
        length("the output", handles.output.len(), rows * dim)?;
        length("the buffer of log-sums", handles.lse.len(), rows)?;
        length("the buffer of verdicts", handles.verdicts.len(), rows)?;
        length("the buffer of lengths", handles.lengths.len(), sequences)?;
        length("the block table", handles.table.len(), sequences * self.shape.scan.max_blocks as usize)?;
        let block = BLOCK_TOKENS as usize * kv_heads * dim;
        length("the buffer of keys", handles.keys.len(), handles.keys.len() / block * block)?;
        length("the buffer of values", handles.values.len(), handles.keys.len())?;
        length("what is given of codes", usize::from(handles.codes.is_some()), self.budget.codes.into())?;
        if let Some(CodeHandles { tiles, annotations, .. }) = handles.codes {
            let pairs = handles.keys.len() / (BLOCK_TOKENS as usize * dim);
            let tile = TileLayout::new(head_dim, Layout::Compact).bytes as usize / 4;
            length("the buffer of tiles", tiles.len(), pairs * tile)?;
            length("the buffer of annotations", annotations.len(), pairs)?;
        }
        let words = sequences * kv_heads * tiles_of(self.problem.max_tokens) as usize;
        length(
            "the sketches",
            handles.sketches.len(),
            words * sketch_words(head_dim, self.budget.bits) as usize,
        )
    }
}
