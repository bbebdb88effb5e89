//! Which accesses nothing orders: vector clocks over the threads of a launch.
//!
//! A thread's accesses carry its own clock, which ticks whenever others may learn of what it did. Thread B
//! has access X of thread A behind it if
//! - both are one thread, or
//! - they share a block and a block barrier came between (the barrier count, `epoch`, is higher), or
//! - they share a warp and B has heard A's clock through a warp synchronisation, or
//! - B has heard of X through an atomic: A made a fence and then an atomic on a word, and B (or one B has
//!   heard from) a later atomic on that word and then a fence or a barrier. The atomics are relaxed, so both
//!   sides need theirs. Between threads of one block fences of the block will do.
//!
//! Anything else on the same byte, one of the two writing, is a race. Two atomics never race if they change
//! the same bytes and the scope of each takes in the other's thread.
//!
//! Two things are mistakes in whatever order: a read-only load of a byte that the launch writes, and a write
//! to the source of an asynchronous copy that its thread has not waited for.

use super::clock::{Clock, Known, Word};
use super::collective::FenceScope;
use super::fault::{FaultKind, Place, Race, Space, ThreadId};
use super::history::{Access, ByAddress, Event, History, Memory};
use super::lane::Lane;
use super::late::Late;
use super::mbarrier::AGENTS;
use super::weak::{FullFences, Versions};
use crate::kernel::LaunchShape;
use core::panic::Location;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

mod copies;
mod remote;
mod weakly;

use remote::Past;

/// An asynchronous copy that reads global memory and has not been waited for.
struct Source {
    event: Event,
    index: u64,
    /// The addresses that it reads.
    start: u64,
    end: u64,
}

/// The memory of the race check for a launch. The blocks of one core share it.
#[derive(Default)]
pub(crate) struct GridRaces {
    memory: Memory,
    words: ByAddress<Word>,
    /// By the number of the 16 bytes that the copied ones are in.
    sources: ByAddress<Vec<Source>>,
    /// Of the words that atomics have changed.
    versions: ByAddress<Versions>,
    fences: FullFences,
    late: Option<Arc<Mutex<Late>>>,
}

impl GridRaces {
    pub(super) fn new(late: Option<Arc<Mutex<Late>>>) -> Self {
        GridRaces { late, ..GridRaces::default() }
    }
}

/// The same for the block that runs.
pub(crate) struct Races {
    grid: Rc<RefCell<GridRaces>>,
    clocks: Vec<Clock>,
    /// Block barriers passed by the block that runs.
    epoch: u32,
    /// Of its shared memory.
    past: Past,
    /// Whether looks may see older values.
    weak: bool,
}

impl Races {
    pub(super) fn new(threads: u32, grid: Rc<RefCell<GridRaces>>, weak: bool) -> Self {
        let nothing = Rc::default();
        Races {
            grid,
            clocks: (0..threads as usize).map(|thread| Clock::start(thread % 32, &nothing)).collect(),
            epoch: 0,
            past: Past::default(),
            weak,
        }
    }

    /// The next block starts: it has heard of no other.
    pub(super) fn enter_block(&mut self, block: u64) {
        let nothing = Rc::default();
        for (thread, clock) in self.clocks.iter_mut().enumerate() {
            *clock = Clock::start(thread % 32, &nothing);
        }
        self.epoch = 0;
        self.past.begin(block);
    }

    /// The block ends: what it has not waited for nobody will look at.
    pub(super) fn leave_block(&mut self, block: u64) {
        self.grid.borrow_mut().sources.retain(|_, sources| {
            sources.retain(|source| source.event.block != block);
            !sources.is_empty()
        });
    }

    /// Every thread of `block` has met every other.
    pub(super) fn block_sync(&mut self, block: u64) {
        self.epoch += 1;
        let mut known = Known::default();
        Clock::tell(self.clocks.iter(), &mut known);
        // What they knew of each other is behind the barrier, but for copies, which go on.
        known.threads.retain(|(of, who), _| *of != block || *who >= AGENTS);
        let known = Rc::new(known);
        for (thread, clock) in self.clocks.iter_mut().enumerate() {
            clock.warp[thread % 32] += 1;
            clock.known = known.clone();
        }
    }

