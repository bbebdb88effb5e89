//! One block: its threads as coroutines, parked where they wait for each other.

use super::async_copy::Copies;
use super::collective::{self, FenceScope, ReduceOp, ShuffleKind, VoteKind, WarpCall, WarpOp};
use super::fault::{Fault, FaultKind, Place};
use super::memory::SharedMemory;
use super::race::Races;
use super::stack::ThreadStack;
use super::{EmuOptions, MAX_BLOCK_THREADS};
use crate::kernel::{Dim3, KernelInfo, LaunchShape};
use core::cell::{Cell, RefCell};
use core::ops::Deref;
use core::panic::Location;
use core::ptr::NonNull;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, Once};

/// What a block barrier hands back beside its ordering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    Plain,
    Count,
    And,
    Or,
}

/// Why a thread is parked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pause {
    Barrier { kind: BarrierKind, predicate: u32 },
    Warp(WarpCall),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum State {
    NotStarted,
    Running,
    Parked(Pause, &'static Location<'static>),
    Done,
}

/// One emulated thread.
pub(crate) struct Lane {
    /// Its index in the block.
    pub(crate) thread: Dim3,
    /// The same, x fastest: what warps are cut from.
    pub(crate) linear: u32,
    block: *const Block,
    pub(crate) state: Cell<State>,
    /// Which coroutine its stack is on, once it has parked.
    worker: Cell<usize>,
    yielder: Cell<*const Yielder<u64, ()>>,
    /// Whether it has waited for the launch before.
    waited: Cell<bool>,
    /// Its asynchronous copies that are under way.
    pub(crate) copies: RefCell<Copies>,
}

impl Lane {
    pub(crate) fn block(&self) -> &Block {
        // SAFETY: the runner keeps its block boxed for as long as it keeps its lanes.
        unsafe { &*self.block }
    }

    pub(crate) fn lane(&self) -> u32 {
        self.linear % 32
    }
}

/// What the threads of one block share.
pub(crate) struct Block {
    pub(crate) info: &'static KernelInfo,
    pub(crate) shape: LaunchShape,
    pub(crate) index: Cell<Dim3>,
    pub(crate) number: Cell<u64>,
    pub(crate) shared: SharedMemory,
    pub(crate) races: Option<RefCell<Races>>,
    lanes: Cell<*const Lane>,
    threads: u32,
    /// The next thread that has not started.
    next: Cell<u32>,
    /// The thread that runs now.
    running: Cell<u32>,
}

thread_local! {
    static CURRENT: Cell<*const Lane> = const { Cell::new(core::ptr::null()) };
    /// Where the kernel that runs here panicked.
    static PANIC_PLACE: Cell<Option<Place>> = const { Cell::new(None) };
}

/// From the first launch on, a panic inside a kernel is noted for the fault that it becomes, and not printed.
/// Every other panic goes to the hook that was there before.
pub(super) fn watch_panics() {
    static WATCHING: Once = Once::new();
    if std::thread::panicking() {
        return;
    }
    WATCHING.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if CURRENT.get().is_null() {
                before(info);
            } else {
                PANIC_PLACE.set(info.location().map(|at| Place {
                    file: interned(at.file()),
                    line: at.line(),
                    column: at.column(),
                }));
            }
        }));
    });
}

/// The same text for the rest of the program: the hook's file name is only borrowed. One copy for each file.
fn interned(file: &str) -> &'static str {
    static FILES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut files = FILES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(known) = files.get(file) {
        return known;
    }
    let leaked: &'static str = Box::leak(file.into());
    files.insert(leaked);
    leaked
}

/// Runs `f` on the emulated thread that is executing.
#[track_caller]
#[inline]
pub(crate) fn with_lane<R>(f: impl FnOnce(&Lane) -> R) -> R {
    let lane = CURRENT.get();
    assert!(!lane.is_null(), "a kernel primitive was called outside of a kernel: launch the kernel");
    // SAFETY: set by the runner on this OS thread for as long as the lane runs.
    f(unsafe { &*lane })
}

/// Ends the launch with a fault of the executing thread. Unwinds to the runner without the panic hook.
#[cold]
#[inline(never)]
pub(crate) fn raise(place: &'static Location<'static>, kind: FaultKind) -> ! {
    let fault = with_lane(|lane| Fault::of(lane, Some(place.into()), kind));
    resume_unwind(Box::new(fault))
}

