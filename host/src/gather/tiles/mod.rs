//! Gather over codes: keys in 8 bits and values in 4, of which steps read a constant number.
//!
//! Blocks are chosen by the bounds of the original keys, as ever. What a step then reads of them are the
//! tiles that `int8-int4` keeps (`kernels_gpu::certified::layout`), half of the bytes in the compact layout;
//! the block at the end that is not full is read in 16 bits. No kernel is new: a choice is a block table of
//! each KV head, and the pass over tiles takes one, each KV head being a sequence of its own.
//!
//! Two errors add up: what is left out, of which nothing is known (`audit` is not for codes), and that of the
//! codes, which is the one of `int8-int4` over the tokens that are kept.
//!
//! With `:certified` blocks are chosen by sketches of the original keys, and both errors have one bound
//! ([`SketchedCodes`]): the pass over tiles makes certificates, and [`Plan`](super::sketch::Plan) takes them
//! in.

mod cache;
mod plan;
mod sketched;
mod workload;

pub use cache::{ByBounds, CodedCache, OverCodes, TiledCache};
pub use plan::{TiledElement, TiledPlan};
pub use sketched::{BySketches, SketchedCodes};
pub(super) use workload::open;

use super::{Error, Ranking, Result, Support, is_certified};
use crate::certified::{Layout, TileLayout};
use crate::kv::Selection;
use kernels_gpu::attention::BLOCK_TOKENS;

/// The option, and its value that asks for this.
pub(super) const OPTION: &str = "tiles";
pub(super) const CODES: &str = "int8-int4";

/// Whether a selection asks for codes.
pub(super) fn asked(selection: &Selection) -> bool {
    selection.word(OPTION, "") == CODES
}

/// Whether a selection asks for codes with nothing that there is for originals alone.
///
/// # Errors
/// [`Error::Tiles`], [`Error::TilesDense`].
pub(super) fn check(selection: &Selection) -> Result<()> {
    if !asked(selection) {
        return Ok(());
    }
    let dense = Support::exact_layers(selection) > 0;
    let given = ["staging", "audit", "score", "list", "ranks", "dense"]
        .into_iter()
        .filter(|option| *option != "dense" || dense)
        .find(|option| selection.value(option).is_some());
    match given {
        // It says itself what does not go with it.
        _ if is_certified(selection) => Ok(()),
        Some(option) => Err(Error::Tiles { option }),
        // Of a preset.
        None if dense => Err(Error::TilesDense),
        None => Ok(()),
    }
}

/// Bytes that a step reads of a KV head.
pub(super) fn step_bytes(selection: &Selection, head_dim: u32, tokens: u64) -> f64 {
    let (support, score) = (Support::of(selection), Ranking::of(selection, head_dim, true).score);
    let originals = super::step_bytes(support, score, head_dim, tokens);
    let kept = f64::from(support.kept(tokens.min(super::MOST_TOKENS.into()) as u32));
    originals - kept * (f64::from(4 * head_dim) - token_bytes(head_dim))
}

/// Bytes of a token's codes of a KV head.
pub(super) fn token_bytes(head_dim: u32) -> f64 {
    f64::from(TileLayout::new(head_dim, Layout::Compact).bytes) / f64::from(BLOCK_TOKENS)
}
