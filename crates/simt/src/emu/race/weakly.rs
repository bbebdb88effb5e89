//! What atomics see and set in weak order.

use super::super::fault::Space;
use super::super::history::Access;
use super::super::lane::Lane;
use super::super::late::{Outcome, Step};
use super::Races;
use core::panic::Location;
use std::sync::PoisonError;

impl Races {
    /// An atomic has brought the value `new` in the place of `old`.
    pub(in super::super) fn changed(
        &mut self,
        lane: &Lane,
        (space, byte): (Space, u64),
        (old, new): (u64, u64),
        access: Access,
        place: &'static Location<'static>,
    ) {
        let event = self.event(lane, access, place);
        let grid = &mut *self.grid.borrow_mut();
        let (memory, versions) = match space {
            Space::Global => (&mut grid.memory, &mut grid.versions),
            Space::Shared | Space::Cluster => (&mut self.past.memory, &mut self.past.versions),
        };
        memory.of_byte(byte).rare().changed = Some(event);
        if self.weak {
            versions.entry(byte).or_default().changed(old, new, event, grid.fences.tick());
        }
    }

    /// What an atomic found that comes in ahead of what others have set, of a word that holds `now`, if it
    /// does: then the word stays as it is.
    pub(in super::super) fn early(
        &mut self,
        lane: &Lane,
        access: Access,
        (space, byte): (Space, u64),
        now: u64,
        update: impl Fn(u64) -> u64,
        place: &'static Location<'static>,
    ) -> Option<u64> {
        if !self.weak || access.is_look() {
            return None;
        }
        let (event, clock) = (self.event(lane, access, place), &self.clocks[lane.linear as usize]);
        let grid = &mut *self.grid.borrow_mut();
        let time = grid.fences.tick();
        let versions = if space == Space::Global { &mut grid.versions } else { &mut self.past.versions };
        let choose = |count| lane.block().choose(count);
        versions.get_mut(&byte)?.early(now, (&event, clock), update, choose, time)
    }

    /// An atomic has found `old`, and has set `new`, if that is anything: what a load has seen instead, if it
    /// is one that takes effect later.
    pub(in super::super) fn late(
        &mut self,
        lane: &Lane,
        access: Access,
        (space, byte): (Space, u64),
        (old, new): (u64, Option<u64>),
        place: &'static Location<'static>,
    ) -> Option<u64> {
        let grid = &mut *self.grid.borrow_mut();
        let late = grid.late.as_ref()?;
        let event = self.event(lane, access, place);
        let block = (space != Space::Global).then_some(self.past.owner);
        let clock = &self.clocks[lane.linear as usize];
        let step = Step { event, clock, time: grid.fences.tick(), word: (block, byte), old, new };
        match late.lock().unwrap_or_else(PoisonError::into_inner).step(&step) {
            Outcome::Nothing => None,
            Outcome::Sees(value) => Some(value),
            Outcome::SeenBy(load) => {
                let versions =
                    if space == Space::Global { &mut grid.versions } else { &mut self.past.versions };
                versions.entry(byte).or_default().seen_late(load, event.thread_key());
                None
            }
        }
    }

    /// An older value of a word that holds `now`, if an atomic that leaves it as it is sees that one.
    pub(in super::super) fn look(
        &mut self,
        lane: &Lane,
        access: Access,
        (space, byte): (Space, u64),
        now: u64,
        is_look: impl Fn(u64) -> bool,
        place: &'static Location<'static>,
    ) -> Option<u64> {
        let clock = &self.clocks[lane.linear as usize];
        // An update that passes something on would have passed it on to those who came behind that value.
        let newest = !access.is_look() && clock.releases();
        if !self.weak {
            return None;
        }
        let event = self.event(lane, access, place);
        let grid = &mut *self.grid.borrow_mut();
        let versions = if space == Space::Global { &mut grid.versions } else { &mut self.past.versions };
        let choose = |count| if newest { count - 1 } else { lane.block().choose(count) };
        versions.get_mut(&byte)?.look(now, (&event, clock), is_look, choose)
    }
}
