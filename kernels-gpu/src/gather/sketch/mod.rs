//! Blocks chosen by a sketch of every key, and a bound on the mass of what is left out.
//!
//! | kernel | what it does |
//! |---|---|
//! | [`sketch`](fn@sketch) | writes keys in 4 or 8 bits as tokens come, with what bounds their errors |
//! | [`scan`](fn@scan) | bounds the mass of every block for every query head |
//! | [`scan_lean`](fn@scan_lean) | the same in 99 KiB of shared memory |
//! | [`decide`](fn@decide) | decides what is kept, and sums up what is not |
//! | [`settle`](fn@settle) | bounds each head's error, sends those over their budget to the dense rung |
//!
//! Between the last two, and after them for the heads that `settle` names, attention is that of
//! [`dense`](crate::attention::dense) over a block table; or, between them, that of
//! [`carry`](fn@crate::certified::carry) over codes, with a certificate.

mod bound;
mod counting;
mod cutting;
mod deciding;
mod leaving;
mod masses;
mod products;
mod scanning;
mod settling;
mod sharing;
mod tile;
mod write;

pub use bound::delta;
pub use counting::{
    Edges, MASS_BINS, SHARE, STEPS, Shares, Skipped, Whole, bin_of, heads_of, in_units, inverse_of, kinds_of,
    level_of, octave_unit, ratio_of, reference_of, scale_of, step_of, top_of, unit_of, units,
};
pub use deciding::{DECIDE_THREADS, decide, decide_bytes, decide_parts};
pub use masses::{estimated, joined, mass_above, most_of, moved};
pub use products::code_unit;
pub use scanning::{
    Deal, Norms, SCAN_THREADS, ScanShape, Total, scan, scan_bytes, scan_lean, scan_lean_bytes, scan_parts,
};
pub use settling::{Codes, Facts, SETTLE_THREADS, SettleShape, Verdict, settle, settle_bytes, verdict};
pub use tile::{
    Annotation, TILE_TOKENS, channel, code, code_word, code_words, error, largest_code, place, raised_by,
    sketch_words, tiles_of,
};
pub use write::{SKETCH_LANES, SketchShape, sketch, sketch_bytes};
