//! KIVI (Liu et al., 2024), and the variant of it that the paper on Block-GTQ compares with.
//!
//! Numbers x of a group become code = round((x − zero) / scale), with zero their least and scale their range
//! over 2^b − 1, both in f16. Groups of keys are of neighbouring tokens in one channel, those of values of
//! neighbouring channels in one token.
//!
//! Of KIVI a step reads the newest tokens in f16. Keys wait until there are `residual` of them, which are
//! then quantized together; of values the newest `residual` stay.
//!
//! **KIVI-ScaleOnly** quantizes a key when it comes, by the range of the tokens before it: here by that of
//! the group before, and the first group by its own, where the paper takes a range from other text. What is
//! beyond the range is cut off.

use super::{bits, equal_bits, equal_bytes};
use crate::gtq::groups::Library;
use crate::kv::restored::{Coded, Original, Restored, Side};
use crate::kv::{Error, Opening, Result, Selection};
use half::f16;
use rayon::prelude::*;

/// What a group shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Range {
    zero: f32,
    scale: f32,
}

impl Range {
    /// That of some numbers, for so many bits.
    pub fn of(numbers: impl Iterator<Item = f32>, bits: u32) -> Self {
        let (low, high) =
            numbers.fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        let scale = (high - low) / ((1u32 << bits) - 1) as f32;
        Range { zero: f16::from_f32(low).to_f32(), scale: f16::from_f32(scale).to_f32() }
    }

    /// What a number's code stands for.
    pub fn restored(self, x: f32, bits: u32) -> f32 {
        let Range { zero, scale } = self;
        // A range too small for f16 has one level.
        if scale == 0.0 {
            return zero;
        }
        let most = ((1u32 << bits) - 1) as f32;
        ((x - zero) / scale).clamp(0.0, most).round_ties_even() * scale + zero
    }
}

#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("kivi-paper/residual={residual} is no multiple of its group of {group}; make it one")]
    Residual { residual: usize, group: usize },
    #[error("groups of {group} channels do not divide head_dim {head_dim}; give group=N that does")]
    Group { group: usize, head_dim: usize },
}

fn group(selection: &Selection) -> usize {
    selection.count("group", 32) as usize
}

fn residual(selection: &Selection) -> usize {
    selection.count("residual", 32) as usize
}

pub(super) fn check(selection: &Selection) -> Result<()> {
    let (residual, group) = (residual(selection), group(selection));
    if residual.is_multiple_of(group) {
        Ok(())
    } else {
        Err(Error::refused(Refused::Residual { residual, group }))
    }
}

/// Bytes of a row of so many channels, each group with a scale and a zero.
fn bytes(bits: u32, head_dim: usize, group: usize) -> f64 {
    let metadata = (2 * size_of::<f16>()) as f64 / group as f64;
    head_dim as f64 * (f64::from(bits) / 8.0 + metadata)
}

/// Keys and values of KIVI, without their rows.
fn sides(selection: &Selection, head_dim: usize) -> [Side; 2] {
    let (group, residual) = (group(selection), residual(selection));
    let coded = [
        Coded { block: residual, kept: 0, front: 0, extra: 0 },
        Coded { block: 1, kept: residual, front: 0, extra: 0 },
    ];
    let [keys, values] = bits(selection);
    let [of_keys, of_values] = coded;
    let side = |bits, coded| Side { rows: Vec::new(), bytes: bytes(bits, head_dim, group), coded };
    [side(keys, of_keys), side(values, of_values)]
}

pub(super) fn step_bytes(selection: &Selection, head_dim: u32, tokens: u64) -> f64 {
    let sides = sides(selection, head_dim as usize);
    sides.iter().map(|side| side.bytes_at(tokens as usize, head_dim as usize)).sum::<f64>() * tokens as f64
}

pub(super) fn scale_only_step_bytes(selection: &Selection, head_dim: u32, tokens: u64) -> f64 {
    let [keys, values] = bits(selection);
    let key = bytes(keys, head_dim as usize, group(selection));
    (key + equal_bytes(values, head_dim)) * tokens as f64
}

/// Keys [tokens, width] by channel and `group` tokens, the first `coded` of them; `before` by the range of
/// the group before.
pub(super) fn keys(
    rows: &[f16],
    width: usize,
    group: usize,
    bits: u32,
    coded: usize,
    before: bool,
) -> Vec<f32> {
    let mut out: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
    let groups = out.par_chunks_mut(group * width).enumerate().take(coded.div_ceil(group));
    groups.for_each(|(number, out)| {
        let from = number.saturating_sub(usize::from(before)) * group * width;
        let ranged = &rows[from..rows.len().min(from + group * width)];
        for channel in 0..width {
            let numbers = ranged[channel..].iter().step_by(width).map(|x| x.to_f32());
            let range = Range::of(numbers, bits);
            for x in out[channel..].iter_mut().step_by(width) {
                *x = range.restored(*x, bits);
            }
        }
    });
    out
}

/// Values by token and `group` channels.
fn values(rows: &[f16], group: usize, bits: u32) -> Vec<f32> {
    let mut out = vec![0f32; rows.len()];
    out.par_chunks_exact_mut(group).zip(rows.par_chunks_exact(group)).for_each(|(out, rows)| {
        let range = Range::of(rows.iter().map(|x| x.to_f32()), bits);
        out.iter_mut().zip(rows).for_each(|(out, x)| *out = range.restored(x.to_f32(), bits));
    });
    out
}

pub(super) fn restored(
    opening: &Opening<'_>,
    layers: &[Original<'_>],
    mut watch: impl FnMut(usize),
) -> Result<Vec<Restored>> {
    let (selection, geometry) = (opening.selection, opening.geometry);
    let (group, head_dim, width) = (group(selection), geometry.head_dim, geometry.kv_width());
    if !head_dim.is_multiple_of(group) {
        return Err(Error::refused(Refused::Group { group, head_dim }));
    }
    let [key_bits, value_bits] = bits(selection);
    let one = |layer: &Original<'_>| {
        let [of_keys, of_values] = sides(selection, head_dim);
        let tokens = layer.keys.len() / width;
        let rows = keys(layer.keys, width, group, key_bits, of_keys.coded.of(tokens), false);
        let restored = Restored {
            keys: Side { rows, ..of_keys },
            values: Side { rows: values(layer.values, group, value_bits), ..of_values },
        };
        watch(tokens);
        restored
    };
    Ok(layers.iter().map(one).collect())
}

pub(super) fn scale_only(
    opening: &Opening<'_>,
    layers: &[Original<'_>],
    mut watch: impl FnMut(usize),
) -> Result<Vec<Restored>> {
    let (geometry, group) = (opening.geometry, group(opening.selection));
    let [key_bits, value_bits] = bits(opening.selection);
    let mut library = Library::default();
    let one = |layer: &Original<'_>| {
        let width = geometry.kv_width();
        let tokens = layer.keys.len() / width;
        let rows = keys(layer.keys, width, group, key_bits, tokens, true);
        let keys = Side { rows, bytes: bytes(key_bits, geometry.head_dim, group), coded: Coded::ALL };
        let values = equal_bits(&mut library, value_bits, layer.values, geometry);
        watch(tokens);
        Restored { keys, values }
    };
    Ok(layers.iter().map(one).collect())
}
