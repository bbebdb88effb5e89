//! What threads know of each other: vector clocks, and what fences and atomics hand on.

use super::collective::FenceScope;
use super::fault::Space;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What a thread has heard through atomics.
#[derive(Clone, Default)]
pub(super) struct Known {
    /// Block number to epoch: everything the block did in earlier epochs.
    pub(super) blocks: BTreeMap<u64, u32>,
    /// (Block number, thread) to clock: everything the thread did up to it.
    pub(super) threads: BTreeMap<(u64, u32), u32>,
    /// Which of these accesses copies by the asynchronous proxy see, those ahead of a fence for that: by
    /// [`Space`], what a thread did to its own block's shared memory apart from what it did to another's.
    pub(super) shown: [Shown; 3],
    /// The time of the last fence of sequential consistency that another one lies behind, of a thread that
    /// was heard of: values set before that are not seen any more.
    pub(super) fenced: u64,
}

/// What a fence has shown to copies.
#[derive(Clone, Default)]
pub(super) struct Shown {
    pub(super) blocks: BTreeMap<u64, u32>,
    pub(super) threads: BTreeMap<(u64, u32), u32>,
}

impl Shown {
    fn is_nothing(&self) -> bool {
        self.blocks.is_empty() && self.threads.is_empty()
    }

    fn join(&mut self, blocks: &BTreeMap<u64, u32>, threads: &BTreeMap<(u64, u32), u32>) {
        join(&mut self.blocks, blocks);
        join(&mut self.threads, threads);
    }
}

/// Takes over what is later.
fn join<K: Copy + Ord>(mine: &mut BTreeMap<K, u32>, theirs: &BTreeMap<K, u32>) {
    for (key, time) in theirs {
        let known = mine.entry(*key).or_insert(0);
        *known = (*known).max(*time);
    }
}

impl Known {
    fn is_nothing(&self) -> bool {
        self.blocks.is_empty()
            && self.threads.is_empty()
            && self.shown.iter().all(Shown::is_nothing)
            && self.fenced == 0
    }

    pub(super) fn join(&mut self, other: &Known) {
        join(&mut self.blocks, &other.blocks);
        join(&mut self.threads, &other.threads);
        for (mine, theirs) in self.shown.iter_mut().zip(&other.shown) {
            mine.join(&theirs.blocks, &theirs.threads);
        }
        self.fenced = self.fenced.max(other.fenced);
    }
}

/// What is left on a word by the atomics of threads that had made a fence.
#[derive(Default)]
pub(super) struct Word {
    /// For every thread of the device.
    device: Known,
    /// For the threads of one block, by its number.
    blocks: BTreeMap<u64, Known>,
}

#[derive(Clone)]
pub(super) struct Clock {
    /// What this thread has heard of each lane of its warp; its own entry is its own clock.
    pub(super) warp: [u32; 32],
    pub(super) known: Rc<Known>,
    /// What atomics have brought since the last fence or barrier: from threads of the block, for whom a fence
    /// of the block will do, and from others.
    heard_in_block: Known,
    heard: Known,
    /// What an atomic would pass on: taken at the last fence.
    released_to_device: Option<Known>,
    released_to_block: Option<Known>,
}

impl Clock {
    /// That of a thread that knows of none but itself; `nothing` is what all threads of a block begin with.
    pub(super) fn start(lane: usize, nothing: &Rc<Known>) -> Self {
        let mut warp = [0; 32];
        warp[lane] = 1;
        Clock {
            warp,
            known: nothing.clone(),
            heard_in_block: Known::default(),
            heard: Known::default(),
            released_to_device: None,
            released_to_block: None,
        }
    }

