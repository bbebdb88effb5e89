//! A step of certified attention on slices: all cores, SIMD, and the bits of the kernels' output, log-sums and certificates.
//!
//! What the kernels do on tensor cores is done sixteen outputs at a time, as in [`dense::cpu`]; what they
//! decide is decided by their own functions, and every sum has their order. Threads share out what on a GPU are thread
//! blocks. Scores of the pass are kept for the blocks that are promoted, which the kernels compute twice.
//!
//! All is host memory here: originals are read where they are, the trailing block too, and no scratch is needed. Neither output
//! nor certificates know the difference. [`Step::admit`] keeps a scratch as the kernels would, traffic included.

mod choose;
mod finish;
mod near;
mod pass;
mod query;
mod replace;
mod tile;
mod write;

pub use crate::simd_level::Level;
pub use near::NearSlices;
pub(crate) use write::quantize;

use super::step::step_shape;
use super::{Annotation, BLOCK_TOKENS, Certificate, Error, OriginalsRead, Policy, Result, StepProblem};
use crate::attention::Half;
use crate::attention::cpu::{TILES_ALONE, run};
use crate::dense;
use choose::{Choose, Chosen};
use finish::Finish;
use kernels_gpu::attention::{part_floats, warps};
use kernels_gpu::certified::layout::TileLayout;
use kernels_gpu::certified::parts::weighing_blocks;
use kernels_gpu::certified::{StepShape, Thresholds, pass_share};
use pass::{Note, Pass, RowGroup, Scratch, View};
use rayon::prelude::*;
use replace::Replace;
use std::cell::RefCell;
use std::marker::PhantomData;

/// What a step reads.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a, E> {
    /// [sequences, q_heads, head_dim].
    pub queries: &'a [E],
    /// Quantized blocks, [blocks, kv_heads] of tiles.
    pub tiles: &'a [u32],
    /// Their annotations, [blocks, kv_heads].
    pub annotations: &'a [Annotation],
    /// A sequence's blocks in order, [sequences, max_blocks]; entries that its length does not reach may be anything.
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
    thresholds: Thresholds,
    shape: StepShape,
    groups: Vec<RowGroup>,
    /// What the pass notes, for the full blocks of each group of rows.
    notes: Vec<Note>,
    /// Of the splits of the pass, then of the replacers, for each group.
    partials: Vec<f32>,
    chosen: Vec<Chosen>,
    norms: Vec<[f32; 2]>,
    dense_rows: Vec<u32>,
    trailing: u64,
}

impl Step {
    /// A step of a problem. What it notes of blocks takes some 640 bytes a full block and group of eight query heads, as
    /// sequences grow; without a certificate nothing.
    ///
    /// # Errors
    /// As [`StepPlan::new`](super::StepPlan::new); [`Error::Policy`] for a policy that checks the order of blocks or what is
    /// stored: these checks have kernels and no path of their own here.
    pub fn new(problem: StepProblem, policy: &Policy) -> Result<Self> {
        let shape = step_shape(problem, policy)?;
        if policy.watch().is_some() {
            let what =
                "ranking and canary are checks of the kernels alone: run a StepPlan, or switch them off";
            return Err(Error::Policy { what: what.into() });
        }
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
        Ok(Step {
            problem,
            thresholds: policy.thresholds(),
            shape,
            notes: Vec::new(),
            partials: vec![0.0; parts * part_floats(problem.head_dim)],
            chosen: groups.iter().map(|_| Chosen::default()).collect(),
            norms: vec![[0.0; 2]; groups.len()],
            dense_rows: vec![0; groups.len()],
            trailing: 0,
            groups,
        })
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    /// One step. The bits are those of a [`StepPlan`](super::StepPlan) for the same problem and policy, whatever its scratch.
    /// Runs on rayon's current thread pool.
    ///
    /// # Errors
    /// [`Error::Dense`] for slices of other lengths than the problem's, and for a length or a block that table or pool do not
    /// have; nothing is written then.
    pub fn run<E: Half>(&mut self, slices: Slices<'_, E>, out: Out<'_>) -> Result<()> {
        self.run_at(Level::best(), slices, out)
    }

    /// [`run`](Self::run) on a path, or on the best below it that the machine has.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_at<E: Half>(&mut self, level: Level, slices: Slices<'_, E>, out: Out<'_>) -> Result<()> {
        self.check(slices, &out)?;
        let level = level.checked();
        // `step_shape` refuses others.
        match self.problem.head_dim {
            64 => self.run_with::<E, 64>(level, slices, out),
            _ => self.run_with::<E, 128>(level, slices, out),
        }
    }

