//! The last accesses of many threads.

use super::Event;
use std::collections::BTreeMap;

/// The last access of each of many threads.
#[derive(Clone, Default)]
pub(in super::super) struct Crowd {
    events: Vec<Event>,
    /// Whether a later event is of an earlier thread.
    mixed: bool,
    /// Where the event of each thread is; made when they are mixed and too many to look through.
    places: Option<Box<BTreeMap<(u64, u32), usize>>>,
}

/// So many events are looked through.
const FEW: usize = 16;

impl Crowd {
    /// Puts the event where it belongs if that is the end, or the place of the last one, and there is room;
    /// says whether it did.
    #[inline(always)]
    pub(super) fn takes(&mut self, event: &Event) -> bool {
        let has_room = self.events.len() < self.events.capacity();
        if self.mixed || event.agent != 0 {
            return false;
        }
        match self.events.last_mut() {
            None if has_room => self.events.push(*event),
            Some(last) if last.agent != 0 || last.block > event.block => return false,
            Some(last) if last.block < event.block || last.linear < event.linear => {
                if !has_room {
                    return false;
                }
                self.events.push(*event);
            }
            Some(last) if last.linear == event.linear => *last = *event,
            _ => return false,
        }
        true
    }

    /// Whether all are ordered ahead of an access by barriers of its block, as far as that is known at once.
    #[inline(always)]
    pub(super) fn is_before(&self, event: &Event) -> bool {
        match &self.events[..] {
            [] => true,
            [only] => only.is_before(event) || only.is_own(event),
            // In their order, the first and the last of one block, the last a thread: so are all in between. And
            // the last one is the latest.
            [first, .., last] => {
                !self.mixed && last.agent == 0 && first.block == event.block && last.is_before(event)
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The event takes the place of the thread's last one: what is ordered behind it is behind that one too.
    pub(in super::super) fn put(&mut self, event: Event) {
        let key = event.thread_key();
        if !self.mixed {
            match self.events.last_mut() {
                Some(last) if last.thread_key() == key => return *last = event,
                Some(last) if last.thread_key() > key => self.mixed = true,
                _ => return self.events.push(event),
            }
        }
        let known = match &self.places {
            Some(places) => places.get(&key).copied(),
            None => self.events.iter().position(|past| past.thread_key() == key),
        };
        if let Some(known) = known {
            self.events[known] = event;
            return;
        }
        self.events.push(event);
        match &mut self.places {
            Some(places) => {
                places.insert(key, self.events.len() - 1);
            }
            None if self.events.len() > FEW => {
                let all = self.events.iter().enumerate();
                self.places = Some(Box::new(all.map(|(i, event)| (event.thread_key(), i)).collect()));
            }
            None => {}
        }
    }

    /// The same as [`clear`](Self::clear) where they are in their order.
    #[inline(always)]
    pub(super) fn clear_ordered(&mut self) {
        self.events.clear();
    }

    pub(in super::super) fn clear(&mut self) {
        self.events.clear();
        self.mixed = false;
        self.places = None;
    }

    pub(in super::super) fn iter(&self) -> std::slice::Iter<'_, Event> {
        self.events.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Access;
    use super::*;
    use core::panic::Location;

    #[test]
    fn a_crowd_holds_one_event_a_thread() {
        let event = |block, linear, clock| Event {
            block,
            linear,
            agent: 0,
            epoch: 0,
            clock,
            access: Access::Atomic,
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
}