    /// Joins to `known` what these threads know behind a barrier. Those that have met share what they know.
    pub(super) fn tell<'c>(clocks: impl Iterator<Item = &'c Clock>, known: &mut Known) {
        let mut last: Option<&Rc<Known>> = None;
        for clock in clocks {
            if last.is_none_or(|last| !Rc::ptr_eq(last, &clock.known)) {
                known.join(&clock.known);
                last = Some(&clock.known);
            }
            for heard in [&clock.heard_in_block, &clock.heard] {
                if !heard.is_nothing() {
                    known.join(heard);
                }
            }
        }
    }

    /// From here on these threads know `known` as well.
    pub(super) fn learn<'c>(clocks: impl Iterator<Item = &'c mut Clock>, known: &Known) {
        let mut last: Option<(Rc<Known>, Rc<Known>)> = None;
        for clock in clocks {
            let joined = match &last {
                Some((before, joined)) if Rc::ptr_eq(before, &clock.known) => joined.clone(),
                _ => {
                    let mut joined = Known::clone(&clock.known);
                    joined.join(known);
                    Rc::new(joined)
                }
            };
            last = Some((std::mem::replace(&mut clock.known, joined.clone()), joined));
        }
    }

    fn learn_heard(&mut self, heard: Known) {
        if !heard.is_nothing() {
            Rc::make_mut(&mut self.known).join(&heard);
        }
    }

    /// Joins to `known` what this thread, `lane` of the warp that starts at thread `first` of `block`, has
    /// done and knows for certain: what it releases.
    pub(super) fn release(&mut self, known: &mut Known, block: u64, epoch: u32, first: u32, lane: usize) {
        known.join(&self.known);
        let own = known.blocks.entry(block).or_insert(0);
        *own = (*own).max(epoch);
        for (other, heard) in self.warp.iter().enumerate().filter(|(_, heard)| **heard > 0) {
            let mine = known.threads.entry((block, first + other as u32)).or_insert(0);
            *mine = (*mine).max(*heard);
        }
        self.warp[lane] += 1;
    }

    /// Copies that are behind this see all that the thread has done and knows, in memory of these kinds.
    pub(super) fn show_to_copies(
        &mut self,
        spaces: &[Space],
        (block, epoch): (u64, u32),
        (first, lane): (u32, usize),
    ) {
        let mut released = Known::default();
        self.release(&mut released, block, epoch, first, lane);
        let known = Rc::make_mut(&mut self.known);
        for space in spaces {
            known.shown[*space as usize].join(&released.blocks, &released.threads);
        }
        // To this block's memory, which such a fence is of, others may have written.
        if !spaces.contains(&Space::Cluster) {
            released.blocks.remove(&block);
            released.threads.retain(|(of, _), _| *of != block);
            known.shown[Space::Cluster as usize].join(&released.blocks, &released.threads);
        }
    }

    /// It has made a fence of sequential consistency behind one of another thread at `time`.
    pub(super) fn fence_behind(&mut self, time: u64) {
        if time > self.known.fenced {
            Rc::make_mut(&mut self.known).fenced = time;
        }
    }

    /// Whether its atomics pass anything on.
    pub(super) fn releases(&self) -> bool {
        self.released_to_block.is_some()
    }

    /// A fence of the thread that is `lane` of the warp that starts at thread `first` of `block`.
    pub(super) fn fence(&mut self, scope: FenceScope, block: u64, epoch: u32, first: u32, lane: usize) {
        let heard = std::mem::take(&mut self.heard_in_block);
        self.learn_heard(heard);
        if scope != FenceScope::Block {
            let heard = std::mem::take(&mut self.heard);
            self.learn_heard(heard);
        }
        let mut known = Known::clone(&self.known);
        let mut own = Known::default();
        own.blocks.insert(block, epoch);
        for (other, heard) in self.warp.iter().enumerate().filter(|(_, heard)| **heard > 0) {
            own.threads.insert((block, first + other as u32), *heard);
        }
        known.join(&own);
        self.warp[lane] += 1;
        self.released_to_block = Some(known.clone());
        if scope != FenceScope::Block {
            self.released_to_device = Some(known);
        }
    }

    /// An atomic of a thread of `block` that sets the word leaves there what the thread released.
    pub(super) fn pass_on(&self, word: &mut Word, block: u64) {
        if let Some(released) = &self.released_to_block {
            word.blocks.entry(block).or_default().join(released);
        }
        if let Some(released) = &self.released_to_device {
            word.device.join(released);
        }
    }

    /// An atomic of a thread of `block` that sees the word hears what others left there.
    pub(super) fn hear(&mut self, word: &Word, block: u64) {
        if let Some(left) = word.blocks.get(&block) {
            self.heard_in_block.join(left);
        }
        self.heard.join(&word.device);
    }
}
