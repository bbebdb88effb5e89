//! Blocks that wait for their part of a certificate's sums: four at a time, one for each of a row's four
//! lanes.
//!
//! What a block adds follows from a few numbers by some two hundred instructions, the same in the four lanes
//! that share a row. So a pass leaves these numbers in shared memory, and when four blocks are there each
//! lane makes what one of them adds, in all words of [`Gathered`], and the lanes add up what they have. A
//! lane has five words of the sums.

use super::super::layout::Annotation;
use super::super::pass::Record;
use super::super::policy::Thresholds;
use super::super::query::{self, Query};
use super::Notes;
use super::gather::{Bounds, Gathered, Moments};
use super::likely::Noise;
use crate::attention::ROWS;
use glam::{UVec4, Vec4};
use half::f16;
use simt::math::{exp2_nonpositive, fma, max};
use simt::warp::{self, FULL_MASK, sync_warp, warp_shuffle_xor};
use simt::{Shared, bits, thread, unroll};

/// Blocks that wait at the most.
pub const WAITING: u32 = 4;
/// Words of a block: four for each of eight rows.
const BLOCK: u32 = 4 * ROWS;
/// Where scores and references lie behind moments, and what is known of blocks behind these.
const SCORES: u32 = WAITING * BLOCK;
const ANNOTATIONS: u32 = 2 * SCORES;
/// Words of an annotation but for the sizes.
const BOUNDS: u32 = 8;
/// Behind them what the rows' sums are relative to.
const REFERENCES: u32 = ANNOTATIONS + WAITING * BOUNDS;
/// Words of a warp.
pub const WORDS: u32 = REFERENCES + ROWS;

/// Beside a block's place in the sequence: its keys, its values are the originals; it is not full, and nobody
/// notes it.
const EXACT_KEYS: u32 = 1 << 31;
const EXACT_VALUES: u32 = 1 << 30;
const TRAILING: u32 = 1 << 29;

/// What is known of a block, besides its weights.
#[derive(Clone, Copy)]
pub(super) struct Visited {
    /// Its place in the sequence.
    pub(super) index: u32,
    /// Whether keys and values are the originals.
    pub(super) exact: [bool; 2],
    /// Whether it is not full.
    pub(super) trailing: bool,
    /// Σ|q_n|·σ and Σ(q_n·σ)², of quantized keys.
    pub(super) sums: [f32; 2],
    /// What the weights are relative to.
    pub(super) reference: f32,
    /// In even lanes the first four words of its annotation, in odd ones the next four.
    pub(super) bounds: UVec4,
}

/// What a warp has gathered, and the blocks that wait.
#[derive(Clone, Copy)]
pub(super) struct Waiting {
    /// [`Gathered`] of the rows, [warps, 8, 20]: a lane has five words after each other.
    gathered: Shared<f32>,
    /// How many blocks wait.
    count: u32,
    memory: Shared<f32>,
}

impl Waiting {
    /// Of `memory` [warps, [`WORDS`]].
    #[inline(always)]
    pub(super) fn new(gathered: Shared<f32>, memory: Shared<f32>) -> Self {
        Waiting { gathered, count: 0, memory }
    }

    /// No block so far.
    #[simt::device]
    pub(super) fn begin(&self, reference: f32) {
        let first = Gathered::OF_LANE * thread::thread_idx_x();
        unroll!(for i in 0..5 {
            self.gathered.store(first + i as u32, 0.0);
        });
        let (row, q) = (warp::lane_id() >> 2, warp::lane_id() & 3);
        if q == 0 {
            self.memory.store(first_word() + REFERENCES + row, reference);
        }
    }

