//! The launches of a step.

use super::kernels::StepKernels;
use super::watching::{Watching, of, words};
use super::{
    Attended, AttendedHandles, Checked, OriginalsRead, StepElement, StepHandles, StepProblem, step_shape,
};
use crate::certified::{BLOCK_TOKENS, Error, Policy, Result, cpu};
use crate::{Buffer, Device, Stream, dense};
use kernels_gpu::attention::threads;
use kernels_gpu::certified::choice::BINS;
use kernels_gpu::certified::marking::THREADS as MARK_THREADS;
use kernels_gpu::certified::parts::weighing_blocks;
use kernels_gpu::certified::ranking::THREADS as RANK_THREADS;
use kernels_gpu::certified::settling::THREADS as SETTLE_THREADS;
use kernels_gpu::certified::weighing::PARTIAL_SUMS;
use kernels_gpu::certified::{
    Entry, ListHead, Record, StepShape, Taken, Thresholds, Weighed, mark, mark_layout, rank, rank_layout,
    settle, weigh, weigh_layout,
};
use kernels_gpu::dense::partial_floats;
use simt::LaunchShape;

/// The launches of a step, and everything they need but the cache.
///
/// `attend` reads every quantized block once and notes each block's mass and error bound; `weigh` chooses what to promote;
/// `mark` lists it, and settles what comes into the scratch; `replace` swaps the shares of the promoted blocks and writes
/// output and certificates; if the policy asks, what was stored and how it was chosen is checked; the dense kernel computes the
/// heads whose certificate is over budget or that failed a check. Nothing waits for the host.
pub struct StepPlan<E: StepElement> {
    device: Device,
    pub(super) problem: StepProblem,
    pub(super) policy: Policy,
    thresholds: Thresholds,
    shape: StepShape,
    /// The CPU's own path, if the last step took it.
    pub(super) on_slices: Option<Box<cpu::Step>>,
    kernels: StepKernels<E>,
    attend: LaunchShape,
    weigh: LaunchShape,
    mark: LaunchShape,
    replace: LaunchShape,
    dense: dense::Plan<E>,
    records: Buffer<Record>,
    /// Of the splits of the pass, then of the replacers, for each row of blocks.
    partials: Buffer<f32>,
    histograms: Buffer<u64>,
    part_counts: Buffer<u32>,
    part_sums: Buffer<f32>,
    weighed: Buffer<Weighed>,
    lists: Buffer<ListHead>,
    entries: Buffer<Entry>,
    taken: Buffer<Taken>,
    trailing_norms: Buffer<f32>,
    dense_rows: Buffer<u32>,
    /// Of `weigh` and `replace`; 0 between launches.
    counters: [Buffer<u32>; 2],
    /// The checks that the policy asks for.
    pub(super) watching: Option<Watching>,
}

