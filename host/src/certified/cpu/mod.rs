//! A step of certified attention on slices: all cores, SIMD, and the bits of the kernels' output, log-sums
//! and certificates.
//!
//! What the kernels do on tensor cores is done sixteen outputs at a time, as in [`dense::cpu`]; what they
//! decide is decided by their own functions, and every sum has their order. Threads share out what on a GPU
//! are thread blocks. Where a step chooses for itself, scores of the pass are kept for the blocks that are
//! promoted, which the kernels compute twice; where it promotes what an earlier one has chosen, it is one
//! pass, as in `carry`.
//!
//! All is host memory here: originals are read where they are, the trailing block too, and no scratch is
//! needed. Neither output nor certificates know the difference. [`Step::admit`] keeps a scratch as the
//! kernels would, traffic included.

mod choose;
mod exact;
mod finish;
mod gather;
mod list;
mod near;
mod original;
mod pass;
mod query;
mod replace;
mod stages;
mod tile;
mod watch;
mod write;

pub use crate::simd_level::Level;
pub use list::Lists;
pub use near::{Directory, NearSlices};
pub(crate) use write::{Chances, channel, put_key, quantize};

use super::step::{again_shape, step_shape};
use super::{
    Annotation, BLOCK_TOKENS, Certificate, Checked, Error, Layout, OriginalsRead, Policy, Result, StepProblem,
};
use crate::attention::Half;
use crate::attention::cpu::TILES_ALONE;
use crate::attention::cpu::pieces::{Memory, Pieces, with_memory};
use crate::attention::cpu::softmax::MAX_WARPS;
use crate::attention::dense;
use choose::Chosen;
use gather::Gather;
use kernels_gpu::attention::{part_floats, warps};
use kernels_gpu::certified::carried::{carried_warps, mode};
use kernels_gpu::certified::layout::TileLayout;
use kernels_gpu::certified::parts::weighing_blocks;
use kernels_gpu::certified::{StepShape, Thresholds, Watch};
use list::{List, OwnLists, Used};
use pass::{Note, RowGroup, Scratch, View};
use rayon::prelude::*;
use stages::{Share, Stages, Threads};
use std::cell::RefCell;
use watch::{Watched, Watching, compare_ahead, settle};

/// Full blocks of a sequence up to which a group of rows is one task, all stages of it, if there are as many
/// groups as threads: waiting for each other after each stage would take longer than what sharing it out
/// saves. A thread that has no group left takes warps of another's ([`Pieces`]).
const BLOCKS_TOGETHER: usize = 64;

/// What a step reads.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a, E> {
    /// [sequences, q_heads, head_dim].
    pub queries: &'a [E],
    /// Quantized blocks, [blocks, kv_heads] of tiles.
    pub tiles: &'a [u32],
    /// Their annotations, [blocks, kv_heads].
    pub annotations: &'a [Annotation],
    /// A sequence's blocks in order, [sequences, max_blocks]; entries that its length does not reach may be
    /// anything.
    pub table: &'a [u32],
    /// \[sequences\], in tokens.
    pub lengths: &'a [u32],
    /// Original keys, [blocks, kv_heads, 16, head_dim].
    pub keys: &'a [E],
    /// Original values.
    pub values: &'a [E],
}

/// What a step writes: all of it.
#[derive(Debug)]
pub struct Out<'a> {
    /// Attention, [sequences, q_heads, head_dim].
    pub output: &'a mut [f32],
    /// Natural log-sum-exp of the weights used, [sequences, q_heads].
    pub lse: &'a mut [f32],
    /// What is known of each head, [sequences, q_heads].
    pub certificates: &'a mut [Certificate],
}

