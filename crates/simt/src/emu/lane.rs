//! One emulated thread, and the calls by which it parks.

use super::MAX_BLOCK_THREADS;
use super::async_copy::Copies;
use super::block::Block;
use super::bulk::Stores;
use super::calls::{self, Calls};
use super::collective::{FenceScope, ReduceOp, ShuffleKind, VoteKind, WarpCall, WarpOp};
use super::fault::{Fault, FaultKind, Space};
use super::matrix::Operands;
use super::mutation::Change;
use super::named::{self, NamedCall};
use super::shared::SharedView;
use super::stack;
use super::wgmma::{Fragments, Products};
use crate::kernel::Dim3;
use core::cell::{Cell, RefCell};
use core::panic::Location;
use corosensei::Yielder;
use std::panic::resume_unwind;

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
    Barrier {
        kind: BarrierKind,
        predicate: u32,
        calls: Option<&'static Calls>,
    },
    Warp(WarpCall),
    Named(NamedCall),
    /// It asks which lanes are with it.
    Active,
    /// It could go on, and lets others go first.
    Turn,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum State {
    NotStarted,
    Running,
    Parked(Pause, &'static Location<'static>),
    Done,
}

/// The word that a thread looked at last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    pub(crate) space: Space,
    pub(crate) byte: u64,
    pub(crate) index: u64,
    /// What it held; not known of a plain load.
    pub(crate) value: Option<u64>,
}

/// One emulated thread.
pub(crate) struct Lane {
    /// Its index in the block.
    pub(crate) thread: Dim3,
    /// The same, x fastest: what warps are cut from.
    pub(crate) linear: u32,
    pub(super) block: *const Block,
    pub(crate) state: Cell<State>,
    /// Which coroutine its stack is on, once it has parked.
    pub(super) worker: Cell<usize>,
    pub(super) yielder: Cell<*const Yielder<u64, ()>>,
    /// The addresses of its stack.
    pub(super) stack: Cell<(usize, usize)>,
    /// Where it parked, if its block is a guest: what it has on its stack is above that.
    pub(super) parked_at: Cell<usize>,
    /// Whether it has waited for the launch before.
    pub(super) waited: Cell<bool>,
    /// The phase of the cluster's barrier in which it has arrived and for which it has not waited.
    pub(super) arrived: Cell<Option<u32>>,
    /// Its block's shared memory.
    pub(super) shared: SharedView,
    /// What it has spent of [`FUEL`] since it last got a turn.
    spent: Cell<u32>,
    /// How many accesses it may make before the next one is looked at; 0 where each is.
    unwatched: Cell<u32>,
    pub(super) look: Cell<Option<Look>>,
    /// Its asynchronous copies that are under way.
    pub(crate) copies: RefCell<Copies>,
    /// The same of bulk copies to global memory.
    pub(super) stores: RefCell<Stores>,
    /// What it hands to a matrix operation of its warp, and to one of its group of warps.
    pub(super) operands: Cell<Operands>,
    pub(super) fragments: Cell<Fragments>,
    /// The same of its group's products.
    pub(super) products: RefCell<Products>,
    /// The addresses of tensor maps that it has acquired.
    pub(super) maps: RefCell<Vec<u64>>,
}

/// What a thread may spend until it gives way: 64 atomics or fences, four pauses, or very many plain
/// accesses. A thread that waits for a word to change spends it soon, and few others ever do.
const FUEL: u32 = 1 << 16;
const ATOMIC: u32 = FUEL / 64;
const PAUSE: u32 = FUEL / 4;

/// Accesses that nobody looks at come in so many at a time.
const UNWATCHED: u32 = 1 << 20;

impl Lane {
    pub(super) fn new(thread: Dim3, linear: u32, block: *const Block, shared: SharedView) -> Self {
        Lane {
            thread,
            linear,
            block,
            state: Cell::new(State::NotStarted),
            worker: Cell::new(0),
            yielder: Cell::new(core::ptr::null()),
            stack: Cell::new((0, 0)),
            parked_at: Cell::new(0),
            waited: Cell::new(false),
            arrived: Cell::new(None),
            shared,
            spent: Cell::new(0),
            unwatched: Cell::new(0),
            look: Cell::new(None),
            copies: RefCell::default(),
            stores: RefCell::default(),
            operands: Cell::default(),
            fragments: Cell::default(),
            products: RefCell::default(),
            maps: RefCell::default(),
        }
    }