impl<E: StepElement> StepPlan<E> {
    /// A plan for a problem.
    ///
    /// # Errors
    /// [`Error::StepHeadDim`], [`Error::TooLong`], [`Error::Policy`], [`Error::Dense`] for extents that no kernel takes; out of
    /// memory.
    pub fn new(device: &Device, problem: StepProblem, policy: &Policy) -> Result<Self> {
        let StepProblem { sequences, q_heads, kv_heads, head_dim, .. } = problem;
        let shape = step_shape(problem, policy)?;
        let kernels = E::step_kernels(head_dim).ok_or(Error::StepHeadDim { head_dim })?;
        let dense = dense::Plan::new(device, problem.dense())?;
        let max_blocks = shape.max_blocks;
        let rows = kv_heads * shape.row_groups();
        let launches = sequences * rows;
        let heads = (sequences * q_heads) as usize;
        let weighing = weighing_blocks(heads as u32, shape.parts);
        let in_rows = launches as usize;
        let (row_parts, head_parts) = (in_rows * shape.parts as usize, heads * shape.parts as usize);
        let grid = |x: u32| (x, rows, sequences);
        // What only a certificate needs.
        let noted = |elements: usize| if policy.certify { elements } else { 0 };
        let places = noted(row_parts * shape.places() as usize);
        let watching = policy.watch().map(|watch| Watching::new(device, watch, heads, places)).transpose()?;
        Ok(StepPlan {
            device: device.clone(),
            problem,
            policy: *policy,
            thresholds: policy.thresholds(),
            on_slices: None,
            attend: LaunchShape::new(grid(shape.splits), threads(head_dim)).shared(kernels.attend.1),
            weigh: LaunchShape::new((weighing, q_heads, sequences), BINS).shared(weigh_layout().bytes),
            mark: LaunchShape::new(grid(shape.parts), MARK_THREADS).shared(mark_layout().bytes),
            replace: LaunchShape::new(grid(shape.replacers), threads(head_dim)).shared(kernels.replace.1),
            kernels,
            dense,
            records: Buffer::new(device, noted(heads * max_blocks as usize))?,
            partials: Buffer::new(
                device,
                partial_floats(launches, shape.splits + shape.replacers, head_dim),
            )?,
            histograms: Buffer::zeroed(device, noted(heads * 2 * BINS as usize))?,
            part_counts: Buffer::new(device, noted(head_parts * BINS as usize))?,
            part_sums: Buffer::new(device, noted(heads * (weighing * PARTIAL_SUMS) as usize))?,
            weighed: Buffer::new(device, noted(heads))?,
            lists: Buffer::new(device, noted(row_parts))?,
            entries: Buffer::new(device, places)?,
            taken: Buffer::new(device, noted(head_parts))?,
            trailing_norms: Buffer::new(device, 2 * in_rows)?,
            dense_rows: Buffer::zeroed(device, in_rows)?,
            counters: [Buffer::zeroed(device, noted(heads))?, Buffer::zeroed(device, in_rows)?],
            watching,
            shape,
        })
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    /// Parts that a sequence is cut into.
    pub fn splits(&self) -> u32 {
        self.shape.splits
    }

    /// Bytes of device memory that the plan owns, the dense rung's not counted.
    pub fn bytes(&self) -> usize {
        of(&self.records)
            + of(&self.partials)
            + of(&self.histograms)
            + of(&self.part_counts)
            + of(&self.part_sums)
            + of(&self.weighed)
            + of(&self.lists)
            + of(&self.entries)
            + of(&self.taken)
            + of(&self.trailing_norms)
            + of(&self.dense_rows)
            + self.counters.iter().map(of).sum::<usize>()
            + self.watching.as_ref().map_or(0, Watching::bytes)
    }

    /// What the last step read of the originals; waits for the device. `lengths` are those of its sequences.
    ///
    /// # Errors
    /// What the device reports.
    pub fn originals_read(&self, lengths: &[u32]) -> Result<OriginalsRead> {
        if let Some(step) = &self.on_slices {
            return Ok(step.originals_read());
        }
        let mut read = OriginalsRead::default();
        for list in self.lists.to_vec()? {
            read.key_tiles += u64::from(list.key_tiles);
            read.value_tiles += u64::from(list.value_tiles);
        }
        let rows = u64::from(self.shape.kv_heads * self.shape.row_groups());
        let trailing = lengths.iter().filter(|length| !length.is_multiple_of(BLOCK_TOKENS)).count() as u64;
        read.key_tiles += trailing * rows;
        read.value_tiles += trailing * rows;
        read.dense_rows = self.dense_rows.to_vec()?.iter().filter(|rows| **rows != 0).count() as u64;
        Ok(read)
    }

    /// What the checks of the last step read; waits for the device. `lengths` are those of its sequences.
    ///
    /// # Errors
    /// What the device reports.
    pub fn checked(&self, lengths: &[u32]) -> Result<Checked> {
        let Some(watching) = &self.watching else { return Ok(Checked::default()) };
        watching.checked(&self.lists.to_vec()?, lengths, self.shape)
    }

    /// Buffers for what a step writes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn allocate(&self) -> Result<Attended> {
        let heads = (self.problem.sequences * self.problem.q_heads) as usize;
        Ok(Attended {
            output: Buffer::new(&self.device, heads * self.problem.head_dim as usize)?,
            lse: Buffer::new(&self.device, heads)?,
            certificates: Buffer::new(&self.device, heads)?,
        })
    }