/// A step on the CPU, and the memory that it needs.
pub struct Step {
    problem: StepProblem,
    layout: Layout,
    thresholds: Thresholds,
    shape: StepShape,
    /// Whether a step promotes what an earlier one has chosen, and for how many steps; 0 if nothing is.
    carries: bool,
    every: u32,
    /// Whether it has a second pass; its shape.
    again: bool,
    again_shape: StepShape,
    /// What is carried, where [`run_carried`](Self::run_carried) is not given any.
    own: OwnLists,
    groups: Vec<RowGroup>,
    /// What the pass notes, for the full blocks of each group of rows.
    notes: Vec<Note>,
    /// Of the splits of the pass, then of the replacers, for each group.
    partials: Vec<f32>,
    /// What the splits of a carried step gather for certificates.
    gathered: Vec<Gather>,
    /// The same of the second pass.
    again_partials: Vec<f32>,
    again_gathered: Vec<Gather>,
    /// What of a list the last step has promoted, of each group.
    used: Vec<Used>,
    chosen: Vec<Chosen>,
    norms: Vec<[f32; 2]>,
    dense_rows: Vec<u32>,
    trailing: u64,
    /// What is checked after a step, and steps so far.
    watch: Option<Watch>,
    clock: u32,
    /// What was looked at, of each group.
    watched: Vec<Watched>,
}

impl Step {
    /// A step of a problem. What it notes of blocks takes some 640 bytes a full block and group of eight
    /// query heads, as sequences grow; without a certificate, and where nothing may be promoted, nothing.
    ///
    /// # Errors
    /// As [`StepPlan::new`](super::StepPlan::new).
    pub fn new(problem: StepProblem, policy: &Policy) -> Result<Self> {
        Self::with_layout(problem, policy, Layout::Compact)
    }

    /// The same over tiles of a layout.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::CarriedLayout`].
    pub fn with_layout(problem: StepProblem, policy: &Policy, layout: Layout) -> Result<Self> {
        Self::with_splits(problem, policy, layout, 0)
    }

    /// The same that cuts a sequence into so many parts at the least.
    pub(crate) fn with_splits(
        problem: StepProblem,
        policy: &Policy,
        layout: Layout,
        splits: u32,
    ) -> Result<Self> {
        let shape = step_shape(problem, policy, layout)?;
        let shape = StepShape { splits: shape.splits.max(splits), ..shape };
        let StepProblem { sequences, kv_heads, .. } = problem;
        let mut groups = Vec::new();
        for sequence in 0..sequences as usize {
            for head in 0..kv_heads as usize {
                let first = (sequence * kv_heads as usize + head) * shape.group as usize;
                groups.extend((0..shape.group as usize).step_by(8).map(|row| RowGroup {
                    sequence,
                    head,
                    first_row: first + row,
                    rows: (shape.group as usize - row).min(8),
                }));
            }
        }
        let parts = groups.len() * (shape.splits + shape.replacers) as usize;
        let gathers = policy.carries() && policy.certify;
        let second = again_shape(problem, shape);
        let again = if policy.passes_again() { groups.len() * second.splits as usize } else { 0 };
        let heads = (sequences * problem.q_heads) as usize;
        let extents = if policy.every() == 0 { [0; 4] } else { list::extents(shape, groups.len(), heads) };
        Ok(Step {
            problem,
            layout,
            thresholds: policy.thresholds(),
            shape,
            carries: policy.carries(),
            every: policy.every(),
            again: policy.passes_again(),
            again_shape: second,
            again_partials: vec![0.0; again * part_floats(problem.head_dim)],
            again_gathered: vec![Gather::NONE; again],
            own: OwnLists::new(extents),
            gathered: vec![Gather::NONE; if gathers { groups.len() * shape.splits as usize } else { 0 }],
            used: groups.iter().map(|_| Used::default()).collect(),
            notes: Vec::new(),
            partials: vec![0.0; parts * part_floats(problem.head_dim)],
            chosen: groups.iter().map(|_| Chosen::default()).collect(),
            norms: vec![[0.0; 2]; groups.len()],
            dense_rows: vec![0; groups.len()],
            trailing: 0,
            watch: policy.watch(),
            clock: 0,
            watched: groups.iter().map(|_| Watched::default()).collect(),
            groups,
        })
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    /// One step. The bits are those of a [`StepPlan`](super::StepPlan) for the same problem and policy,
    /// whatever its scratch, unless stored data have changed: all that is listed is compared here, and there
    /// what its scratch has. Runs on rayon's current thread pool. With [`Policy::renew`] it promotes what
    /// earlier steps of this [`Step`] have chosen.
    ///
    /// # Errors
    /// [`Error::Dense`] for slices of other lengths than the problem's, and for a length or a block that
    /// table or pool do not have; nothing is written then.
    pub fn run<E: Half>(&mut self, slices: Slices<'_, E>, out: Out<'_>) -> Result<()> {
        self.run_at(Level::best(), slices, out)
    }

    /// [`run`](Self::run) on a path, or on the best below it that the machine has.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_at<E: Half>(&mut self, level: Level, slices: Slices<'_, E>, out: Out<'_>) -> Result<()> {
        let mut own = std::mem::take(&mut self.own);
        let turns = own.turns;
        let done = self.run_carried_at(level, slices, own.lend(self.every, self.again), out);
        if done.is_err() {
            own.turns = turns;
        }
        self.own = own;
        done
    }

