//! What happened to each word of memory, and to its bytes where they were used apart.

use super::clock::Clock;
use super::fault::Space;
use super::mbarrier::{AGENTS, agent};
use crate::atomic::AtomicScope;
use core::panic::Location;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

mod crowd;

use crowd::Crowd;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    /// A load of what the launch must not write.
    ReadOnly,
    Write,
    Atomic(AtomicScope),
    /// An atomic load.
    Look(AtomicScope),
    /// An atomic store.
    Put(AtomicScope),
    /// The read of an asynchronous copy, at any moment until its wait.
    Copy,
}

impl Access {
    fn name(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::ReadOnly => "read-only load",
            Access::Write => "write",
            Access::Atomic(AtomicScope::Block) => "atomic of block scope",
            Access::Look(AtomicScope::Block) => "atomic load of block scope",
            Access::Put(AtomicScope::Block) => "atomic store of block scope",
            Access::Atomic(_) => "atomic",
            Access::Look(_) => "atomic load",
            Access::Put(_) => "atomic store",
            Access::Copy => "asynchronous copy",
        }
    }

    pub(super) fn is_atomic(self) -> bool {
        matches!(self, Access::Atomic(_) | Access::Look(_) | Access::Put(_))
    }

    pub(super) fn is_look(self) -> bool {
        matches!(self, Access::Look(_))
    }

    pub(super) fn is_put(self) -> bool {
        matches!(self, Access::Put(_))
    }

    /// Whether it is atomic to threads of its block alone.
    pub(super) fn is_narrow(self) -> bool {
        use AtomicScope::Block;
        matches!(self, Access::Atomic(Block) | Access::Look(Block) | Access::Put(Block))
    }

    pub(super) fn writes(self) -> bool {
        matches!(self, Access::Write | Access::Atomic(_) | Access::Put(_))
    }
}

/// One access of the past.
#[derive(Clone, Copy)]
pub(super) struct Event {
    /// The block's number, and the thread's in it.
    pub(super) block: u64,
    pub(super) linear: u32,
    /// Who makes the access for the thread, at a time that only a wait ends: see
    /// [`agent`](super::mbarrier::agent). 0 for the thread itself.
    pub(super) agent: u16,
    pub(super) epoch: u32,
    pub(super) clock: u32,
    pub(super) access: Access,
    pub(super) place: &'static Location<'static>,
}

impl Event {
    pub(super) fn thread_key(&self) -> (u64, u32) {
        (self.block, if self.agent == 0 { self.linear } else { AGENTS | u32::from(self.agent) })
    }

    /// What it is called in a report.
    pub(super) fn name(&self) -> &'static str {
        match self.access {
            Access::Write if self.agent != 0 => "bulk copy's write",
            Access::Copy if agent::is_of_products(self.agent) => "product's read",
            Access::Copy if self.agent != 0 => "bulk copy's read",
            access => access.name(),
        }
    }

    /// Whether it is of the thread of `now`.
    #[inline(always)]
    fn is_own(&self, now: &Event) -> bool {
        self.agent == 0 && self.block == now.block && self.linear == now.linear
    }

    /// Whether each of these two atomics is of a scope that takes in the other's thread.
    pub(super) fn is_atomic_to(&self, other: &Event) -> bool {
        self.block == other.block || !self.access.is_narrow() && !other.access.is_narrow()
    }

    /// Whether it is of an earlier thread than that of `other`.
    #[inline(always)]
    fn is_of_earlier(&self, other: &Event) -> bool {
        self.block < other.block || self.block == other.block && self.linear < other.linear
    }

    /// Whether a barrier of its block orders it before the access `now`.
    #[inline(always)]
    fn is_before(&self, now: &Event) -> bool {
        self.agent == 0 && self.block == now.block && self.epoch < now.epoch
    }

    /// Whether it is ordered before the access `now` of the thread that has `clock`.
    #[inline]
    pub(super) fn is_behind(&self, now: &Event, clock: &Clock) -> bool {
        self.is_own(now) || self.is_before(now) || self.is_known(now, clock)
    }

    /// The same of one that neither the block's barriers nor the thread itself put there.
    #[inline(never)]
    fn is_known(&self, now: &Event, clock: &Clock) -> bool {
        let is_of_warp = self.agent == 0 && self.block == now.block && self.linear / 32 == now.linear / 32;
        if is_of_warp && clock.warp[(self.linear % 32) as usize] >= self.clock {
            return true;
        }
        self.is_heard_by(clock)
    }

    /// Whether the thread that has `clock` has heard of it, by other means than meeting its warp or block.
    pub(super) fn is_heard_by(&self, clock: &Clock) -> bool {
        let by_epoch = |epoch: &u32| self.agent == 0 && self.epoch < *epoch;
        clock.known.blocks.get(&self.block).is_some_and(by_epoch)
            || clock.known.threads.get(&self.thread_key()).is_some_and(|heard| self.clock <= *heard)
    }
}