    pub(super) fn reset(&self) {
        self.state.set(State::NotStarted);
        self.waited.set(false);
        self.arrived.set(None);
        self.refuel(false);
        self.look.set(None);
        self.copies.borrow_mut().clear();
        self.stores.borrow_mut().clear();
        self.products.borrow_mut().clear();
        self.maps.borrow_mut().clear();
    }

    /// The part of its stack that it uses while it is parked.
    pub(super) fn used_stack(&self) -> std::ops::Range<usize> {
        let (start, end) = self.stack.get();
        self.parked_at.get().max(start + stack::guard_bytes())..end
    }

    pub(crate) fn block(&self) -> &Block {
        // SAFETY: the runner keeps its block boxed for as long as it keeps its lanes.
        unsafe { &*self.block }
    }

    pub(crate) fn lane(&self) -> u32 {
        self.linear % 32
    }

    /// Whether it could go on at once.
    pub(super) fn gave_way(&self) -> bool {
        matches!(self.state.get(), State::Parked(Pause::Turn, _))
    }

    /// It gets a turn: a short one, if nothing has changed.
    pub(super) fn refuel(&self, short: bool) {
        self.spent.set(if short { FUEL - ATOMIC } else { 0 });
        self.unwatched.set(if self.block().watched { 0 } else { UNWATCHED });
    }

    /// Whether the access that comes is one to look at.
    #[inline(always)]
    pub(super) fn is_watched(&self) -> bool {
        let left = self.unwatched.get();
        self.unwatched.set(left.saturating_sub(1));
        left == 0
    }

    /// Whether nobody looks at the access that comes; if so, it is counted.
    #[inline(always)]
    pub(super) fn passes(&self) -> bool {
        let left = self.unwatched.get().checked_sub(1);
        if let Some(left) = left {
            self.unwatched.set(left);
        }
        left.is_some()
    }

    /// The same of a write.
    #[inline(always)]
    pub(super) fn passes_writing(&self) -> bool {
        let passes = self.passes();
        if passes {
            self.block().changed.set(true);
        }
        passes
    }

    /// Whether it may make a plain access and another one.
    #[inline(always)]
    pub(super) fn has_fuel(&self) -> bool {
        self.spent.get() < FUEL - 1
    }

    /// Whether it has to give way for that.
    #[inline]
    pub(super) fn spend(&self, fuel: u32) -> bool {
        let spent = self.spent.get() + fuel;
        self.spent.set(spent);
        spent >= FUEL
    }
}

thread_local! {
    pub(super) static CURRENT: Cell<*const Lane> = const { Cell::new(core::ptr::null()) };
}

/// The emulated thread that is executing, or null. `LocalKey::get` may stay a call in the crates of kernels.
#[inline(always)]
fn current() -> *const Lane {
    CURRENT.try_with(Cell::get).unwrap_or(core::ptr::null())
}

/// Runs `f` on the emulated thread that is executing.
#[track_caller]
#[inline(always)]
pub(crate) fn with_lane<R>(f: impl FnOnce(&Lane) -> R) -> R {
    let lane = current();
    assert!(!lane.is_null(), "a kernel primitive was called outside of a kernel: launch the kernel");
    // SAFETY: set by the runner on this OS thread for as long as the lane runs.
    f(unsafe { &*lane })
}

/// The same where there is one.
pub(super) fn running<R>(f: impl FnOnce(&Lane) -> R) -> Option<R> {
    let lane = current();
    // SAFETY: as in `with_lane`.
    (!lane.is_null()).then(|| f(unsafe { &*lane }))
}

/// Ends the launch with a fault of the executing thread. Unwinds to the runner without the panic hook.
#[cold]
#[inline(never)]
pub(crate) fn raise(place: &'static Location<'static>, kind: FaultKind) -> ! {
    let fault = with_lane(|lane| Fault::of(lane, Some(place.into()), kind));
    resume_unwind(Box::new(fault))
}

/// No frame reaches further below the address that [`below`] gives.
const PARKING_FRAMES: usize = 2048;

/// An address on the stack, below the frame of who calls.
#[inline(never)]
fn below() -> usize {
    let mark = 0u8;
    core::hint::black_box(&raw const mark) as usize
}

