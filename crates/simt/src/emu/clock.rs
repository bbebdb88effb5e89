//! What threads know of each other: vector clocks, and what fences and atomics hand on.

use super::collective::FenceScope;
use std::collections::BTreeMap;

/// What a thread has heard through atomics.
#[derive(Clone, Default)]
pub(super) struct Known {
    /// Block number to epoch: everything the block did in earlier epochs.
    pub(super) blocks: BTreeMap<u64, u32>,
    /// (Block number, thread) to clock: everything the thread did up to it.
    pub(super) threads: BTreeMap<(u64, u32), u32>,
}

impl Known {
    pub(super) fn join(&mut self, other: &Known) {
        for (block, epoch) in &other.blocks {
            let mine = self.blocks.entry(*block).or_insert(0);
            *mine = (*mine).max(*epoch);
        }
        for (thread, clock) in &other.threads {
            let mine = self.threads.entry(*thread).or_insert(0);
            *mine = (*mine).max(*clock);
        }
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
    pub(super) known: Known,
    /// What atomics have brought since the last fence or barrier: from threads of the block, for whom a fence
    /// of the block will do, and from others.
    heard_in_block: Known,
    heard: Known,
    /// What an atomic would pass on: taken at the last fence.
    released_to_device: Option<Known>,
    released_to_block: Option<Known>,
}

impl Clock {
    pub(super) fn start(lane: usize) -> Self {
        let mut warp = [0; 32];
        warp[lane] = 1;
        Clock {
            warp,
            known: Known::default(),
            heard_in_block: Known::default(),
            heard: Known::default(),
            released_to_device: None,
            released_to_block: None,
        }
    }

    /// Joins to `known` what this thread knows behind a barrier.
    pub(super) fn tell(&self, known: &mut Known) {
        known.join(&self.known);
        known.join(&self.heard_in_block);
        known.join(&self.heard);
    }

    /// Whether its atomics pass anything on.
    pub(super) fn releases(&self) -> bool {
        self.released_to_block.is_some()
    }

    /// A fence of the thread that is `lane` of the warp that starts at thread `first` of `block`.
    pub(super) fn fence(&mut self, scope: FenceScope, block: u64, epoch: u32, first: u32, lane: usize) {
        self.known.join(&std::mem::take(&mut self.heard_in_block));
        if scope != FenceScope::Block {
            self.known.join(&std::mem::take(&mut self.heard));
        }
        let mut known = self.known.clone();
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

    /// An atomic of a thread of `block`: leaves on the word what the thread released, and hears what others
    /// left there.
    pub(super) fn pass_on(&mut self, word: &mut Word, block: u64) {
        if let Some(released) = &self.released_to_block {
            word.blocks.entry(block).or_default().join(released);
        }
        if let Some(released) = &self.released_to_device {
            word.device.join(released);
        }
        self.hear(word, block);
    }

    /// An atomic load of a thread of `block` hears what others left on the word.
    pub(super) fn hear(&mut self, word: &Word, block: u64) {
        if let Some(left) = word.blocks.get(&block) {
            self.heard_in_block.join(left);
        }
        self.heard.join(&word.device);
    }
}
