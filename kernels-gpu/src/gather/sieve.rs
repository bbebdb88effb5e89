//! The best of many keys by few of them: exact, and in the order that [`Keys`] has.
//!
//! # Mathematics
//! Keys come in tiles of 16, of which the maxima are known. At least k keys are no smaller than the k-th
//! largest of maxima of disjoint sets, so none of the k best keys is smaller than that: the **floor**. What
//! is below it falls out unread, with its whole tile if the maximum is below. Of n keys in no particular
//! order, in g sets, some g·ln(g / (g − k)) are left: of 8,192 in 64 sets, k = 32, it is 44.
//!
//! The floor is found by counting for each maximum of 64 sets how many are ahead of it, or of up to 128 sets
//! if more are wanted; with so many wanted that these are too few, by [`Keys::cut`] over the tiles' maxima.
//! If it is of no use, or too much is left (equal keys by the thousand), all keys are ranked. Of up to 1,024
//! keys the 64 sets are of keys; of more than 1,024 tiles there are 128 sets. Each way gives the same list.
//!
//! # Work
//! By 64 sets: [`Sieve::quick`]. Else a thread has a tile: it reads 16 keys if they may be wanted. Prefix
//! sums over the block say where they go, so that their order stays. Up to 128 of them are ranked by
//! counting, each thread one; more by [`Keys`].

use super::bounds::TILE_BLOCKS;
use super::choice::SELECT_THREADS;
use super::top::{CACHED, Keys, Ranking};
use glam::UVec4;
use simt::warp::{self, FULL_MASK, warp_shuffle_up};
use simt::{GlobalMut, Shared, bits, thread, unroll};

const WARPS: u32 = SELECT_THREADS / 32;
/// The most sets whose maxima are ranked by counting, and the most keys.
const COUNTED: u32 = 128;
/// Where the names of what is left are in the shared memory of keys.
const NAMES: u32 = CACHED / 2;
/// Sets of which four threads have one each.
const SETS: u32 = SELECT_THREADS / 4;
/// Where the best ones are in the shared memory of keys, and where tiles are that may have some.
const SORTED: u32 = 1024;
const TILES: u32 = 2048;
/// The most that may be left: a gap ahead of the keys, and zeros behind them.
const MOST_LEFT: u32 = NAMES - 8;

/// Words of the maxima of a row of `tiles` tiles: the first is nobody's.
#[inline(always)]
pub const fn maxima_words(tiles: u32) -> u32 {
    (tiles + 1).next_multiple_of(4)
}

/// The keys of a row, and the maxima of their tiles.
#[derive(Clone, Copy)]
pub(super) struct Sieve {
    pub layout: Ranking,
    /// Not 0.
    pub keys: GlobalMut<u32>,
    /// Where the key of index 0 is, which does not count, at a multiple of four.
    pub first: usize,
    /// Past the last index.
    pub end: u32,
    /// The largest key that counts of each tile.
    pub maxima: GlobalMut<u32>,
    /// Ahead of the first tile's, at a multiple of four.
    pub first_maximum: usize,
    pub tiles: u32,
}

/// How many of `keys` before `end` are ahead of `own`, which is at `at`: larger, or equal with a lower index.
/// What is there up to a multiple of four is 0.
#[simt::device]
fn ahead(keys: Shared<u32>, end: u32, own: u32, at: u32) -> u32 {
    let (mut ahead, mut index) = (0, 0);
    while index < end {
        let four: UVec4 = keys.load_vector(index);
        let four = four.to_array();
        unroll!(for i in 0..4 {
            let first = index + (i as u32) < at;
            ahead += (four[i] > own || (first && four[i] == own)) as u32;
        });
        index += 4;
    }
    ahead
}

impl Sieve {
    /// Calls `put` with the place, from 0 on, and the index of each of the `wanted` largest keys, in the
    /// order of their indices; there are more keys than that, and one is wanted at least. The whole block
    /// calls it.
    #[simt::device]
    pub fn write(self, wanted: u32, put: impl Fn(u32, u32)) {
        if self.quick(wanted, &put) {
            return;
        }
        let floor = self.floor(wanted);
        let left = if floor > 0 { self.sift(floor) } else { u32::MAX };
        if left <= COUNTED {
            self.count_out(left, wanted, put);
            return;
        }
        let here = left <= MOST_LEFT;
        let end = if here { left + 1 } else { self.end };
        let names = self.layout.keys;
        let keys = Keys { layout: self.layout, keys: self.keys, first: self.first, end, here };
        let cut = keys.cut(wanted);
        keys.write(cut, |place, index| put(place, if here { names.load(NAMES + index) } else { index }));
    }

    #[simt::device]
    fn maximum(self, tile: u32) -> u32 {
        let at = self.first_maximum + 1 + tile as usize;
        self.maxima.load(at)
    }