    /// [`run`](Self::run) by lists that the caller keeps, and the kernels too if he likes. A policy that
    /// carries none does not look at them.
    ///
    /// # Errors
    /// As [`run`](Self::run), lists included.
    pub fn run_carried<E: Half>(
        &mut self,
        slices: Slices<'_, E>,
        lists: Lists<'_>,
        out: Out<'_>,
    ) -> Result<()> {
        self.run_carried_at(Level::best(), slices, lists, out)
    }

    /// [`run_carried`](Self::run_carried) on a path, or on the best below it that the machine has.
    ///
    /// # Errors
    /// As [`run_carried`](Self::run_carried).
    pub fn run_carried_at<E: Half>(
        &mut self,
        level: Level,
        slices: Slices<'_, E>,
        lists: Lists<'_>,
        out: Out<'_>,
    ) -> Result<()> {
        self.check(slices, &lists, &out)?;
        let level = level.checked();
        // `step_shape` refuses others.
        match self.problem.head_dim {
            64 => self.run_with::<E, 64>(level, slices, lists, out),
            _ => self.run_with::<E, 128>(level, slices, lists, out),
        }
    }

    /// How many steps there were: blocks are drawn by it, for [`Policy::exploration`].
    pub(super) fn clock(&mut self) -> &mut u32 {
        &mut self.clock
    }

    /// What the checks of the last step read, as [`StepPlan::checked`](super::StepPlan::checked) counts it.
    pub fn checked(&self) -> Checked {
        let mut checked = Checked::default();
        if self.watch.is_some() {
            self.watched.iter().for_each(|watched| checked.add(watched.checked));
        }
        checked
    }

    /// What the last step read of the originals, as
    /// [`StepPlan::originals_read`](super::StepPlan::originals_read) counts it.
    pub fn originals_read(&self) -> OriginalsRead {
        let mut read = OriginalsRead {
            key_tiles: self.trailing,
            value_tiles: self.trailing,
            dense_rows: self.dense_rows.iter().filter(|rows| **rows != 0).count() as u64,
            exact_rows: 0,
            again_rows: 0,
        };
        if self.carries {
            for used in &self.used {
                let [keys, values] = used.tiles();
                read.key_tiles += u64::from(keys);
                read.value_tiles += u64::from(values);
                read.exact_rows += u64::from(used.exact);
                read.again_rows += u64::from(used.earlier.is_some());
            }
            return read;
        }
        for entry in self.chosen.iter().flat_map(|chosen| &chosen.entries) {
            let [keys, values] = entry.wants();
            read.key_tiles += u64::from(keys);
            read.value_tiles += u64::from(values);
        }
        read
    }