fn park(pause: Pause, place: &'static Location<'static>) -> u64 {
    let yielder = with_lane(|lane| {
        lane.state.set(State::Parked(pause, place));
        lane.yielder.get()
    });
    // SAFETY: the coroutine that runs this thread set it and is the one suspended here.
    unsafe { &*yielder }.suspend(())
}

#[track_caller]
pub(crate) fn barrier(kind: BarrierKind, predicate: u32) -> u32 {
    park(Pause::Barrier { kind, predicate }, Location::caller()) as u32
}

#[track_caller]
pub(super) fn warp_call(call: WarpCall) -> u64 {
    let place = Location::caller();
    let lane = with_lane(|lane| lane.lane());
    if call.mask >> lane & 1 == 0 {
        raise(place, FaultKind::LaneNotInMask { mask: call.mask, lane });
    }
    park(Pause::Warp(call), place)
}

#[track_caller]
pub(crate) fn sync_warp(mask: u32) {
    warp_call(WarpCall { mask, op: WarpOp::Sync, value: 0, param: 0 });
}

#[track_caller]
pub(crate) fn vote(mask: u32, kind: VoteKind, predicate: bool) -> u32 {
    warp_call(WarpCall { mask, op: WarpOp::Vote(kind), value: predicate as u64, param: 0 }) as u32
}

#[track_caller]
pub(crate) fn reduce(mask: u32, op: ReduceOp, value: u32) -> u32 {
    warp_call(WarpCall { mask, op: WarpOp::Reduce(op), value: value as u64, param: 0 }) as u32
}

#[track_caller]
pub(crate) fn shuffle(mask: u32, kind: ShuffleKind, value: u64, param: u32, width: u32) -> u64 {
    if !width.is_power_of_two() || width > 32 {
        raise(Location::caller(), FaultKind::ShuffleWidth { width });
    }
    warp_call(WarpCall { mask, op: WarpOp::Shuffle(kind, width), value, param })
}

pub(crate) fn wait_for_previous() {
    with_lane(|lane| lane.waited.set(true));
}

pub(crate) fn fence(scope: FenceScope) {
    with_lane(|lane| {
        if let Some(races) = &lane.block().races {
            races.borrow_mut().fence(lane, scope);
        }
    });
}

/// Owns a value that raw pointers lead to: unlike a `Box`, moving or borrowing it claims no exclusive access.
struct Fixed<T: ?Sized>(NonNull<T>);

impl<T: ?Sized> Fixed<T> {
    fn new(value: Box<T>) -> Self {
        // SAFETY: a box is never null.
        Fixed(unsafe { NonNull::new_unchecked(Box::into_raw(value)) })
    }
}

impl<T: ?Sized> Deref for Fixed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: made from a box and owned until the drop; shared access only, what changes is in cells.
        unsafe { self.0.as_ref() }
    }
}

impl<T: ?Sized> Drop for Fixed<T> {
    fn drop(&mut self) {
        // SAFETY: made from a box, and dropped once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

struct Worker {
    coroutine: Coroutine<u64, (), (), ThreadStack>,
}

/// How many blocks one task of the thread pool runs: enough work to be worth a task.
pub(super) fn blocks_per_task(shape: LaunchShape) -> u64 {
    (16 * 1024 / shape.block.count()).max(1)
}

/// Runs blocks of one launch, one after another, on one OS thread.
pub(super) struct Runner<'a> {
    // Before what their coroutines point to.
    workers: Vec<Option<Worker>>,
    block: Fixed<Block>,
    lanes: Fixed<[Lane]>,
    body: &'a (dyn Fn() + Sync),
    stack_bytes: usize,
}

impl<'a> Runner<'a> {
    pub(super) fn new(
        info: &'static KernelInfo,
        shape: LaunchShape,
        body: &'a (dyn Fn() + Sync),
        options: &EmuOptions,
    ) -> Self {
        let threads = shape.block.count().min(MAX_BLOCK_THREADS) as u32;
        let block = Fixed::new(Box::new(Block {
            info,
            shape,
            index: Cell::new(Dim3 { x: 0, y: 0, z: 0 }),
            number: Cell::new(0),
            shared: SharedMemory::new(shape.shared_bytes),
            races: options.race_check.then(|| RefCell::new(Races::new(threads))),
            lanes: Cell::new(core::ptr::null()),
            threads,
            next: Cell::new(0),
            running: Cell::new(0),
        }));
        let pointer: *const Block = &*block;
        let lanes: Box<[Lane]> = (0..threads)
            .map(|linear| Lane {
                thread: shape.block.at(linear as u64),
                linear,
                block: pointer,
                state: Cell::new(State::NotStarted),
                worker: Cell::new(0),
                yielder: Cell::new(core::ptr::null()),
                waited: Cell::new(false),
                copies: RefCell::default(),
            })
            .collect();
        let lanes = Fixed::new(lanes);
        block.lanes.set(lanes.as_ptr());
        Runner { workers: Vec::new(), block, lanes, body, stack_bytes: options.stack_bytes }
    }

