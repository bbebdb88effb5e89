//! Barriers in shared memory: phases, arrivals, and the bytes of copies.
//!
//! A phase is over when as many threads have arrived as the barrier was made for, and all bytes that they
//! expect have come. Copies bring their bytes as late as they may: when somebody looks at a barrier that
//! lacks nothing else.

use super::bulk::Load;
use super::clock::Known;
use super::fault::{Excess, FaultKind, Place, Space, ThreadId, WaitFor};
use super::history::Access;
use super::lane::{Lane, Look, before_atomic, park_after_look, raise, with_lane};
use super::memory::watch;
use super::mutation::Change;
use super::shared::{check_arrived, locate_shared};
use crate::Shared;
use crate::atomic::AtomicScope;
use crate::mbarrier::Mbarrier as Word;
use core::cell::RefCell;
use core::panic::Location;
use std::collections::BTreeMap;

/// The most arrivals, and the most bytes under way.
pub(super) const MOST: u32 = (1 << 20) - 1;

/// In the place of a thread, agents have numbers from here on.
pub(super) const AGENTS: u32 = 1 << 31;

/// Who makes the accesses of copies, as the race check counts them: a thread knows of those of an agent up to
/// a time once it has waited for that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agent {
    /// Not 0.
    pub(super) id: u16,
    pub(super) time: u32,
}

impl Agent {
    /// What a thread knows it by.
    pub(super) fn key(self, block: u64) -> (u64, u32) {
        (block, AGENTS | u32::from(self.id))
    }
}

pub(super) mod agent {
    use super::Agent;

    const READS: u16 = 1 << 15;
    const WRITES: u16 = 3 << 14;
    const PRODUCTS: u16 = READS | 1 << 13;

    /// Copies to shared memory that the mbarrier at `offset` waits for, in its phase number `phase`.
    pub(in super::super) fn of_barrier(offset: u32, phase: u32) -> Agent {
        // There is room for fewer than 2^15 in a block's shared memory.
        Agent { id: 1 + (offset / 8) as u16, time: phase + 1 }
    }

    /// What a thread's copies to global memory read, in its group number `group`.
    pub(in super::super) fn reads(thread: u32, group: u32) -> Agent {
        Agent { id: READS | thread as u16, time: group + 1 }
    }

    /// What a warp's products read, in its group number `group`; by the warp's first thread.
    pub(in super::super) fn products(thread: u32, group: u32) -> Agent {
        Agent { id: PRODUCTS | thread as u16, time: group + 1 }
    }

    /// Whether an agent's number is that of products.
    pub(in super::super) fn is_of_products(id: u16) -> bool {
        id & (WRITES | PRODUCTS) == PRODUCTS
    }

    /// What a thread's copies to global memory write, in its group number `group`.
    pub(in super::super) fn writes(thread: u32, group: u32) -> Agent {
        Agent { id: WRITES | thread as u16, time: group + 1 }
    }
}

/// One barrier.
struct Mbarrier {
    /// The element that it was made by.
    index: u32,
    place: Place,
    /// How many arrive in a phase, and how many have not.
    count: u32,
    pending: u32,
    /// Bytes that are expected and have not come.
    bytes: i64,
    /// The phase's number, counted from the first barrier that was here, and that of this one's first.
    phase: u32,
    first: u32,
    /// Copies that are under way.
    loads: Vec<Load>,
    /// What those who have arrived in this phase did and knew.
    arrived: Known,
    /// The same of the phases that are over.
    over: Known,
    /// Who arrived last.
    last: Option<(ThreadId, Place)>,
}

/// A block's.
#[derive(Default)]
pub(super) struct Mbarriers {
    live: RefCell<BTreeMap<u32, Mbarrier>>,
    /// The phases of those that are no more.
    phases: RefCell<BTreeMap<u32, u32>>,
}

impl Mbarriers {
    /// A new block.
    pub(super) fn reset(&self) {
        self.live.borrow_mut().clear();
        self.phases.borrow_mut().clear();
    }

