//! Plan and run: a plan owns its scratch and fixes the launches of a step.

use super::cpu::{self, Selecting};
use super::elements::{GatherElement, Select};
use super::ranks::{Each, Ranks, longest};
use super::{Error, Ranking, Result, Score, Support, UP_TO_128, length};
use crate::attention::dense::{self, Problem};
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::cpu::handles::{slice, slice_mut};
use crate::kv::Selection;
use crate::simd_level::Level;
use crate::{Buffer, Device, Stream};
use kernels_gpu::attention::ROWS;
use kernels_gpu::gather::{
    MOST_LISTED, SELECT_THREADS, SelectShape, TILE_BLOCKS, maxima_words, parts_for, select, select_bytes,
    summary_words,
};
use simt::{Global, GlobalMut, LaunchShape};

/// What a step chose, for each sequence and KV head; or for each query head in the place of a KV head, where
/// these have lists of their own.
#[derive(Debug)]
pub struct Chosen {
    /// The gather-blocks that are kept, in their order, then `u32::MAX`: [sequences, kv_heads, most].
    pub list: Buffer<u32>,
    /// How many these are, [sequences, kv_heads].
    pub counts: Buffer<u32>,
    /// A block table over the pool seen as [blocks · kv_heads, 1, 16, head_dim], [sequences · kv_heads, most
    /// · block / 16]; `u32::MAX` where there is no token.
    pub entries: Buffer<u32>,
    /// Tokens that are kept, [sequences · kv_heads].
    pub kept: Buffer<u32>,
}

impl Chosen {
    /// Of up to `most` gather-blocks of each of the attention's sequences.
    pub(super) fn new(device: &Device, attended: Problem, most: u32) -> Result<Self> {
        let rows = attended.sequences as usize;
        Ok(Chosen {
            // Looked at before it is written, for a hint.
            list: Buffer::zeroed(device, rows * most as usize)?,
            counts: Buffer::new(device, rows)?,
            entries: Buffer::new(device, rows * attended.max_blocks() as usize)?,
            kept: Buffer::new(device, rows)?,
        })
    }
}

/// Attention over what was chosen: each KV head of a step is a sequence of its own, of up to `tokens` tokens.
pub(super) fn head_by_head(problem: StepProblem, tokens: u32) -> Problem {
    let StepProblem { sequences, kv_heads, head_dim, .. } = problem;
    Problem {
        sequences: sequences * kv_heads,
        q_heads: problem.dense().group(),
        kv_heads: 1,
        head_dim,
        query_tokens: 1,
        max_tokens: tokens,
    }
}

/// The arguments of a step: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct Handles<E> {
    /// [sequences, q_heads, head_dim].
    pub queries: Global<E>,
    /// The pool's keys, [blocks, kv_heads, 16, head_dim].
    pub keys: Global<E>,
    /// Its values, like the keys.
    pub values: Global<E>,
    /// [`Bounds::words`](super::Bounds::words) of the same tokens.
    pub bounds: Global<u32>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// \[sequences\].
    pub lengths: Global<u32>,
    /// Like the queries.
    pub output: GlobalMut<f32>,
    /// Natural log-sum-exp over what is kept, [sequences, q_heads].
    pub lse: GlobalMut<f32>,
}

/// The launches of a step, [`step_on`](Self::step_on), which are its [`stages`](Self::stages):
/// [`select_on`](Self::select_on), then [`attend_on`](Self::attend_on); or two others that do the same.
///
/// What is chosen depends on queries, bounds and lengths, and on nothing else; the output is that of
/// [`dense::Plan`] for [`attended`](Self::attended) over the table of what was chosen, bit for bit.
///
/// One step at a time: scratch and choice are the plan's. Steps in one stream follow each other anyway.
#[derive(Debug)]
pub struct Plan<E: GatherElement> {
    device: Device,
    problem: StepProblem,
    support: Support,
    score: Score,
    kernel: Select<E>,
    launch: LaunchShape,
    shape: SelectShape,
    /// Words that order like the scores, [sequences, kv_heads, tiles, 16].
    scores: Buffer<u32>,
    /// The largest of each tile, [sequences, kv_heads, maxima_words(tiles)].
    maxima: Buffer<u32>,
    /// How many thread blocks of a row have come; 0 between launches.
    counters: Buffer<u32>,
    chosen: Chosen,
    dense: dense::Plan<E>,
    /// The launches of a step that each thread block ranks.
    each: Option<Each<E>>,
}