/// Lets others go on until it is this thread's turn again; gives what it is told then.
///
/// In line in the kernel, up to the instruction that changes the stacks. A processor foretells where a
/// function returns to by the calls that it has seen, whatever the stack: returns that are executed on
/// another thread's stack than the calls before them are foretold wrongly, at some twenty cycles each. So
/// between two changes of stacks there shall be as many returns as calls.
#[inline(always)]
pub(super) fn park(pause: Pause, place: &'static Location<'static>) -> u64 {
    let yielder = with_lane(|lane| {
        if lane.block().is_guest.get() {
            lane.parked_at.set(below().saturating_sub(PARKING_FRAMES));
        }
        lane.state.set(State::Parked(pause, place));
        lane.yielder.get()
    });
    // SAFETY: the coroutine that runs this thread set it and is the one suspended here.
    unsafe { &*yielder }.suspend(())
}

/// The same of a thread that could go on. Not in line: few short waits are of this kind.
#[inline(never)]
fn give_turn(place: &'static Location<'static>) {
    park(Pause::Turn, place);
}

/// Ahead of an atomic: another thread may come in between, if the order is one of seeds.
pub(super) fn before_atomic(place: &'static Location<'static>) {
    if with_lane(|lane| lane.block().tosses()) {
        give_turn(place);
    }
}

/// Behind an atomic that found `look`.
pub(super) fn after_atomic(look: Look, place: &'static Location<'static>) {
    let parks = with_lane(|lane| {
        lane.look.set(Some(look));
        lane.spend(ATOMIC) || lane.block().tosses()
    });
    if parks {
        give_turn(place);
    }
}

/// Behind a look that has not found what it waits for: others go first.
pub(super) fn park_after_look(look: Look, place: &'static Location<'static>) {
    with_lane(|lane| lane.look.set(Some(look)));
    give_turn(place);
}

/// Ahead of an access that is looked at: a thread that makes very many may wait for another one.
#[inline]
pub(super) fn before_plain(lane: &Lane, look: impl FnOnce() -> Look, place: &'static Location<'static>) {
    if lane.spend(if lane.block().watched { 1 } else { FUEL }) {
        park_after_look(look(), place);
    }
}

/// Whether this change is made here, of a kernel broken on purpose.
pub(super) fn breaks(change: Change, place: &'static Location<'static>) -> bool {
    with_lane(|lane| lane.block().breaks(change, place))
}

/// The calls that have led here, if races are checked.
pub(super) fn calls() -> Option<&'static Calls> {
    with_lane(|lane| {
        lane.block().races.as_ref()?;
        let (start, end) = lane.stack.get();
        calls::here(start..end)
    })
}

/// Lets others go first, whatever the thread has spent: it has done something that is worth a turn's end.
pub(super) fn give_way(place: &'static Location<'static>) {
    with_lane(|lane| {
        lane.look.set(None);
        lane.block().changed.set(true);
    });
    give_turn(place);
}

#[track_caller]
pub(crate) fn pause() {
    let parks = with_lane(|lane| lane.spend(PAUSE) || lane.block().tosses());
    if parks {
        give_turn(Location::caller());
    }
}

#[track_caller]
#[inline(always)]
pub(crate) fn barrier(kind: BarrierKind, predicate: u32) -> u32 {
    let place = Location::caller();
    let mut pause = Pause::Barrier { kind, predicate, calls: None };
    if with_lane(|lane| lane.block().watched) {
        match watched_barrier(kind, predicate, place) {
            Some(watched) => pause = watched,
            None => return 0,
        }
    }
    park(pause, place) as u32
}

/// What is known of a barrier where kernels are looked at; of one that is left out nothing.
#[inline(never)]
fn watched_barrier(kind: BarrierKind, predicate: u32, place: &'static Location<'static>) -> Option<Pause> {
    if kind == BarrierKind::Plain && breaks(Change::NoBarrier, place) {
        return None;
    }
    let negated = kind != BarrierKind::Plain && breaks(Change::Negated, place);
    let predicate = if negated { u32::from(predicate == 0) } else { predicate };
    Some(Pause::Barrier { kind, predicate, calls: calls() })
}

