//! Which accesses nothing orders: vector clocks over the threads of a launch.
//!
//! A thread's accesses carry its own clock, which ticks whenever others may learn of what it did. Thread B
//! has access X of thread A behind it if
//! - both are one thread, or
//! - they share a block and a block barrier came between (the barrier count, `epoch`, is higher), or
//! - they share a warp and B has heard A's clock through a warp synchronisation, or
//! - B has heard of X through an atomic: A made a fence and then an atomic on a word, and B (or one B has
//!   heard from) a later atomic on that word and then a fence or a barrier. The atomics are relaxed, so both
//!   sides need theirs.
//!
//! Anything else on the same byte, one of the two writing, is a race. Two atomics never race.

use super::block::Lane;
use super::collective::FenceScope;
use super::fault::{FaultKind, Place, Race, Space, ThreadId};
use crate::kernel::Dim3;
use core::panic::Location;
use std::collections::{BTreeMap, HashMap};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
    Atomic,
}

impl Access {
    fn name(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::Write => "write",
            Access::Atomic => "atomic",
        }
    }
}

/// One access of the past.
#[derive(Clone, Copy)]
struct Event {
    block: u64,
    block_index: Dim3,
    thread: Dim3,
    linear: u32,
    epoch: u32,
    clock: u32,
    access: Access,
    place: &'static Location<'static>,
}

/// What happened to one byte since the last ordered write.
#[derive(Clone, Default)]
struct History {
    /// The last write and the atomics since.
    writes: Vec<Event>,
    reads: Vec<Event>,
}

/// What a thread has heard through atomics.
#[derive(Clone, Default)]
struct Known {
    /// Block number to epoch: everything the block did in earlier epochs.
    blocks: BTreeMap<u64, u32>,
    /// (Block number, thread) to clock: everything the thread did up to it.
    threads: BTreeMap<(u64, u32), u32>,
}

impl Known {
    fn join(&mut self, other: &Known) {
        for (block, epoch) in &other.blocks {
            let mine = self.blocks.entry(*block).or_insert(0);
            *mine = (*mine).max(*epoch);
        }
        for (thread, clock) in &other.threads {
            let mine = self.threads.entry(*thread).or_insert(0);
            *mine = (*mine).max(*clock);
        }
    }
}

#[derive(Clone)]
struct Clock {
    /// What this thread has heard of each lane of its warp; its own entry is its own clock.
    warp: [u32; 32],
    known: Known,
    /// What atomics have brought since the last fence: known from the next fence or barrier on.
    heard: Known,
    /// What an atomic would pass on: taken at the last fence.
    released_to_device: Option<Known>,
    released_to_block: Option<Known>,
}

impl Clock {
    fn start(lane: usize) -> Self {
        let mut warp = [0; 32];
        warp[lane] = 1;
        Clock {
            warp,
            known: Known::default(),
            heard: Known::default(),
            released_to_device: None,
            released_to_block: None,
        }
    }
}

/// The race check's memory: for the launch (global) and for the block that runs (everything else).
pub(crate) struct Races {
    clocks: Vec<Clock>,
    /// Block barriers passed by the block that runs.
    epoch: u32,
    global: HashMap<u64, History>,
    shared: HashMap<u64, History>,
    global_words: HashMap<u64, Known>,
    shared_words: HashMap<u64, Known>,
}

impl Races {
    pub(super) fn new(threads: u32) -> Self {
        Races {
            clocks: (0..threads as usize).map(|thread| Clock::start(thread % 32)).collect(),
            epoch: 0,
            global: HashMap::new(),
            shared: HashMap::new(),
            global_words: HashMap::new(),
            shared_words: HashMap::new(),
        }
    }

    /// The next block starts: it has heard of no other.
    pub(super) fn enter_block(&mut self) {
        for (thread, clock) in self.clocks.iter_mut().enumerate() {
            *clock = Clock::start(thread % 32);
        }
        self.epoch = 0;
        self.shared.clear();
        self.shared_words.clear();
    }

