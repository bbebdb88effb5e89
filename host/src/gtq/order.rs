//! The order of channels that puts a key's rotary blocks in parts: by calibration, from a file, on a device.
//!
//! Blocks are ranked in each layer and KV head by what a squared error of theirs does to a score,
//! E|q|²·E|k|² ([`Score::Product`](super::allocation::Score)), and cut into four parts of as many blocks
//! each.

use super::allocation::{Energies, blocks, ranked};
use super::{Error, HEAD_DIMS, Result, stability};
use crate::attention::BLOCK_TOKENS;
use crate::attention::rope::Pairing;
use crate::hash::hash;
use crate::kv::calibration::{Artifact, Calibration, Calibrator, Chart, Material};
use crate::kv::{self, Geometry, Opening, Rope};
use crate::tensor_file::{Dtype, TensorFile};
use half::f16;
use kernels_gpu::gtq::parts::{self, PARTS};

/// The option that takes the file.
pub(super) const OPTION: &str = "order";

/// How `ferrokv calibrate` makes the file.
pub(super) const CALIBRATOR: Calibrator =
    Calibrator { artifact: OPTION, options: &[], queries: true, check: |_| Ok(()), chart: true, run };

/// The channels of a model's keys in the order of their parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Of each layer [kv_heads, head_dim]: dimension d is channel `layer[head · head_dim + d]`.
    pub layers: Vec<Vec<u8>>,
}

/// Which channels turn together, as a file says it.
fn turned(rope: Option<&Rope>) -> String {
    match rope {
        None => "neighbours, of no model".into(),
        Some(Rope { pairing, rotary, .. }) => {
            let pairs = match pairing {
                Pairing::HalfSplit => "half-split",
                Pairing::Interleaved => "interleaved",
            };
            format!("{pairs} over {rotary} channels")
        }
    }
}

fn tensor_name(layer: usize) -> String {
    format!("layer.{layer:02}.order")
}

fn hash_of(layers: &[Vec<u8>]) -> String {
    format!("{:016x}", hash(layers.iter().map(Vec::as_slice)))
}

impl Order {
    /// By keys and queries of a real run. Without RoPE neighbours are taken for blocks.
    ///
    /// # Errors
    /// [`Error::HeadDim`].
    pub fn of(material: &Material) -> Result<Self> {
        let mut order = Order { layers: Vec::new() };
        for layer in 0..material.layers.len() {
            order.layers.push(of_layer(material, layer)?);
        }
        Ok(order)
    }

    /// What a file has of it.
    pub(super) fn artifact(&self, geometry: Geometry, rope: Option<&Rope>) -> Artifact {
        let mut artifact = Artifact::default();
        for (layer, own) in self.layers.iter().enumerate() {
            let shape = [geometry.kv_heads, geometry.head_dim];
            artifact.add(tensor_name(layer), Dtype::U8, &shape, own);
        }
        artifact.say("blocks", turned(rope));
        artifact.say("order_hash", hash_of(&self.layers));
        artifact
    }

    /// The part of each rotary block, by layer and KV head, blocks as RoPE counts them.
    pub(super) fn chart(&self, geometry: Geometry, rope: Option<&Rope>) -> Chart {
        let Geometry { kv_heads, head_dim, .. } = geometry;
        let (pairing, rotary) = rope.map_or((Pairing::Interleaved, 0), |rope| (rope.pairing, rope.rotary));
        let pairs = blocks(head_dim, rotary as usize, pairing);
        let of_head = |order: &[u8]| -> Vec<u8> {
            let part = |channel: usize| {
                let at = order.iter().position(|own| usize::from(*own) == channel).unwrap_or(0);
                (at / (head_dim / PARTS)) as u8
            };
            pairs.iter().map(|[first, _]| part(*first)).collect()
        };
        let plural = |bits: u32| if bits == 1 { "1 bit".into() } else { format!("{bits} bits") };
        let class = |part: usize| {
            let [two, three, four] = [2, 3, 4].map(|average| plural(parts::bits(average)[part]));
            format!("part {}: {three} of 3 on average, {two} of 2, {four} of 4", part + 1)
        };
        Chart {
            title: "Bits of the rotary blocks of keys, gtq-blocks".into(),
            axes: ["rotary block, fast ones first".into(), "layer and KV head".into()],
            classes: (0..PARTS).map(class).collect(),
            rows: self.layers.iter().flat_map(|layer| layer.chunks_exact(head_dim)).map(of_head).collect(),
            names: (0..self.layers.len()).map(|layer| (layer * kv_heads, layer.to_string())).collect(),
        }
    }

    /// That of the selection's file, which must be for these heads, and for blocks as the model turns them.
    ///
    /// # Errors
    /// No file; one for another model, or damaged.
    pub(super) fn open(opening: &Opening<'_>) -> kv::Result<Self> {
        let mut file = opening.needed_artifact(OPTION)?;
        let Geometry { layers, kv_heads, head_dim, .. } = opening.geometry;
        Ok(Order::read(&mut file, [layers, kv_heads, head_dim], opening.rope)?)
    }