    /// The pass over the quantized blocks alone: the first of the step's launches.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_pass(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        let arguments = (
            cache.queries,
            cache.tiles,
            cache.annotations,
            cache.table,
            cache.lengths,
            self.records.global_mut(),
            self.partials.global_mut(),
            self.shape,
        );
        // SAFETY: this function's contract; the scratch was made for this shape.
        unsafe { stream.launch(&self.kernels.attend.0, self.attend, arguments) }?;
        Ok(())
    }

    /// The choice of what to promote: the second. Nothing, where the policy wants no certificate.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_weigh(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        if self.thresholds.certify == 0 {
            return Ok(());
        }
        let arguments = (
            self.records.global(),
            cache.lengths,
            self.partials.global(),
            self.histograms.global_mut(),
            self.part_counts.global_mut(),
            self.part_sums.global_mut(),
            self.weighed.global_mut(),
            self.counters[0].global_mut(),
            self.shape,
            self.thresholds,
            self.problem.head_dim,
        );
        // SAFETY: as above.
        unsafe { stream.launch(&weigh::kernel(), self.weigh, arguments) }?;
        Ok(())
    }

    /// The lists of what is promoted, and what comes into the scratch: the third. Nothing, where the policy wants no
    /// certificate.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_mark(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        if self.thresholds.certify == 0 {
            return Ok(());
        }
        let arguments = (
            self.records.global(),
            self.weighed.global(),
            self.part_counts.global(),
            cache.lengths,
            cache.table,
            self.lists.global_mut(),
            self.entries.global_mut(),
            self.taken.global_mut(),
            cache.near.directory,
            self.shape,
            self.thresholds,
            cache.near.scratch,
        );
        // SAFETY: as above.
        unsafe { stream.launch(&mark::kernel(), self.mark, arguments) }?;
        Ok(())
    }

    /// The replacement of the promoted shares, and the certificates: the fourth.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_replace(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        let arguments = (
            cache.queries,
            cache.tiles,
            cache.table,
            cache.lengths,
            cache.keys,
            cache.values,
            cache.near.tiles,
            cache.near.directory,
            self.lists.global(),
            self.entries.global(),
            self.weighed.global(),
            self.taken.global(),
            self.trailing_norms.global_mut(),
            self.partials.global_mut(),
            self.counters[1].global_mut(),
            out.output,
            out.lse,
            out.certificates,
            self.dense_rows.global_mut(),
            self.shape,
            self.thresholds,
            cache.near.scratch,
        );
        // SAFETY: as above.
        unsafe { stream.launch(&self.kernels.replace.0, self.replace, arguments) }?;
        Ok(())
    }

    /// The checks of what is stored and of the order of blocks: `audit`, `rank` and `settle`, the fifth to seventh. Nothing,
    /// where the policy asks for none.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launches report.
    pub unsafe fn run_checks(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        let Some(watching) = &mut self.watching else { return Ok(()) };
        let Watching { watch, masses, flags, exacts, clock } = watching;
        let (watch, problem) = (*watch, self.problem);
        let arguments = (
            cache.queries,
            cache.tiles,
            cache.table,
            cache.lengths,
            cache.keys,
            cache.values,
            cache.near.tiles.as_const(),
            cache.near.directory.as_const(),
            self.records.global(),
            self.lists.global(),
            self.entries.global(),
            self.weighed.global(),
            self.trailing_norms.global(),
            clock.global(),
            masses.global_mut(),
            flags.global_mut(),
            exacts.global_mut(),
            self.shape,
            watch,
            cache.near.scratch,
        );
        // The work of `replace`, split as there.
        let (audit, shared) = &self.kernels.audit;
        let grid = LaunchShape { shared_bytes: *shared, ..self.replace };
        // SAFETY: this function's contract; the buffers were made for this shape.
        unsafe { stream.launch(audit, grid, arguments) }?;
        if watch.depth > 0 {
            let arguments = (
                self.records.global(),
                self.weighed.global(),
                cache.lengths,
                self.lists.global(),
                self.entries.global(),
                masses.global(),
                flags.global_mut(),
                self.shape,
                self.thresholds,
                watch,
            );
            let grid = LaunchShape::new((problem.q_heads, problem.sequences), RANK_THREADS);
            // SAFETY: as above.
            unsafe { stream.launch(&rank::kernel(), grid.shared(rank_layout().bytes), arguments) }?;
        }
        let arguments = (
            exacts.global(),
            flags.global_mut(),
            out.certificates,
            self.dense_rows.global_mut(),
            clock.global_mut(),
            self.shape,
        );
        let grid = LaunchShape::new(problem.sequences, SETTLE_THREADS);
        // SAFETY: as above.
        unsafe { stream.launch(&settle::kernel(), grid, arguments) }?;
        Ok(())
    }

    /// The dense rung, for the heads that want it: the last.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_dense(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        let handles = dense::Handles {
            queries: cache.queries,
            keys: cache.keys,
            values: cache.values,
            table: cache.table,
            lengths: cache.lengths,
            wanted: Some(self.dense_rows.global()),
            output: out.output,
            lse: out.lse,
        };
        // SAFETY: this function's contract.
        unsafe { self.dense.run_on(stream, handles) }?;
        Ok(())
    }

    /// One step: allocates nothing, waits for nothing, can be captured.
    ///
    /// # Safety
    /// Until the last launch has finished (for a capture: until each run of the graph has), the memory behind every handle is
    /// there and used by nothing that writes it; each length is at most `max_tokens`, each table entry that a length reaches
    /// is a block of the pools, and every full block among them is quantized.
    ///
    /// # Errors
    /// [`crate::Error::WrongDevice`]; what the launches report.
    pub unsafe fn run(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        self.on_slices = None;
        // SAFETY: this function's contract.
        unsafe {
            self.run_pass(stream, cache)?;
            self.run_weigh(stream, cache)?;
            self.run_mark(stream, cache)?;
            self.run_replace(stream, cache, out)?;
            self.run_checks(stream, cache, out)?;
            self.run_dense(stream, cache, out)
        }
    }

    /// Fills what the kernels hand to each other with a byte, so that what none of them writes is the same everywhere.
    pub(in crate::certified) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<()> {
        stream.fill_u8(&mut self.records, .., byte)?;
        stream.fill_u8(&mut self.partials, .., byte)?;
        stream.fill_u8(&mut self.part_counts, .., byte)?;
        stream.fill_u8(&mut self.part_sums, .., byte)?;
        stream.fill_u8(&mut self.weighed, .., byte)?;
        stream.fill_u8(&mut self.lists, .., byte)?;
        stream.fill_u8(&mut self.entries, .., byte)?;
        stream.fill_u8(&mut self.taken, .., byte)?;
        stream.fill_u8(&mut self.trailing_norms, .., byte)?;
        if let Some(watching) = &mut self.watching {
            watching.fill(stream, byte)?;
        }
        Ok(stream.fill_u8(&mut self.dense_rows, .., byte)?)
    }

    /// What the kernels hand to each other, word by word.
    pub(in crate::certified) fn between(&self) -> Result<Vec<(&'static str, Vec<u32>)>> {
        let mut between = vec![
            ("records", words(&self.records)?),
            ("partials", words(&self.partials)?),
            ("histograms", words(&self.histograms)?),
            ("part counts", words(&self.part_counts)?),
            ("part sums", words(&self.part_sums)?),
            ("weighed", words(&self.weighed)?),
            ("lists", words(&self.lists)?),
            ("entries", words(&self.entries)?),
            ("taken", words(&self.taken)?),
            ("trailing norms", words(&self.trailing_norms)?),
            ("dense rows", words(&self.dense_rows)?),
            ("counters", self.counters.iter().map(words).collect::<Result<Vec<_>>>()?.concat()),
        ];
        if let Some(watching) = &self.watching {
            between.extend(watching.between()?);
        }
        Ok(between)
    }
}