    fn check<E: Half>(&self, slices: Slices<'_, E>, lists: &Lists<'_>, out: &Out<'_>) -> Result<()> {
        let Slices { queries, tiles, annotations, table, lengths, keys, values } = slices;
        let problem = self.problem.dense();
        let of_dense = dense::cpu::Slices { queries, keys, values, table, lengths };
        dense::cpu::check(problem, of_dense, out.output, out.lse)?;
        let layout = TileLayout::new(problem.head_dim, self.layout);
        let pairs = keys.len() / layout.elements() as usize;
        for (what, got, expected) in [
            ("the slice of tiles", tiles.len(), pairs * layout.bytes as usize / 4),
            ("the slice of annotations", annotations.len(), pairs),
            ("the slice of certificates", out.certificates.len(), out.lse.len()),
        ] {
            if got != expected {
                return Err(dense::Error::Length { what, got, expected }.into());
            }
        }
        if self.every != 0 {
            let Lists { lists, entries, promoted, log_sums, .. } = lists;
            let got = [lists.len(), entries.len(), promoted.len(), log_sums.len()];
            let expected = list::extents(self.shape, self.groups.len(), out.lse.len());
            if got != expected {
                return Err(Error::Carried { got, expected });
            }
        }
        if let Some(Directory { words, scratch }) = lists.directory {
            let (got, expected) = (words.len(), scratch.words() as usize);
            if scratch.claims() && got < expected {
                return Err(dense::Error::Length { what: "the directory", got, expected }.into());
            }
        }
        Ok(())
    }

    fn run_with<E: Half, const D: usize>(
        &mut self,
        level: Level,
        slices: Slices<'_, E>,
        mut lists: Lists<'_>,
        out: Out<'_>,
    ) -> Result<()> {
        let Out { output, lse, certificates } = out;
        let view = View {
            queries: bytemuck::cast_slice(slices.queries),
            tiles: slices.tiles,
            annotations: slices.annotations,
            keys: bytemuck::cast_slice(slices.keys),
            values: bytemuck::cast_slice(slices.values),
            table: slices.table,
            lengths: slices.lengths,
            shape: self.shape,
            layout: self.layout,
            log_odds: self.thresholds.log_odds,
            deviations: self.thresholds.deviations,
        };
        let (thresholds, shape, carries) = (self.thresholds, self.shape, self.carries);
        let (watch, clock) = (self.watch, self.clock);
        let again = self.again_shape;
        let weighing = weighing_blocks(self.problem.sequences * self.problem.q_heads, shape.parts);
        if let Some(watch) = watch.filter(|_| carries) {
            if lists.mode & mode::RENEWS != 0 {
                compare_ahead::<E, D>(level, view, watch, &self.groups, &mut self.watched, &mut lists);
            } else {
                self.watched.iter_mut().for_each(Watched::skip);
            }
        }
        let mut shares = self.shares(view, D, lists, output, lse, certificates);
        let most = shares.iter().map(|share| share.blocks).max().unwrap_or(0);
        let tiles = shares.iter().map(|share| share.blocks + 1).sum();
        let warps = if carries { carried_warps(D as u32) } else { warps(D as u32) };
        let mut pieces = Pieces::of(shares.len() * shape.splits as usize, warps as usize);
        if tiles <= TILES_ALONE {
            pieces.count = 1;
        }
        let watching = watch.filter(|_| !carries).map(|watch| Watching { watch, step: clock });
        let stages = Stages { level, view, thresholds, carries, weighing, pieces, again, watching };
        if most <= BLOCKS_TOGETHER && shares.len() >= rayon::current_num_threads() {
            let shares = shares.iter_mut().collect();
            each(shares, tiles, |share| stages.run::<E, D>(std::slice::from_mut(share), Threads::This));
        } else {
            stages.run::<E, D>(&mut shares, Threads::All);
        }
        if watching.is_some() {
            settle::<E, D>(&mut shares, view, level);
            self.clock = clock.wrapping_add(1);
        }
        if self.dense_rows.iter().any(|rows| *rows != 0) {
            let Slices { queries, keys, values, table, lengths, .. } = slices;
            let slices = dense::cpu::Slices { queries, keys, values, table, lengths };
            let wanted = Some(&self.dense_rows[..]);
            let splits = [shape.dense_splits, shape.rung_splits];
            dense::cpu::attend_rows(level, self.problem.dense(), splits, slices, wanted, output, lse)?;
        }
        Ok(())
    }

