//! What happened to a block's shared memory, by its own threads and by those of other blocks of its cluster.
//!
//! A thread that accesses the memory of another block does so with its own clock and that block's past, which
//! for so long is in the place of its own block's.

use super::super::clock::Word;
use super::super::history::{Access, ByAddress, Event, Memory};
use super::super::lane::Lane;
use super::super::weak::{ThreadKey, Versions};
use super::Races;
use core::panic::Location;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::rc::Rc;

/// The past of one block's shared memory.
#[derive(Default)]
pub(super) struct Past {
    pub(super) memory: Memory,
    pub(super) words: ByAddress<Word>,
    pub(super) versions: ByAddress<Versions>,
    /// The block's number.
    pub(super) owner: u64,
    /// The last access of each thread of another block.
    visitors: BTreeMap<ThreadKey, Event>,
}

impl Past {
    /// That of block number `owner`, to which nothing has happened.
    pub(super) fn begin(&mut self, owner: u64) {
        self.memory.clear();
        self.words.clear();
        self.versions.clear();
        self.visitors.clear();
        self.owner = owner;
    }
}

impl Races {
    /// The past of this block's shared memory and that of the other's change places.
    pub(in super::super) fn swap_pasts(&mut self, other: &mut Races) {
        std::mem::swap(&mut self.past, &mut other.past);
    }

    /// A thread of another block accesses the memory whose past is here.
    pub(in super::super) fn visit(&mut self, lane: &Lane, access: Access, place: &'static Location<'static>) {
        let event = self.event(lane, access, place);
        self.past.visitors.insert(event.thread_key(), event);
    }

    /// Whether this thread has heard of anything that a thread of `block` did: then that block has started.
    pub(in super::super) fn has_heard_of(&self, lane: &Lane, block: u64) -> bool {
        let known = &self.clocks[lane.linear as usize].known;
        let threads: RangeInclusive<ThreadKey> = (block, 0)..=(block, u32::MAX);
        known.blocks.contains_key(&block) || known.threads.range(threads).next().is_some()
    }

    /// The block ends: an access to its memory by a thread of another block that none of its threads has
    /// behind it, the first of the lowest block and thread.
    pub(in super::super) fn unseen_visitor(&self) -> Option<(ThreadKey, &'static Location<'static>)> {
        let unseen = |event: &&Event| {
            let mut last = None;
            !self.clocks.iter().any(|clock| {
                // Those who have met share what they know.
                let known = Rc::as_ptr(&clock.known);
                let is_new = last.replace(known) != Some(known);
                is_new && event.is_heard_by(clock)
            })
        };
        let event = self.past.visitors.values().find(unseen)?;
        Some((event.thread_key(), event.place))
    }
}
