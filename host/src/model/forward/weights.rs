//! A model's weights, packed for its products.

use super::Result;
use crate::attention::rope::Pairing;
use crate::model::Model;
use crate::model::config::RopeKind;
use crate::model::linear::{PackedWeights, Rows};
use crate::model::weights::{LayerWeights, Tensor};
use kernels_gpu::attention::rotation::RopeShape;
use rayon::prelude::*;

/// One transformer block: `M` is a packed matrix, `V` a vector of f32, where the products are done.
#[derive(Debug)]
pub(super) struct Layer<M, V> {
    /// RMSNorm before attention, \[hidden\].
    pub attn_norm: V,
    /// Rows of Q, K and V, [(q_heads + 2·kv_heads)·head_dim, hidden].
    pub qkv: M,
    pub qkv_bias: Option<V>,
    /// [hidden, q_heads·head_dim].
    pub output: M,
    pub output_bias: Option<V>,
    /// RMSNorm before the feed-forward part, \[hidden\].
    pub ffn_norm: V,
    /// Rows of gate and up, [2·ffn, hidden].
    pub gate_up: M,
    /// [hidden, ffn].
    pub down: M,
}

/// All of a model.
#[derive(Debug)]
pub(super) struct Packed<M, V> {
    /// [vocab, hidden].
    pub embedding: M,
    pub layers: Vec<Layer<M, V>>,
    /// \[hidden\].
    pub output_norm: V,
    /// [vocab, hidden], if it is not the embedding.
    pub output: Option<M>,
    /// Radians a position, [rotary / 2].
    pub frequencies: V,
    pub extents: Extents,
}

/// The sizes that a pass needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extents {
    pub hidden: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub epsilon: f32,
    pub rope: RopeShape,
    pub pairing: Pairing,
}

impl Extents {
    pub fn query_width(self) -> usize {
        self.rope.q_heads as usize * self.rope.head_dim as usize
    }

    pub fn kv_width(self) -> usize {
        self.rope.kv_heads as usize * self.rope.head_dim as usize
    }

    pub fn qkv_width(self) -> usize {
        self.query_width() + 2 * self.kv_width()
    }
}

impl<M, V> Packed<M, V> {
    /// The output projection.
    pub fn output(&self) -> &M {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

impl Packed<PackedWeights, Vec<f32>> {
    /// Bytes that a step of one token reads: every matrix, of an embedding that is not the output one row.
    pub fn step_bytes(&self) -> u64 {
        let layer = |l: &Layer<PackedWeights, Vec<f32>>| {
            let matrices = [&l.qkv, &l.output, &l.gate_up, &l.down].map(PackedWeights::bytes);
            matrices.iter().sum::<usize>() + 4 * (l.attn_norm.len() + l.ffn_norm.len())
        };
        let layers: usize = self.layers.iter().map(layer).sum();
        (layers + self.output().bytes()) as u64
    }

    /// Packs the tensors of a model.
    pub fn new(model: &Model) -> Result<Self> {
        let (config, weights) = (&model.config, &model.weights);
        let pack = |parts: &[&Tensor]| -> Result<PackedWeights> {
            let rows: Vec<Rows<'_>> = parts.iter().map(|tensor| Rows::from(*tensor)).collect();
            Ok(PackedWeights::new(&rows)?)
        };
        let layer = |layer: &LayerWeights| -> Result<Layer<PackedWeights, Vec<f32>>> {
            let biases = [&layer.attn_q_bias, &layer.attn_k_bias, &layer.attn_v_bias];
            Ok(Layer {
                attn_norm: layer.attn_norm.to_f32(),
                qkv: pack(&[&layer.attn_q, &layer.attn_k, &layer.attn_v])?,
                qkv_bias: config
                    .qkv_bias
                    .then(|| biases.into_iter().flatten().flat_map(Tensor::to_f32).collect()),
                output: pack(&[&layer.attn_output])?,
                output_bias: layer.attn_output_bias.as_ref().map(Tensor::to_f32),
                ffn_norm: layer.ffn_norm.to_f32(),
                gate_up: pack(&[&layer.ffn_gate, &layer.ffn_up])?,
                down: pack(&[&layer.ffn_down])?,
            })
        };
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(Packed {
            embedding: pack(&[&weights.token_embedding])?,
            layers: weights.layers.par_iter().map(layer).collect::<Result<_>>()?,
            output_norm: weights.output_norm.to_f32(),
            output: (!config.tied_embeddings).then(|| pack(&[&weights.output])).transpose()?,
            frequencies: config.rope.frequencies().into_iter().map(|f| f as f32).collect(),
            extents: Extents {
                hidden: config.hidden,
                ffn: config.ffn,
                vocab: config.vocab,
                epsilon: config.norm_eps,
                rope: RopeShape {
                    q_heads: narrow(config.query_heads),
                    kv_heads: narrow(config.kv_heads),
                    head_dim: narrow(config.head_dim),
                    rotary: narrow(config.rope.dims),
                },
                pairing: match config.rope.kind {
                    RopeKind::Interleaved => Pairing::Interleaved,
                    RopeKind::HalfSplit => Pairing::HalfSplit,
                },
            },
        })
    }
}