    /// What the last step read of the originals, as [`StepPlan::originals_read`](super::StepPlan::originals_read) counts it.
    pub fn originals_read(&self) -> OriginalsRead {
        let mut read = OriginalsRead {
            key_tiles: self.trailing,
            value_tiles: self.trailing,
            dense_rows: self.dense_rows.iter().filter(|rows| **rows != 0).count() as u64,
        };
        for entry in self.chosen.iter().flat_map(|chosen| &chosen.entries) {
            let [keys, values] = entry.wants();
            read.key_tiles += u64::from(keys);
            read.value_tiles += u64::from(values);
        }
        read
    }

    fn check<E: Half>(&self, slices: Slices<'_, E>, out: &Out<'_>) -> Result<()> {
        let Slices { queries, tiles, annotations, table, lengths, keys, values } = slices;
        let problem = self.problem.dense();
        let of_dense = dense::cpu::Slices { queries, keys, values, table, lengths };
        dense::cpu::check(problem, of_dense, out.output, out.lse)?;
        let layout = TileLayout::new(problem.head_dim);
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
        Ok(())
    }

    fn run_with<E: Half, const D: usize>(
        &mut self,
        level: Level,
        slices: Slices<'_, E>,
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
        };
        self.pass::<E, D>(level, view);
        self.choose(level, view);
        self.replace::<E, D>(level, view);
        self.finish::<E, D>(level, view, output, lse, certificates);
        if self.dense_rows.iter().any(|rows| *rows != 0) {
            let Slices { queries, keys, values, table, lengths, .. } = slices;
            let slices = dense::cpu::Slices { queries, keys, values, table, lengths };
            let wanted = Some(&self.dense_rows[..]);
            dense::cpu::attend_rows(level, self.problem.dense(), slices, wanted, output, lse)?;
        }
        Ok(())
    }

    /// Full blocks of a group's sequence.
    fn blocks(view: View<'_>, group: RowGroup) -> usize {
        (view.lengths[group.sequence] / BLOCK_TOKENS) as usize
    }

    /// Floats of a group's partial results.
    fn partial_floats(&self) -> usize {
        (self.shape.splits + self.shape.replacers) as usize * part_floats(self.problem.head_dim)
    }

    fn pass<E: Half, const D: usize>(&mut self, level: Level, view: View<'_>) {
        let noted = self.thresholds.certify != 0;
        let blocks: usize = self.groups.iter().map(|group| Self::blocks(view, *group)).sum();
        if noted && self.notes.len() < blocks {
            self.notes.resize(blocks, Note::zeroed());
        }
        let of_group = self.partial_floats();
        let mut notes = &mut self.notes[..];
        let mut tasks = Vec::new();
        for (group, partials) in self.groups.iter().zip(self.partials.chunks_exact_mut(of_group)) {
            let blocks = Self::blocks(view, *group);
            let (a_split, used) = pass_share(blocks as u32, self.shape.splits);
            for (split, out) in
                partials.chunks_exact_mut(part_floats(D as u32)).take(used as usize).enumerate()
            {
                let first = split * a_split as usize;
                let end = (first + a_split as usize).min(blocks);
                let own = notes.split_off_mut(..if noted { end - first } else { 0 }).unwrap_or_default();
                tasks.push((*group, [first, end], own, out));
            }
        }
        each(tasks, blocks, |(group, blocks, notes, out)| {
            with_scratch(|scratch| {
                run(level, Pass::<E, D> { view, group, blocks, notes, scratch, out, element: PhantomData });
            });
        });
    }

    fn choose(&mut self, level: Level, view: View<'_>) {
        if self.thresholds.certify == 0 {
            return;
        }
        let of_group = self.partial_floats();
        let head_dim = self.problem.head_dim;
        let heads = self.problem.sequences * self.problem.q_heads;
        let (shape, thresholds) = (self.shape, self.thresholds);
        let weighing = weighing_blocks(heads, shape.parts);
        let mut notes = &self.notes[..];
        let mut tasks = Vec::new();
        let mut all = 0;
        let groups = self.groups.iter().zip(&mut self.chosen).zip(self.partials.chunks_exact(of_group));
        for ((group, chosen), partials) in groups {
            let blocks = Self::blocks(view, *group);
            let own = notes.split_off(..blocks).unwrap_or_default();
            let used = pass_share(blocks as u32, shape.splits).1 as usize;
            let partials = &partials[..used * part_floats(head_dim)];
            all += blocks * group.rows;
            tasks.push((*group, own, partials, chosen));
        }
        each(tasks, all / 16, |(group, notes, partials, chosen)| {
            run(level, Choose { shape, thresholds, weighing, head_dim, group, notes, partials, chosen });
        });
    }

    fn replace<E: Half, const D: usize>(&mut self, level: Level, view: View<'_>) {
        let of_group = self.partial_floats();
        let mut notes = &self.notes[..];
        let mut tasks = Vec::new();
        let (mut all, mut trailing) = (0, 0);
        let groups = self.groups.iter().zip(&mut self.chosen).zip(&mut self.norms);
        for (((group, chosen), norms), partials) in groups.zip(self.partials.chunks_exact_mut(of_group)) {
            let blocks = Self::blocks(view, *group);
            let own = notes.split_off(..blocks).unwrap_or_default();
            let has_trailing = usize::from(!view.lengths[group.sequence].is_multiple_of(BLOCK_TOKENS));
            let count = chosen.entries.len() + has_trailing;
            trailing += has_trailing as u64;
            let most = self.shape.replacers as usize;
            chosen.replacers = count.div_ceil(warps(D as u32) as usize).min(most).max(1);
            all += count;
            let passed = pass_share(blocks as u32, self.shape.splits).1 as usize;
            let partials = partials.chunks_exact_mut(part_floats(D as u32)).skip(passed);
            // The trailing block comes last.
            let mut norms = Some(norms);
            let last = count.saturating_sub(1) / warps(D as u32) as usize % chosen.replacers;
            for (replacer, out) in partials.take(chosen.replacers).enumerate() {
                let norms = if replacer == last { norms.take() } else { None };
                tasks.push((*group, &chosen.entries[..], own, [replacer, chosen.replacers], norms, out));
            }
        }
        self.trailing = trailing;
        let norms_wanted = self.thresholds.certify != 0;
        each(tasks, all, |(group, entries, notes, replacer, norms, out)| {
            let found = with_scratch(|scratch| {
                let element = PhantomData;
                run(
                    level,
                    Replace::<E, D> {
                        view,
                        group,
                        entries,
                        notes,
                        replacer,
                        norms_wanted,
                        scratch,
                        out,
                        element,
                    },
                )
            });
            if let (Some(norms), Some(found)) = (norms, found) {
                *norms = found;
            }
        });
    }

    fn finish<E: Half, const D: usize>(
        &mut self,
        level: Level,
        view: View<'_>,
        mut output: &mut [f32],
        mut lse: &mut [f32],
        mut certificates: &mut [Certificate],
    ) {
        let of_group = self.partial_floats();
        let (shape, thresholds) = (self.shape, self.thresholds);
        let groups = self.groups.iter().zip(&self.chosen).zip(&self.norms).zip(&mut self.dense_rows);
        // Rows of outputs are in the groups' order.
        for ((((group, chosen), norms), dense), partials) in groups.zip(self.partials.chunks_exact(of_group))
        {
            let used = pass_share(Self::blocks(view, *group) as u32, shape.splits).1 as usize;
            let parts = used + chosen.replacers;
            let rows = group.rows;
            *dense = with_scratch(|scratch| {
                run(
                    level,
                    Finish::<E, D> {
                        shape,
                        thresholds,
                        group: *group,
                        rows: view.rows::<D>(*group),
                        queries: &mut scratch.queries,
                        chosen,
                        length: view.lengths[group.sequence],
                        norms: *norms,
                        partials: &partials[..parts * part_floats(D as u32)],
                        output: output.split_off_mut(..rows * D).unwrap_or_default(),
                        lse: lse.split_off_mut(..rows).unwrap_or_default(),
                        certificates: certificates.split_off_mut(..rows).unwrap_or_default(),
                        element: PhantomData,
                    },
                )
            });
        }
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

fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    thread_local!(static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Scratch::new()));
    SCRATCH.with_borrow_mut(|scratch| f(scratch))
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step").field("problem", &self.problem).finish_non_exhaustive()
    }
}
