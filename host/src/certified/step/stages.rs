//! What a step consists of, and in which order.

use super::{AttendedHandles, StepElement, StepHandles, StepPlan};
use crate::Stream;
use crate::certified::Result;

/// A launch of a step, or a few that belong together.
#[derive(Clone, Copy)]
enum Stage {
    Canary,
    Carry,
    Own,
    Again,
    Pass,
    Weigh,
    Mark,
    Replace,
    Checks,
    Dense,
}

impl<E: StepElement> StepPlan<E> {
    /// One step: allocates nothing, waits for nothing, can be captured.
    ///
    /// # Safety
    /// Until the last launch has finished (for a capture: until each run of the graph has), the memory behind
    /// every handle is there and used by nothing that writes it, and so is the plan's list
    /// ([`swap_carried`](Self::swap_carried)); each length is at most `max_tokens`, each table entry that a
    /// length reaches is a block of the pools, and every full block among them is quantized, in the plan's
    /// layout.
    ///
    /// # Errors
    /// [`crate::Error::WrongDevice`]; what the launches report.
    pub unsafe fn run(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.run_stages(stream, cache, out, usize::MAX) }
    }

    /// What there is of a list of which the first is done by steps alone that compare what is stored.
    fn without_canary<T>(&self, all: &'static [T]) -> &'static [T] {
        &all[usize::from(self.watching.is_none())..]
    }

    fn schedule(&self) -> &'static [Stage] {
        use Stage::{Again, Canary, Carry, Checks, Dense, Mark, Own, Pass, Replace, Weigh};
        match (self.policy.carries(), self.policy.certify) {
            (true, true) if self.policy.passes_again() => {
                self.without_canary(&[Canary, Carry, Own, Again, Dense, Weigh, Mark])
            }
            (true, true) => self.without_canary(&[Canary, Carry, Dense, Weigh, Mark]),
            (true, false) => &[Carry],
            (false, _) => &[Pass, Weigh, Mark, Replace, Checks, Dense],
        }
    }

    /// What a step consists of, in order.
    pub fn stages(&self) -> &'static [&'static str] {
        match (self.policy.carries(), self.policy.certify) {
            (true, true) if self.policy.passes_again() => {
                self.without_canary(&["canary", "carry", "own list", "again", "dense", "weigh", "mark"])
            }
            (true, true) => self.without_canary(&["canary", "carry", "dense", "weigh", "mark"]),
            (true, false) => &["carry"],
            (false, _) => &["pass", "weigh", "mark", "replace", "checks", "dense"],
        }
    }

    /// The first `count` of the [`stages`](Self::stages) of a step; all of them are [`run`](Self::run).
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub unsafe fn run_stages(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: AttendedHandles,
        count: usize,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        self.on_slices = None;
        self.resident = false;
        if self.policy.carries() {
            self.mode = self.carried.turns.begin(self.policy.every(), self.policy.passes_again());
        }
        for stage in self.schedule().iter().take(count) {
            // SAFETY: this function's contract; each stage finds what those before it have written.
            unsafe {
                match stage {
                    Stage::Canary => self.run_canary(stream, cache),
                    Stage::Carry => self.run_carry(stream, cache, out),
                    Stage::Own => self.run_own(stream, cache),
                    Stage::Again => self.run_again(stream, cache, out),
                    Stage::Pass => self.run_pass(stream, cache),
                    Stage::Weigh => self.run_weigh(stream, cache),
                    Stage::Mark => self.run_mark(stream, cache),
                    Stage::Replace => self.run_replace(stream, cache, out),
                    Stage::Checks => self.run_checks(stream, cache, out),
                    Stage::Dense => self.run_dense(stream, cache, out),
                }
            }?;
        }
        Ok(())
    }
}
