//! What happened to one byte.

use super::clock::Clock;
use crate::kernel::Dim3;
use core::panic::Location;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    /// A load of what the launch must not write.
    ReadOnly,
    Write,
    Atomic,
    /// An atomic load.
    Look,
    /// An atomic store.
    Put,
    /// The read of an asynchronous copy, at any moment until its wait.
    Copy,
}

impl Access {
    pub(super) fn name(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::ReadOnly => "read-only load",
            Access::Write => "write",
            Access::Atomic => "atomic",
            Access::Look => "atomic load",
            Access::Put => "atomic store",
            Access::Copy => "asynchronous copy",
        }
    }

    pub(super) fn is_atomic(self) -> bool {
        matches!(self, Access::Atomic | Access::Look | Access::Put)
    }

    pub(super) fn writes(self) -> bool {
        matches!(self, Access::Write | Access::Atomic | Access::Put)
    }
}

/// One access of the past.
#[derive(Clone, Copy)]
pub(super) struct Event {
    pub(super) block: u64,
    pub(super) block_index: Dim3,
    pub(super) thread: Dim3,
    pub(super) linear: u32,
    pub(super) epoch: u32,
    pub(super) clock: u32,
    pub(super) access: Access,
    pub(super) place: &'static Location<'static>,
}

impl Event {
    pub(super) fn thread_key(&self) -> (u64, u32) {
        (self.block, self.linear)
    }

    /// Whether it is ordered before the access `now` of the thread that has `clock`.
    pub(super) fn is_behind(&self, now: &Event, clock: &Clock) -> bool {
        if self.block == now.block {
            if self.linear == now.linear || self.epoch < now.epoch {
                return true;
            }
            if self.linear / 32 == now.linear / 32 && clock.warp[(self.linear % 32) as usize] >= self.clock {
                return true;
            }
        }
        clock.known.blocks.get(&self.block).is_some_and(|epoch| self.epoch < *epoch)
            || clock.known.threads.get(&self.thread_key()).is_some_and(|heard| self.clock <= *heard)
    }
}

/// The last access of each of many threads.
#[derive(Default)]
pub(super) struct Crowd {
    events: Vec<Event>,
    /// Where the event of each thread is; made when there are too many to look through.
    places: Option<BTreeMap<(u64, u32), usize>>,
}

/// So many events are looked through.
const FEW: usize = 16;

impl Crowd {
    /// The event takes the place of the thread's last one: what is ordered behind it is behind that one too.
    pub(super) fn put(&mut self, event: Event) {
        let key = event.thread_key();
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
                self.places = Some(all.map(|(i, event)| (event.thread_key(), i)).collect());
            }
            None => {}
        }
    }

    pub(super) fn clear(&mut self) {
        self.events.clear();
        self.places = None;
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Event> {
        self.events.iter()
    }
}

/// What happened to one byte since the last ordered write.
#[derive(Default)]
pub(super) struct History {
    pub(super) write: Option<Event>,
    pub(super) reads: Crowd,
    /// What happens to few bytes.
    pub(super) rare: Option<Box<Rare>>,
}

#[derive(Default)]
pub(super) struct Rare {
    /// The atomics since the write, and the start and the bytes of what they change.
    pub(super) atomics: Crowd,
    pub(super) word: (u64, usize),
    /// The atomic loads since the write.
    pub(super) looks: Crowd,
    /// The last atomic that brought another value, if no write came behind it.
    pub(super) changed: Option<Event>,
    /// The launch's first read-only load.
    pub(super) read_only: Option<Event>,
}

impl History {
    pub(super) fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    pub(super) fn looks(&self) -> std::slice::Iter<'_, Event> {
        self.rare.as_ref().map_or_else(Default::default, |rare| rare.looks.iter())
    }

    pub(super) fn atomics(&self) -> std::slice::Iter<'_, Event> {
        self.rare.as_ref().map_or_else(Default::default, |rare| rare.atomics.iter())
    }

    /// A write or an atomic of the launch, if there is one.
    pub(super) fn written(&self) -> Option<&Event> {
        self.write.as_ref().or_else(|| self.atomics().next())
    }

    pub(super) fn read_only(&self) -> Option<&Event> {
        self.rare.as_ref()?.read_only.as_ref()
    }

    /// The last write, or the last atomic that brought another value.
    pub(super) fn changed(&self) -> Option<&Event> {
        self.rare.as_ref().and_then(|rare| rare.changed.as_ref()).or(self.write.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_holds_one_event_a_thread() {
        let at = Dim3 { x: 0, y: 0, z: 0 };
        let event = |block, linear, clock| Event {
            block,
            block_index: at,
            thread: at,
            linear,
            epoch: 0,
            clock,
            access: Access::Atomic,
            place: Location::caller(),
        };
        for threads in [FEW as u32 - 1, FEW as u32 + 2, 1000] {
            let mut crowd = Crowd::default();
            for clock in 0..3 {
                (0..threads).for_each(|linear| crowd.put(event(1, linear, clock)));
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
