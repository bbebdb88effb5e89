//! Bulk copies, which access memory for a thread at times that only a wait ends, and by a proxy of their own;
//! and the mbarriers that end such a time.

use super::super::clock::{Clock, Known};
use super::super::fault::{FaultKind, Space};
use super::super::history::{Access, Event};
use super::super::lane::Lane;
use super::super::mbarrier::Agent;
use super::{Races, against_read_only, kind_of, note, pair, race};
use core::panic::Location;
use std::rc::Rc;

impl Races {
    /// A copy that this thread starts reads or writes so many bytes from `start` on, whose first element is
    /// `index`, until somebody waits for `agent`.
    pub(in super::super) fn copy(
        &mut self,
        lane: &Lane,
        agent: Agent,
        space: Space,
        (start, index, bytes): (u64, u64, usize),
        access: Access,
        place: &'static Location<'static>,
    ) -> Option<FaultKind> {
        let event = Event { agent: agent.id, clock: agent.time, ..self.event(lane, access, place) };
        let shape = lane.block().shape;
        let clock = &self.clocks[lane.linear as usize];
        let grid = &mut *self.grid.borrow_mut();
        if access.writes() && space == Space::Global && !grid.sources.is_empty() {
            let mut units =
                (start / 16..(start + bytes as u64).div_ceil(16)).filter_map(|at| grid.sources.get(&at));
            let end = start + bytes as u64;
            let meets = |source: &&super::Source| source.start < end && start < source.end;
            if let Some(source) = units.find_map(|sources| sources.iter().find(meets)) {
                return Some(FaultKind::CopySource(pair(
                    &event,
                    (shape, &source.event),
                    space,
                    index,
                    start,
                )));
            }
        }
        let owner = self.past.owner;
        let memory = if space == Space::Global { &mut grid.memory } else { &mut self.past.memory };
        memory.visit(start, bytes, |byte, history| {
            let fault = |kind: fn(Box<super::Race>) -> FaultKind, other: &Event| {
                Some(kind(pair(&event, (shape, other), space, index, byte)))
            };
            if let Some(other) = against_read_only(history, access) {
                return fault(FaultKind::ReadOnlyLoad, other);
            }
            if let Some(other) = race(history, &event, clock) {
                return fault(kind_of(other), other);
            }
            let mut writes = history.write.iter().chain(history.atomics());
            if let Some(other) =
                writes.find(|past| !past.is_shown_to_copies(written(past, space, owner), clock))
            {
                return fault(FaultKind::NoProxyFence, other);
            }
            note(history, event);
            None
        })
    }

    /// What this thread has done in memory of these kinds is shown to copies behind this.
    pub(in super::super) fn show_to_copies(&mut self, lane: &Lane, spaces: &[Space]) {
        let (block, first) = (lane.block().number.get(), lane.linear - lane.lane());
        let clock = &mut self.clocks[lane.linear as usize];
        clock.show_to_copies(spaces, (block, self.epoch), (first, lane.lane() as usize));
    }

    /// What was written last at `byte` of shared memory, if copies of this thread do not see it.
    pub(in super::super) fn hidden_from_copies(
        &mut self,
        lane: &Lane,
        (byte, index): (u64, u64),
        place: &'static Location<'static>,
    ) -> Option<FaultKind> {
        let event = self.event(lane, Access::Copy, place);
        let clock = &self.clocks[lane.linear as usize];
        let write = self.past.memory.of_byte(byte).write.filter(|write| {
            !write.is_shown_to_copies(written(write, Space::Shared, self.past.owner), clock)
        })?;
        Some(FaultKind::NoProxyFence(pair(&event, (lane.block().shape, &write), Space::Shared, index, byte)))
    }

    /// This thread arrives at an mbarrier and leaves there what it did and knows.
    pub(in super::super) fn arrive_alone(&mut self, lane: &Lane, known: &mut Known) {
        let (block, first) = (lane.block().number.get(), lane.linear - lane.lane());
        let clock = &mut self.clocks[lane.linear as usize];
        clock.release(known, block, self.epoch, first, lane.lane() as usize);
    }

    /// This thread has waited, and knows what is known there.
    pub(in super::super) fn learn(&mut self, lane: &Lane, known: &Known) {
        Clock::learn(self.clocks.iter_mut().skip(lane.linear as usize).take(1), known);
    }

    /// This thread has waited for its own copies.
    pub(in super::super) fn copies_are_over(&mut self, lane: &Lane, agent: Agent) {
        let clock = &mut self.clocks[lane.linear as usize];
        let known = Rc::make_mut(&mut clock.known);
        let time = known.threads.entry(agent.key(lane.block().number.get())).or_insert(0);
        *time = (*time).max(agent.time);
    }
}

/// What kind of memory a write in one of `owner`'s was to, for the thread that wrote.
fn written(write: &Event, space: Space, owner: u64) -> Space {
    if space == Space::Shared && write.block != owner { Space::Cluster } else { space }
}