    /// The lanes of `mask` of the warp that starts at thread `first` have met.
    pub(super) fn warp_sync(&mut self, first: u32, mask: u32) {
        let lanes: Vec<usize> = (0..32).filter(|lane| mask >> lane & 1 == 1).collect();
        let mut heard = [0; 32];
        let mut known = Known::default();
        for lane in &lanes {
            let clock = &self.clocks[first as usize + lane];
            for (mine, theirs) in heard.iter_mut().zip(clock.warp) {
                *mine = theirs.max(*mine);
            }
        }
        Clock::tell(lanes.iter().map(|lane| &self.clocks[first as usize + lane]), &mut known);
        let known = Rc::new(known);
        for lane in &lanes {
            let clock = &mut self.clocks[first as usize + lane];
            clock.warp = heard;
            clock.warp[*lane] += 1;
            clock.known = known.clone();
        }
    }

    /// The lanes of the warp that starts at thread `first` have come to a barrier with a number, and leave
    /// there what they did and know.
    pub(super) fn arrive(&mut self, block: u64, first: u32, lanes: u32, known: &mut Known) {
        known.blocks.insert(block, self.epoch);
        let warp = &mut self.clocks[first as usize..(first + lanes) as usize];
        Clock::tell(warp.iter(), known);
        for (lane, clock) in warp.iter_mut().enumerate() {
            for (other, heard) in clock.warp.iter().enumerate().filter(|(_, heard)| **heard > 0) {
                let mine = known.threads.entry((block, first + other as u32)).or_insert(0);
                *mine = (*mine).max(*heard);
            }
            clock.warp[lane] += 1;
        }
    }

    /// They go on, and know what all who came there knew.
    pub(super) fn depart(&mut self, first: u32, known: &Known) {
        Clock::learn(self.clocks.iter_mut().skip(first as usize).take(32), known);
    }

    /// From here on this thread knows what its atomics have heard, as far as the fence reaches, and its next
    /// atomics pass on what it has done and knows.
    pub(super) fn fence(&mut self, lane: &Lane, scope: FenceScope) {
        let (block, first) = (lane.block().number.get(), lane.linear - lane.lane());
        let clock = &mut self.clocks[lane.linear as usize];
        if scope == FenceScope::Full {
            let other = self.grid.borrow_mut().fences.fence((block, lane.linear));
            clock.fence_behind(other);
        }
        clock.fence(scope, block, self.epoch, first, lane.lane() as usize);
    }

    fn event(&self, lane: &Lane, access: Access, place: &'static Location<'static>) -> Event {
        self.event_at(lane, &self.clocks[lane.linear as usize], access, place)
    }

    #[inline(always)]
    fn event_at(
        &self,
        lane: &Lane,
        clock: &Clock,
        access: Access,
        place: &'static Location<'static>,
    ) -> Event {
        Event {
            block: lane.block().number.get(),
            linear: lane.linear,
            agent: 0,
            epoch: self.epoch,
            clock: clock.warp[lane.lane() as usize],
            access,
            place,
        }
    }

    /// Records an access if nothing is wrong with it, which is known at once of most: see [`Memory::takes`].
    #[inline(always)]
    pub(super) fn takes(
        &mut self,
        lane: &Lane,
        space: Space,
        (start, bytes): (u64, usize),
        access: Access,
        place: &'static Location<'static>,
    ) -> bool {
        let Some(clock) = self.clocks.get(lane.linear as usize) else { return false };
        let event = self.event_at(lane, clock, access, place);
        if space == Space::Shared {
            return self.past.memory.takes(start, bytes, &event);
        }
        let Ok(mut grid) = self.grid.try_borrow_mut() else { return false };
        (!access.writes() || grid.sources.is_empty()) && grid.memory.takes(start, bytes, &event)
    }

