//! Blocks chosen by a sketch of every key, and a bound on the mass of what is left out.
//!
//! | kernel | what it does |
//! |---|---|
//! | [`sketch`](fn@sketch) | writes keys in 4 or 8 bits as tokens come, with what bounds their errors |
//! | [`scan`](fn@scan) | bounds the mass of every block for every query head, decides what is kept |
//! | [`settle`](fn@settle) | bounds each head's error, sends those over their budget to the dense rung |
//!
//! Between the last two, and after them for the heads that `settle` names, attention is that of
//! [`dense`](crate::attention::dense) over a block table.

mod bound;
mod decide;
mod scanning;
mod settling;
mod tile;
mod write;

pub use bound::delta;
pub use decide::{MASS_BINS, SHARE, Skipped, Whole, bin_of, edge, heads_of, in_units, level_of, units};
pub use scanning::{
    CODE_UNIT, Deal, Norms, SCAN_THREADS, ScanShape, about, joined, mass_above, raised, scan, scan_bytes,
    scan_parts,
};
pub use settling::{Facts, SETTLE_THREADS, SettleShape, Verdict, settle, settle_bytes, verdict};
pub use tile::{Annotation, channel, code, code_word, code_words, error, largest_code, place, sketch_words};
pub use write::{SKETCH_LANES, SketchShape, sketch, sketch_bytes};
