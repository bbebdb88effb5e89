//! The launches of a step, one by one.

use super::plan::Again;
use super::watching::Watching;
use super::{AttendedHandles, StepElement, StepHandles, StepPlan};
use crate::attention::dense;
use crate::certified::Result;
use crate::{Buffer, Stream};
use kernels_gpu::attention::dense::DenseShape;
use kernels_gpu::certified::carried::mode;
use kernels_gpu::certified::ranking::THREADS as RANK_THREADS;
use kernels_gpu::certified::settling::THREADS as SETTLE_THREADS;
use kernels_gpu::certified::{
    StepShape, attend, audit, canary, carry, mark, rank, rank_layout, replace, settle, weigh,
};
use simt::{Global, LaunchShape};

impl<E: StepElement> StepPlan<E> {
    /// The shape of a step over this cache.
    fn shape_over(&self, cache: &StepHandles<E>, shape: StepShape) -> StepShape {
        let blocks = cache.annotations.len() / shape.kv_heads as usize;
        StepShape { pool_blocks: blocks as u32, ..shape }
    }

    /// What is stored, compared ahead of a step that makes its list anew: `canary`. Nothing, where the list
    /// stays.
    ///
    /// # Safety
    /// As [`run_carry`](Self::run_carry).
    ///
    /// # Errors
    /// What the launch reports.
    pub(super) unsafe fn run_canary(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        let Some(watching) = &mut self.watching else { return Ok(()) };
        if self.mode & mode::RENEWS == 0 {
            return Ok(());
        }
        let arguments = canary::Args {
            queries: cache.queries,
            tiles: cache.tiles,
            annotations: cache.annotations,
            table: cache.table,
            lengths: cache.lengths,
            keys: cache.keys,
            values: cache.values,
            near: cache.near.tiles.as_const(),
            directory: cache.near.directory.as_const(),
            lists: self.carried.lists.global(),
            entries: self.carried.entries.global(),
            promoted: self.carried.promoted.global_mut(),
            looked: watching.looked.global_mut(),
            shape: self.shape,
            watch: watching.watch,
            scratch: cache.near.scratch,
        };
        // SAFETY: this function's contract; the buffers were made for this shape.
        unsafe { stream.launch(&self.kernels.canary.0, self.canary, arguments) }?;
        Ok(())
    }

