//! The list of a group of rows that is carried from step to step, and what the warps of a step visit by it.

use super::choose::Chosen;
use super::near::Directory;
use super::pass::RowGroup;
use crate::attention::cpu::pieces::Pieces;
use crate::certified::step::Turns;
use kernels_gpu::certified::carried::{Promoted, Turn, first_recent, mode};
use kernels_gpu::certified::{Entry, ListHead, StepShape};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is carried from step to step, as the kernels keep it: a cache may change its path with it at any
/// step. Zeros at first; afterwards what a step has left. It may be of other sequences, but no list has a
/// block twice.
#[derive(Debug)]
pub struct Lists<'a> {
    /// [sequences · kv_heads · row groups, parts].
    pub lists: &'a mut [ListHead],
    /// The same, places of a part.
    pub entries: &'a mut [Entry],
    /// What the step promotes, [sequences · kv_heads · row groups].
    pub promoted: &'a mut [Promoted],
    /// What each head's last step has left of its mass, [sequences, q_heads]: [`log_sum`].
    ///
    /// [`log_sum`]: kernels_gpu::certified::carried::sight::log_sum
    pub log_sums: &'a mut [f32],
    /// What the step does with them: bits of [`mode`].
    pub mode: u32,
    /// The directory of a scratch: listed blocks that it has not are not compared. Without one all are at
    /// hand.
    pub directory: Option<Directory<'a>>,
}

/// The same, owned.
#[derive(Default)]
pub(super) struct OwnLists {
    pub(super) lists: Vec<ListHead>,
    pub(super) entries: Vec<Entry>,
    pub(super) promoted: Vec<Promoted>,
    pub(super) log_sums: Vec<f32>,
    pub(super) turns: Turns,
}

impl OwnLists {
    /// Empty ones of these extents.
    pub(super) fn new([lists, entries, rows, heads]: [usize; 4]) -> Self {
        OwnLists {
            lists: vec![bytemuck::Zeroable::zeroed(); lists],
            entries: vec![bytemuck::Zeroable::zeroed(); entries],
            promoted: vec![bytemuck::Zeroable::zeroed(); rows],
            log_sums: vec![0.0; heads],
            turns: Turns::default(),
        }
    }

    /// For the step that comes now, of those that use a list for `every` steps; `again`: whether they have a
    /// second pass.
    pub(super) fn lend(&mut self, every: u32, again: bool) -> Lists<'_> {
        let OwnLists { lists, entries, promoted, log_sums, turns } = self;
        Lists { lists, entries, promoted, log_sums, mode: turns.begin(every, again), directory: None }
    }
}

/// Lists, entries, rows of blocks and heads that there are for so many rows and heads.
pub(super) fn extents(shape: StepShape, rows: usize, heads: usize) -> [usize; 4] {
    let lists = rows * shape.parts as usize;
    [lists, lists * shape.places() as usize, rows, heads]
}

/// The lists of the groups of rows; none if a list is used for no step.
pub(super) fn deal<'a>(
    lists: Lists<'a>,
    shape: StepShape,
    groups: &[RowGroup],
    every: u32,
) -> impl Iterator<Item = List<'a>> {
    let Lists { lists, entries, promoted, mut log_sums, mode, .. } = lists;
    let [parts, places, ..] = extents(shape, 1, 0);
    let rows = if every == 0 { 0 } else { promoted.len() };
    let of_rows = lists.chunks_exact_mut(parts).zip(entries.chunks_exact_mut(places)).zip(promoted);
    of_rows.zip(groups).take(rows).map(move |(((heads, entries), promoted), group)| {
        let log_sums = log_sums.split_off_mut(..group.rows).unwrap_or_default();
        let turn = Turn::of(mode, [promoted.exact_for, promoted.wait].map(u32::from), promoted.blocks);
        let [renews, followed] = [mode::RENEWS, mode::FOLLOWED].map(|bit| mode & bit != 0);
        List { mode, renews, followed, turn, heads, entries, promoted, log_sums }
    })
}

/// The list of one group of rows.
pub(super) struct List<'a> {
    /// The step's bits of [`mode`].
    mode: u32,
    /// Whether this step's masses make the next list.
    pub(super) renews: bool,
    /// Whether a group with a head over budget is passed over again.
    pub(super) followed: bool,
    /// Whether the group is left to the dense rung.
    pub(super) turn: Turn,
    /// A part's each.
    pub(super) heads: &'a mut [ListHead],
    /// Places of a part, for each.
    pub(super) entries: &'a mut [Entry],
    pub(super) promoted: &'a mut Promoted,
    /// Of the group's rows: [`log_sum`].
    ///
    /// [`log_sum`]: kernels_gpu::certified::carried::sight::log_sum
    pub(super) log_sums: &'a mut [f32],
}