    /// [`write`](Self::write) for few that are wanted, no more than three quarters of the sets: whether it
    /// could.
    ///
    /// Each thread has up to four items: keys, or where there are more than 1,024 the maxima of tiles. Four
    /// threads are a set, and nothing below the k-th largest of the 64 sets' maxima is among the best. What
    /// is left is put to shared memory in any order, and ranked by key and index, so that the order changes
    /// nothing. Each instruction runs a few times a launch and is not in the caches when it does: so there
    /// are few of them.
    #[simt::device]
    fn quick(self, wanted: u32, put: &impl Fn(u32, u32)) -> bool {
        let t = thread::thread_idx_x();
        let Ranking { keys, bins, told, .. } = self.layout;
        let direct = self.end <= 4 * SELECT_THREADS + 1;
        let items = if direct { self.end - 1 } else { self.tiles };
        let all = direct && items <= COUNTED;
        let sets = items.min(SETS);
        if !(all || items <= 4 * SELECT_THREADS && wanted <= sets / 4 * 3) {
            return false;
        }
        // The first 64 are in sets of their own, so that few make as many sets as there can be.
        let item = |i: usize| t / 4 + SETS * (t & 3) + SELECT_THREADS * i as u32;
        let mut most = [0u32; 4];
        unroll!(for i in 0..4 {
            let item = item(i);
            if item < items {
                let at = if direct { self.first } else { self.first_maximum } + 1 + item as usize;
                most[i] = if direct { self.keys.load(at) } else { self.maxima.load(at) };
            }
        });
        if t < 4 {
            told.store(t, (t == 0) as u32);
        }
        // What is behind the last one counts for nothing.
        if t < COUNTED + 8 {
            keys.store(t, 0);
            keys.store(NAMES + t, 0);
            keys.store(SORTED + t, u32::MAX);
        }
        if !all {
            let mut own = most[0].max(most[1]).max(most[2]).max(most[3]);
            own = own.max(warp::warp_shuffle_xor(FULL_MASK, own, 1, 32));
            own = own.max(warp::warp_shuffle_xor(FULL_MASK, own, 2, 32));
            if t & 3 == 0 {
                bins.store(t / 4, own);
            }
            thread::sync_threads();
            // A quarter of the sets each.
            let mut before = 0;
            unroll!(for i in 0..4 {
                let at = 4 * (t & 3) + 16 * i as u32;
                let four: UVec4 = bins.load_vector(at);
                let four = four.to_array();
                unroll!(for j in 0..4 {
                    let first = at + (j as u32) < t / 4;
                    before += (four[j] > own || (first && four[j] == own)) as u32;
                });
            });
            before += warp::warp_shuffle_xor(FULL_MASK, before, 1, 32);
            before += warp::warp_shuffle_xor(FULL_MASK, before, 2, 32);
            if t & 3 == 0 && before == wanted - 1 {
                told.store(0, own);
            }
        }
        thread::sync_threads();
        let floor = told.load(0);
        unroll!(for i in 0..4 {
            if most[i] >= floor {
                let item = item(i);
                let place = told.atomic_add(if direct { 2 } else { 1 }, 1);
                if !direct {
                    keys.store(TILES + place, item);
                } else if place < COUNTED {
                    keys.store(place, most[i]);
                    keys.store(NAMES + place, item + 1);
                }
            }
        });
        thread::sync_threads();
        if !direct {
            let tiles = told.load(1);
            let mut slot = t / TILE_BLOCKS;
            while slot < tiles {
                let (mut index, mut key) = ([0u32; 4], [0u32; 4]);
                unroll!(for i in 0..4 {
                    let slot = slot + i as u32 * (SELECT_THREADS / TILE_BLOCKS);
                    if slot < tiles {
                        index[i] = TILE_BLOCKS * keys.load(TILES + slot) + t % TILE_BLOCKS;
                        if index[i] >= 1 && index[i] < self.end {
                            key[i] = self.keys.load(self.first + index[i] as usize);
                        }
                    }
                });
                unroll!(for i in 0..4 {
                    if key[i] >= floor {
                        let place = told.atomic_add(2, 1);
                        if place < COUNTED {
                            keys.store(place, key[i]);
                            keys.store(NAMES + place, index[i]);
                        }
                    }
                });
                slot += 4 * (SELECT_THREADS / TILE_BLOCKS);
            }
            thread::sync_threads();
        }
        let left = told.load(2);
        if left > COUNTED {
            return false;
        }
        // Two threads a key.
        let (own, half) = (t / 2, 4 * (t & 1));
        let (key, name) = (keys.load(own), keys.load(NAMES + own));
        let (mut before, mut at) = (0, half);
        while at < left {
            let (four, names): (UVec4, UVec4) = (keys.load_vector(at), keys.load_vector(NAMES + at));
            let (four, names) = (four.to_array(), names.to_array());
            unroll!(for i in 0..4 {
                before += (four[i] > key || (four[i] == key && names[i] < name)) as u32;
            });
            at += 8;
        }
        before += warp::warp_shuffle_xor(FULL_MASK, before, 1, 32);
        if half == 0 && own < left && before < wanted {
            keys.store(SORTED + before, name);
        }
        thread::sync_threads();
        let name = keys.load(SORTED + own);
        let (mut place, mut at) = (0, half);
        while at < wanted {
            let four: UVec4 = keys.load_vector(SORTED + at);
            let four = four.to_array();
            unroll!(for i in 0..4 {
                place += (four[i] < name) as u32;
            });
            at += 8;
        }
        place += warp::warp_shuffle_xor(FULL_MASK, place, 1, 32);
        if half == 0 && own < wanted {
            put(place, name);
        }
        true
    }