    /// All of a step by the list that is carried: the first of its launches. Then come the dense rung and,
    /// where the list is due to be made anew, the choice of the next one and that list itself.
    ///
    /// # Safety
    /// As [`run`](Self::run); the policy's `renew` is not 0, for which there are other launches.
    ///
    /// # Errors
    /// What the launch reports.
    pub(super) unsafe fn run_carry(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.launch_carry(stream, cache, out, self.mode) }
    }

    /// The same over rows of blocks with a head over budget alone, by the list that the step has made for
    /// them.
    ///
    /// # Safety
    /// As [`run`](Self::run), behind the other launches of a step whose policy
    /// [passes again](crate::certified::Policy::again).
    ///
    /// # Errors
    /// What the launch reports.
    pub(super) unsafe fn run_again(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        let mode = mode::again(self.mode);
        // SAFETY: this function's contract.
        unsafe { self.launch_carry(stream, cache, out, mode) }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn launch_carry(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
        mode: u32,
    ) -> Result<()> {
        let (shape, grid, partials, gathered) = if mode & mode::AGAIN != 0 {
            let Again { shape, carry, partials, gathered } = &mut self.again;
            (*shape, *carry, partials.global_mut(), gathered.global_mut())
        } else {
            (self.shape, self.carry, self.partials.global_mut(), self.gathered.global_mut())
        };
        let arguments = carry::Args {
            queries: cache.queries,
            tiles: cache.tiles,
            annotations: cache.annotations,
            table: cache.table,
            lengths: cache.lengths,
            keys: cache.keys,
            values: cache.values,
            near: cache.near.tiles,
            directory: cache.near.directory,
            lists: self.carried.lists.global(),
            entries: self.carried.entries.global(),
            promoted: self.carried.promoted.global_mut(),
            records: self.records.global_mut(),
            partials,
            gathered,
            counters: self.counters[1].global_mut(),
            output: out.output,
            lse: out.lse,
            certificates: out.certificates,
            dense_rows: self.dense_rows.global_mut(),
            log_sums: self.carried.log_sums.global_mut(),
            shape: self.shape_over(cache, shape),
            thresholds: self.thresholds,
            scratch: cache.near.scratch,
            mode,
        };
        // SAFETY: this function's contract; the scratch was made for this shape.
        unsafe { stream.launch(self.kernels.carry(self.policy.certify), grid, arguments) }?;
        Ok(())
    }

    /// The pass over the quantized blocks alone: the first of the launches of a step that chooses for itself.
    ///
    /// # Safety
    /// As [`run`](Self::run); the policy's `renew` is 0.
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_pass(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        let arguments = attend::Args {
            queries: cache.queries,
            tiles: cache.tiles,
            annotations: cache.annotations,
            table: cache.table,
            lengths: cache.lengths,
            records: self.records.global_mut(),
            partials: self.partials.global_mut(),
            shape: self.shape,
        };
        // SAFETY: this function's contract; the scratch was made for this shape.
        unsafe { stream.launch(&self.kernels.attend.0, self.attend, arguments) }?;
        Ok(())
    }

    /// The choice of what to promote: the second, or of a step by a carried list the third. Nothing, where
    /// nothing may be promoted, the policy wants no certificate, or a carried list stays.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub(super) unsafe fn run_weigh(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        if !self.chooses() || self.stays() {
            return Ok(());
        }
        // SAFETY: this function's contract.
        unsafe { self.launch_weigh(stream, cache, self.mode) }
    }

    /// The choice and the lists of rows of blocks with a head over budget, for the second pass of the step.
    ///
    /// # Safety
    /// As [`run_again`](Self::run_again).
    ///
    /// # Errors
    /// What the launches report.
    pub(super) unsafe fn run_own(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        let mode = mode::again(self.mode);
        // SAFETY: this function's contract.
        unsafe {
            self.launch_weigh(stream, cache, mode)?;
            self.launch_mark(stream, cache, mode)
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn launch_weigh(&mut self, stream: &Stream, cache: &StepHandles<E>, mode: u32) -> Result<()> {
        let arguments = weigh::Args {
            records: self.records.global(),
            lengths: cache.lengths,
            partials: self.partials.global(),
            histograms: self.histograms.global_mut(),
            counts: self.part_counts.global_mut(),
            partial_sums: self.part_sums.global_mut(),
            weighed: self.weighed.global_mut(),
            counters: self.counters[0].global_mut(),
            promoted: self.carried.promoted.global(),
            dense_rows: self.dense_rows.global(),
            shape: self.shape,
            thresholds: self.thresholds,
            head_dim: self.problem.head_dim,
            mode,
        };
        // SAFETY: as above.
        unsafe { stream.launch(&weigh::kernel(), self.weigh, arguments) }?;
        Ok(())
    }

    /// The lists of what is promoted, and what comes into the scratch: behind the choice, and nothing where
    /// that is nothing, but that a list that stays claims its slots again.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub(super) unsafe fn run_mark(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        if !self.chooses() || self.stays() && !cache.near.scratch.claims() {
            return Ok(());
        }
        // SAFETY: this function's contract.
        unsafe { self.launch_mark(stream, cache, self.mode) }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn launch_mark(&mut self, stream: &Stream, cache: &StepHandles<E>, mode: u32) -> Result<()> {
        let arguments = mark::Args {
            records: self.records.global(),
            weighed: self.weighed.global(),
            part_counts: self.part_counts.global(),
            lengths: cache.lengths,
            table: cache.table,
            lists: self.carried.lists.global_mut(),
            entries: self.carried.entries.global_mut(),
            taken: self.taken.global_mut(),
            directory: cache.near.directory,
            promoted: self.carried.promoted.global_mut(),
            dense_rows: self.dense_rows.global(),
            shape: self.shape,
            thresholds: self.thresholds,
            scratch: cache.near.scratch,
            mode,
        };
        // SAFETY: as above.
        unsafe { stream.launch(&mark::kernel(), self.mark, arguments) }?;
        Ok(())
    }

    /// The replacement of the promoted shares, and the certificates: the fourth.
    ///
    /// # Safety
    /// As [`run`](Self::run); the policy's `renew` is 0.
    ///
    /// # Errors
    /// What the launch reports.
    pub(super) unsafe fn run_replace(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        let arguments = replace::Args {
            queries: cache.queries,
            tiles: cache.tiles,
            table: cache.table,
            lengths: cache.lengths,
            keys: cache.keys,
            values: cache.values,
            near: cache.near.tiles,
            directory: cache.near.directory,
            lists: self.carried.lists.global(),
            entries: self.carried.entries.global(),
            weighed: self.weighed.global(),
            taken: self.taken.global(),
            norms: self.trailing_norms.global_mut(),
            partials: self.partials.global_mut(),
            counters: self.counters[1].global_mut(),
            output: out.output,
            lse: out.lse,
            certificates: out.certificates,
            dense_rows: self.dense_rows.global_mut(),
            shape: self.shape,
            thresholds: self.thresholds,
            scratch: cache.near.scratch,
        };
        // SAFETY: as above.
        unsafe { stream.launch(&self.kernels.replace.0, self.replace, arguments) }?;
        Ok(())
    }

    /// The checks of what is stored and of the order of blocks: `audit`, `rank` and `settle`, the fifth to
    /// seventh. Nothing, where the policy asks for none.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launches report.
    pub(super) unsafe fn run_checks(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        let Some(watching) = &mut self.watching else { return Ok(()) };
        let Watching { watch, masses, flags, exacts, clock, .. } = watching;
        let (watch, problem) = (*watch, self.problem);
        let arguments = audit::Args {
            queries: cache.queries,
            tiles: cache.tiles,
            table: cache.table,
            lengths: cache.lengths,
            keys: cache.keys,
            values: cache.values,
            near: cache.near.tiles.as_const(),
            directory: cache.near.directory.as_const(),
            records: self.records.global(),
            lists: self.carried.lists.global(),
            entries: self.carried.entries.global(),
            weighed: self.weighed.global(),
            norms: self.trailing_norms.global(),
            clock: clock.global(),
            masses: masses.global_mut(),
            flags: flags.global_mut(),
            exacts: exacts.global_mut(),
            shape: self.shape,
            watch,
            scratch: cache.near.scratch,
        };
        // The work of `replace`, split as there.
        let (kernel, shared) = &self.kernels.audit;
        let grid = LaunchShape { shared_bytes: *shared, ..self.replace };
        // SAFETY: this function's contract; the buffers were made for this shape.
        unsafe { stream.launch(kernel, grid, arguments) }?;
        if watch.depth > 0 {
            let arguments = rank::Args {
                records: self.records.global(),
                weighed: self.weighed.global(),
                lengths: cache.lengths,
                lists: self.carried.lists.global(),
                entries: self.carried.entries.global(),
                masses: masses.global(),
                flags: flags.global_mut(),
                shape: self.shape,
                thresholds: self.thresholds,
                watch,
            };
            let grid = LaunchShape::new((problem.q_heads, problem.sequences), RANK_THREADS);
            // SAFETY: as above.
            unsafe { stream.launch(&rank::kernel(), grid.shared(rank_layout().bytes), arguments) }?;
        }
        let arguments = settle::Args {
            exacts: exacts.global(),
            flags: flags.global_mut(),
            certificates: out.certificates,
            dense_rows: self.dense_rows.global_mut(),
            clock: clock.global_mut(),
            shape: self.shape,
        };
        let grid = LaunchShape::new(problem.sequences, SETTLE_THREADS);
        // SAFETY: as above.
        unsafe { stream.launch(&settle::kernel(), grid, arguments) }?;
        Ok(())
    }

    /// What the dense rung computes of all heads, [sequences, q_heads, head_dim]: as rows of many are cut,
    /// and as rows of few are. Waits for the stream.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the device reports.
    pub(in crate::certified) unsafe fn exact_outputs(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
    ) -> Result<Vec<Vec<f32>>> {
        let mut outputs = Vec::new();
        for flag in [DenseShape::MANY, 0] {
            let wanted = Buffer::from_slice(&self.device, &vec![0xff | flag; self.dense_rows.len()])?;
            let mut out = self.allocate()?;
            // SAFETY: this function's contract; it waits before `wanted` and `out` go.
            unsafe { self.launch_dense(stream, cache, out.handles(), wanted.global()) }?;
            stream.synchronize()?;
            outputs.push(out.output.to_vec()?);
        }
        Ok(outputs)
    }

    /// The dense rung, for the heads that want it: the last.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub(super) unsafe fn run_dense(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.launch_dense(stream, cache, out, self.dense_rows.global()) }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn launch_dense(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
        wanted: Global<u32>,
    ) -> Result<()> {
        let handles = dense::Handles {
            queries: cache.queries,
            keys: cache.keys,
            values: cache.values,
            table: cache.table,
            lengths: cache.lengths,
            wanted: Some(wanted),
            near: false,
            output: out.output,
            lse: out.lse,
        };
        // SAFETY: this function's contract.
        unsafe { self.dense.run_on(stream, handles) }?;
        Ok(())
    }
}
