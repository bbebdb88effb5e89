//! Published ways to quantize keys and values, in plain f32 and f64: what schemes are held against.
//!
//! They have no kernels and no cache, so that no text can be generated over them; `ferrokv diagnose` takes
//! them beside the schemes of the registry. Each counts all bytes that its storage would need, codes packed
//! as their bits say.

mod block_gtq;
mod kivi;
#[cfg(test)]
mod tests;

use crate::attention::rope::Pairing;
use crate::gtq::allocation::blocks;
use crate::gtq::groups::{Book, Groups, Library, Norm};
use crate::kv::restored::{Coded, Original, Restored, Side};
use crate::kv::{
    Error, Geometry, Kind, Opening, OptionSpec, Result, Rope, Scheme, Selection, proof, workload,
};
use half::f16;
use rayon::prelude::*;

const KEY_BITS: OptionSpec =
    OptionSpec { name: "k", about: "bits of a channel of a key; 2", kind: Kind::Count(1, 8) };
const VALUE_BITS: OptionSpec =
    OptionSpec { name: "v", about: "bits of a channel of a value; as the keys", kind: Kind::Count(1, 8) };
const GROUP: OptionSpec = OptionSpec {
    name: "group",
    about: "numbers that share a scale and a zero; 32",
    kind: Kind::Count(2, 1 << 16),
};

/// All of them.
pub static REFERENCES: [Scheme; 3] = [
    reference(
        "kivi-paper",
        "KIVI with its authors' rule for the tokens in f16, and codes of 1 to 8 bits",
        &[
            KEY_BITS,
            VALUE_BITS,
            GROUP,
            OptionSpec {
                name: "residual",
                about: "tokens at the end that stay in f16, a multiple of the group; 32",
                kind: Kind::Count(1, 1 << 16),
            },
        ],
        kivi::check,
        kivi::step_bytes,
    ),
    reference(
        "kivi-scale",
        "KIVI-ScaleOnly: nothing in f16, keys by the range of the group before; values as block-gtq's",
        &[KEY_BITS, VALUE_BITS, GROUP],
        |_| Ok(()),
        kivi::scale_only_step_bytes,
    ),
    reference(
        "block-gtq",
        "Block-GTQ as published: bits by rotary blocks, Gaussian levels, a norm in f16 for each group",
        &[
            OptionSpec {
                name: "k",
                about: "bits of a channel of a key, on average; 2",
                kind: Kind::Count(1, 8),
            },
            VALUE_BITS,
            OptionSpec {
                name: block_gtq::OPTION,
                about: "queries and keys of another text, by `ferrokv capture`",
                kind: Kind::File,
            },
        ],
        |_| Ok(()),
        block_gtq::step_bytes,
    ),
];

/// A scheme that is no more than its numbers.
const fn reference(
    name: &'static str,
    about: &'static str,
    options: &'static [OptionSpec],
    check: fn(&Selection) -> Result<()>,
    step_bytes: fn(&Selection, u32, u64) -> f64,
) -> Scheme {
    Scheme {
        name,
        about,
        presets: &[],
        options,
        step_bytes,
        check,
        open: |opening| Err(Error::refused(NoCache(opening.selection.scheme().name))),
        workload: workload::through_cache,
        proof: proof::by_workload,
        calibrate: None,
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0} is a reference for `ferrokv diagnose`, with no kernels and no cache; give a scheme")]
struct NoCache(&'static str);

/// Whether a selection is of one of them.
pub fn is_reference(selection: &Selection) -> bool {
    REFERENCES.iter().any(|reference| reference.name == selection.scheme().name)
}

/// What a reference makes of layers, each named by its number in the model. `watch` hears of each token of a
/// layer that is done.
///
/// # Errors
/// Heads that its groups do not divide; a file that is not there, or of another model.
pub fn restored(
    opening: &Opening<'_>,
    layers: &[Original<'_>],
    watch: impl FnMut(usize),
) -> Result<Vec<Restored>> {
    match opening.selection.scheme().name {
        "kivi-paper" => kivi::restored(opening, layers, watch),
        "kivi-scale" => kivi::scale_only(opening, layers, watch),
        _ => block_gtq::restored(opening, layers, watch),
    }
}

/// The bits of keys and of values.
fn bits(selection: &Selection) -> [u32; 2] {
    let keys = selection.count("k", 2);
    [keys, selection.count("v", keys)].map(|bits| bits as u32)
}

/// A model's rotary blocks; without RoPE neighbours are taken for them.
fn rotary_blocks(head_dim: usize, rope: Option<&Rope>) -> Vec<[usize; 2]> {
    let (pairing, rotary) = rope.map_or((Pairing::Interleaved, 0), |rope| (rope.pairing, rope.rotary));
    blocks(head_dim, rotary as usize, pairing)
}

/// Rows [tokens, kv_heads, head_dim], each through the groups of its head.
fn through(groups: &[Groups], rows: &[f16], head_dim: usize) -> Vec<f32> {
    let mut out = vec![0f32; rows.len()];
    let pairs = rows.par_chunks_exact(head_dim).zip(out.par_chunks_exact_mut(head_dim));
    pairs.enumerate().for_each(|(row, (from, to))| {
        let wide: Vec<f64> = from.iter().map(|x| x.to_f64()).collect();
        let restored = groups[row % groups.len()].restored(&wide);
        to.iter_mut().zip(restored).for_each(|(to, x)| *to = x as f32);
    });
    out
}

/// Values in equal bits: one group with the levels of the normal distribution, which is TQ-MSE.
fn equal_bits(library: &mut Library, bits: u32, rows: &[f16], geometry: Geometry) -> Side {
    let Geometry { kv_heads, head_dim, .. } = geometry;
    let pairs = rotary_blocks(head_dim, None);
    let all = [(bits, (0..pairs.len()).collect())];
    let groups = |_| Groups::new(library, &pairs, &all, Book::Normal, Norm::Half);
    let groups: Vec<Groups> = (0..kv_heads).map(groups).collect();
    let bytes = equal_bytes(bits, head_dim as u32);
    Side { rows: through(&groups, rows, head_dim), bytes, coded: Coded::ALL }
}

/// Bytes of a row of [`equal_bits`].
fn equal_bytes(bits: u32, head_dim: u32) -> f64 {
    f64::from(bits * head_dim) / 8.0 + size_of::<f16>() as f64
}