    /// A copy that nobody has waited for: the thread that started it, and where.
    pub(super) fn left(&self) -> Option<(u32, &'static Location<'static>)> {
        let live = self.live.borrow();
        let mut loads = live.values().flat_map(|barrier| &barrier.loads);
        loads.next().map(|load| (load.thread, load.place))
    }

    /// What is lacking at the barrier at `offset`, if there is one.
    pub(super) fn lacking(&self, offset: u64) -> Option<WaitFor> {
        let live = self.live.borrow();
        let barrier = live.get(&u32::try_from(offset).ok()?)?;
        Some(WaitFor::Phase {
            index: barrier.index.into(),
            parity: barrier.parity(),
            arrivals: barrier.pending,
            count: barrier.count,
            bytes: barrier.bytes - barrier.under_way(),
            last: barrier.last,
        })
    }
}

impl Mbarrier {
    fn parity(&self) -> u32 {
        (self.phase - self.first) % 2
    }

    fn under_way(&self) -> i64 {
        self.loads.iter().map(|load| i64::from(load.bytes)).sum()
    }

    fn next_phase(&mut self, lane: &Lane, offset: u32) {
        let agent = agent::of_barrier(offset, self.phase);
        self.over.join(&std::mem::take(&mut self.arrived));
        self.over.threads.insert(agent.key(lane.block().number.get()), agent.time);
        (self.pending, self.bytes) = (self.count, 0);
        self.phase += 1;
        lane.block().changed.set(true);
    }

    /// More bytes are on their way than are expected, and nobody is left to expect more.
    fn excess(&self) -> Option<FaultKind> {
        let (expected, copied) = (self.bytes, self.under_way());
        (self.pending == 0 && copied > expected).then(|| {
            let excess = Excess { index: self.index.into(), expected, copied, last: self.last };
            FaultKind::MbarrierExcess(Box::new(excess))
        })
    }
}

/// An element of an array of barriers, as a kernel names it.
#[derive(Clone, Copy)]
pub(crate) struct Named {
    base: u32,
    len: u32,
    index: u32,
}

impl Named {
    pub(crate) fn new(array: Shared<Word>, index: u32) -> Self {
        let (base, len) = array.extent();
        Named { base, len, index }
    }

    fn locate(self, lane: &Lane, place: &'static Location<'static>) -> u32 {
        locate_shared::<u64, u64>(lane, self.base, self.len, self.index, true, place)
    }

    /// Does `f` to the barrier at an offset. Who uses it before it is there, or uses it in a race with
    /// whoever makes it, is at fault.
    fn with<R>(
        self,
        access: Access,
        place: &'static Location<'static>,
        f: impl FnOnce(&Lane, u32, &mut Mbarrier) -> Result<R, FaultKind>,
    ) -> R {
        with_lane(|lane| {
            let offset = self.locate(lane, place);
            if !lane.block().mbarriers.live.borrow().contains_key(&offset) {
                raise(place, FaultKind::NoMbarrier { index: self.index.into() });
            }
            watch(lane, Space::Shared, (offset.into(), self.index.into()), 8, access, place);
            let mut live = lane.block().mbarriers.live.borrow_mut();
            let done = match live.get_mut(&offset) {
                Some(barrier) => f(lane, offset, barrier),
                // Another thread has come in between.
                None => Err(FaultKind::NoMbarrier { index: self.index.into() }),
            };
            drop(live);
            done.unwrap_or_else(|kind| raise(place, kind))
        })
    }

    /// A copy comes to it, whose accesses are those of the agent that `start` gets.
    pub(super) fn load(
        self,
        place: &'static Location<'static>,
        start: impl FnOnce(&Lane, Agent) -> Result<Load, FaultKind>,
    ) {
        self.with(Access::Look(AtomicScope::Device), place, |lane, offset, barrier| {
            if let Some(races) = &lane.block().races {
                let at = (offset.into(), self.index.into());
                if let Some(hidden) = races.borrow_mut().hidden_from_copies(lane, at, place) {
                    return Err(hidden);
                }
            }
            let load = start(lane, agent::of_barrier(offset, barrier.phase))?;
            barrier.loads.extend((load.bytes > 0).then_some(load));
            barrier.excess().map_or(Ok(()), Err)
        });
    }
}

