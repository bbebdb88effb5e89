//! SplitMix64: random words that a seed and a number decide, on every machine the same.

/// How far apart the states of two numbers that follow each other are.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A 64-bit word that depends on every bit of `x`: what the generator makes of the state `x`.
#[inline(always)]
pub const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(STEP);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Number `index` of the generator that starts in the state `seed`: a counter, so that any part can be made
/// by any thread.
#[inline(always)]
pub const fn mixed(seed: u64, index: u64) -> u64 {
    mix(seed.wrapping_add(index.wrapping_mul(STEP)))
}