    /// Reads a file for so many layers, KV heads and channels.
    fn read(
        file: &mut TensorFile,
        [layers, kv_heads, head_dim]: [usize; 3],
        rope: Option<&Rope>,
    ) -> Result<Self> {
        let path = file.path().display().to_string();
        let damaged = |what: String| Error::Damaged { path: path.clone(), what };
        let said = |file: &TensorFile, name: &str| file.metadata().get(name).cloned().unwrap_or_default();
        let (found, expected) = (said(file, "blocks"), turned(rope));
        if rope.is_some() && found != expected {
            return Err(Error::Blocks { path, found, expected });
        }
        let mut order = Order { layers: Vec::new() };
        for layer in 0..layers {
            let own: Vec<u8> = file.read(&tensor_name(layer), Dtype::U8)?;
            if own.len() != kv_heads * head_dim {
                let expected = kv_heads * head_dim;
                return Err(damaged(format!("layer {layer} has {} channels for {expected}", own.len())));
            }
            for (head, channels) in own.chunks_exact(head_dim).enumerate() {
                let mut seen = vec![false; head_dim];
                for channel in channels {
                    match seen.get_mut(usize::from(*channel)) {
                        Some(seen) if !*seen => *seen = true,
                        found => {
                            let why = if found.is_some() { "twice" } else { "which there is not" };
                            let what = format!("layer {layer}, KV head {head}: channel {channel} {why}");
                            return Err(damaged(what));
                        }
                    }
                }
            }
            order.layers.push(own);
        }
        let hash = hash_of(&order.layers);
        match said(file, "order_hash") {
            found if found == hash => Ok(order),
            found => Err(damaged(format!("its contents have the hash {hash}, and it says {found}"))),
        }
    }
}

/// The blocks of a layer, and the energies of each KV head's.
///
/// # Errors
/// [`Error::HeadDim`].
pub(super) fn energies(material: &Material, layer: usize) -> Result<(Vec<[usize; 2]>, Vec<Energies>)> {
    let Geometry { q_heads, kv_heads, head_dim, .. } = material.geometry;
    if !HEAD_DIMS.iter().any(|dim| *dim as usize == head_dim) {
        return Err(Error::HeadDim { head_dim: u32::try_from(head_dim).unwrap_or(u32::MAX) });
    }
    let (pairing, rotary) =
        material.rope.as_ref().map_or((Pairing::Interleaved, 0), |rope| (rope.pairing, rope.rotary));
    let pairs = blocks(head_dim, rotary as usize, pairing);
    let group = q_heads / kv_heads;
    // Caches have the first tile in f16, and its keys are unlike all that follow.
    let passed = &material.layers[layer];
    let [keys, queries] =
        [&passed.keys, &passed.queries].map(|rows| material.behind_fronts(rows, BLOCK_TOKENS as usize));
    let of_head = |head: usize| {
        let of = |rows: &'_ [f16], heads: usize, own: std::ops::Range<usize>| -> Vec<Vec<f64>> {
            let wide = |row: &[f16]| row.iter().map(|x| x.to_f64()).collect();
            let own = rows.chunks_exact(head_dim).enumerate().filter(|(row, _)| own.contains(&(row % heads)));
            own.map(|(_, row)| wide(row)).collect()
        };
        let keys = of(&keys, kv_heads, head..head + 1);
        let queries = of(&queries, q_heads, head * group..(head + 1) * group);
        Energies::of(&pairs, keys.iter().map(Vec::as_slice), queries.iter().map(Vec::as_slice))
    };
    let energies = (0..kv_heads).map(of_head).collect();
    Ok((pairs, energies))
}

/// The order of a layer, [kv_heads, head_dim].
fn of_layer(material: &Material, layer: usize) -> Result<Vec<u8>> {
    let (pairs, energies) = energies(material, layer)?;
    let parts = energies.iter().flat_map(|energies| ranked(energies, PARTS));
    let channels = parts.flatten().flat_map(|block| pairs[block]);
    Ok(channels.map(|channel| channel as u8).collect())
}

fn run(calibration: &Calibration<'_>) -> kv::Result<Artifact> {
    let Calibration { material, .. } = *calibration;
    let layers = material.layers.len();
    let mut order = Order { layers: Vec::new() };
    for layer in 0..layers {
        order.layers.push(of_layer(material, layer)?);
        calibration.tell(layer + 1, layers)?;
    }
    let mut artifact = order.artifact(material.geometry, material.rope.as_ref());
    artifact.chart = Some(order.chart(material.geometry, material.rope.as_ref()));
    for (name, found) in stability::found(material)? {
        artifact.say(name, found.to_string());
    }
    Ok(artifact)
}
