//! # Mathematics
//! Which blocks of a part any of eight query rows wants from the originals. Each row's choice is a bin and
//! the room in it; who is in that bin comes by part and place. So the numbers of the parts before this one,
//! which `weigh` has left, and of the words before one tell for every word of 32 places who still has room.
//! Then what a row's promoted blocks take out of its sums, and which of the blocks come into the scratch:
//! [`admit`](super::admit).
//!
//! # Layout
//! `lists` [sequences · kv_heads · row groups, parts] and `entries` [the same, places of a part]; `taken`
//! [sequences · query heads, parts].
//!
//! # Bytes
//! Read: 16 a block and query head, from the L2 cache for the most part. Written: 8 a listed block.
//!
//! # Work split
//! Grid (parts, kv_heads · row groups, sequences), a warp for every eighth word of 32 places, then for a row.

use super::admit::{Scratch, claim, tally, tally_nothing};
use super::carried::{Promoted, first_recent, mode};
use super::choice::{BINS, Bins, Choice};
use super::parts::{PART_BLOCKS, Part};
use super::pass::{Record, StepShape};
use super::policy::Thresholds;
use super::sums::{Taken, weights};
use super::weighing::{RowChoice, Weighed, ranks_error};
use crate::attention::{BLOCK_TOKENS, GridPlace, ROWS};
use glam::UVec4;
use simt::warp::{self, FULL_MASK, warp_shuffle_idx, warp_shuffle_up};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, kernel, thread, unroll};

/// Threads of a block that marks: a warp for each row.
pub const THREADS: u32 = 256;
/// Words of a bitmap over a part.
const WORDS: u32 = PART_BLOCKS / 32;
/// Words of a [`RowChoice`].
const CHOICE: u32 = 8;

/// A block that some row wants from the originals.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Entry {
    /// Its index in the sequence.
    pub index: u32,
    /// Rows of the group of eight that want its keys in bits 0 to 7, its values in 8 to 15.
    pub rows: u32,
}

impl Entry {
    /// Whether any row wants its keys, its values.
    #[inline(always)]
    pub const fn wants(self) -> [bool; 2] {
        [self.rows & 0xff != 0, self.rows & 0xff00 != 0]
    }

    /// Whether row `r` does.
    #[inline(always)]
    pub const fn row_wants(self, r: u32) -> [bool; 2] {
        [self.rows >> r & 1 != 0, self.rows >> (8 + r) & 1 != 0]
    }
}

/// What a part's list holds.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct ListHead {
    /// Entries.
    pub entries: u32,
    /// Of them, those whose keys are wanted.
    pub key_tiles: u32,
    /// Those whose values are.
    pub value_tiles: u32,
    /// Whether K_max was raised for any row.
    pub expanded: u32,
}