    /// Records an access and checks it against the past of its bytes.
    pub(super) fn access(
        &mut self,
        lane: &Lane,
        space: Space,
        (start, index): (u64, u64),
        bytes: usize,
        access: Access,
        place: &'static Location<'static>,
    ) -> Option<FaultKind> {
        let event = self.event(lane, access, place);
        let clock = &mut self.clocks[lane.linear as usize];
        if space != Space::Global {
            if access.is_atomic() {
                hand_on(&mut self.past.words, start, clock, &event);
            }
            return check(&mut self.past.memory, lane, (&event, clock), space, (start, index), bytes);
        }
        let grid = &mut *self.grid.borrow_mut();
        if access.writes() && !grid.sources.is_empty() {
            // An access does not leave its 16 bytes, and neither does a copy.
            let meets = |source: &&Source| source.start < start + bytes as u64 && start < source.end;
            let sources = grid.sources.get(&(start / 16));
            if let Some(source) = sources.and_then(|sources| sources.iter().find(meets)) {
                return Some(FaultKind::CopySource(pair(
                    &event,
                    (lane.block().shape, &source.event),
                    space,
                    index,
                    start,
                )));
            }
        }
        if access.is_atomic() {
            hand_on(&mut grid.words, start, clock, &event);
        }
        check(&mut grid.memory, lane, (&event, clock), space, (start, index), bytes)
    }

    /// An asynchronous copy of so many bytes from `start` on is under way.
    pub(super) fn copy_starts(
        &mut self,
        lane: &Lane,
        (start, bytes): (u64, usize),
        index: u64,
        place: &'static Location<'static>,
    ) {
        let source =
            Source { event: self.event(lane, Access::Copy, place), index, start, end: start + bytes as u64 };
        self.grid.borrow_mut().sources.entry(start / 16).or_default().push(source);
    }

    /// A copy that this thread started has arrived.
    pub(super) fn copy_ends(&mut self, lane: &Lane, (start, bytes): (u64, usize), index: u64) {
        let mut grid = self.grid.borrow_mut();
        let Some(sources) = grid.sources.get_mut(&(start / 16)) else { return };
        let block = lane.block().number.get();
        let own = |source: &Source| {
            source.event.block == block
                && source.event.linear == lane.linear
                && (source.start, source.end, source.index) == (start, start + bytes as u64, index)
        };
        if let Some(at) = sources.iter().position(own) {
            sources.swap_remove(at);
        }
        if sources.is_empty() {
            grid.sources.remove(&(start / 16));
        }
    }

    /// Who changed a byte last, and where.
    pub(super) fn last_change(
        &mut self,
        shape: LaunchShape,
        space: Space,
        byte: u64,
    ) -> Option<(ThreadId, Place)> {
        let mut grid = self.grid.borrow_mut();
        let memory = if space == Space::Global { &mut grid.memory } else { &mut self.past.memory };
        let event = memory.of_byte(byte).changed()?;
        Some((thread(shape, event), Place::from(event.place)))
    }
}

/// What an atomic leaves on the word at `start`, and what it hears there.
fn hand_on(words: &mut ByAddress<Word>, start: u64, clock: &mut Clock, event: &Event) {
    let word = words.entry(start).or_default();
    if event.access.writes() {
        clock.pass_on(word, event.block);
    }
    if !event.access.is_put() {
        clock.hear(word, event.block);
    }
}