    /// Runs block number `number` of the grid.
    pub(super) fn run(&mut self, number: u64) -> Result<(), Box<Fault>> {
        self.block.number.set(number);
        self.block.index.set(self.block.shape.grid.at(number));
        self.block.next.set(0);
        self.block.shared.reset();
        if let Some(races) = &self.block.races {
            races.borrow_mut().enter_block();
        }
        for lane in self.lanes.iter() {
            lane.state.set(State::NotStarted);
            lane.waited.set(false);
            lane.copies.borrow_mut().clear();
        }
        let result = self.run_threads();
        // After a fault, parked threads are unwound here, while their stacks and lanes still exist.
        self.workers.clear();
        result
    }

    fn run_threads(&mut self) -> Result<(), Box<Fault>> {
        while self.block.next.get() < self.block.threads {
            let worker = self.start_worker()?;
            self.drive(worker, 0)?;
        }
        loop {
            let mut progress = false;
            for first in (0..self.lanes.len()).step_by(32) {
                progress |= self.settle_warp(first)?;
            }
            if progress {
                continue;
            }
            if self.lanes.iter().all(|lane| matches!(lane.state.get(), State::Done)) {
                return Ok(());
            }
            self.release_barrier()?;
        }
    }

    /// Completes every warp primitive of one warp that has all its lanes; says whether there was any.
    fn settle_warp(&mut self, first: usize) -> Result<bool, Box<Fault>> {
        let mut progress = false;
        loop {
            let warp = &self.lanes[first..self.lanes.len().min(first + 32)];
            let Some(settled) = collective::settle(warp)
                .map_err(|(lane, place, kind)| self.fault(&self.lanes[first + lane], Some(place), kind))?
            else {
                return Ok(progress);
            };
            if let Some(races) = self.block.races.as_ref().filter(|_| settled.orders_memory) {
                races.borrow_mut().warp_sync(first as u32, settled.mask);
            }
            progress = true;
            for lane in (0..32).filter(|lane| settled.mask >> lane & 1 == 1) {
                self.resume(first + lane, settled.results[lane])?;
            }
        }
    }

    /// Releases the barrier if every thread of the block waits at the same one; otherwise nothing can move
    /// any more, and that is the fault.
    fn release_barrier(&mut self) -> Result<(), Box<Fault>> {
        if let Some((lane, place, kind)) = collective::why_stuck(&self.lanes) {
            return Err(self.fault(&self.lanes[lane], Some(place), kind));
        }
        let Some(value) = collective::barrier_value(&self.lanes) else {
            unreachable!("threads that are not stuck all wait at one barrier")
        };
        if let Some(races) = &self.block.races {
            races.borrow_mut().block_sync();
        }
        for lane in 0..self.lanes.len() {
            self.resume(lane, value as u64)?;
        }
        Ok(())
    }

    fn fault(&self, lane: &Lane, place: Option<Place>, kind: FaultKind) -> Box<Fault> {
        Box::new(Fault::of(lane, place, kind))
    }

