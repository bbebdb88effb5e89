//! A model's tensors by what they are for, every shape checked against the configuration.
//!
//! A projection is stored as [outputs, inputs]: y\[r\] is the sum over c of W\[r\]\[c\]·x\[c\] (+ bias\[r\]).

use super::config::{ModelConfig, model_name};
use super::error::{Error, Result};
use super::gguf::{Bytes, Gguf, TensorInfo, TensorType, dequantize};
use rayon::prelude::*;
use std::collections::HashSet;

/// A matrix as it is stored, rows one after another; a vector has one row.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name in the file, as `blk.0.attn_q.weight`.
    pub name: String,
    /// How the values are stored.
    pub tensor_type: TensorType,
    /// Outputs of a projection, tokens of an embedding.
    pub rows: usize,
    /// Inputs of a projection, channels of an embedding; a whole number of blocks.
    pub columns: usize,
    /// The packed blocks: `rows` · [`row_bytes`](Tensor::row_bytes).
    pub bytes: Bytes,
}

impl Tensor {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.columns / self.tensor_type.block_values() * self.tensor_type.block_bytes()
    }

    /// The packed blocks of a row.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &[u8] {
        &self.bytes[row * self.row_bytes()..][..self.row_bytes()]
    }

    /// The values of a row.
    ///
    /// # Panics
    /// If there is no such row or `values` has not `columns` places.
    pub fn dequantize_row(&self, row: usize, values: &mut [f32]) {
        dequantize(self.tensor_type, self.row(row), values);
    }

    /// All values, rows × columns.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows * self.columns];
        let rows = values.par_chunks_mut(self.columns).enumerate();
        rows.for_each(|(row, values)| self.dequantize_row(row, values));
        values
    }
}

/// The tensors of one transformer block.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// RMSNorm before attention: \[hidden\].
    pub attn_norm: Tensor,
    /// Queries: [query_heads · head_dim, hidden].
    pub attn_q: Tensor,
    /// Keys: [kv_heads · head_dim, hidden].
    pub attn_k: Tensor,
    /// Values: [kv_heads · head_dim, hidden].
    pub attn_v: Tensor,
    /// Bias of the queries: \[query_heads · head_dim\]; with those of keys and values or not at all.
    pub attn_q_bias: Option<Tensor>,
    /// Bias of the keys: \[kv_heads · head_dim\].
    pub attn_k_bias: Option<Tensor>,
    /// Bias of the values: \[kv_heads · head_dim\].
    pub attn_v_bias: Option<Tensor>,
    /// Output of attention: [hidden, query_heads · head_dim].
    pub attn_output: Tensor,
    /// Bias of the output: \[hidden\].
    pub attn_output_bias: Option<Tensor>,
    /// RMSNorm before the feed-forward part: \[hidden\].
    pub ffn_norm: Tensor,
    /// The part that SiLU is taken of: [ffn, hidden].
    pub ffn_gate: Tensor,
    /// The part that the gate multiplies: [ffn, hidden].
    pub ffn_up: Tensor,
    /// Back to the residual stream: [hidden, ffn].
    pub ffn_down: Tensor,
}

impl LayerWeights {
    /// All of them.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let always = [
            &self.attn_norm,
            &self.attn_q,
            &self.attn_k,
            &self.attn_v,
            &self.attn_output,
            &self.ffn_norm,
            &self.ffn_gate,
            &self.ffn_up,
            &self.ffn_down,
        ];
        let biases = [&self.attn_q_bias, &self.attn_k_bias, &self.attn_v_bias, &self.attn_output_bias];
        always.into_iter().chain(biases.into_iter().flatten())
    }
}

/// All tensors of a model.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Token embedding: [vocab, hidden].
    pub token_embedding: Tensor,
    /// The transformer blocks, first to last.
    pub layers: Vec<LayerWeights>,
    /// RMSNorm before the output: \[hidden\].
    pub output_norm: Tensor,
    /// Output projection: [vocab, hidden]; the embedding again where the two are tied.
    pub output: Tensor,
}