    /// Whether there is no room for another one.
    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.count == WAITING
    }

    /// Whether any block waits.
    #[inline(always)]
    pub(super) fn any(&self) -> bool {
        self.count != 0
    }

    /// Four words of block `i`, row `row`, behind `part`: where eight lanes that read two rows of four blocks
    /// meet in no bank.
    #[inline(always)]
    fn place(&self, part: u32, i: u32, row: u32) -> u32 {
        first_word() + part + BLOCK * i + 4 * (row ^ (2 * i))
    }

    /// Leaves a block: `sum` and `own` are what the lane's four weights add to [`Moments`].
    #[simt::device]
    pub(super) fn leave(&mut self, sum: f32, own: [f32; 3], of: Visited, lane: u32) {
        let (row, q) = (lane >> 2, lane & 3);
        // Three exchanges give each of the four lanes one sum.
        let (odd, upper) = (q & 1 != 0, q & 2 != 0);
        let [sized, squares, sized_squares] = own;
        let (kept, away) = if odd {
            ([sized, sized_squares], [sum, squares])
        } else {
            ([sum, squares], [sized, sized_squares])
        };
        let pair = [0, 1].map(|i| kept[i] + warp_shuffle_xor(FULL_MASK, away[i], 1, 32));
        let (kept, away) = if upper { (pair[1], pair[0]) } else { (pair[0], pair[1]) };
        let moment = kept + warp_shuffle_xor(FULL_MASK, away, 2, 32);
        let flag = |is: bool, flag: u32| if is { flag } else { 0 };
        let flags =
            flag(of.exact[0], EXACT_KEYS) | flag(of.exact[1], EXACT_VALUES) | flag(of.trailing, TRAILING);
        // Chosen twice, not by a table of jumps.
        let place = f32::from_bits(of.index | flags);
        let [low, high] =
            [[of.sums[0], of.sums[1]], [of.reference, place]].map(|[a, b]| if odd { b } else { a });
        let known = if upper { high } else { low };
        self.memory.store(self.place(0, self.count, row) + q, moment);
        self.memory.store(self.place(SCORES, self.count, row) + q, known);
        if lane < 2 {
            let at = first_word() + ANNOTATIONS + BOUNDS * self.count + 4 * lane;
            self.memory.store_vector(at, of.bounds);
        }
        self.count += 1;
    }

    /// Adds up what waits, relative to `reference`, the row's, which is no lower than it was.
    #[simt::device]
    pub(super) fn add_up<const D: usize>(
        &mut self,
        query: &Query,
        reference: f32,
        thresholds: Thresholds,
        notes: &Notes,
        lane: u32,
    ) {
        sync_warp(FULL_MASK);
        let (row, q) = (lane >> 2, lane & 3);
        let mut own = Gathered::NONE;
        if q < self.count {
            let moments: Vec4 = self.memory.load_vector(self.place(0, q, row));
            let [x, of_keys, before, place] =
                self.memory.load_vector::<Vec4>(self.place(SCORES, q, row)).to_array();
            let first = first_word() + ANNOTATIONS + BOUNDS * q;
            let words: [UVec4; 2] = [0, 4].map(|at| self.memory.load_vector(first + at));
            let annotation: Annotation = bytemuck::cast([words[0], words[1], UVec4::ZERO]);
            let moments = Moments::new(moments.to_array());
            let place = place.to_bits();
            let delta = (place & EXACT_KEYS == 0).then(|| query::delta::<f16, D>(query, x, annotation));
            if notes.writes && place & TRAILING == 0 {
                let index = place & (TRAILING - 1);
                notes.store(index, lane, Record::new(moments.mass, before, delta.unwrap_or(0.0), annotation));
            }
            let by_chance = thresholds.log_odds > 0.0;
            let noise = if by_chance {
                delta.map(|delta| {
                    Noise::of_keys::<D>(query, of_keys, delta, thresholds.deviations, annotation)
                })
            } else {
                None
            };
            let moments = moments.times(exp2_nonpositive(before - reference));
            let bounds = Bounds::of(annotation, delta, place & EXACT_VALUES == 0, by_chance);
            own = Gathered::of_block(moments, noise, bounds);
        }
        let four = over_lanes(own.words(), q);
        let last = first_word() + REFERENCES + row;
        let factor = exp2_nonpositive(self.memory.load(last) - reference);
        let square = factor * factor;
        // As `Gathered::merged` of each of the lane's words, of which the fourth is a sum of weights in two
        // lanes and one of squares in the others.
        let first = Gathered::OF_LANE * bits::renewed(thread::thread_idx_x());
        let [a, b, largest, c, d] = [0, 1, 2, 3, 4].map(|i| self.gathered.load(first + i));
        let words = [
            fma(a, factor, four[0]),
            fma(b, factor, four[1]),
            max(largest, four[2]),
            fma(c, if q < 2 { factor } else { square }, four[3]),
            fma(d, square, four[4]),
        ];
        unroll!(for i in 0..5 {
            self.gathered.store(first + i as u32, words[i]);
        });
        sync_warp(FULL_MASK);
        if q == 0 {
            self.memory.store(last, reference);
        }
        self.count = 0;
    }
}

/// The warp's first word, made anew each time: registers are short.
#[simt::device]
fn first_word() -> u32 {
    bits::renewed(thread::thread_idx_x()) / 32 * WORDS
}

/// The words of four lanes over all of them, five to each.
#[simt::device]
fn over_lanes(words: [f32; 20], q: u32) -> [f32; 5] {
    let (odd, upper) = (q & 1 != 0, q & 2 != 0);
    let mut ten = [0f32; 10];
    unroll!(for i in 0..10 {
        let (low, high) = (words[i], words[i + 10]);
        let (kept, away) = if upper { (high, low) } else { (low, high) };
        ten[i] = Gathered::both(i as u32, kept, warp_shuffle_xor(FULL_MASK, away, 2, 32));
    });
    let mut five = [0f32; 5];
    unroll!(for i in 0..5 {
        let (low, high) = (ten[i], ten[i + 5]);
        let (kept, away) = if odd { (high, low) } else { (low, high) };
        five[i] = Gathered::both(i as u32, kept, warp_shuffle_xor(FULL_MASK, away, 1, 32));
    });
    five
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_has_one_largest_word_and_knows_its_squares() {
        for word in 0..Gathered::WORDS {
            let (lane, i) = (word / Gathered::OF_LANE, word % Gathered::OF_LANE);
            assert_eq!(Gathered::is_largest(word), i == 2, "{word}");
            assert_eq!(Gathered::is_square(word), i == 4 || i == 3 && lane >= 2, "{word}");
        }
    }
}