    fn start_worker(&mut self) -> Result<usize, Box<Fault>> {
        let bytes = self.stack_bytes;
        let stack = ThreadStack::get(bytes).map_err(|error| {
            let threads = self.block.threads;
            let reason = format!("no memory for {threads} stacks of {bytes} bytes: {error}");
            Box::new(Fault::refused(self.block.info, reason))
        })?;
        let block: *const Block = &*self.block;
        let body: *const (dyn Fn() + Sync + 'a) = self.body;
        // SAFETY: only the lifetime changes; the runner outlives its coroutines, the body outlives it.
        let body: *const (dyn Fn() + Sync + 'static) = unsafe { core::mem::transmute(body) };
        let coroutine = Coroutine::with_stack(stack, move |yielder: &Yielder<u64, ()>, _| {
            // SAFETY: as above: block, lanes and body outlive this coroutine; one OS thread runs them all.
            let (block, body) = unsafe { (&*block, &*body) };
            while block.next.get() < block.threads {
                let index = block.next.get();
                block.next.set(index + 1);
                block.running.set(index);
                // SAFETY: `index` is below the number of lanes.
                let lane = unsafe { &*block.lanes.get().add(index as usize) };
                lane.yielder.set(yielder);
                lane.state.set(State::Running);
                CURRENT.set(lane);
                body();
                if block.info.waits_late && !lane.waited.get() {
                    resume_unwind(Box::new(Fault::of(lane, None, FaultKind::NoWait)));
                }
                lane.state.set(State::Done);
            }
        });
        self.workers.push(Some(Worker { coroutine }));
        Ok(self.workers.len() - 1)
    }

    fn resume(&mut self, lane: usize, value: u64) -> Result<(), Box<Fault>> {
        let lane_state = &self.lanes[lane];
        lane_state.state.set(State::Running);
        CURRENT.set(lane_state);
        self.block.running.set(lane as u32);
        self.drive(lane_state.worker.get(), value)
    }

    /// Lets a coroutine run until a thread on it parks or it has no thread left.
    fn drive(&mut self, worker: usize, value: u64) -> Result<(), Box<Fault>> {
        let Some(slot) = &mut self.workers[worker] else { unreachable!("a parked thread has a coroutine") };
        let outcome = catch_unwind(AssertUnwindSafe(|| slot.coroutine.resume(value)));
        CURRENT.set(core::ptr::null());
        let running = &self.lanes[self.block.running.get() as usize];
        match outcome {
            Ok(CoroutineResult::Yield(())) => {
                running.worker.set(worker);
                Ok(())
            }
            Ok(CoroutineResult::Return(())) => {
                if let Some(done) = self.workers[worker].take() {
                    done.coroutine.into_stack().put_back();
                }
                Ok(())
            }
            Err(payload) => Err(match payload.downcast::<Fault>() {
                Ok(fault) => fault,
                Err(payload) => {
                    let message = payload
                        .downcast_ref::<&str>()
                        .map(|text| text.to_string())
                        .or_else(|| payload.downcast_ref::<String>().cloned())
                        .unwrap_or_else(|| "(no message)".to_string());
                    self.fault(running, PANIC_PLACE.take(), FaultKind::Panic { message })
                }
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emu::launch;
    use crate::{kernel, thread};

    #[kernel]
    fn park(faulty: u32) {
        thread::sync_threads();
        assert!(faulty == 0 || thread::thread_idx_x() < 40, "planted");
        thread::sync_threads();
    }

    #[kernel]
    fn barrier() {
        thread::sync_threads();
    }

    #[test]
    fn stacks_are_reused_from_launch_to_launch() {
        let kernel = park::kernel();
        // With race checking, blocks run on this very thread, whose pool can be looked at.
        let options = EmuOptions::race_checked();
        // SAFETY: no memory is involved.
        let run = |faulty: u32| unsafe {
            launch(&kernel, LaunchShape::new(2, 64), park::Args { faulty }, &options)
        };
        for _ in 0..50 {
            assert_eq!(run(0), Ok(()));
            assert_eq!(ThreadStack::idle(), 64);
        }
        for _ in 0..50 {
            assert!(run(1).is_err());
            // The stacks of threads that the fault left parked are freed.
            assert_eq!(ThreadStack::idle(), 0);
        }
        assert_eq!(run(0), Ok(()));
        let other_size = EmuOptions { stack_bytes: 128 * 1024, ..options };
        // SAFETY: no memory is involved.
        let result =
            unsafe { launch(&kernel, LaunchShape::new(1, 16), park::Args { faulty: 0 }, &other_size) };
        assert_eq!((result, ThreadStack::idle()), (Ok(()), 16));
    }

    #[test]
    fn a_stack_that_no_machine_has_is_refused() {
        let options = EmuOptions { stack_bytes: 1 << 60, ..EmuOptions::default() };
        // SAFETY: no memory is involved.
        let fault =
            unsafe { launch(&barrier::kernel(), LaunchShape::new(1, 64), barrier::Args {}, &options) }
                .unwrap_err();
        assert!(
            fault.to_string().contains("no memory for 64 stacks of 1152921504606846976 bytes"),
            "{fault}"
        );
    }
}
