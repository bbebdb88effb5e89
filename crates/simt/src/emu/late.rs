//! Loads that take effect late: behind a store of another thread, which takes effect behind what the loading
//! thread has set since.
//!
//! An emulator that runs a thread step by step cannot see what comes later. So in an order of a seed, with
//! the race check, a launch notes a load after which its thread has set another word, which somebody has read
//! and then, or somebody behind that, has set the word that was loaded. It is then run once more in the same
//! order, and the load gives that later value. What comes of this counts only if all others do up to the
//! store what they did: the value comes out of nothing that depends on it.

use super::clock::Clock;
use super::history::Event;
use super::weak::ThreadKey;

/// A word: its block, if it lies in shared memory, and its address.
pub(super) type WordKey = (Option<u64>, u64);

/// So many loads are looked at, and so many words that their threads set since.
const LOADS: usize = 16;
const WORDS: usize = 4;

/// A load that has not taken effect for certain.
#[derive(Clone)]
struct Pending {
    /// The number of the load among the launch's atomics.
    step: u64,
    event: Event,
    time: u64,
    word: WordKey,
    /// Words that its thread has set since.
    set: Vec<WordKey>,
    /// Whether another thread has read one of them.
    read: bool,
    /// What other threads did since.
    trace: u64,
}

/// A load and the store that it sees.
#[derive(Clone)]
pub(super) struct Promise {
    load: Pending,
    /// The store's number, its thread, and its value.
    step: u64,
    storer: ThreadKey,
    value: u64,
}

/// An atomic that a thread has made.
pub(super) struct Step<'a> {
    pub(super) event: Event,
    pub(super) clock: &'a Clock,
    /// A time of [`FullFences`](super::weak::FullFences).
    pub(super) time: u64,
    pub(super) word: WordKey,
    pub(super) old: u64,
    /// What it has set, if that is anything.
    pub(super) new: Option<u64>,
}

/// What comes of a step.
pub(super) enum Outcome {
    Nothing,
    /// It is the late load, and sees this.
    Sees(u64),
    /// It is the store that the late load has seen: its value is known to the thread of this event.
    SeenBy(Event),
}

/// What is known of the late loads of one run.
#[derive(Default)]
pub(super) struct Late {
    steps: u64,
    /// Of a run that notes loads.
    pending: Vec<Pending>,
    found: Option<Promise>,
    /// Of a run that has a late load.
    promise: Option<Promise>,
    /// That load, from when it was made until the store comes.
    made: Option<Pending>,
    is_kept: bool,
}

impl Late {
    /// A run with a late load.
    pub(super) fn with(promise: Promise) -> Self {
        Late { promise: Some(promise), ..Late::default() }
    }

    /// A load that may be late.
    pub(super) fn found(&mut self) -> Option<Promise> {
        self.found.take()
    }

    /// Whether the store came that the late load has seen.
    pub(super) fn is_kept(&self) -> bool {
        self.is_kept
    }

    pub(super) fn step(&mut self, step: &Step<'_>) -> Outcome {
        self.steps += 1;
        if self.promise.is_some() { self.keep(step) } else { self.note(step) }
    }

    fn note(&mut self, step: &Step<'_>) -> Outcome {
        let number = self.steps;
        self.pending.retain_mut(|load| load.goes_on(step, number));
        if self.found.is_none() {
            let late = self.pending.iter().find(|load| load.may_see(step));
            self.found = late.zip(step.new).map(|(load, value)| Promise {
                load: load.clone(),
                step: number,
                storer: step.event.thread_key(),
                value,
            });
        }
        if step.event.access.is_look() {
            if self.pending.len() == LOADS {
                self.pending.remove(0);
            }
            self.pending.push(Pending::new(step, number));
        }
        Outcome::Nothing
    }

    fn keep(&mut self, step: &Step<'_>) -> Outcome {
        let (number, Some(promise)) = (self.steps, &self.promise) else { return Outcome::Nothing };
        if number == promise.load.step {
            let same = step.event.thread_key() == promise.load.event.thread_key()
                && step.word == promise.load.word
                && step.event.access.is_look();
            if same {
                self.made = Some(Pending::new(step, number));
                return Outcome::Sees(promise.value);
            }
        }
        let Some(mut load) = self.made.take() else { return Outcome::Nothing };
        if !load.goes_on(step, number) {
            return Outcome::Nothing;
        }
        if number < promise.step {
            self.made = Some(load);
            return Outcome::Nothing;
        }
        self.is_kept = step.event.thread_key() == promise.storer
            && step.new == Some(promise.value)
            && load.trace == promise.load.trace
            && load.may_see(step);
        if self.is_kept { Outcome::SeenBy(load.event) } else { Outcome::Nothing }
    }
}

impl Pending {
    fn new(step: &Step<'_>, number: u64) -> Self {
        Pending {
            step: number,
            event: step.event,
            time: step.time,
            word: step.word,
            set: Vec::new(),
            read: false,
            trace: 0,
        }
    }

    /// Another atomic comes behind it; says whether it may still be late.
    fn goes_on(&mut self, step: &Step<'_>, number: u64) -> bool {
        if step.event.thread_key() == self.event.thread_key() {
            // Behind a fence or a barrier of its thread, and behind an access to its word, it has been.
            let same = (step.event.epoch, step.event.clock) == (self.event.epoch, self.event.clock);
            if step.new.is_some() && self.set.len() < WORDS {
                self.set.push(step.word);
            }
            return same && step.word != self.word;
        }
        let (block, thread) = step.event.thread_key();
        let shared = step.word.0.map_or(0, |block| block + 1);
        let what = [number - self.step, block, thread.into(), shared, step.word.1, step.old];
        for value in what.into_iter().chain([step.new.map_or(0, |_| 1), step.new.unwrap_or(0)]) {
            self.trace = (self.trace ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
        self.read |= !step.event.access.is_put() && self.set.contains(&step.word);
        true
    }

    /// Whether it may see what this step has set.
    fn may_see(&self, step: &Step<'_>) -> bool {
        self.read
            && step.word == self.word
            && step.event.thread_key() != self.event.thread_key()
            && step.new.is_some()
            && !self.event.is_behind(&step.event, step.clock)
            && self.time >= step.clock.known.fenced
    }
}
