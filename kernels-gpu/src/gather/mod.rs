//! Attention to a constant number of keys, after Alsufi and Scott, *Attention Pays Its Bill* (2026).
//!
//! | kernel | what it does |
//! |---|---|
//! | [`fold`](fn@fold) | keeps the bounds of each gather-block as tokens are appended |
//! | [`squeeze`](fn@squeeze) | keeps them in 8 bits, rounded outward |
//! | [`average`](fn@average) | keeps their mean keys instead |
//! | [`select`](fn@select) | scores the distant blocks, takes the k best, writes a table of what is kept |
//! | [`score`](fn@score) | scores the distant blocks |
//! | [`attend_chosen`](fn@attend_chosen) | ranks what has been scored, and attends to what is kept |
//! | [`place`](fn@place) | keys and values in the host's memory: where on the GPU what is kept comes to be |
//! | [`fetch`](fn@fetch) | brings it there, and a new token home |
//! | [`carry`](fn@carry) | a prompt's tokens from one to the other |
//! | [`draw`](fn@draw) | which heads of a step are held against all of their sequence |
//! | [`audit`](fn@audit) | what these left out, and how far off they are |
//!
//! [`sketch`] has the kernels that choose by a sketch of every key instead, and bound what is left out.
//!
//! The attention is [`attend`](fn@crate::attention::dense::attend) over that table: a pool [blocks, kv_heads,
//! 16, D] is also a pool [blocks · kv_heads, 1, 16, D], in which each KV head is a sequence of its own, with
//! entries `block · kv_heads + head`.
//!
//! # What is kept
//! A sequence of n gather-blocks, the last one maybe not full: block 0 (the sink), the last `local` blocks,
//! and of those between them the `k` with the highest scores; all of them where there are no more. Of equal
//! scores the lower index is taken. Blocks between are ranked without the sink and the local ones, so no
//! block is there twice. There is a list for each KV head, by the largest score of its query heads, or one
//! for each query head.

mod auditing;
mod bounds;
mod choice;
mod chosen;
mod codes;
mod kept;
mod listing;
mod means;
mod rule;
mod score_kernel;
mod scoring;
mod sieve;
pub mod sketch;
mod staging;

mod top;
mod transfer;

pub use auditing::{AUDIT_THREADS, AuditShape, Audited, DRAW_THREADS, audit, draw, skipped_mass};
pub use bounds::{
    Extremes, FOLD_LANES, FoldShape, TILE_BLOCKS, fold, fold_bytes, mean_word, tile_words, word,
};
pub use choice::{SELECT_THREADS, SelectShape, parts_for, select, select_bytes};
pub use chosen::{CHOSEN_THREADS, ChosenShape, MOST_LISTED, attend_chosen, chosen_bytes};
pub use codes::{
    Quad, SQUEEZE_LANES, code_word, code_words, codes, largest, restored, scale_of, scale_word, squeeze,
    squeeze_bytes,
};
pub use means::{average, mean};
pub use rule::{Extent, Rule};
pub use score_kernel::{SCORE_THREADS, score, score_parts, score_wide};
pub use scoring::{BY_BOUNDS, BY_CODES, BY_MEANS, ordered, score_of, signs, summary_words};
pub use sieve::maxima_words;
pub use staging::{MOST_SLOTS, PLACE_THREADS, StagingShape, place, place_bytes};
pub use transfer::{CarryShape, FETCH_THREADS, carry, fetch, fetch_parts};

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    [fold::INSTANCES, squeeze::INSTANCES, average::INSTANCES, select::INSTANCES]
        .into_iter()
        .chain([score::INSTANCES, score_wide::INSTANCES, attend_chosen::INSTANCES])
        .chain([place::INSTANCES, fetch::INSTANCES, carry::INSTANCES, draw::INSTANCES, audit::INSTANCES])
        .chain([
            sketch::sketch::INSTANCES,
            sketch::scan::INSTANCES,
            sketch::scan_lean::INSTANCES,
            sketch::decide::INSTANCES,
            sketch::settle::INSTANCES,
        ])
        .flatten()
}
