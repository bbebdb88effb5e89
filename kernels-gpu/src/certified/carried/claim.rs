//! What `carry` says of its output.

use super::super::pass::{Rings, warps_of};
use super::super::policy::Thresholds;

/// Whether a pass certifies what it returns. One that does not has machine code of its own, without lists and
/// sums for bounds: less code has to come from memory, where each launch finds it gone from the caches
/// (docs/experiments/046-a-pass-without-certificates.md).
pub trait Claim: Rings {
    /// Whether there are certificates, and with them lists.
    const CERTIFIES: bool;

    /// What a launch asks for, as far as the claim goes: the compiler then knows what is never asked for.
    #[inline(always)]
    fn narrowed(thresholds: Thresholds, mode: u32) -> (Thresholds, u32) {
        if Self::CERTIFIES {
            (Thresholds { certify: 1, ..thresholds }, mode)
        } else {
            (Thresholds { certify: 0, log_odds: 0.0, ..thresholds }, 0)
        }
    }
}

/// INT8/INT4 attention alone.
pub struct Bare;

impl Claim for Bare {
    const CERTIFIES: bool = false;
}

/// Attention with certificates, by a list where there is one.
pub struct Certified;

impl Claim for Certified {
    const CERTIFIES: bool = true;
}

/// [`Bare`] in 99 KiB of shared memory, with the same bits.
pub struct LeanBare;

impl Claim for LeanBare {
    const CERTIFIES: bool = false;
}

/// [`Certified`] in 99 KiB of shared memory, with the same bits.
pub struct LeanCertified;

impl Claim for LeanCertified {
    const CERTIFIES: bool = true;
}

impl Rings for Bare {
    const LEAN: bool = false;
    const TWELVE: bool = true;
}

impl Rings for Certified {
    const LEAN: bool = false;
    const TWELVE: bool = true;
}

impl Rings for LeanBare {
    const LEAN: bool = true;
    const TWELVE: bool = true;
}

impl Rings for LeanCertified {
    const LEAN: bool = true;
    const TWELVE: bool = true;
}

/// Warps of a block of [`carry`](fn@super::carry): as many whatever is claimed, so that outputs have the same
/// bits with a certificate and without.
#[inline(always)]
pub const fn carried_warps(head_dim: u32) -> u32 {
    warps_of::<Certified>(head_dim)
}

const _: () =
    assert!(carried_warps(64) == warps_of::<Bare>(64) && carried_warps(64) == warps_of::<LeanBare>(64));