#[track_caller]
pub(crate) fn named_barrier(id: u32, threads: u32, waits: bool) {
    let place = Location::caller();
    if !(1..named::BARRIERS as u32).contains(&id) {
        raise(place, FaultKind::NamedBarrierId { id });
    }
    if threads == 0 || !threads.is_multiple_of(32) || threads > MAX_BLOCK_THREADS as u32 {
        raise(place, FaultKind::NamedBarrierThreads { id, threads });
    }
    if breaks(Change::NoBarrier, place) {
        return;
    }
    let call = NamedCall { id, threads, waits, counted: false, calls: calls() };
    park(Pause::Named(call), place);
}

#[track_caller]
#[inline(always)]
pub(super) fn warp_call(call: WarpCall) -> u64 {
    let place = Location::caller();
    let mut call = call;
    let (lane, watched) = with_lane(|lane| (lane.lane(), lane.block().watched));
    if watched {
        call = watched_call(call, place);
    }
    if call.mask >> lane & 1 == 0 {
        raise(place, FaultKind::LaneNotInMask { mask: call.mask, lane });
    }
    park(Pause::Warp(call), place)
}

/// The call as it is made where kernels are looked at.
#[inline(never)]
fn watched_call(mut call: WarpCall, place: &'static Location<'static>) -> WarpCall {
    let is_masked = !matches!(call.op, WarpOp::Matrix(_)) && call.mask.count_ones() > 1;
    if is_masked && breaks(Change::MaskBit, place) {
        call.mask &= !(1 << (31 - call.mask.leading_zeros()));
    }
    if matches!(call.op, WarpOp::Matrix(_)) {
        call.calls = calls();
    }
    call
}

#[track_caller]
#[inline(always)]
pub(crate) fn sync_warp(mask: u32) {
    if breaks(Change::NoWarpBarrier, Location::caller()) {
        return;
    }
    warp_call(WarpCall::new(mask, WarpOp::Sync, 0, 0));
}

#[track_caller]
#[inline(always)]
pub(crate) fn vote(mask: u32, kind: VoteKind, predicate: bool) -> u32 {
    let predicate = predicate ^ breaks(Change::Negated, Location::caller());
    warp_call(WarpCall::new(mask, WarpOp::Vote(kind), predicate as u64, 0)) as u32
}

#[track_caller]
#[inline(always)]
pub(crate) fn match_any(mask: u32, value: u64) -> u32 {
    warp_call(WarpCall::new(mask, WarpOp::MatchAny, value, 0)) as u32
}

#[track_caller]
#[inline(always)]
pub(crate) fn match_all(mask: u32, value: u64) -> bool {
    let negated = breaks(Change::Negated, Location::caller());
    (warp_call(WarpCall::new(mask, WarpOp::MatchAll, value, 0)) != 0) ^ negated
}

#[track_caller]
#[inline(always)]
pub(crate) fn reduce(mask: u32, op: ReduceOp, value: u32) -> u32 {
    warp_call(WarpCall::new(mask, WarpOp::Reduce(op), value as u64, 0)) as u32
}

#[track_caller]
#[inline(always)]
pub(crate) fn shuffle(mask: u32, kind: ShuffleKind, value: u64, param: u32, width: u32) -> u64 {
    if !width.is_power_of_two() || width > 32 {
        raise(Location::caller(), FaultKind::ShuffleWidth { width });
    }
    warp_call(WarpCall::new(mask, WarpOp::Shuffle(kind, width), value, param))
}

#[track_caller]
pub(crate) fn active_mask() -> u32 {
    with_lane(|lane| lane.block().asking.update(|asking| asking + 1));
    park(Pause::Active, Location::caller()) as u32
}

pub(crate) fn wait_for_previous() {
    with_lane(|lane| lane.waited.set(true));
}

#[track_caller]
pub(crate) fn fence(scope: FenceScope) {
    let place = Location::caller();
    if breaks(Change::NoFence, place) {
        return;
    }
    let narrowed = scope != FenceScope::Block && breaks(Change::BlockFence, place);
    let relaxed = scope == FenceScope::Full && breaks(Change::RelaxedFence, place);
    let scope = match (narrowed, relaxed) {
        (true, _) => FenceScope::Block,
        (false, true) => FenceScope::Device,
        (false, false) => scope,
    };
    let parks = with_lane(|lane| {
        if let Some(races) = &lane.block().races {
            races.borrow_mut().fence(lane, scope);
        }
        lane.spend(ATOMIC) || lane.block().tosses()
    });
    if parks {
        give_turn(place);
    }
}