impl List<'_> {
    /// What this step promotes of a sequence with so many full blocks; nothing of a group that is left to the
    /// dense rung.
    pub(super) fn read(&self, blocks: usize, exact: bool, used: &mut Used) {
        used.entries.clear();
        used.listed.clear();
        used.promoted = [0; 3];
        used.earlier = None;
        used.newer = 0;
        used.sighted.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        if exact {
            return;
        }
        for entries in of_parts(self.heads, self.entries) {
            used.entries.extend_from_slice(entries);
        }
        let recent = first_recent(blocks as u32, self.promoted.blocks);
        let newer = (recent..blocks as u32).map(|index| Entry { index, rows: 0xffff });
        used.newer = newer.len();
        used.entries.extend(newer);
        if used.entries.is_empty() {
            return;
        }
        used.promoted[2] = self.heads[0].expanded;
        used.listed.resize(blocks.div_ceil(64), 0);
        for entry in used.entries.iter().filter(|entry| (entry.index as usize) < blocks) {
            let [keys, values] = entry.wants();
            used.promoted[0] += u32::from(keys);
            used.promoted[1] += u32::from(values);
            used.listed[entry.index as usize / 64] |= 1 << (entry.index % 64);
        }
    }

    /// Takes over what was chosen.
    pub(super) fn write(&mut self, chosen: &Chosen) {
        let expanded = chosen.sums.iter().fold(0, |expanded, sums| expanded | sums.expanded);
        let places = self.entries.len() / self.heads.len();
        let mut first = 0;
        for (part, end) in chosen.ends.iter().enumerate() {
            let entries = &chosen.entries[first..*end];
            first = *end;
            let of_kind = |kind: usize| entries.iter().filter(|entry| entry.wants()[kind]).count() as u32;
            self.entries[part * places..][..entries.len()].copy_from_slice(entries);
            self.heads[part] = ListHead {
                entries: entries.len() as u32,
                key_tiles: of_kind(0),
                value_tiles: of_kind(1),
                expanded,
            };
        }
    }

    /// What was chosen is for a second pass of this step, over a sequence with so many full blocks. `left`:
    /// what the first one has left, as for [`count`](Self::count).
    pub(super) fn own(&mut self, chosen: &Chosen, blocks: usize, left: [u32; 2], used: &mut Used) {
        self.write(chosen);
        self.promoted.blocks = blocks as u32;
        self.turn = Turn::of(mode::again(self.mode), left, blocks as u32);
        let earlier = Earlier { entries: used.listed().to_vec(), promoted: used.promoted };
        let sighted = std::mem::take(&mut used.sighted);
        self.read(blocks, false, used);
        used.sighted = sighted;
        used.earlier = Some(earlier);
    }

    /// The step is done, of a sequence with so many full blocks; `left`: for how many renewals it leaves the
    /// group to the dense rung, and how many it will wait for.
    pub(super) fn count(&mut self, used: &Used, blocks: usize, left: [u32; 2]) {
        let [key_tiles, value_tiles] = used.tiles();
        let [exact_for, wait] = left.map(|renewals| renewals as u8);
        let made = if self.renews && exact_for == 0 { blocks as u32 } else { self.promoted.blocks };
        let (exact, again) = (used.exact.into(), used.earlier.is_some().into());
        *self.promoted = Promoted { key_tiles, value_tiles, blocks: made, exact_for, wait, exact, again };
    }
}

/// What each part's list has, of the places that there are for it.
pub(super) fn of_parts<'a>(heads: &'a [ListHead], entries: &'a [Entry]) -> impl Iterator<Item = &'a [Entry]> {
    let places = entries.len() / heads.len().max(1);
    let of_parts = heads.iter().zip(entries.chunks_exact(places.max(1)));
    of_parts.map(|(head, entries)| &entries[..(head.entries as usize).min(entries.len())])
}

/// The list of the step behind a step.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) enum Next {
    /// The same.
    #[default]
    Same,
    /// What the step has chosen.
    Chosen,
    /// None: the group is left to the dense rung.
    Nothing,
}

/// What the first of two passes has promoted.
pub(super) struct Earlier {
    /// What its list had.
    pub(super) entries: Vec<Entry>,
    /// As [`Used::promoted`].
    promoted: [u32; 3],
}

