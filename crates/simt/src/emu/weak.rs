//! What an atomic may see: on a GPU not always the newest value.
//!
//! Atomics are relaxed. One that leaves the word as it is (a look: a sum with 0, a compare-and-swap that
//! fails) may take effect at any point of the word's history that its thread cannot tell from the present:
//! behind every value that the thread has seen or set there, behind every value that a fence or a barrier
//! has brought it, and, if the thread has made a fence of sequential consistency, behind every value that was
//! set before the last such fence of another thread ahead of its own. In orders of a seed, with the race
//! check, the seed decides whether a look sees an older value.

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
}

/// The newest values of one word, the oldest first.
#[derive(Default)]
pub(super) struct Versions {
    values: VecDeque<Version>,
    /// How many values came before those.
    forgotten: u64,
    /// The number of the newest value that each thread has seen.
    seen: BTreeMap<ThreadKey, u64>,
}

impl Versions {
    /// An atomic has found `old` and left `new`.
    pub(super) fn changed(&mut self, old: u64, new: u64, event: Event, time: u64) {
        if self.values.back().is_none_or(|last| last.value != old) {
            // Something else than atomics wrote the word, and barriers or fences ordered it.
            *self = Versions::default();
            self.values.push_back(Version { value: old, event: None });
        }
        self.values.push_back(Version { value: new, event: Some((event, time)) });
        if self.values.len() > REMEMBERED {
            self.values.pop_front();
            self.forgotten += 1;
        }
    }

    /// The values that a look of the thread of `event` may see, the oldest first; the last is the newest.
    /// Nothing if only `now`, what the word holds, can be seen. `fenced` is the time of the last fence of
    /// sequential consistency of another thread that lies behind one of its own.
    fn choices(&self, now: u64, event: &Event, clock: &Clock, fenced: u64) -> &[Version] {
        let (all, []) = self.values.as_slices() else { return &[] };
        if all.last().is_none_or(|last| last.value != now) {
            return &[];
        }
        let known = |version: &Version| match &version.event {
            None => true,
            Some((set, time)) => set.is_behind(event, clock) || *time < fenced,
        };
        let seen = self.seen.get(&event.thread_key()).map_or(0, |seen| seen.saturating_sub(self.forgotten));
        let first = all.iter().rposition(known).unwrap_or(0).max(seen as usize);
        &all[first.min(all.len() - 1)..]
    }

    /// What an atomic of the thread of `event` sees, if that is older than `now`: `choose` takes one of so
    /// many, and `is_look` says whether the atomic leaves a value as it is.
    pub(super) fn look(
        &mut self,
        now: u64,
        (event, clock, fenced): (&Event, &Clock, u64),
        is_look: impl Fn(u64) -> bool,
        choose: impl FnOnce(usize) -> usize,
    ) -> Option<u64> {
        self.values.make_contiguous();
        let choices = self.choices(now, event, clock, fenced);
        if choices.len() < 2 {
            return None;
        }
        let newest = choices.len() - 1;
        let chosen = Some(choose(choices.len())).filter(|chosen| is_look(choices[*chosen].value));
        let chosen = chosen.unwrap_or(newest);
        let value = choices[chosen].value;
        let number = self.forgotten + (self.values.len() - 1 - (newest - chosen)) as u64;
        self.seen.insert(event.thread_key(), number);
        (chosen < newest).then_some(value)
    }
}

/// Who made fences of sequential consistency, and when.
#[derive(Default)]
pub(super) struct FullFences {
    time: u64,
    /// The last one, and the last one of another thread than that.
    last: [Option<(ThreadKey, u64)>; 2],
    /// For each thread that made one: when the last one of another thread was, as of its own.
    behind: BTreeMap<ThreadKey, u64>,
}

impl FullFences {
    /// A time later than all others.
    pub(super) fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    pub(super) fn fence(&mut self, thread: ThreadKey) {
        let time = self.tick();
        let other = self.last.iter().flatten().find(|(by, _)| *by != thread).copied();
        self.behind.insert(thread, other.map_or(0, |(_, time)| time));
        self.last = [Some((thread, time)), other];
    }

    /// The time of the last fence of another thread that lies behind one of `thread`.
    pub(super) fn behind(&self, thread: ThreadKey) -> u64 {
        self.behind.get(&thread).copied().unwrap_or(0)
    }
}