/// Notes an access, if its bytes' past allows it.
fn check(
    memory: &mut Memory,
    lane: &Lane,
    (event, clock): (&Event, &Clock),
    space: Space,
    (start, index): (u64, u64),
    bytes: usize,
) -> Option<FaultKind> {
    let shape = lane.block().shape;
    memory.visit(start, bytes, |byte, history| {
        let fault = |kind: fn(Box<Race>) -> FaultKind, other: &Event| {
            Some(kind(pair(event, (shape, other), space, index, byte)))
        };
        if let Some(other) = against_read_only(history, event.access) {
            return fault(FaultKind::ReadOnlyLoad, other);
        }
        if let Some(other) = race(history, event, clock) {
            return fault(kind_of(other), other);
        }
        if let Some(other) = out_of_scope(history, event, clock) {
            return fault(FaultKind::AtomicScope, other);
        }
        if event.access.is_atomic() && history.rare().word != (start, bytes) {
            if let Some(other) = history.atomics().find(|past| !past.is_behind(event, clock)) {
                return fault(FaultKind::AtomicWidths, other);
            }
            // A look is no atomic that a read could be in a race with: those before it still are.
            if event.access.writes() {
                let rare = history.rare();
                rare.atomics.clear();
                rare.word = (start, bytes);
            }
        }
        note(history, *event);
        None
    })
}

/// What it is that an access meets `other`, which nothing orders before it.
fn kind_of(other: &Event) -> fn(Box<Race>) -> FaultKind {
    if other.agent != 0 && other.access == Access::Copy { FaultKind::CopySource } else { FaultKind::Race }
}

/// Whose access it was.
fn thread(shape: LaunchShape, event: &Event) -> ThreadId {
    ThreadId { block: shape.grid.at(event.block), thread: shape.block.at(event.linear.into()) }
}

fn pair(
    event: &Event,
    (shape, other): (LaunchShape, &Event),
    space: Space,
    index: u64,
    byte: u64,
) -> Box<Race> {
    Box::new(Race {
        space,
        index,
        byte,
        access: event.name(),
        other_access: other.name(),
        other: thread(shape, other),
        other_place: Place::from(other.place),
    })
}

fn against_read_only(history: &History, access: Access) -> Option<&Event> {
    match access {
        Access::ReadOnly => history.written(),
        Access::Write | Access::Atomic(_) | Access::Put(_) => history.read_only(),
        Access::Read | Access::Look(_) | Access::Copy => None,
    }
}

/// An access of the past that nothing orders before `event`.
fn race<'h>(history: &'h History, event: &Event, clock: &Clock) -> Option<&'h Event> {
    let unordered = |past: &&Event| !past.is_behind(event, clock);
    let mut found = history.write.as_ref().filter(unordered);
    if !event.access.is_atomic() {
        found = found.or_else(|| history.atomics().find(unordered));
    }
    if event.access.writes() {
        found = found.or_else(|| history.reads.iter().find(unordered));
        if !event.access.is_atomic() {
            found = found.or_else(|| history.looks().find(unordered));
        }
    }
    found
}

/// An atomic of the past, to which this one is not atomic, and which nothing orders before it. Of a thread's
/// atomics on a word the last one counts.
fn out_of_scope<'h>(history: &'h History, event: &Event, clock: &Clock) -> Option<&'h Event> {
    // Most kernels have none of block scope: then nothing is looked through.
    let narrow = event.access.is_narrow() || history.rare.as_ref().is_some_and(|rare| rare.narrow);
    if !event.access.is_atomic() || !narrow {
        return None;
    }
    let apart = |past: &&Event| !past.is_atomic_to(event) && !past.is_behind(event, clock);
    let mut found = history.atomics().find(apart);
    if event.access.writes() {
        found = found.or_else(|| history.looks().find(apart));
    }
    found
}

fn note(history: &mut History, event: Event) {
    match event.access {
        Access::Read | Access::ReadOnly | Access::Copy => history.reads.put(event),
        Access::Look(_) => history.rare().looks.put(event),
        Access::Write => {
            history.reads.clear();
            if let Some(rare) = &mut history.rare {
                rare.atomics.clear();
                rare.looks.clear();
                (rare.changed, rare.narrow) = (None, false);
            }
            history.write = Some(event);
        }
        // What lies behind this atomic need not lie behind the next one: atomics order nothing.
        Access::Atomic(_) | Access::Put(_) => history.rare().atomics.put(event),
    }
    if event.access.is_narrow() {
        history.rare().narrow = true;
    }
    if event.access == Access::ReadOnly {
        history.rare().read_only.get_or_insert(event);
    }
}
