//! A step on the CPU's own path.

use super::{AttendedHandles, StepElement, StepHandles, StepPlan};
use crate::certified::{Result, cpu};
use crate::cpu::handles::{slice, slice_mut};

impl<E: StepElement> StepPlan<E> {
    /// The same step by the CPU's own path: the bits of [`run`](Self::run) in all that is returned, in the
    /// scratch and its traffic, in [`originals_read`](Self::originals_read) and [`checked`](Self::checked).
    /// It needs no stream, and cannot be captured; the first run allocates, later ones where sequences have
    /// grown.
    ///
    /// # Safety
    /// As [`run`](Self::run), and all is host memory that the call alone uses.
    ///
    /// # Errors
    /// As [`cpu::Step::new`], [`cpu::Step::run`] and [`cpu::Step::admit`].
    pub unsafe fn run_on_slices(&mut self, cache: &StepHandles<E>, out: AttendedHandles) -> Result<()> {
        let mut step = match self.on_slices.take() {
            Some(step) => step,
            None => {
                let splits = self.shape.splits;
                Box::new(cpu::Step::with_splits(self.problem, &self.policy, self.layout, splits)?)
            }
        };
        let carried = &mut self.carried;
        self.mode = carried.turns.begin(self.policy.every(), self.policy.passes_again());
        // SAFETY: the caller's word; the lists are the plan's own.
        let (slices, near, mut lists, out) = unsafe {
            let slices = cpu::Slices {
                queries: slice(cache.queries),
                tiles: slice(cache.tiles),
                annotations: slice(cache.annotations),
                table: slice(cache.table),
                lengths: slice(cache.lengths),
                keys: slice(cache.keys),
                values: slice(cache.values),
            };
            let near = cpu::NearSlices {
                tiles: slice_mut(cache.near.tiles),
                directory: slice_mut(cache.near.directory),
                scratch: cache.near.scratch,
            };
            let out = cpu::Out {
                output: slice_mut(out.output),
                lse: slice_mut(out.lse),
                certificates: slice_mut(out.certificates),
            };
            let lists = cpu::Lists {
                lists: slice_mut(carried.lists.global_mut()),
                entries: slice_mut(carried.entries.global_mut()),
                promoted: slice_mut(carried.promoted.global_mut()),
                log_sums: slice_mut(carried.log_sums.global_mut()),
                mode: self.mode,
                directory: None,
            };
            (slices, near, lists, out)
        };
        // Steps by kernels and on slices are counted together.
        let clock = match &mut self.watching {
            // SAFETY: as above. There is one where steps choose for themselves.
            Some(watching) => unsafe { slice_mut(watching.clock.global_mut()) }.first_mut(),
            None => None,
        };
        if let Some(clock) = &clock {
            *step.clock() = **clock;
        }
        lists.directory = Some(cpu::Directory { words: near.directory, scratch: near.scratch });
        let done = step.run_carried(slices, lists, out).and_then(|()| step.admit(slices, near));
        if let Some(clock) = clock {
            *clock = *step.clock();
        }
        self.on_slices = Some(step);
        done
    }
}
