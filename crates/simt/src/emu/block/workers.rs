//! Coroutines: each takes a thread of the block, and the next one when that is done.

use super::super::fault::{Fault, FaultKind};
use super::super::lane::{CURRENT, State};
use super::super::panics;
use super::super::stack::ThreadStack;
use super::super::trap::{self, End};
use super::super::{bulk, wgmma};
use super::{Block, Runner};
use corosensei::stack::Stack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub(super) struct Worker {
    coroutine: Coroutine<u64, (), End, ThreadStack>,
}

impl<'a> Runner<'a> {
    pub(super) fn start_worker(&mut self) -> Result<usize, Box<Fault>> {
        let bytes = self.stack_bytes;
        let place = self.vacant.pop().unwrap_or(self.workers.len());
        let stack = match &self.lodging {
            None => ThreadStack::get(bytes),
            Some(lodging) => lodging.stack(self.block.number.get(), place),
        };
        let stack = stack.map_err(|error| {
            let threads = self.block.threads;
            let reason = format!("no memory for {threads} stacks of {bytes} bytes: {error}");
            Box::new(Fault::refused(self.block.info, reason))
        })?;
        let block: *const Block = &*self.block;
        let body: *const (dyn Fn() + Sync + 'a) = self.body;
        // SAFETY: only the lifetime changes; the runner outlives its coroutines, the body outlives it.
        let body: *const (dyn Fn() + Sync + 'static) = unsafe { core::mem::transmute(body) };
        let addresses = (stack.limit().get(), stack.base().get());
        let coroutine = Coroutine::with_stack(stack, move |yielder: &Yielder<u64, ()>, _| {
            // SAFETY: as above: block, lanes and body outlive this coroutine; one OS thread runs them all.
            let (block, body) = unsafe { (&*block, &*body) };
            while block.next.get() < block.end.get() {
                let index = block.order[block.next.get() as usize].get();
                block.next.set(block.next.get() + 1);
                block.running.set(index);
                // SAFETY: `index` is below the number of lanes.
                let lane = unsafe { &*block.lanes.get().add(index as usize) };
                lane.yielder.set(yielder);
                lane.stack.set(addresses);
                lane.state.set(State::Running);
                CURRENT.set(lane);
                body();
                if block.info.waits_late && !lane.waited.get() {
                    resume_unwind(Box::new(Fault::of(lane, None, FaultKind::NoWait)));
                }
                if let Some((place, kind)) = bulk::end(lane) {
                    resume_unwind(Box::new(Fault::of(lane, Some(place), kind)));
                }
                if let Some(kind) = wgmma::end(lane) {
                    resume_unwind(Box::new(Fault::of(lane, None, kind)));
                }
                lane.state.set(State::Done);
                block.ended.set(true);
            }
            End::Done
        });
        let worker = Some(Worker { coroutine });
        match self.workers.get_mut(place) {
            Some(vacant) => *vacant = worker,
            None => self.workers.push(worker),
        }
        Ok(place)
    }

    /// Threads that are parked unwind here, while their stacks and lanes still exist.
    pub(in super::super) fn unwind(&mut self) {
        for place in 0..self.workers.len() {
            let Some(worker) = self.workers[place].take() else { continue };
            match &self.lodging {
                None => drop(worker),
                Some(lodging) => {
                    lodging.enter(self.block.number.get(), place);
                    drop(worker);
                    lodging.leave(place);
                }
            }
        }
        self.workers.clear();
        self.vacant.clear();
    }

    pub(super) fn resume(&mut self, lane: usize, value: u64) -> Result<(), Box<Fault>> {
        let lane_state = &self.lanes[lane];
        lane_state.refuel(lane_state.gave_way() && self.quiet);
        lane_state.state.set(State::Running);
        CURRENT.set(lane_state);
        self.block.running.set(lane as u32);
        self.drive(lane_state.worker.get(), value)
    }

    /// Lets a coroutine run until a thread on it parks or it has no thread left.
    pub(super) fn drive(&mut self, worker: usize, value: u64) -> Result<(), Box<Fault>> {
        let number = self.block.number.get();
        let Some(slot) = &mut self.workers[worker] else { unreachable!("a parked thread has a coroutine") };
        if let Some(lodging) = &self.lodging {
            lodging.enter(number, worker);
        }
        trap::enter(slot.coroutine.trap_handler());
        let outcome = catch_unwind(AssertUnwindSafe(|| slot.coroutine.resume(value)));
        trap::leave();
        CURRENT.set(core::ptr::null());
        let running = &self.lanes[self.block.running.get() as usize];
        debug_assert_eq!(self.block.is_guest.get(), self.lodging.is_some(), "a guest notes where it parks");
        match &self.lodging {
            Some(lodging) if matches!(outcome, Ok(CoroutineResult::Yield(()))) => {
                lodging.rest(number, worker, running.used_stack());
            }
            Some(lodging) => lodging.leave(worker),
            None => {}
        }
        match outcome {
            Ok(CoroutineResult::Yield(())) => {
                running.worker.set(worker);
                Ok(())
            }
            Ok(CoroutineResult::Return(End::Overflow)) => {
                // Who was borrowing the record of accesses never gives it back: nobody may look there.
                self.overflowed = true;
                Err(self.fault(running, None, FaultKind::StackOverflow { bytes: self.stack_bytes }))
            }
            Ok(CoroutineResult::Return(End::Done)) => {
                if let Some(done) = self.workers[worker].take() {
                    done.coroutine.into_stack().put_back();
                }
                self.vacant.push(worker);
                Ok(())
            }
            Err(payload) => Err(match payload.downcast::<Fault>() {
                Ok(fault) => fault,
                Err(payload) => {
                    let message = panics::message(&*payload);
                    self.fault(running, panics::take_place(), FaultKind::Panic { message })
                }
            }),
        }
    }
}