    /// What none of the `wanted` best is below; 0 where that would leave too much.
    #[simt::device]
    fn floor(self, wanted: u32) -> u32 {
        let (t, Ranking { bins, told, .. }) = (thread::thread_idx_x(), self.layout);
        let width = self.tiles.div_ceil(COUNTED);
        let sets = bits::div_u32(self.tiles + width - 1, width);
        let worth = |sets: u32| wanted <= sets / 4 * 3;
        if self.tiles <= COUNTED {
            return 0;
        }
        if worth(sets) {
            if t < COUNTED {
                let (mut most, mut tile) = (0, t * width);
                let end = (tile + width).min(self.tiles);
                while tile < end {
                    most = most.max(self.maximum(tile));
                    tile += 1;
                }
                bins.store(t, most);
            }
            thread::sync_threads();
            if t < sets {
                let own = bins.load(t);
                if ahead(bins, sets, own, t) == wanted - 1 {
                    told.store(0, own);
                }
            }
            thread::sync_threads();
            told.load(0)
        } else if worth(self.tiles) {
            let (first, end) = (self.first_maximum, self.tiles + 1);
            let keys = Keys { layout: self.layout, keys: self.maxima, first, end, here: false };
            keys.cut(wanted).prefix
        } else {
            0
        }
    }

    /// Takes what is not below `floor` to shared memory, in order: keys from place 1 on, and their indices.
    /// How many these are; only [`MOST_LEFT`] are there.
    #[simt::device]
    fn sift(self, floor: u32) -> u32 {
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let Ranking { keys, warps, .. } = self.layout;
        let (mut before, mut start) = (0, 0);
        // The cut has read what it keeps there.
        thread::sync_threads();
        while start < self.tiles {
            let tile = start + t;
            let (mut marks, mut sixteen) = (0, [[0u32; 4]; 4]);
            if tile < self.tiles && self.maximum(tile) >= floor {
                let from = self.first + (TILE_BLOCKS * tile) as usize;
                let counts = |index: u32| {
                    let index = TILE_BLOCKS * tile + index;
                    index >= 1 && index < self.end
                };
                unroll!(for i in 0..4 {
                    let four: UVec4 = self.keys.load_vector(from + 4 * i);
                    sixteen[i] = four.to_array();
                });
                unroll!(for i in 0..4 {
                    unroll!(for j in 0..4 {
                        let stays = sixteen[i][j] >= floor && counts(4 * i as u32 + j as u32);
                        marks |= (stays as u32) << (4 * i + j);
                    });
                });
            }
            let own = marks.count_ones();
            let mut count = own;
            unroll!(for i in 0..5 {
                let others = warp_shuffle_up(FULL_MASK, count, 1 << i, 32);
                count += if lane >= 1 << i { others } else { 0 };
            });
            if lane == 31 {
                warps.store(warp, count);
            }
            thread::sync_threads();
            let mut place = 1 + before + count - own;
            unroll!(for w in 0..8 {
                let of_warp = warps.load(w as u32);
                place += if (w as u32) < warp { of_warp } else { 0 };
                before += of_warp;
            });
            unroll!(for i in 0..4 {
                unroll!(for j in 0..4 {
                    let bit = (4 * i + j) as u32;
                    let place = place + (marks & ((1 << bit) - 1)).count_ones();
                    if marks >> bit & 1 != 0 && place <= MOST_LEFT {
                        keys.store(place, sixteen[i][j]);
                        keys.store(NAMES + place, TILE_BLOCKS * tile + bit);
                    }
                });
            });
            // Before the next round tells.
            thread::sync_threads();
            start += SELECT_THREADS;
        }
        if t < 4 {
            let behind = before.min(MOST_LEFT) + 1 + t;
            keys.store(behind, 0);
            if t == 0 {
                keys.store(0, 0);
            }
        }
        thread::sync_threads();
        before
    }

    /// The `wanted` best of the `left` keys that are there, no more than [`COUNTED`].
    #[simt::device]
    fn count_out(self, left: u32, wanted: u32, put: impl Fn(u32, u32)) {
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let Ranking { keys, warps, .. } = self.layout;
        let mut taken = false;
        if t < left {
            taken = ahead(keys, left + 1, keys.load(1 + t), 1 + t) < wanted;
        }
        let ballot = warp::warp_vote_ballot(FULL_MASK, taken);
        if lane == 0 {
            warps.store(warp, ballot.count_ones());
        }
        thread::sync_threads();
        let mut place = (ballot & ((1 << lane) - 1)).count_ones();
        unroll!(for w in 0..8 {
            place += if (w as u32) < warp { warps.load(w as u32) } else { 0 };
        });
        if taken {
            put(place, keys.load(NAMES + 1 + t));
        }
    }
}

const _: () = assert!(SELECT_THREADS == 32 * WARPS && WARPS == 8, "sums over eight warps");