impl Event {
    /// Whether copies of the thread that has `clock` see what this access wrote: a fence between the two
    /// kinds of access lies in between. Those of copies themselves they see.
    pub(super) fn is_shown_to_copies(&self, space: Space, clock: &Clock) -> bool {
        let shown = &clock.known.shown[space as usize];
        self.agent != 0
            || shown.blocks.get(&self.block).is_some_and(|epoch| self.epoch < *epoch)
            || shown.threads.get(&self.thread_key()).is_some_and(|known| self.clock <= *known)
    }
}

/// What happened to some bytes since the last ordered write.
#[derive(Clone, Default)]
pub(super) struct History {
    pub(super) write: Option<Event>,
    pub(super) reads: Crowd,
    /// What happens to few bytes.
    pub(super) rare: Option<Box<Rare>>,
}

#[derive(Clone, Default)]
pub(super) struct Rare {
    /// The atomics since the write, and the start and the bytes of what they change.
    pub(super) atomics: Crowd,
    pub(super) word: (u64, usize),
    /// The atomic loads since the write.
    pub(super) looks: Crowd,
    /// Whether one of either was of block scope.
    pub(super) narrow: bool,
    /// The last atomic that brought another value, if no write came behind it.
    pub(super) changed: Option<Event>,
    /// The launch's first read-only load.
    pub(super) read_only: Option<Event>,
}

impl History {
    /// Notes a plain access of a thread, if that is known at once to be ordered behind those before it, and
    /// nothing has to be made or searched for it; says whether it did.
    #[inline(always)]
    fn takes(&mut self, event: &Event) -> bool {
        if !self.write.as_ref().is_none_or(|write| write.is_before(event) || write.is_own(event)) {
            return false;
        }
        match (event.access, &self.rare) {
            (Access::Read | Access::Copy, None) => self.reads.takes(event),
            (Access::Read | Access::Copy, Some(rare)) => rare.atomics.is_empty() && self.reads.takes(event),
            (Access::ReadOnly, Some(rare)) => {
                let read_only = rare.read_only.is_some() && rare.atomics.is_empty() && self.write.is_none();
                read_only && self.reads.takes(event)
            }
            (Access::Write, None) if self.reads.is_before(event) && self.reads.forgets() => {
                self.write = Some(*event);
                true
            }
            _ => false,
        }
    }

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

/// What happened to a word.
#[derive(Default)]
struct Word {
    whole: History,
    /// The same of each of its bytes, once one was used without the others.
    apart: Option<Box<[History; WORD]>>,
}

const WORD: usize = 4;

impl Word {
    fn clear(&mut self) {
        self.whole.write = None;
        self.whole.reads.clear();
        self.whole.rare = None;
        self.apart = None;
    }
}

/// Words that lie side by side.
const PAGE: u64 = 64;

/// So many pages are found without a look at the map.
const RECENT: usize = 64;

/// What happened to memory.
#[derive(Default)]
pub(super) struct Memory {
    pages: Vec<Box<[Word; PAGE as usize]>>,
    /// Where the page of a number is.
    places: ByAddress<usize>,
    recent: Recent,
}

/// Pages used of late, each by the low bits of its number: the number and the place.
struct Recent([(u64, usize); RECENT]);

impl Default for Recent {
    fn default() -> Self {
        // No page has that number.
        Recent([(u64::MAX, 0); RECENT])
    }
}

impl Memory {
    /// Nothing has happened to any byte. The room for it stays.
    pub(super) fn clear(&mut self) {
        self.pages.iter_mut().flat_map(|page| page.iter_mut()).for_each(Word::clear);
    }