/// What a step promotes of a group of rows.
#[derive(Default)]
pub(super) struct Used {
    /// Parts' lists one after another, of which those past the sequence's full blocks are passed over; then
    /// blocks that are newer.
    pub(super) entries: Vec<Entry>,
    /// How many of the last.
    pub(super) newer: usize,
    /// A bit for each full block that is among them; nothing if there are no entries.
    pub(super) listed: Vec<u64>,
    /// Blocks whose keys are promoted, those whose values are, and whether K_max was raised for them.
    pub(super) promoted: [u32; 3],
    /// Blocks that the step's first pass has promoted on sight, in any order. They count as `promoted`.
    pub(super) sighted: Mutex<Vec<Entry>>,
    /// What the next step promotes.
    pub(super) next: Next,
    /// Whether the group was left to the dense rung.
    pub(super) exact: bool,
    /// The first pass, where the rest is of a second one.
    pub(super) earlier: Option<Earlier>,
}

impl Used {
    /// Tiles of keys and of values that the step has promoted.
    pub(super) fn tiles(&self) -> [u32; 2] {
        let earlier = self.earlier.as_ref().map_or([0; 3], |earlier| earlier.promoted);
        [0, 1].map(|kind| self.promoted[kind] + earlier[kind])
    }

    /// The pass is done: what it has promoted on sight is promoted too.
    pub(super) fn count_sighted(&mut self) {
        let sighted = self.sighted().len() as u32;
        self.promoted[0] += sighted;
        self.promoted[1] += sighted;
    }

    /// Blocks that were promoted on sight.
    pub(super) fn sighted(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.sighted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a list has of the entries.
    pub(super) fn listed(&self) -> &[Entry] {
        &self.entries[..self.entries.len() - self.newer]
    }

    /// What is listed for the warps of a split.
    #[inline(always)]
    fn has(listed: &[u64], block: usize) -> bool {
        listed.get(block / 64).is_some_and(|word| word >> (block % 64) & 1 != 0)
    }
}

/// What the warps of a thread block visit: full blocks of a stretch, but for those that are listed, then
/// entries of the list.
#[derive(Clone, Copy)]
pub(super) struct Visits<'a> {
    /// From the first block to before the last.
    pub(super) blocks: [usize; 2],
    /// Warps of a thread block.
    pub(super) warps: usize,
    /// Which thread block of how many.
    pub(super) split: [usize; 2],
    /// Full blocks of the sequence.
    pub(super) full: u32,
    /// See [`Used`].
    pub(super) entries: &'a [Entry],
    /// See [`Used`].
    pub(super) listed: &'a [u64],
    /// Whether a trailing block comes behind the entries.
    pub(super) trailing: bool,
}

/// A visit to a block.
#[derive(Clone, Copy)]
pub(super) struct Visit {
    /// What it wants: of a quantized block nothing.
    pub(super) entry: Entry,
    /// Whether the block comes by itself, not by an entry: then it may be promoted on sight.
    pub(super) by_itself: bool,
}

impl<'a> Visits<'a> {
    /// The visits of a warp, in their order.
    #[inline(always)]
    pub(super) fn of(self, warp: usize) -> impl Iterator<Item = Visit> + 'a {
        let Visits { blocks: [first, end], warps, split: [split, splits], full, entries, listed, .. } = self;
        let quantized = (first + warp..end).step_by(warps).filter(move |index| !Used::has(listed, *index));
        let quantized =
            quantized.map(|index| Visit { entry: Entry { index: index as u32, rows: 0 }, by_itself: true });
        let count = entries.len() + usize::from(self.trailing);
        let promoted = (split * warps + warp..count).step_by(splits * warps).filter_map(move |e| {
            let entry = match entries.get(e) {
                // Of a sequence that was longer.
                Some(entry) if entry.index >= full => return None,
                Some(entry) => *entry,
                None => Entry { index: full, rows: u32::MAX },
            };
            Some(Visit { entry, by_itself: false })
        });
        quantized.chain(promoted)
    }

    /// What each piece's warps need of what full blocks have, each its own: in the order of their visits, one
    /// for each.
    pub(super) fn deal<T>(self, pieces: Pieces, left: &mut [Option<T>]) -> Vec<Vec<Option<T>>> {
        let of_piece = |piece| {
            let visits = pieces.warps_of(piece).flat_map(|warp| self.of(warp));
            visits.map(|visit| left.get_mut(visit.entry.index as usize)?.take()).collect()
        };
        (0..pieces.count).map(of_piece).collect()
    }
}