/// Shared memory of the marks.
#[derive(Clone, Copy)]
pub struct MarkLayout {
    /// Bitmaps of what is chosen, by kind (keys, values), row and word: [2, 8, WORDS].
    chosen: Shared<u32>,
    /// Bitmaps of the bin of which only some are.
    undecided: Shared<u32>,
    /// The rows' choices, [8].
    choices: Shared<u32>,
    /// The list.
    entries: Shared<Entry>,
    /// Of them, those that want keys and those that want values.
    tiles: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory.
pub const fn mark_layout() -> MarkLayout {
    let mut plan = SharedPlan::new();
    let chosen = plan.array(2 * ROWS * WORDS);
    let undecided = plan.array(2 * ROWS * WORDS);
    let choices = plan.array(ROWS * CHOICE);
    let entries = plan.array(PART_BLOCKS);
    let tiles = plan.array(2);
    MarkLayout { chosen, undecided, choices, entries, tiles, bytes: plan.bytes() }
}

impl MarkLayout {
    /// Where a word of a bitmap is.
    #[inline(always)]
    fn word(kind: u32, r: u32, word: u32) -> u32 {
        (kind * ROWS + r) * WORDS + word
    }
}

/// Lists the blocks that are wanted, and settles which of them come into the scratch.
///
/// `mode`, bits of [`mode`](super::carried::mode): 0 where the step itself promotes what is listed. Where the
/// next one does, RENEWS if the list is made anew; else the blocks of the one that there is claim their slots
/// again. With AGAIN it is for the second pass of the step over the rows that `dense_rows` names.
#[kernel(system = certified, max_threads = 256, min_blocks = 3, overlaps = in_turn)]
pub fn mark(
    records: Global<Record>,
    weighed: Global<Weighed>,
    part_counts: Global<u32>,
    lengths: Global<u32>,
    table: Global<u32>,
    lists: GlobalMut<ListHead>,
    entries: GlobalMut<Entry>,
    taken: GlobalMut<Taken>,
    directory: GlobalMut<u64>,
    promoted: GlobalMut<Promoted>,
    dense_rows: Global<u32>,
    shape: StepShape,
    thresholds: Thresholds,
    scratch: Scratch,
    mode: u32,
) {
    let GridPlace { split: index, sequence, head, row_group, launch_row } = GridPlace::of(shape.row_groups());
    if Promoted::none_again(promoted.as_const(), dense_rows, mode) {
        if scratch.claims() && launch_row == 0 && index == 0 && thread::thread_idx_x() == 0 {
            tally_nothing(directory);
        }
        return;
    }
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let length = lengths.load(sequence as usize);
    let blocks = length / BLOCK_TOKENS;
    let part = Part { index, parts: shape.parts, blocks };
    let first_row = (sequence * shape.kv_heads + head) * shape.group + row_group * ROWS;
    let layout = mark_layout();
    let marking = Marking {
        records,
        weighed,
        counts: part_counts,
        first_row,
        first_record: shape.record(first_row, 0),
        rows: (shape.group - row_group * ROWS).min(ROWS),
        part,
        shape,
        thresholds,
    };
    let of_part = (launch_row * shape.parts + part.index) as usize;
    // A row that is left to the dense rung has noted nothing, and wants nothing of the scratch.
    let [exact_for, exact] =
        if mode != 0 { Promoted::exact(promoted.as_const(), launch_row) } else { [0; 2] };
    let again = mode & mode::AGAIN != 0;
    let passed_over = Promoted::passed_over(promoted.as_const(), dense_rows, launch_row, mode);
    let kept = mode & mode::LISTED != 0 && mode & (mode::RENEWS | mode::AGAIN) == 0;
    let stays = kept || passed_over || exact_for != 0;
    if thread::thread_idx_x() < 2 {
        layout.tiles.store(thread::thread_idx_x(), 0);
    }
    let count = if exact_for != 0 || passed_over {
        0
    } else if stays {
        lists.as_const().cast::<u32>().load(4 * of_part)
    } else {
        marking.list(layout, lane, warp)
    };
    if warp < marking.rows && mode == 0 {
        let of_row = marking.taken(layout, count, warp, lane);
        if lane == 0 {
            of_row.store(taken, ((first_row + warp) * shape.parts + part.index) as usize);
        }
    }
    let first = of_part * shape.places() as usize;
    let mut wanted = [0u32; 2];
    let mut counts = [0u32; 4];
    let mut e = thread::thread_idx_x();
    while e < count {
        let entry = if stays {
            entries.as_const().load(first + e as usize)
        } else {
            let Entry { index, rows } = layout.entries.load(e);
            let entry = Entry { index: part.block(index), rows };
            entries.store(first + e as usize, entry);
            entry
        };
        let wants = entry.wants();
        wanted[0] += wants[0] as u32;
        wanted[1] += wants[1] as u32;
        if scratch.claims() && entry.index < blocks {
            let block = table.load((sequence * shape.max_blocks + entry.index) as usize);
            let place = super::admit::order(launch_row, shape.max_blocks, entry.index);
            claim(directory, scratch, block * shape.kv_heads + head, place, wants, &mut counts);
        }
        e += THREADS;
    }
    // A trailing block that is near needs no bus.
    let trailing = part.index == 0 && !length.is_multiple_of(BLOCK_TOKENS) && scratch.fresh == 0;
    if trailing && !passed_over && thread::thread_idx_x() == 0 {
        counts[1] += 1;
        counts[3] += 1;
    }
    if mode != 0 && part.index == 0 && thread::thread_idx_x() == 0 {
        // What `carry` has promoted in this step though no list had it.
        if exact == 0 && !again {
            let newer = blocks - first_recent(blocks, Promoted::blocks(promoted.as_const(), launch_row));
            counts[1] += newer;
            counts[3] += newer;
        }
        if !stays {
            Promoted::note_blocks(promoted, launch_row, blocks);
        }
    }
    unroll!(for kind in 0..2 {
        let of_warp = warp::warp_reduce_add_u32(FULL_MASK, wanted[kind]);
        if lane == 0 && of_warp != 0 && !stays {
            layout.tiles.atomic_add(kind as u32, of_warp);
        }
    });
    thread::sync_threads();
    if thread::thread_idx_x() == 0 && !stays {
        let [key_tiles, value_tiles] = [0, 1].map(|kind| layout.tiles.load(kind));
        let mut expanded = 0;
        if mode != 0 {
            for r in 0..marking.rows {
                let word = Weighed::WORDS * (first_row + r) + Weighed::EXPANDED;
                expanded |= weighed.cast::<u32>().load(word as usize);
            }
        }
        let words = UVec4::new(count, key_tiles, value_tiles, expanded);
        lists.cast::<UVec4>().store(of_part, words);
    }
    if scratch.claims() {
        // Two launches of a step with a second pass count what it has used.
        tally(directory, counts, mode & mode::FOLLOWED != 0, lane);
    }
}

/// What marking reads.
#[derive(Clone, Copy)]
struct Marking {
    records: Global<Record>,
    weighed: Global<Weighed>,
    counts: Global<u32>,
    /// The first query row of the group of eight.
    first_row: u32,
    /// Its record of block 0.
    first_record: usize,
    /// Rows of the group that exist.
    rows: u32,
    part: Part,
    shape: StepShape,
    thresholds: Thresholds,
}

impl Marking {
    /// Row `r`'s record of the block at a place, if there is one.
    #[simt::device]
    fn record(&self, r: u32, place: u32) -> Record {
        let block = self.part.block(place);
        if r < self.rows && block < self.part.blocks {
            self.records.load(self.first_record + block as usize * self.shape.group as usize + r as usize)
        } else {
            Record::zeroed()
        }
    }

