//! The most likely token.
//!
//! # Mathematics
//! The index of the largest logit; of equal ones (−0 equals +0) the lowest. NaN loses to every number; with
//! nothing but NaN the choice is token 0.
//!
//! # Work split and bytes
//! One block of 1024 threads a sequence; 4·vocabulary bytes read. A logit and its index are one 64-bit number
//! that orders as wanted ([`order_key`]), so the maximum does not depend on any order.

use simt::warp::{self, FULL_MASK, warp_shuffle_xor};
use simt::{Global, GlobalMut, Shared, SharedPlan, kernel, thread, unroll};

/// Threads of a block of both choosing kernels.
pub const CHOICE_THREADS: u32 = 1024;

/// A number that is larger for a larger logit and, among equal ones, for a lower index.
#[inline(always)]
pub fn order_key(logit: f32, index: u32) -> u64 {
    let bits = if logit == 0.0 { 0 } else { logit.to_bits() };
    let ordered = if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits };
    let ordered = if logit.is_nan() { 0 } else { ordered };
    (ordered as u64) << 32 | !index as u64
}

/// The token of an [`order_key`].
#[inline(always)]
pub(super) fn key_index(key: u64) -> u32 {
    if key >> 32 == 0 { 0 } else { !(key as u32) }
}

/// The largest key of a sequence's logits, in every thread. Ends with all threads past the last read of
/// `exchanged`'s words.
#[simt::device]
pub(super) fn largest_key(logits: Global<f32>, start: usize, vocabulary: u32, exchanged: Shared<u64>) -> u64 {
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    // The first of this thread's largest logits. Of −∞ and NaN alone none is found so, and keys decide.
    let (mut best, mut at) = (f32::NEG_INFINITY, u32::MAX);
    let mut i = t;
    while i < vocabulary {
        let mut several = [0f32; 16];
        // Past the end the last one again: loads without a condition are under way together.
        unroll!(for j in 0..16 {
            several[j] = logits.load(start + (i + j as u32 * CHOICE_THREADS).min(vocabulary - 1) as usize);
        });
        unroll!(for j in 0..16 {
            if several[j] > best {
                (best, at) = (several[j], (i + j as u32 * CHOICE_THREADS).min(vocabulary - 1));
            }
        });
        i += 16 * CHOICE_THREADS;
    }
    let mut largest = if at == u32::MAX { 0 } else { order_key(best, at) };
    if at == u32::MAX {
        i = t;
        while i < vocabulary {
            largest = largest.max(order_key(logits.load(start + i as usize), i));
            i += CHOICE_THREADS;
        }
    }
    unroll!(for i in 0..5 {
        largest = largest.max(warp_shuffle_xor(FULL_MASK, largest, 1 << i, 32));
    });
    if lane == 0 {
        exchanged.store(t / 32, largest);
    }
    thread::sync_threads();
    largest = exchanged.load(lane);
    unroll!(for i in 0..5 {
        largest = largest.max(warp_shuffle_xor(FULL_MASK, largest, 1 << i, 32));
    });
    thread::sync_threads();
    largest
}

/// Writes the choice where the next step looks: `tokens` \[sequences\], and `positions` \[sequences\] go up
/// by one.
#[simt::device]
pub(super) fn tell(tokens: GlobalMut<u32>, positions: GlobalMut<u32>, sequence: usize, token: u32) {
    tokens.store(sequence, token);
    positions.store(sequence, positions.load(sequence).wrapping_add(1));
}

/// The most likely token of each sequence: `logits` [sequences, vocabulary]. One block of [`CHOICE_THREADS`]
/// threads a sequence, 256 bytes of shared memory.
#[kernel(system = model, max_threads = 1024, overlaps)]
pub fn choose_largest(
    logits: Global<f32>,
    tokens: GlobalMut<u32>,
    positions: GlobalMut<u32>,
    vocabulary: u32,
) {
    let sequence = thread::block_idx_x() as usize;
    let mut plan = SharedPlan::new();
    let exchanged = plan.array(32);
    let key = largest_key(logits, sequence * vocabulary as usize, vocabulary, exchanged);
    if thread::thread_idx_x() == 0 {
        tell(tokens, positions, sequence, key_index(key));
    }
}