impl Weights {
    /// Takes the tensors of a file.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape than the configuration asks for, or that has no place in
    /// the architecture.
    pub fn from_gguf(file: &Gguf, config: &ModelConfig) -> Result<Weights> {
        let mut used = HashSet::new();
        let mut find = |name: &str, rows: usize, columns: usize| -> Result<Tensor> {
            let tensor = find(file, name, rows, columns)?;
            used.insert(name.to_owned());
            Ok(tensor)
        };
        let weights = assemble(config, &mut find)?;
        used.insert("rope_freqs.weight".to_owned());
        match file.header().tensors.iter().find(|tensor| !used.contains(&tensor.name)) {
            None => Ok(weights),
            Some(tensor) => Err(Error::UnknownTensor {
                model: model_name(file),
                name: tensor.name.clone(),
                architecture: config.architecture.name(),
            }),
        }
    }

    /// All of them, each once.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let output = (self.output.name != self.token_embedding.name).then_some(&self.output);
        let ends = [&self.token_embedding, &self.output_norm];
        ends.into_iter().chain(output).chain(self.layers.iter().flat_map(LayerWeights::tensors))
    }
}

/// Makes the weights that a configuration asks for, each tensor by name, rows and columns; a vector has one
/// row.
pub(super) fn assemble(
    config: &ModelConfig,
    make: &mut dyn FnMut(&str, usize, usize) -> Result<Tensor>,
) -> Result<Weights> {
    let &ModelConfig { hidden, ffn, vocab, .. } = config;
    let (query_width, kv_width) = (config.query_width(), config.kv_width());
    let token_embedding = make("token_embd.weight", vocab, hidden)?;
    let output_norm = make("output_norm.weight", 1, hidden)?;
    let output =
        if config.tied_embeddings { token_embedding.clone() } else { make("output.weight", vocab, hidden)? };
    let mut layers = Vec::new();
    for layer in 0..config.layers {
        let mut weight =
            |role: &str, rows, columns| make(&format!("blk.{layer}.{role}.weight"), rows, columns);
        let (attn_norm, ffn_norm) = (weight("attn_norm", 1, hidden)?, weight("ffn_norm", 1, hidden)?);
        let attn_q = weight("attn_q", query_width, hidden)?;
        let attn_k = weight("attn_k", kv_width, hidden)?;
        let attn_v = weight("attn_v", kv_width, hidden)?;
        let attn_output = weight("attn_output", hidden, query_width)?;
        let ffn_gate = weight("ffn_gate", ffn, hidden)?;
        let ffn_up = weight("ffn_up", ffn, hidden)?;
        let ffn_down = weight("ffn_down", hidden, ffn)?;
        let mut bias = |is_there: bool, role: &str, length| {
            is_there.then(|| make(&format!("blk.{layer}.{role}.bias"), 1, length)).transpose()
        };
        layers.push(LayerWeights {
            attn_norm,
            attn_q,
            attn_k,
            attn_v,
            attn_q_bias: bias(config.qkv_bias, "attn_q", query_width)?,
            attn_k_bias: bias(config.qkv_bias, "attn_k", kv_width)?,
            attn_v_bias: bias(config.qkv_bias, "attn_v", kv_width)?,
            attn_output,
            attn_output_bias: bias(config.attn_output_bias, "attn_output", hidden)?,
            ffn_norm,
            ffn_gate,
            ffn_up,
            ffn_down,
        });
    }
    Ok(Weights { token_embedding, layers, output_norm, output })
}

fn find(file: &Gguf, name: &str, rows: usize, columns: usize) -> Result<Tensor> {
    let dims = if rows == 1 { vec![columns as u64] } else { vec![columns as u64, rows as u64] };
    let expected = || format!("{} (row length first)", shape(&dims));
    let Some(info) = file.tensor(name) else {
        return Err(Error::MissingTensor {
            model: model_name(file),
            name: name.to_owned(),
            expected: expected(),
        });
    };
    if !same_shape(info, &dims) {
        return Err(Error::TensorShape {
            model: model_name(file),
            name: name.to_owned(),
            found: shape(&info.dims),
            expected: expected(),
        });
    }
    Ok(Tensor { name: name.to_owned(), tensor_type: info.tensor_type, rows, columns, bytes: file.data(info) })
}

/// Extents of 1 at the end make no difference.
fn same_shape(info: &TensorInfo, dims: &[u64]) -> bool {
    let significant = |dims: &[u64]| dims.iter().rposition(|&dim| dim != 1).map_or(0, |last| last + 1);
    info.dims[..significant(&info.dims)] == dims[..significant(dims)]
}

fn shape(dims: &[u64]) -> String {
    dims.iter().map(u64::to_string).collect::<Vec<_>>().join(" × ")
}
