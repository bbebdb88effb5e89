//! What an atomic may see: on a GPU not always the newest value.
//!
//! Atomics are relaxed. One that leaves the word as it is (a look: a sum with 0, a compare-and-swap that
//! fails) may take effect at any point of the word's history that its thread cannot tell from the present:
//! behind every value that the thread has seen or set there, and behind every value that another thread has
//! seen or set there and that fences or a barrier have told it of. If the thread has made a fence of
//! sequential consistency, or has heard of one, it is behind every value that was set before the last such
//! fence of another thread ahead of that one. In orders of a seed, with the race check, the seed decides
//! whether a look sees an older value.
//!
//! What an atomic sets may likewise come in anywhere in the word's history behind what its thread knows
//! there. Ahead of what others have set, that is as if these had taken effect later: the word keeps its
//! newest value. An update stays right behind what it found, so nothing comes in between.

use super::clock::Clock;
use super::history::Event;
use std::collections::{BTreeMap, VecDeque};

/// So many values of a word are remembered.
const REMEMBERED: usize = 8;

/// The block's number, and the thread's in it.
pub(super) type ThreadKey = (u64, u32);

struct Version {
    value: u64,
    /// Who set it, and at which time; `None` of what was there first.
    event: Option<(Event, u64)>,
    /// Whether it was made of the value before it.
    is_update: bool,
    /// The first looks of threads that have seen it and did not know of it.
    looks: Vec<Event>,
}

impl Version {
    fn new(value: u64, event: Option<(Event, u64)>) -> Self {
        let is_update = event.is_some_and(|(event, _)| !event.access.is_put());
        Version { value, event, is_update, looks: Vec::new() }
    }

    /// Whether the thread of `event` must not see an older one.
    fn is_known(&self, event: &Event, clock: &Clock) -> bool {
        let Some((set, time)) = &self.event else { return true };
        *time < clock.known.fenced
            || set.is_behind(event, clock)
            || self.looks.iter().any(|look| look.is_behind(event, clock))
    }
}

/// The newest values of one word, the oldest first.
#[derive(Default)]
pub(super) struct Versions {
    values: VecDeque<Version>,
    /// How many values came before those.
    forgotten: u64,
    /// The number of the newest value that each thread has seen. Its look is among those of the value, too;
    /// this finds it at once where many threads wait for one word.
    seen: BTreeMap<ThreadKey, u64>,
}

impl Versions {
    /// An atomic has found `old` and left `new`.
    pub(super) fn changed(&mut self, old: u64, new: u64, event: Event, time: u64) {
        if self.values.back().is_none_or(|last| last.value != old) {
            // Something else than atomics wrote the word, and barriers or fences ordered it.
            *self = Versions::default();
            self.values.push_back(Version::new(old, None));
        }
        self.values.push_back(Version::new(new, Some((event, time))));
        self.forget();
    }

    fn forget(&mut self) {
        if self.values.len() > REMEMBERED {
            self.values.pop_front();
            self.forgotten += 1;
        }
    }

    /// An atomic of the thread of `event`, which makes `update` of a value, comes in ahead of what others
    /// have set, if `choose` takes such a place of so many, the last of which is the present: the value that
    /// it found there.
    pub(super) fn early(
        &mut self,
        now: u64,
        (event, clock): (&Event, &Clock),
        update: impl Fn(u64) -> u64,
        choose: impl FnOnce(usize) -> usize,
        time: u64,
    ) -> Option<u64> {
        if self.values.back().is_none_or(|last| last.value != now) {
            return None;
        }
        let known = self.known(event, clock).unwrap_or(0);
        let is_place = |at: &usize| {
            let value = self.values[*at].value;
            !self.values[at + 1].is_update && (event.access.is_put() || update(value) != value)
        };
        let places: Vec<usize> = (known..self.values.len() - 1).filter(is_place).collect();
        if places.is_empty() {
            return None;
        }
        let at = *places.get(choose(places.len() + 1))?;
        let found = self.values[at].value;
        self.values.insert(at + 1, Version::new(update(found), Some((*event, time))));
        let number = self.forgotten + at as u64 + 1;
        self.seen.values_mut().filter(|seen| **seen >= number).for_each(|seen| *seen += 1);
        self.seen.insert(event.thread_key(), number);
        self.forget();
        Some(found)
    }

    /// The thread of `event` has seen the last value that `storer` has set.
    pub(super) fn seen_late(&mut self, event: Event, storer: ThreadKey) {
        let by_storer =
            |version: &Version| version.event.is_some_and(|(event, _)| event.thread_key() == storer);
        if let Some(at) = self.values.iter().rposition(by_storer) {
            self.values[at].looks.push(event);
            let seen = self.seen.entry(event.thread_key()).or_insert(0);
            *seen = (*seen).max(self.forgotten + at as u64);
        }
    }

    /// The newest value that the thread of `event` knows of.
    fn known(&self, event: &Event, clock: &Clock) -> Option<usize> {
        let seen = self.seen.get(&event.thread_key()).and_then(|seen| seen.checked_sub(self.forgotten));
        let seen = seen.map(|seen| seen as usize);
        (0..self.values.len()).rev().find(|at| Some(*at) == seen || self.values[*at].is_known(event, clock))
    }

    /// What an atomic of the thread of `event` sees, if that is older than `now`, what the word holds:
    /// `choose` takes one of so many values, the newest last, and `is_look` says whether the atomic leaves a
    /// value as it is.
    pub(super) fn look(
        &mut self,
        now: u64,
        (event, clock): (&Event, &Clock),
        is_look: impl Fn(u64) -> bool,
        choose: impl FnOnce(usize) -> usize,
    ) -> Option<u64> {
        if self.values.back().is_none_or(|last| last.value != now) {
            return None;
        }
        let known = self.known(event, clock);
        let (oldest, newest) = (known.unwrap_or(0), self.values.len() - 1);
        let mut seen = newest;
        if oldest < newest {
            let chosen = oldest + choose(newest - oldest + 1);
            if is_look(self.values[chosen].value) {
                seen = chosen;
            }
        }
        if known != Some(seen) {
            self.seen.insert(event.thread_key(), self.forgotten + seen as u64);
            self.values[seen].looks.push(*event);
        }
        (seen < newest).then_some(self.values[seen].value)
    }
}

/// Who made fences of sequential consistency, and when.
#[derive(Default)]
pub(super) struct FullFences {
    time: u64,
    /// The last one, and the last one of another thread than that.
    last: [Option<(ThreadKey, u64)>; 2],
}

impl FullFences {
    /// A time later than all others.
    pub(super) fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// A fence of `thread`: when the last one of another thread was.
    pub(super) fn fence(&mut self, thread: ThreadKey) -> u64 {
        let time = self.tick();
        let other = self.last.iter().flatten().find(|(by, _)| *by != thread).copied();
        self.last = [Some((thread, time)), other];
        other.map_or(0, |(_, time)| time)
    }
}