    /// Every thread of the block has met every other.
    pub(super) fn block_sync(&mut self) {
        self.epoch += 1;
        let mut known = Known::default();
        for clock in &self.clocks {
            known.join(&clock.known);
            known.join(&clock.heard);
        }
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
            known.join(&clock.known);
            known.join(&clock.heard);
        }
        for lane in &lanes {
            let clock = &mut self.clocks[first as usize + lane];
            clock.warp = heard;
            clock.warp[*lane] += 1;
            clock.known = known.clone();
        }
    }

    /// From here on this thread knows what its atomics have heard, and its next atomics pass on what it has
    /// done and knows.
    pub(super) fn fence(&mut self, lane: &Lane, scope: FenceScope) {
        let (block, first) = (lane.block().number.get(), lane.linear - lane.lane());
        let epoch = self.epoch;
        let clock = &mut self.clocks[lane.linear as usize];
        clock.known.join(&std::mem::take(&mut clock.heard));
        let mut known = clock.known.clone();
        let mut own = Known::default();
        own.blocks.insert(block, epoch);
        for (other, heard) in clock.warp.iter().enumerate().filter(|(_, heard)| **heard > 0) {
            own.threads.insert((block, first + other as u32), *heard);
        }
        known.join(&own);
        clock.warp[lane.lane() as usize] += 1;
        clock.released_to_block = Some(known.clone());
        if scope == FenceScope::Device {
            clock.released_to_device = Some(known);
        }
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
        if access == Access::Atomic {
            self.pass_on(lane, space, start);
        }
        let clock = &self.clocks[lane.linear as usize];
        let event = Event {
            block: lane.block().number.get(),
            block_index: lane.block().index.get(),
            thread: lane.thread,
            linear: lane.linear,
            epoch: self.epoch,
            clock: clock.warp[lane.lane() as usize],
            access,
            place,
        };
        let memory = match space {
            Space::Global => &mut self.global,
            Space::Shared => &mut self.shared,
        };
        for byte in start..start + bytes as u64 {
            let history = memory.entry(byte).or_default();
            let unordered = |past: &&Event| {
                let both_atomic = access == Access::Atomic && past.access == Access::Atomic;
                !both_atomic && !is_behind(past, &event, clock)
            };
            let mut conflict = history.writes.iter().find(unordered);
            if access != Access::Read {
                conflict = conflict.or_else(|| history.reads.iter().find(unordered));
            }
            if let Some(other) = conflict {
                return Some(FaultKind::Race(Box::new(Race {
                    space,
                    index,
                    byte,
                    access: access.name(),
                    other_access: other.access.name(),
                    other: ThreadId { block: other.block_index, thread: other.thread },
                    other_place: Place::from(other.place),
                })));
            }
            let same_thread = |past: &Event| past.block == event.block && past.linear == event.linear;
            match access {
                Access::Read => {
                    history.reads.retain(|past| !same_thread(past));
                    history.reads.push(event);
                }
                Access::Write => {
                    history.reads.clear();
                    history.writes.clear();
                    history.writes.push(event);
                }
                Access::Atomic => {
                    // What lies behind this atomic need not lie behind the next one: atomics order nothing.
                    history.writes.retain(|past| past.access != Access::Atomic || !same_thread(past));
                    history.writes.push(event);
                }
            }
        }
        None
    }

    /// An atomic: leaves on the word what the thread released, and hears what others left there.
    fn pass_on(&mut self, lane: &Lane, space: Space, word: u64) {
        let clock = &mut self.clocks[lane.linear as usize];
        let (word, released) = match space {
            Space::Global => (self.global_words.entry(word).or_default(), &clock.released_to_device),
            Space::Shared => (self.shared_words.entry(word).or_default(), &clock.released_to_block),
        };
        if let Some(released) = released {
            word.join(released);
        }
        clock.heard.join(word);
    }
}

/// Whether `past` is ordered before the access `now` of the thread that has `clock`.
fn is_behind(past: &Event, now: &Event, clock: &Clock) -> bool {
    if past.block == now.block {
        if past.linear == now.linear || past.epoch < now.epoch {
            return true;
        }
        if past.linear / 32 == now.linear / 32 && clock.warp[(past.linear % 32) as usize] >= past.clock {
            return true;
        }
    }
    clock.known.blocks.get(&past.block).is_some_and(|epoch| past.epoch < *epoch)
        || clock.known.threads.get(&(past.block, past.linear)).is_some_and(|heard| past.clock <= *heard)
}