#[track_caller]
pub(crate) fn mbarrier_init(barrier: Named, count: u32) {
    let place = Location::caller();
    with_lane(|lane| {
        let offset = barrier.locate(lane, place);
        let index = barrier.index;
        if count == 0 || count > MOST {
            raise(place, FaultKind::MbarrierCount { count });
        }
        check_arrived(lane, offset, 8, place);
        watch(lane, Space::Shared, (offset.into(), index.into()), 8, Access::Write, place);
        let block = lane.block();
        block.shared.mark_barrier(offset, true);
        let first = block.mbarriers.phases.borrow().get(&offset).copied().unwrap_or(0);
        let made = Mbarrier {
            index,
            place: place.into(),
            count,
            pending: count,
            bytes: 0,
            phase: first,
            first,
            loads: Vec::new(),
            arrived: Known::default(),
            over: Known::default(),
            last: None,
        };
        block.mbarriers.live.borrow_mut().insert(offset, made);
        block.changed.set(true);
    });
}

#[track_caller]
pub(crate) fn mbarrier_invalidate(barrier: Named) {
    let place = Location::caller();
    barrier.with(Access::Write, place, |lane, offset, found| match found.loads.first() {
        Some(load) => Err(FaultKind::CopyUnderWay { offset: load.target, bytes: load.bytes as usize }),
        None => {
            lane.block().mbarriers.phases.borrow_mut().insert(offset, found.phase + 1);
            Ok(())
        }
    });
    with_lane(|lane| {
        let offset = barrier.locate(lane, place);
        lane.block().mbarriers.live.borrow_mut().remove(&offset);
        lane.block().shared.mark_barrier(offset, false);
        lane.block().changed.set(true);
    });
}

/// One thread arrives, and expects so many bytes more.
#[track_caller]
pub(crate) fn mbarrier_arrive(barrier: Named, bytes: u32) {
    let place = Location::caller();
    before_atomic(place);
    barrier.with(Access::Atomic(AtomicScope::Device), place, |lane, offset, found| {
        let more = found.bytes + i64::from(bytes);
        if more > i64::from(MOST) {
            return Err(FaultKind::MbarrierExpected { bytes: more, most: MOST });
        }
        if found.pending == 0 {
            let (index, count) = (found.index.into(), found.count);
            return Err(FaultKind::MbarrierArrivals { index, count, made: found.place });
        }
        found.bytes = more;
        found.pending -= 1;
        let block = lane.block();
        found.last = Some((ThreadId { block: block.index.get(), thread: lane.thread }, place.into()));
        if let Some(races) = &block.races {
            races.borrow_mut().arrive_alone(lane, &mut found.arrived);
        }
        block.changed.set(true);
        if let Some(excess) = found.excess() {
            return Err(excess);
        }
        if found.pending == 0 && found.bytes == 0 && found.loads.is_empty() {
            found.next_phase(lane, offset);
        }
        Ok(())
    });
}

/// Whether the phase of this parity is over; if not, others go first.
#[track_caller]
pub(crate) fn mbarrier_try_wait(barrier: Named, parity: u32) -> bool {
    let place = Location::caller();
    before_atomic(place);
    if with_lane(|lane| lane.block().breaks(Change::NoWait, place)) {
        return true;
    }
    let waits = barrier.with(Access::Look(AtomicScope::Device), place, |lane, offset, found| {
        if found.parity() == parity % 2 && found.pending == 0 && found.bytes == found.under_way() {
            std::mem::take(&mut found.loads).iter().for_each(|load| load.land(lane));
            found.next_phase(lane, offset);
        }
        if found.parity() == parity % 2 {
            return Ok(Some(offset));
        }
        if let Some(races) = &lane.block().races {
            races.borrow_mut().learn(lane, &found.over);
        }
        Ok(None)
    });
    if let Some(offset) = waits {
        let (space, index) = (Space::Shared, barrier.index.into());
        park_after_look(Look { space, byte: offset.into(), index, value: None }, place);
    }
    waits.is_none()
}