    fn word(&mut self, number: u64) -> &mut Word {
        let page = number / PAGE;
        let (recent, place) = self.recent.0[page as usize % RECENT];
        let place = if recent == page { place } else { self.find(page) };
        &mut self.pages[place][(number % PAGE) as usize]
    }

    /// Where a page is that was not used of late.
    #[inline(never)]
    fn find(&mut self, page: u64) -> usize {
        let pages = &mut self.pages;
        let place = *self.places.entry(page).or_insert_with(|| {
            // Made where it stays: the thread that makes it may have a small stack.
            let words: Box<[Word]> = (0..PAGE).map(|_| Word::default()).collect();
            let Ok(page) = words.try_into() else { unreachable!("it has as many words") };
            pages.push(page);
            pages.len() - 1
        });
        self.recent.0[page as usize % RECENT] = (page, place);
        place
    }

    /// Notes a plain access of a thread to these bytes, if they are whole words that were used of late, and
    /// if it is known at once to be ordered behind those before it; says whether it did. If not, it may have
    /// noted a part of the words: to note those again changes nothing.
    #[inline(always)]
    pub(super) fn takes(&mut self, start: u64, bytes: usize, event: &Event) -> bool {
        let (size, end) = (WORD as u64, start + bytes as u64);
        if !(start | end).is_multiple_of(size) {
            return false;
        }
        let mut at = start;
        while at < end {
            let number = at / size;
            let (recent, place) = self.recent.0[(number / PAGE) as usize % RECENT];
            let Some(page) = self.pages.get_mut(place).filter(|_| recent == number / PAGE) else {
                return false;
            };
            let word = &mut page[(number % PAGE) as usize];
            if word.apart.is_some() || !word.whole.takes(event) {
                return false;
            }
            at += size;
        }
        true
    }

    /// Calls `visit` with the first byte and the history of all bytes from `start` on, those of a word
    /// together where nobody used them apart; ends with the first answer.
    pub(super) fn visit<R>(
        &mut self,
        start: u64,
        bytes: usize,
        mut visit: impl FnMut(u64, &mut History) -> Option<R>,
    ) -> Option<R> {
        let (size, end) = (WORD as u64, start + bytes as u64);
        let mut at = start;
        while at < end {
            let word = self.word(at / size);
            let whole = at.is_multiple_of(size) && end - at >= size;
            if word.apart.is_none() && !whole {
                word.apart = Some(Box::new(std::array::from_fn(|_| word.whole.clone())));
            }
            let found = match &mut word.apart {
                None => {
                    at += size;
                    visit(at - size, &mut word.whole)
                }
                Some(apart) => {
                    at += 1;
                    visit(at - 1, &mut apart[((at - 1) % size) as usize])
                }
            };
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// The history of one byte.
    pub(super) fn of_byte(&mut self, at: u64) -> &mut History {
        let word = self.word(at / WORD as u64);
        match &mut word.apart {
            None => &mut word.whole,
            Some(apart) => &mut apart[(at % WORD as u64) as usize],
        }
    }
}

/// Spreads addresses: they differ in their low bits.
#[derive(Default)]
pub(super) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

pub(super) type ByAddress<T> = HashMap<u64, T, BuildHasherDefault<AddressHasher>>;

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a word have one history until one of them is used alone.
    #[test]
    fn bytes_are_told_apart_when_they_are_used_apart() {
        let mut memory = Memory::default();
        let mut visited = |start, bytes| {
            let mut firsts = Vec::new();
            let _: Option<()> = memory.visit(start, bytes, |at, _| {
                firsts.push(at);
                None
            });
            firsts
        };
        assert_eq!(visited(1000, 8), [1000, 1004]);
        assert_eq!(visited(1004, 2), [1004, 1005]);
        assert_eq!(visited(1000, 16), [1000, 1004, 1005, 1006, 1007, 1008, 1012]);
        assert_eq!(visited(1015, 1), [1015]);
    }
}