    /// Each group's part of the step's memory and of what it writes.
    fn shares<'a>(
        &'a mut self,
        view: View<'_>,
        head_dim: usize,
        lists: Lists<'a>,
        mut output: &'a mut [f32],
        mut lse: &'a mut [f32],
        mut certificates: &'a mut [Certificate],
    ) -> Vec<Share<'a>> {
        let Step { shape, every, carries, .. } = *self;
        let certify = self.thresholds.certify != 0;
        let length = |group: &RowGroup| view.lengths[group.sequence];
        let blocks = |group: &RowGroup| (length(group) / BLOCK_TOKENS) as usize;
        let noted = if carries { every != 0 } else { certify };
        let all: usize = self.groups.iter().map(blocks).sum();
        if noted && self.notes.len() < all {
            self.notes.resize(all, Note::zeroed());
        }
        let has_trailing = |group: &&RowGroup| !length(group).is_multiple_of(BLOCK_TOKENS);
        self.trailing = self.groups.iter().filter(has_trailing).count() as u64;
        let of_group = (shape.splits + shape.replacers) as usize * part_floats(head_dim as u32);
        let gathers = if carries && certify { shape.splits as usize } else { 0 };
        let mut notes = &mut self.notes[..];
        let mut gathered = &mut self.gathered[..];
        let second = if self.again { self.again_shape.splits as usize } else { 0 };
        let mut again_gathered = &mut self.again_gathered[..];
        let mut again_partials = &mut self.again_partials[..];
        let mut lists = list::deal(lists, shape, &self.groups, every);
        let memory = self.partials.chunks_exact_mut(of_group).zip(&mut self.chosen).zip(&mut self.used);
        let found = self.norms.iter_mut().zip(&mut self.dense_rows).zip(&mut self.watched);
        let mut shares = Vec::with_capacity(self.groups.len());
        for ((group, ((partials, chosen), used)), ((norms, dense), watched)) in
            self.groups.iter().zip(memory).zip(found)
        {
            let list = lists.next();
            let exact =
                length(group) != 0 && list.as_ref().is_some_and(|list: &List<'_>| list.turn.is_exact());
            let chooses = if carries {
                !exact && list.as_ref().is_some_and(|list: &List<'_>| list.renews)
            } else {
                certify
            };
            let followed = !exact && list.as_ref().is_some_and(|list: &List<'_>| list.followed);
            let blocks = blocks(group);
            let noted = if chooses || followed { blocks } else { 0 };
            shares.push(Share {
                group: *group,
                length: length(group),
                blocks,
                exact,
                left: [0; 2],
                chooses,
                passes: !exact,
                notes: notes.split_off_mut(..noted).unwrap_or_default(),
                list,
                used,
                gathered: gathered.split_off_mut(..gathers).unwrap_or_default(),
                again_partials: again_partials
                    .split_off_mut(..second * part_floats(head_dim as u32))
                    .unwrap_or_default(),
                again_gathered: again_gathered.split_off_mut(..second).unwrap_or_default(),
                partials,
                chosen,
                norms,
                dense,
                watched,
                // Rows of outputs are in the groups' order.
                output: output.split_off_mut(..group.rows * head_dim).unwrap_or_default(),
                lse: lse.split_off_mut(..group.rows).unwrap_or_default(),
                certificates: certificates.split_off_mut(..group.rows).unwrap_or_default(),
            });
        }
        shares
    }
}

/// Does tasks on all threads, or on this one alone where `tiles` say that the others are not worth waking.
fn each<T: Send>(tasks: Vec<T>, tiles: usize, one: impl Fn(T) + Sync + Send) {
    if tiles <= TILES_ALONE {
        tasks.into_iter().for_each(one);
    } else {
        tasks.into_par_iter().with_max_len(1).for_each(one);
    }
}

/// What the warps of a thread block gather.
fn with_warps<R>(f: impl FnOnce(&mut [Gather; MAX_WARPS]) -> R) -> R {
    thread_local!(static WARPS: Memory<[Gather; MAX_WARPS]> = const { RefCell::new(Vec::new()) });
    with_memory(&WARPS, || Box::new([Gather::NONE; MAX_WARPS]), f)
}

fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    thread_local!(static SCRATCH: Memory<Scratch> = const { RefCell::new(Vec::new()) });
    with_memory(&SCRATCH, Scratch::new, f)
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step").field("problem", &self.problem).finish_non_exhaustive()
    }
}