    /// Row `r`'s choice.
    #[simt::device]
    fn choice(layout: MarkLayout, r: u32) -> RowChoice {
        let words = [0, 4].map(|i| layout.choices.load_vector::<UVec4>(CHOICE * r + i));
        bytemuck::cast(words)
    }

    /// Lists the part's blocks that are wanted, by place: its entries' `index` is a place. Returns how many
    /// there are.
    #[simt::device]
    fn list(&self, layout: MarkLayout, lane: u32, warp: u32) -> u32 {
        let t = thread::thread_idx_x();
        let words = self.part.words();
        if t < CHOICE * self.rows {
            let row = self.first_row + t / CHOICE;
            let word = self.weighed.cast::<u32>().load((Weighed::WORDS * row + t % CHOICE) as usize);
            layout.choices.store(t, word);
        }
        thread::sync_threads();
        self.classify(layout, words, lane, warp);
        let before = if warp < self.rows { self.before_this_part(layout, warp, lane) } else { [0; 2] };
        thread::sync_threads();
        if warp < self.rows {
            decide(layout, words, before, warp, lane);
        }
        thread::sync_threads();
        let count = self.collect(layout, words, lane, warp);
        thread::sync_threads();
        count
    }

    /// Which blocks are in a bin before each row's, and which in that bin.
    #[simt::device]
    fn classify(&self, layout: MarkLayout, words: u32, lane: u32, warp: u32) {
        let mut word = warp;
        while word < words {
            let place = 32 * word + lane;
            let inside = place < self.part.places() && self.part.block(place) < self.part.blocks;
            let mut records = [Record::zeroed(); 8];
            unroll!(for r in 0..8 {
                records[r] = self.record(r as u32, place);
            });
            let mut own = [0u32; 4];
            unroll!(for r in 0..8 {
                if (r as u32) < self.rows {
                    let choice = Marking::choice(layout, r as u32);
                    let (mass, error) = weights(records[r], choice.reference);
                    let of_errors = Bins::of_errors(choice.first_eta);
                    let both =
                        [(choice.keys, Bins::of_masses().bin(mass)), (choice.values, of_errors.bin(error))];
                    unroll!(for kind in 0..2 {
                        let (Choice { bin, .. }, of_block) = both[kind];
                        let inside = inside && (kind == 0 || ranks_error(records[r], self.thresholds));
                        let above = inside && of_block < bin;
                        let equal = inside && of_block == bin;
                        let above = warp::warp_vote_ballot(FULL_MASK, above);
                        let equal = warp::warp_vote_ballot(FULL_MASK, equal);
                        if lane == r as u32 {
                            own[2 * kind] = above;
                            own[2 * kind + 1] = equal;
                        }
                    });
                }
            });
            if lane < self.rows {
                unroll!(for kind in 0..2 {
                    layout.chosen.store(MarkLayout::word(kind as u32, lane, word), own[2 * kind]);
                    layout.undecided.store(MarkLayout::word(kind as u32, lane, word), own[2 * kind + 1]);
                });
            }
            word += THREADS / 32;
        }
    }

