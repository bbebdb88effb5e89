//! What the lanes of a warp exchange.

use super::word;
use crate::mix;
use simt::warp::{self, Word};
use simt::{GlobalMut, Shared, SharedPlan, kernel, thread};

/// Source lanes and distances of the shuffle probe.
pub const PARAMS: u32 = 34;
/// Words that each thread of the shuffle probe writes.
pub const SHUFFLE_WORDS: u32 = 4 * PARAMS;
/// Rounds of the vote and reduction probes.
pub const ROUNDS: u32 = 8;
/// Words that each thread of the vote probe writes.
pub const VOTE_WORDS: u32 = 3 * ROUNDS;
/// Words that each thread of the reduction probe writes.
pub const REDUCE_WORDS: u32 = 10 * ROUNDS;

/// The lanes of this lane's group of `width` lanes.
#[inline(always)]
fn group(width: u32) -> u32 {
    (u32::MAX >> (32 - width)) << (warp::lane_id() & !(width - 1))
}

/// Every shuffle, over all source lanes and distances, in groups of `width` lanes. With `partial` 0 all lanes
/// are in the mask, else only those of the own group.
#[kernel(system = probe, instances(u32, i32, f32, u64, i64, f64))]
pub fn shuffles<T: Word>(out: GlobalMut<u64>, width: u32, partial: u32) {
    let i = thread::index_1d();
    let value = T::from_bits64(mix(i as u64));
    let mask = if partial == 0 { warp::FULL_MASK } else { group(width) };
    for param in 0..PARAMS {
        // Between groups an exclusive or may read downwards: only where all lanes take part.
        let other = if partial == 0 { param } else { param & (width - 1) };
        let at = i * SHUFFLE_WORDS as usize + 4 * param as usize;
        out.store(at, warp::warp_shuffle_idx(mask, value, param, width).to_bits64());
        out.store(at + 1, warp::warp_shuffle_up(mask, value, param, width).to_bits64());
        out.store(at + 2, warp::warp_shuffle_down(mask, value, param, width).to_bits64());
        out.store(at + 3, warp::warp_shuffle_xor(mask, value, other, width).to_bits64());
    }
}

/// Every vote in groups of `width` lanes, over predicates that few to all lanes fulfil.
#[kernel(system = probe)]
pub fn votes(out: GlobalMut<u32>, width: u32, seed: u32) {
    let i = thread::index_1d();
    let mask = group(width);
    for round in 0..ROUNDS {
        let predicate = word(seed, i as u32, round) & 7 < round + 1;
        let at = i * VOTE_WORDS as usize + 3 * round as usize;
        out.store(at, warp::warp_vote_ballot(mask, predicate));
        out.store(at + 1, warp::warp_vote_all(mask, predicate) as u32);
        out.store(at + 2, warp::warp_vote_any(mask, predicate) as u32);
    }
}

/// Every reduction in groups of `width` lanes; the float sum over whole warps.
#[kernel(system = probe, args = votes)]
pub fn reductions(out: GlobalMut<u32>, width: u32, seed: u32) {
    let i = thread::index_1d();
    let mask = group(width);
    for round in 0..ROUNDS {
        let value = word(seed, i as u32, round);
        let at = i * REDUCE_WORDS as usize + 10 * round as usize;
        out.store(at, warp::warp_reduce_add_u32(mask, value));
        out.store(at + 1, warp::warp_reduce_min_u32(mask, value));
        out.store(at + 2, warp::warp_reduce_max_u32(mask, value));
        out.store(at + 3, warp::warp_reduce_add_i32(mask, value as i32) as u32);
        out.store(at + 4, warp::warp_reduce_min_i32(mask, value as i32) as u32);
        out.store(at + 5, warp::warp_reduce_max_i32(mask, value as i32) as u32);
        out.store(at + 6, warp::warp_reduce_and(mask, value | word(seed, round, 77)));
        out.store(at + 7, warp::warp_reduce_or(mask, value & word(seed, round, 78)));
        out.store(at + 8, warp::warp_reduce_xor(mask, value));
        // Exponents of 2^-32 to 2^31, both signs: the order of the additions shows in the bits.
        let float = f32::from_bits(value & 0x8fff_ffff | 0x3000_0000);
        out.store(at + 9, warp::warp_sum_f32(float).to_bits());
    }
}

/// The exchange probe's shared memory: one word for each of 1024 threads.
pub struct Layout {
    tile: Shared<u32>,
    /// Its size.
    pub bytes: u32,
}

/// Lays out the exchange probe's shared memory.
pub const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let tile = plan.array(1024);
    Layout { tile, bytes: plan.bytes() }
}

/// Lanes of a group hand words round through shared memory, ordered by warp barriers alone.
#[kernel(system = probe, args = votes)]
pub fn exchanges(out: GlobalMut<u32>, width: u32, seed: u32) {
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    let (mask, tile) = (group(width), layout().tile);
    let mut value = word(seed, i as u32, 0);
    for round in 0..ROUNDS {
        tile.store(t, value);
        warp::sync_warp(mask);
        let source = (t & !(width - 1)) | (t + round + 1) & (width - 1);
        value = value.rotate_left(5).wrapping_add(tile.load(source));
        out.store(i * ROUNDS as usize + round as usize, value);
        warp::sync_warp(mask);
    }
}

/// Threads of random lanes take places by one atomic for all that are together, and count each place: `taken`
/// holds the number of places, and then how often each was taken. Which lanes are together shows nowhere.
#[kernel(system = probe)]
pub fn together(taken: GlobalMut<u32>, seed: u32) {
    let (i, lane) = (thread::index_1d(), warp::lane_id());
    let random = word(seed, i as u32, 0);
    for round in 0..ROUNDS {
        if random >> round & 1 == 1 {
            let mask = warp::active_mask();
            let leader = mask.trailing_zeros();
            let mut first = 0;
            if lane == leader {
                first = taken.atomic_add(0, mask.count_ones());
            }
            let before = (mask & ((1 << lane) - 1)).count_ones();
            let place = warp::warp_shuffle_idx(mask, first, leader, 32) + before;
            taken.atomic_add(1 + place as usize, 1);
        }
    }
}
