//! The shared memory of [`carry`](fn@super::carry).

use super::claim::{Claim, LeanBare, LeanCertified};
use super::gather::Gathered;
use super::list::Lookup;
use super::sight;
use super::waiting;
use crate::attention::{Adding, KeyTile, MAX_PARTS, ROWS};
use crate::certified::finish::Ends;
use crate::certified::lists::STARTS;
use crate::certified::parts::MAX_BLOCKS;
use crate::certified::pass::{PassLayout, pass_layout_in, stages, warps_of};
use crate::certified::tile::Tile;
use half::f16;
use simt::{Shared, SharedPlan};

/// Splits of which what they have gathered is brought to shared memory: more of it would leave less room for
/// their outputs, which at batch 1 shall be added up in one go.
pub(super) const SPLITS_AT_HAND: u32 = 40;

/// Splits whose outputs there is room for at the end: those of a sequence of four KV heads are all there
/// then.
const AT_ONCE: u32 = 33;

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct CarriedLayout {
    pub(super) pass: PassLayout,
    pub(super) ends: Ends,
    /// What all splits have gathered, if they are not too many, [`EIGHT`](Gathered::EIGHT) words of each: in
    /// the rings' memory too.
    pub(super) splits: Shared<f32>,
    /// Where each part's list starts among all entries, and how many there are.
    pub(super) starts: Shared<u32>,
    /// A bit for each block of the split that the list has.
    pub(super) listed: Shared<u32>,
    /// Each warp's first entry, [warps, 8].
    pub(super) ahead: Shared<u32>,
    /// What [`Chain`](crate::attention::Chain) says of the step's sums and of the dense rung's: worked out
    /// while tiles are on their way.
    pub(super) chains: Shared<u32>,
    /// Entries whose keys are promoted, those whose values are, and whether K_max was raised for them.
    pub(super) promoted: Shared<u32>,
    /// Of the warps, [warps, 8, 20]; at the end of the rows, [8, 20].
    pub(super) gathered: Shared<f32>,
    /// Blocks that wait for their part of the sums: [warps, [`WORDS`](waiting::WORDS)]; nothing where nothing
    /// is certified.
    pub(super) waiting: Shared<f32>,
    /// Blocks that the warps promote on sight, [warps, [`WORDS`](sight::WORDS)]; nothing where nothing
    /// is certified.
    pub(super) sighted: Shared<u32>,
    pub(super) last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory of an instance.
pub const fn carried_layout<const D: usize, C: Claim>() -> CarriedLayout {
    let mut plan = SharedPlan::new();
    // In lean rings as many as they have room for.
    let adding = Adding::words::<D>(MAX_PARTS, AT_ONCE) + SPLITS_AT_HAND * Gathered::EIGHT;
    let pass = pass_layout_in::<f16, D, C>(&mut plan, if C::LEAN { 0 } else { adding });
    // The rings' memory again.
    let mut over = SharedPlan::new();
    let splits = over.array(SPLITS_AT_HAND * Gathered::EIGHT);
    let adding = Adding::over::<D>(&mut over, MAX_PARTS, 4 * pass.ring.len());
    let squares = plan.array(ROWS * 32);
    let totals = plan.array(ROWS);
    let ends = Ends { adding, squares, totals };
    let starts = plan.array(STARTS);
    let listed = plan.array(MAX_BLOCKS / 32);
    let ahead = plan.array(warps_of::<C>(D as u32) * Lookup::WORDS);
    let chains = plan.array(4);
    let promoted = plan.array(3);
    let gathered = plan.array(warps_of::<C>(D as u32) * Gathered::EIGHT);
    let waiting = plan.array(if C::CERTIFIES { warps_of::<C>(D as u32) * waiting::WORDS } else { 0 });
    let sighted = plan.array(if C::CERTIFIES { warps_of::<C>(D as u32) * sight::WORDS } else { 0 });
    let last = plan.array(1);
    CarriedLayout {
        pass,
        ends,
        splits,
        starts,
        listed,
        ahead,
        chains,
        promoted,
        gathered,
        waiting,
        sighted,
        last,
        bytes: plan.bytes(),
    }
}

// What is listed is told apart in stages that are asked for ahead, and a warp's ring has room for two
// originals.
const _: () = assert!(stages::<LeanCertified>(64) > 1 && stages::<LeanCertified>(128) > 1);
const _: () = assert!(KeyTile::<64>::WORDS <= Tile::<f16, 64>::WORDS);
const _: () = assert!(KeyTile::<128>::WORDS <= Tile::<f16, 128>::WORDS);
const _: () = assert!(carried_layout::<64, LeanCertified>().bytes <= 99 << 10);
const _: () = assert!(carried_layout::<64, LeanBare>().bytes <= 99 << 10);
const _: () = assert!(carried_layout::<128, LeanBare>().bytes <= 99 << 10);
const _: () = assert!(carried_layout::<128, LeanCertified>().bytes <= 99 << 10);