    /// Blocks of row `r`'s bins, for keys and for values, that earlier parts have: a warp's work.
    #[simt::device]
    fn before_this_part(&self, layout: MarkLayout, r: u32, lane: u32) -> [u32; 2] {
        let choice = Marking::choice(layout, r);
        let mut sums = [0u32; 2];
        let mut p = lane;
        while p < self.part.index {
            let of_part = ((self.first_row + r) * self.part.parts + p) as usize * BINS as usize;
            sums[0] += self.counts.load(of_part + choice.keys.bin as usize) & 0xffff;
            sums[1] += self.counts.load(of_part + choice.values.bin as usize) >> 16;
            p += 32;
        }
        sums.map(|sum| warp::warp_reduce_add_u32(FULL_MASK, sum))
    }

    /// Writes the list; returns its length. Every warp counts all words, lane w word w.
    #[simt::device]
    fn collect(&self, layout: MarkLayout, words: u32, lane: u32, warp: u32) -> u32 {
        let all = 0xffu32 >> (ROWS - self.rows);
        let mut any = 0u32;
        if lane < words {
            for r in 0..self.rows {
                any |= layout.chosen.load(MarkLayout::word(0, r, lane));
                any |= layout.chosen.load(MarkLayout::word(1, r, lane));
            }
        }
        let up_to_here = inclusive(any.count_ones(), lane);
        let before = up_to_here - any.count_ones();
        let mut word = warp;
        while word < words {
            let (of_word, first) =
                (warp_shuffle_idx(FULL_MASK, any, word, 32), warp_shuffle_idx(FULL_MASK, before, word, 32));
            if of_word >> lane & 1 != 0 {
                let mut wants = 0u32;
                for r in 0..self.rows {
                    wants |= (layout.chosen.load(MarkLayout::word(0, r, word)) >> lane & 1) << r;
                    wants |= (layout.chosen.load(MarkLayout::word(1, r, word)) >> lane & 1) << (8 + r);
                }
                if self.thresholds.per_group != 0 {
                    wants =
                        if wants & 0xff != 0 { all } else { 0 } | if wants >> 8 != 0 { all << 8 } else { 0 };
                }
                let at = first + (of_word & ((1 << lane) - 1)).count_ones();
                layout.entries.store(at, Entry { index: 32 * word + lane, rows: wants });
            }
            word += THREADS / 32;
        }
        warp_shuffle_idx(FULL_MASK, up_to_here, 31, 32)
    }

    /// What row `r` itself has promoted of the list's first `count` entries: a warp's work, the result in
    /// every lane.
    #[simt::device]
    fn taken(&self, layout: MarkLayout, count: u32, r: u32, lane: u32) -> Taken {
        let mut taken = Taken::zeroed();
        let mut e = lane;
        while e < count {
            let place = layout.entries.load(e).index;
            let chosen = [0, 1].map(|kind| {
                layout.chosen.load(MarkLayout::word(kind, r, place / 32)) >> (place % 32) & 1 != 0
            });
            if chosen[0] || chosen[1] {
                let record = self.record(r, place);
                let (mass, error) = weights(record, Marking::choice(layout, r).reference);
                taken.add(mass, error, chosen, self.thresholds.per_group != 0, record);
            }
            e += 32;
        }
        taken.over_lanes(31)
    }
}

/// Gives row `r`'s room to the first of its bin; `before` of each kind came in earlier parts. A warp's work,
/// lane w word w.
#[simt::device]
fn decide(layout: MarkLayout, words: u32, before: [u32; 2], r: u32, lane: u32) {
    let choice = Marking::choice(layout, r);
    unroll!(for kind in 0..2 {
        let at = MarkLayout::word(kind as u32, r, lane);
        let undecided = if lane < words { layout.undecided.load(at) } else { 0 };
        let here = undecided.count_ones();
        let earlier = before[kind] + inclusive(here, lane) - here;
        let room = if kind == 0 { choice.keys.room } else { choice.values.room };
        let kept = first_bits(undecided, room.saturating_sub(earlier));
        if kept != 0 {
            layout.chosen.store(at, layout.chosen.load(at) | kept);
        }
    });
}

/// The lowest `n` of a word's bits that are set.
#[inline(always)]
fn first_bits(word: u32, n: u32) -> u32 {
    if n >= word.count_ones() {
        return word;
    }
    let mut rest = word;
    for _ in 0..n {
        rest &= rest - 1;
    }
    word & !rest
}

/// Sum over the lanes up to this one.
#[simt::device]
pub(super) fn inclusive(count: u32, lane: u32) -> u32 {
    let mut sum = count;
    unroll!(for i in 0..5 {
        let other = warp_shuffle_up(FULL_MASK, sum, 1 << i, 32);
        sum += if lane >= 1 << i { other } else { 0 };
    });
    sum
}