impl<E: GatherElement> Plan<E> {
    /// A plan for a problem: `max_tokens` is what a sequence may grow to.
    ///
    /// # Errors
    /// Those of [`Support::checked`] and of the problem; [`Error::HeadDim`], [`Error::WideGroup`],
    /// [`Error::TooLong`]; out of memory for the scratch.
    pub fn new(device: &Device, problem: StepProblem, support: Support) -> Result<Self> {
        Plan::ranked(device, problem, support, Ranking::default())
    }

    /// The same, with blocks ranked in another way.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn ranked(device: &Device, problem: StepProblem, support: Support, ranking: Ranking) -> Result<Self> {
        let (support, problem) = (support.checked()?, ranking.score.checked(problem)?);
        let StepProblem { sequences, kv_heads, head_dim, max_tokens, .. } = problem;
        let lists = ranking.lists(problem.dense().group());
        let group = problem.dense().group() / lists;
        if ranking.score == Score::Codes && !E::IS_F16 && group > ROWS {
            return Err(Error::WideCodes { group });
        }
        let kernel = E::select_kernel(head_dim, group.div_ceil(ROWS));
        let kernel = kernel.ok_or(Error::WideGroup { head_dim, group })?;
        let rows = sequences * kv_heads * lists;
        let most = support.most(max_tokens);
        let tiles = max_tokens.div_ceil(support.block).div_ceil(TILE_BLOCKS);
        let shape = SelectShape {
            rule: support.rule(),
            group,
            lists,
            summary: ranking.score.summary(),
            kv_heads,
            max_blocks: max_tokens.div_ceil(BLOCK_TOKENS),
            tiles,
            most,
        };
        // With a KV head for each list.
        let listed = StepProblem { kv_heads: kv_heads * lists, ..problem };
        let dense = dense::Plan::new(device, head_by_head(listed, most * support.block))?;
        let grid = (parts_for(rows, tiles), kv_heads * lists, sequences);
        let launch = LaunchShape::new(grid, SELECT_THREADS).shared(select_bytes());
        device.prepare(&kernel, launch)?;
        let rows = rows as usize;
        let chosen = Chosen::new(device, dense.problem(), most)?;
        Ok(Plan {
            device: device.clone(),
            problem,
            support,
            score: ranking.score,
            kernel,
            launch,
            shape,
            scores: Buffer::new(device, rows * (tiles * TILE_BLOCKS) as usize)?,
            // Words that are no tile's are read beside those that are, and do not count.
            maxima: Buffer::zeroed(device, rows * maxima_words(tiles) as usize)?,
            counters: Buffer::zeroed(device, rows)?,
            chosen,
            dense,
            each: None,
        })
    }

    /// The same with its steps ranked by one thread block of a list, as when it is made, or by each.
    ///
    /// # Errors
    /// [`Error::LongList`]; [`Error::HeadDim`] where each shall; out of memory.
    pub fn with_ranks(self, ranks: Ranks) -> Result<Self> {
        let each = match ranks {
            Ranks::One => None,
            Ranks::Each => {
                let head_dim = self.problem.head_dim;
                let kernels = E::each_kernels(head_dim, self.shape.group.div_ceil(ROWS));
                let what = "gather/ranks=each";
                let kernels = kernels.ok_or(Error::HeadDim { what, head_dim, takes: &UP_TO_128 })?;
                let rows = (self.problem.kv_heads * self.shape.lists, self.problem.sequences);
                Some(Each::new(&self.device, kernels, rows, (self.shape, self.dense.shape()), head_dim)?)
            }
        };
        Ok(Plan { each, ..self })
    }

    /// The same with its steps ranked by whom a selection says, or else by who is quicker and can.
    ///
    /// # Errors
    /// Those of [`with_ranks`](Self::with_ranks).
    pub(super) fn with_ranks_of(self, selection: &Selection) -> Result<Self> {
        let shape = self.shape;
        let lists = self.problem.sequences * self.problem.kv_heads * shape.lists;
        let room = self.device.info().max_shared_bytes;
        let kernels = E::each_kernels(self.problem.head_dim, shape.group.div_ceil(ROWS));
        let can = longest(shape) <= MOST_LISTED && kernels.is_some_and(|(.., shared)| shared <= room);
        let quicker = if can { Ranks::quicker(lists, shape.tiles) } else { Ranks::One };
        self.with_ranks(Ranks::of(selection).unwrap_or(quicker))
    }

    /// Who ranks.
    pub fn ranks(&self) -> Ranks {
        if self.each.is_some() { Ranks::Each } else { Ranks::One }
    }

    /// The stages of a step, in order.
    pub fn stages(&self) -> &'static [&'static str] {
        self.audited_stages(false)
    }

    /// The same, and an audit behind them where there is one.
    pub(super) fn audited_stages(&self, audited: bool) -> &'static [&'static str] {
        let all: &[&str] = match self.ranks() {
            Ranks::Each => &["score", "attend", "audit"],
            Ranks::One => &["select", "attend", "audit"],
        };
        if audited { all } else { &all[..all.len() - 1] }
    }

    /// What steps that each ranks leave 0.
    pub(super) fn each(&self) -> Option<&Each<E>> {
        self.each.as_ref()
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    /// How much it keeps.
    pub fn support(&self) -> Support {
        self.support
    }

    /// Lists of a KV head.
    pub fn lists(&self) -> u32 {
        self.shape.lists
    }

    /// What the attention is, each KV head, or each query head, a sequence of its own.
    pub fn attended(&self) -> Problem {
        self.dense.problem()
    }

    /// Parts that this attention is cut into, at the most.
    pub fn splits(&self) -> u32 {
        self.dense.splits()
    }

    /// What the last step chose.
    pub fn chosen(&self) -> &Chosen {
        &self.chosen
    }

    /// What the kernel is told.
    #[cfg(test)]
    pub(super) fn shape(&self) -> SelectShape {
        self.shape
    }

    /// The same, to be filled before a case.
    pub(super) fn chosen_mut(&mut self) -> &mut Chosen {
        &mut self.chosen
    }

    /// The scores, to be filled before a case.
    pub(super) fn scores_mut(&mut self) -> &mut Buffer<u32> {
        &mut self.scores
    }

    /// Words that order like the scores of the blocks that a step last ranked by its kernels, [sequences,
    /// kv_heads, blocks]; others are unspecified.
    pub fn scores(&self) -> &Buffer<u32> {
        &self.scores
    }

    /// Chooses and attends, [whoever](Self::with_ranks) ranks, with the same bits. It allocates nothing,
    /// waits for nothing and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernels, which gives the same bits. Where each
    /// ranks [`Chosen::entries`] stay as they are.
    ///
    /// # Safety
    /// As [`select_on`](Self::select_on); and nothing else touches what is written.
    ///
    /// # Errors
    /// As [`select_on`](Self::select_on).
    pub unsafe fn step_on(&mut self, stream: &Stream, slices: bool, handles: &Handles<E>) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.stages_on(stream, slices, handles, self.stages().len()) }
    }

    /// The first `stages` of the step's [`stages`](Self::stages).
    ///
    /// # Safety
    /// As [`step_on`](Self::step_on).
    ///
    /// # Errors
    /// As [`select_on`](Self::select_on).
    pub unsafe fn stages_on(
        &mut self,
        stream: &Stream,
        slices: bool,
        handles: &Handles<E>,
        stages: usize,
    ) -> Result<()> {
        self.check(stream, handles)?;
        if let Some(each) = self.each.as_mut().filter(|_| !slices) {
            let scratch = (&mut self.scores, &mut self.maxima, &mut self.chosen);
            // SAFETY: lengths as just checked; the rest is this function's contract.
            return unsafe { each.run_on(stream, handles, scratch, stages) };
        }
        // SAFETY: this function's contract.
        unsafe {
            self.select_on(stream, slices, handles)?;
            if stages > 1 { self.attend_on(stream, slices, handles) } else { Ok(()) }
        }
    }

    /// Chooses. It allocates nothing, waits for nothing and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernel, which chooses the same.
    ///
    /// # Safety
    /// Until the launch has finished (for a capture: until each run of the graph has):
    /// - the memory behind every handle is there, reached by the stream's device, and written by nothing
    ///   else; with `slices` it is host memory;
    /// - each length is at most the problem's `max_tokens`, and each table entry that a length reaches is a
    ///   block of the pool.
    ///
    /// # Errors
    /// [`Error::Length`] for handles of another problem; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub unsafe fn select_on(&mut self, stream: &Stream, slices: bool, handles: &Handles<E>) -> Result<()> {
        self.check(stream, handles)?;
        let Handles { queries, bounds, table, lengths, .. } = *handles;
        let Chosen { list, counts, entries, kept } = &mut self.chosen;
        if slices {
            // SAFETY: the caller's word, and the plan's own memory; the emulator's streams have done what
            // they were told when a call returns.
            unsafe {
                let selecting = Selecting {
                    queries: slice(queries),
                    bounds: slice(bounds),
                    table: slice(table),
                    lengths: slice(lengths),
                };
                let (list, counts) = (slice_mut(list.global_mut()), slice_mut(counts.global_mut()));
                let (entries, kept) = (slice_mut(entries.global_mut()), slice_mut(kept.global_mut()));
                cpu::select(
                    Level::best(),
                    self.shape,
                    selecting,
                    cpu::Choice { list, counts, entries, kept },
                );
            }
            return Ok(());
        }
        let args = select::Args {
            queries,
            bounds,
            table,
            lengths,
            scores: self.scores.global_mut(),
            maxima: self.maxima.global_mut(),
            counters: self.counters.global_mut(),
            list: list.global_mut(),
            counts: counts.global_mut(),
            entries: entries.global_mut(),
            kept: kept.global_mut(),
            shape: self.shape,
        };
        // SAFETY: lengths as just checked and scratch made for this shape; the rest is this function's
        // contract. Blocks of a row meet in `counters` only, and the one that reads the others' scores comes
        // last.
        Ok(unsafe { stream.launch(&self.kernel, self.launch, args) }?)
    }

    /// Attends over what [`select_on`](Self::select_on) chose last. It allocates nothing, waits for nothing
    /// and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernel, which gives the same bits.
    ///
    /// # Safety
    /// As [`select_on`](Self::select_on), which came before with the same table and lengths; and nothing else
    /// touches what is written.
    ///
    /// # Errors
    /// As [`select_on`](Self::select_on).
    pub unsafe fn attend_on(&mut self, stream: &Stream, slices: bool, handles: &Handles<E>) -> Result<()> {
        let table = self.chosen.entries.global();
        // SAFETY: this function's contract: what was chosen are blocks of the sequences, in the pool.
        unsafe { self.attend_over(stream, slices, handles, table) }
    }

    /// The same where what was chosen lies elsewhere: `table` is like [`Chosen::entries`], over the pool of
    /// the handles.
    ///
    /// # Safety
    /// As [`attend_on`](Self::attend_on); and the table's entries that the chosen tokens reach are blocks of
    /// the pool.
    ///
    /// # Errors
    /// As [`select_on`](Self::select_on).
    pub unsafe fn attend_over(
        &mut self,
        stream: &Stream,
        slices: bool,
        handles: &Handles<E>,
        table: Global<u32>,
    ) -> Result<()> {
        self.check(stream, handles)?;
        length("the table of what was chosen", table.len(), self.chosen.entries.len())?;
        let Handles { queries, keys, values, output, lse, .. } = *handles;
        let lengths = self.chosen.kept.global();
        let handles =
            dense::Handles { queries, keys, values, table, lengths, wanted: None, near: true, output, lse };
        // SAFETY: entries of the pool and chosen tokens by the caller's word; the rest is this function's
        // contract.
        Ok(unsafe { self.dense.attend_on(stream, slices, handles) }?)
    }

    fn check(&self, stream: &Stream, handles: &Handles<E>) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        let StepProblem { sequences, kv_heads, head_dim, .. } = self.problem;
        let (sequences, kv_heads, dim) = (sequences as usize, kv_heads as usize, head_dim as usize);
        let tile = summary_words(self.score.summary(), head_dim) as usize;
        let rows = self.problem.dense().query_rows();
        length("the buffer of queries", handles.queries.len(), rows * dim)?;
        length("the output", handles.output.len(), rows * dim)?;
        length("the buffer of log-sums", handles.lse.len(), rows)?;
        length("the buffer of lengths", handles.lengths.len(), sequences)?;
        length("the block table", handles.table.len(), sequences * self.shape.max_blocks as usize)?;
        let words = sequences * kv_heads * self.shape.tiles as usize * tile;
        length("the bounds", handles.bounds.len(), words)?;
        let block = BLOCK_TOKENS as usize * kv_heads * dim;
        length("the buffer of keys", handles.keys.len(), handles.keys.len() / block * block)?;
        length("the buffer of values", handles.values.len(), handles.keys.len())
    }
}
