//! The shared memory of attention.

use super::book::{Book, books};
use crate::attention::{Adding, MAX_PARTS, PartialRow, ROWS, combined_rows, warps};
use simt::{Shared, SharedPlan};

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct Layout<const K: u32, const V: u32> {
    pub(super) key_book: Book<K, true>,
    pub(super) value_book: Book<V, false>,
    /// The queries, transformed, [8, D].
    pub(super) queries: Shared<u16>,
    /// The same as integers: of each row the high bytes, then the low ones, [8, 2, D].
    pub(super) integers: Shared<u8>,
    /// The largest elements of the rows.
    pub(super) largest: Shared<f32>,
    /// In the codebooks' place, when they are done with: Σ p·v of each warp, [warps, 8, D].
    pub(super) outputs: Shared<f32>,
    /// There too: where parts are added up.
    pub(super) adding: Adding,
    /// References and sums, [warps, 8].
    pub(super) rows: Shared<PartialRow>,
    /// Whether this block came last.
    pub(super) last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Words that the results of the warps, and a few parts, take.
const fn result_words<const D: usize>() -> u32 {
    let (outputs, adding) = (warps(D as u32) * ROWS * D as u32, Adding::words::<D>(MAX_PARTS, 4));
    if outputs > adding { outputs } else { adding }
}

/// Lays out the shared memory of an instance.
pub const fn layout<const D: usize, const K: u32, const V: u32>() -> Layout<K, V> {
    let mut plan = SharedPlan::new();
    let (key_book, value_book) = books::<K, V>(&mut plan);
    if plan.bytes() < 4 * result_words::<D>() {
        let more: Shared<u32> = plan.array(result_words::<D>() - plan.bytes() / 4);
        let _ = more;
    }
    let outputs = SharedPlan::new().array(warps(D as u32) * ROWS * D as u32);
    let adding = Adding::over::<D>(&mut SharedPlan::new(), MAX_PARTS, plan.bytes());
    let queries = plan.array(ROWS * D as u32);
    let integers = plan.array(2 * ROWS * D as u32);
    let largest = plan.array(ROWS);
    let rows = plan.array(combined_rows(warps(D as u32)));
    let last = plan.array(1);
    Layout {
        key_book,
        value_book,
        queries,
        integers,
        largest,
        outputs,
        adding,
        rows,
        last,
        bytes: plan.bytes(),
    }
}
