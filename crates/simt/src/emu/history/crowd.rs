//! The last accesses of many threads.

use super::Event;
use std::collections::BTreeMap;

/// The last access of each of many threads.
#[derive(Clone, Default)]
pub(in super::super) struct Crowd {
    events: Vec<Event>,
    /// Whether a later event is of an earlier thread.
    mixed: bool,
    /// Whether they are of several blocks, or some of no thread.
    is_of_many: bool,
    /// That of the latest event, if they are of one block.
    epoch: u32,
    /// Where the event of each thread is, once they are mixed and too many to look through.
    places: BTreeMap<(u64, u32), usize>,
}

/// So many events are looked through.
const FEW: usize = 16;

impl Crowd {
    /// Puts the event where it belongs, if nothing has to be made or looked up for that; says whether it did.
    #[inline(always)]
    pub(super) fn takes(&mut self, event: &Event) -> bool {
        let (count, has_room) = (self.events.len(), self.events.len() < self.events.capacity());
        if event.agent != 0 {
            return false;
        }
        match self.events.last_mut() {
            None if !has_room => return false,
            None => self.events.push(*event),
            Some(last) if last.is_own(event) => *last = *event,
            Some(last) if !self.mixed && last.agent == 0 && last.is_of_earlier(event) => {
                if !has_room {
                    return false;
                }
                self.is_of_many |= last.block != event.block;
                self.events.push(*event);
            }
            Some(_) if count > FEW => return false,
            Some(last) => {
                let is_of_another_block = last.block != event.block;
                match self.events.iter_mut().find(|past| past.is_own(event)) {
                    Some(past) => *past = *event,
                    None if !has_room || count == FEW => return false,
                    None => {
                        self.is_of_many |= is_of_another_block;
                        self.events.push(*event);
                    }
                }
                self.mixed = true;
            }
        }
        self.epoch = event.epoch;
        true
    }

    /// Whether all are ordered ahead of an access by barriers of its block, as far as that is known at once.
    #[inline(always)]
    pub(super) fn is_before(&self, event: &Event) -> bool {
        match &self.events[..] {
            [] => true,
            [only] => only.is_before(event) || only.is_own(event),
            // Of the events of one block the latest is of the last epoch.
            [first, ..] => !self.is_of_many && first.block == event.block && self.epoch < event.epoch,
        }
    }

    /// The same as [`clear`](Self::clear), if nothing has to be given back for that; says whether it did.
    #[inline(always)]
    pub(super) fn forgets(&mut self) -> bool {
        let forgets = self.places.is_empty();
        if forgets {
            self.events.clear();
            (self.mixed, self.is_of_many) = (false, false);
        }
        forgets
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The event takes the place of the thread's last one: what is ordered behind it is behind that one too.
    pub(in super::super) fn put(&mut self, event: Event) {
        let key = event.thread_key();
        self.is_of_many |=
            event.agent != 0 || self.events.first().is_some_and(|first| first.block != event.block);
        self.epoch = event.epoch;
        if !self.mixed {
            match self.events.last_mut() {
                Some(last) if last.thread_key() == key => return *last = event,
                Some(last) if last.thread_key() > key => self.mixed = true,
                _ => return self.events.push(event),
            }
        }
        let known = if self.places.is_empty() {
            self.events.iter().position(|past| past.thread_key() == key)
        } else {
            self.places.get(&key).copied()
        };
        if let Some(known) = known {
            self.events[known] = event;
            return;
        }
        self.events.push(event);
        if !self.places.is_empty() {
            self.places.insert(key, self.events.len() - 1);
        } else if self.events.len() > FEW {
            let all = self.events.iter().enumerate();
            self.places = all.map(|(i, event)| (event.thread_key(), i)).collect();
        }
    }

    pub(in super::super) fn clear(&mut self) {
        self.events.clear();
        (self.mixed, self.is_of_many) = (false, false);
        if !self.places.is_empty() {
            self.places.clear();
        }
    }

    pub(in super::super) fn iter(&self) -> std::slice::Iter<'_, Event> {
        self.events.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Access;
    use super::*;
    use crate::atomic::AtomicScope;
    use core::panic::Location;

    #[test]
    fn a_crowd_holds_one_event_a_thread() {
        let event = |block, linear, clock| Event {
            block,
            linear,
            agent: 0,
            epoch: 0,
            clock,
            access: Access::Atomic(AtomicScope::Device),
            place: Location::caller(),
        };
        for threads in [FEW as u32 - 1, FEW as u32 + 2, 1000] {
            let mut crowd = Crowd::default();
            for clock in 0..3 {
                (0..threads).for_each(|linear| crowd.put(event(1, linear, clock)));
                (0..threads).rev().for_each(|linear| crowd.put(event(1, linear, clock)));
                crowd.put(event(2, 0, clock));
                assert_eq!(crowd.iter().len(), threads as usize + 1);
                assert!(crowd.iter().all(|event| event.clock == clock));
            }
            crowd.clear();
            crowd.put(event(1, 0, 0));
            assert_eq!(crowd.iter().len(), 1);
        }
    }

    /// What is put in at once is what is put in else, and no access that is ahead is taken for one behind.
    #[test]
    fn what_is_known_at_once_is_true() {
        let mut seed = 1u32;
        let mut below = |count: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 16) % count
        };
        let (mut at_once, mut before) = (0, 0);
        for round in 0..2000 {
            let (threads, blocks, agents) = (1 + below(24), 1 + below(2), below(8) == 0);
            let (mut quick, mut slow) = (Crowd::default(), Crowd::default());
            let mut epochs = [0, 0];
            for step in 0..below(60) {
                let block = below(blocks);
                epochs[block as usize] += u32::from(below(8) == 0);
                let linear = if round % 3 == 0 { step * threads / 60 } else { below(threads) };
                let event = Event {
                    block: u64::from(block),
                    linear,
                    agent: u16::from(agents && below(4) == 0),
                    epoch: epochs[block as usize],
                    clock: step,
                    access: Access::Read,
                    place: Location::caller(),
                };
                if quick.is_before(&event) {
                    before += 1;
                    assert!(slow.iter().all(|past| past.is_before(&event) || past.is_own(&event)));
                    if below(2) == 0 {
                        slow.clear();
                        if !quick.forgets() {
                            quick.clear();
                        }
                    }
                }
                slow.put(event);
                if quick.takes(&event) {
                    at_once += 1;
                } else {
                    quick.put(event);
                }
                let sorted = |crowd: &Crowd| {
                    let mut events: Vec<_> =
                        crowd.iter().map(|event| (event.thread_key(), event.clock)).collect();
                    events.sort_unstable();
                    events
                };
                assert_eq!(sorted(&quick), sorted(&slow));
            }
        }
        assert!(at_once > 10_000 && before > 5_000, "{at_once} and {before}");
    }
}
