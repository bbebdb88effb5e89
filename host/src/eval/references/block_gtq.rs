//! Block-GTQ as Liang, Zhang and Jia (2026) have published it.
//!
//! In each layer and KV head a rotary block's score is (E|q|² + E|k|²) / 2 over a calibration text. Bits, 1
//! to 8 a block, are given greedily by what 4^−b gains ([`allocate`]). Blocks of equal bits are a group: one
//! norm in f16, one rotation of Haar's measure, levels of the normal distribution whatever the group's size.
//! Values are one group of equal bits.
//!
//! The authors' code leaves groups of 1 bit, or of up to 2, without a rotation; the paper rotates all, and so
//! does this.

use super::{bits, equal_bits, equal_bytes, rotary_blocks, through};
use crate::gtq::allocation::{Energies, Quarters, Score, allocate, groups};
use crate::gtq::groups::{Book, Groups, Library, Norm};
use crate::kv::restored::{Coded, Original, Restored, Side};
use crate::kv::{Error, Geometry, Opening, Result, Selection};
use crate::tensor_file::{Dtype, TensorFile};
use half::f16;

/// The option that takes the calibration.
pub(super) const OPTION: &str = "from";

#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(
        "block-gtq needs queries and keys of another text: make a file by `ferrokv capture --text moby-dick --queries \
         N -o FILE`, and give it as block-gtq/from=FILE"
    )]
    NoFile,
    #[error(
        "{path} has {name} of shape {found:?}, and block-gtq needs [tokens, {heads}, {head_dim}]; capture it from this model"
    )]
    Shape { path: String, name: String, found: Vec<usize>, heads: usize, head_dim: usize },
    #[error("layer {layer} has no bits for its blocks: {source}")]
    Allocation { layer: usize, source: crate::gtq::allocation::Error },
}

/// At least: a head has as many norms as it has groups, one of them here.
pub(super) fn step_bytes(selection: &Selection, head_dim: u32, tokens: u64) -> f64 {
    let [keys, values] = bits(selection);
    (equal_bytes(keys, head_dim) + equal_bytes(values, head_dim)) * tokens as f64
}

/// Rows [tokens, heads, head_dim] of a calibration.
fn rows(file: &mut TensorFile, name: String, heads: usize, head_dim: usize) -> Result<Vec<Vec<f64>>> {
    let found = file.entry(&name)?.shape.clone();
    if !matches!(found[..], [_, a, b] if (a, b) == (heads, head_dim)) {
        let path = file.path().display().to_string();
        return Err(Error::refused(Refused::Shape { path, name, found, heads, head_dim }));
    }
    let numbers: Vec<f16> = file.read(&name, Dtype::F16)?;
    Ok(numbers.chunks_exact(head_dim).map(|row| row.iter().map(|x| x.to_f64()).collect()).collect())
}

/// The groups of each KV head of a layer.
fn of_layer(
    file: &mut TensorFile,
    library: &mut Library,
    opening: &Opening<'_>,
    layer: usize,
) -> Result<Vec<Groups>> {
    let Geometry { q_heads, kv_heads, head_dim, .. } = opening.geometry;
    let keys = rows(file, format!("layer.{layer:02}.key"), kv_heads, head_dim)?;
    let queries = rows(file, format!("layer.{layer:02}.query"), q_heads, head_dim)?;
    let pairs = rotary_blocks(head_dim, opening.rope);
    let [key_bits, _] = bits(opening.selection);
    let group = q_heads / kv_heads;
    let of_head = |head: usize| {
        let own = |rows: &'_ [Vec<f64>], heads: usize, wanted: std::ops::Range<usize>| -> Vec<Vec<f64>> {
            let own = rows.iter().enumerate().filter(|(row, _)| wanted.contains(&(row % heads)));
            own.map(|(_, row)| row.clone()).collect()
        };
        let keys = own(&keys, kv_heads, head..head + 1);
        let queries = own(&queries, q_heads, head * group..(head + 1) * group);
        let energies =
            Energies::of(&pairs, keys.iter().map(Vec::as_slice), queries.iter().map(Vec::as_slice));
        let total = key_bits * pairs.len() as u32;
        let bits = allocate(&Score::Average.of(&energies), total, [1, 8], &Quarters)
            .map_err(|source| Error::refused(Refused::Allocation { layer, source }))?;
        Ok(Groups::new(library, &pairs, &groups(&bits), Book::Normal, Norm::Half))
    };
    (0..kv_heads).map(of_head).collect()
}

pub(super) fn restored(
    opening: &Opening<'_>,
    layers: &[Original<'_>],
    mut watch: impl FnMut(usize),
) -> Result<Vec<Restored>> {
    let mut file = opening.artifact(OPTION)?.ok_or_else(|| Error::refused(Refused::NoFile))?;
    let geometry = opening.geometry;
    let [_, value_bits] = bits(opening.selection);
    let mut library = Library::default();
    let mut done = Vec::new();
    for layer in layers {
        let groups = of_layer(&mut file, &mut library, opening, layer.layer)?;
        // Heads may differ in the number of groups.
        let bytes = groups.iter().map(Groups::bytes).sum::<f64>() / groups.len() as f64;
        let rows = through(&groups, layer.keys, geometry.head_dim);
        let keys = Side { rows, bytes, coded: Coded::ALL };
        let values = equal_bits(&mut library, value_bits, layer.values, geometry);
        done.push(Restored { keys, values });
        watch(layer.keys.len() / geometry.kv_width());
    }
    Ok(done)
}
