//! What a model is: its sizes and the variants of its parts, from a file's metadata.

use super::error::{Error, Result};
use super::gguf;
use super::gguf::{Gguf, TensorType, Value};

/// A family of models with one forward pass.
///
/// A further one (say `gemma3`, with norms of queries and keys and a sliding window) adds a variant here, its
/// fields to [`ModelConfig`] and its tensors to [`LayerWeights`](super::weights::LayerWeights).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// Llama and what follows it: RoPE over adjacent pairs in GGUF (the converter permutes the rows of Q and
    /// K).
    Llama,
    /// Qwen 2 and 2.5: biases on Q, K and V; RoPE over the two halves of a head.
    Qwen2,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Architecture; 2] = [Architecture::Llama, Architecture::Qwen2];

    /// The name in the metadata, which is also the prefix of its keys.
    pub const fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
        }
    }

    /// Which channels its position encoding pairs.
    pub const fn rope_kind(self) -> RopeKind {
        match self {
            Architecture::Llama => RopeKind::Interleaved,
            Architecture::Qwen2 => RopeKind::HalfSplit,
        }
    }
}

/// Which two channels of a head the i-th rotation turns, of `dims` that are turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RopeKind {
    /// 2i and 2i + 1.
    Interleaved,
    /// i and i + dims/2.
    HalfSplit,
}

impl RopeKind {
    /// The channels of rotation `i` of `dims`/2.
    pub const fn pair(self, i: usize, dims: usize) -> (usize, usize) {
        match self {
            RopeKind::Interleaved => (2 * i, 2 * i + 1),
            RopeKind::HalfSplit => (i, i + dims / 2),
        }
    }
}

/// Rotary position encoding: at position p, rotation i turns its pair (a, b) by the angle p·f(i) to
/// (a·cos − b·sin, a·sin + b·cos), with f(i) = theta^(−2i/dims) / factor(i).
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Rope {
    /// Which channels make a pair.
    pub kind: RopeKind,
    /// The base of the frequencies.
    pub theta: f64,
    /// How many channels of a head are turned, from the first; even.
    pub dims: usize,
    /// Divisors of the dims/2 frequencies, for contexts longer than those first trained on (Llama 3.1).
    #[serde(skip)]
    pub factors: Option<Vec<f32>>,
}

impl Rope {
    /// f(i) for i < dims/2, in radians a position.
    pub fn frequencies(&self) -> Vec<f64> {
        let factor = |i: usize| self.factors.as_ref().map_or(1.0, |factors| f64::from(factors[i]));
        let frequency = |i: usize| self.theta.powf(-2.0 * i as f64 / self.dims as f64) / factor(i);
        (0..self.dims / 2).map(frequency).collect()
    }
}

/// A model's sizes. All are positive, and `query_heads` is a multiple of `kv_heads`.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// What the model is called.
    pub name: String,
    /// Transformer blocks.
    pub layers: usize,
    /// Channels of the residual stream.
    pub hidden: usize,
    /// Channels between the gate and the down projection.
    pub ffn: usize,
    /// Query heads.
    pub query_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Position encoding.
    pub rope: Rope,
    /// What RMSNorm adds to the mean of squares.
    pub norm_eps: f32,
    /// Tokens of the vocabulary: rows of the embedding.
    pub vocab: usize,
    /// The longest context trained on, in tokens.
    pub context: usize,
    /// Is the embedding also the output projection?
    pub tied_embeddings: bool,
    /// Are there biases on queries, keys and values?
    pub qkv_bias: bool,
    /// Is there a bias on the attention's output?
    pub attn_output_bias: bool,
}

impl ModelConfig {
    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Values of all query heads: rows of the Q projection.
    pub fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Values of all KV heads: rows of the K and of the V projection.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Keys and values of one token in all layers.
    pub fn kv_values_per_token(&self) -> usize {
        2 * self.layers * self.kv_width()
    }

    /// Reads the configuration of a file.
    ///
    /// # Errors
    /// An architecture or a feature that cannot be run; metadata missing, of the wrong type, or
    /// contradictory.
    pub fn from_gguf(file: &Gguf) -> Result<ModelConfig> {
        let architecture = text(file, "general.architecture")?;
        let Some(architecture) = Architecture::ALL.into_iter().find(|known| known.name() == architecture)
        else {
            return Err(Error::Architecture { model: model_name(file), found: architecture.to_owned() });
        };
        let keys = Keys { file, prefix: architecture.name() };
        keys.refuse_what_is_not_supported()?;
        let hidden = keys.size("embedding_length")?;
        let query_heads = keys.size("attention.head_count")?;
        let kv_heads = keys.optional_size("attention.head_count_kv")?.unwrap_or(query_heads);
        let head_dim = keys.head_dim(hidden, query_heads)?;
        let dims = keys.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
        let vocab = keys.vocab()?;
        let has = |name: &str| file.tensor(name).is_some();
        let config = ModelConfig {
            architecture,
            name: file
                .get("general.name")
                .and_then(Value::as_str)
                .map_or_else(|| model_name(file), str::to_owned),
            layers: keys.size("block_count")?,
            hidden,
            ffn: keys.size("feed_forward_length")?,
            query_heads,
            kv_heads,
            head_dim,
            rope: Rope {
                kind: architecture.rope_kind(),
                // The format's own default.
                theta: keys.positive("rope.freq_base")?.unwrap_or(10000.0),
                dims,
                factors: keys.rope_factors(dims)?,
            },
            norm_eps: keys.norm_eps()?,
            vocab,
            context: keys.size("context_length")?,
            tied_embeddings: !has("output.weight"),
            qkv_bias: architecture == Architecture::Qwen2 || has("blk.0.attn_q.bias"),
            attn_output_bias: has("blk.0.attn_output.bias"),
        };
        match config.contradiction() {
            None => Ok(config),
            Some(reason) => Err(Error::Inconsistent { model: model_name(file), reason }),
        }
    }

    /// What does not go together, if anything.
    fn contradiction(&self) -> Option<String> {
        let ModelConfig { query_heads, kv_heads, head_dim, .. } = self;
        let dims = self.rope.dims;
        if !query_heads.is_multiple_of(*kv_heads) {
            return Some(format!("{query_heads} query heads cannot share {kv_heads} KV heads evenly"));
        }
        if !dims.is_multiple_of(2) || dims > *head_dim {
            return Some(format!(
                "RoPE over {dims} channels of heads of {head_dim}: they must be even and not more"
            ));
        }
        None
    }
}

/// What a file is called in messages.
pub(super) fn model_name(file: &Gguf) -> String {
    file.path().display().to_string()
}

/// A string of the metadata.
pub(super) fn text<'a>(file: &'a Gguf, key: &str) -> Result<&'a str> {
    let value =
        file.get(key).ok_or_else(|| Error::MissingKey { model: model_name(file), key: key.to_owned() })?;
    value.as_str().ok_or_else(|| wrong_key(file, key, value, "a string"))
}

/// An error that shows a key's value, or its type where that says more.
pub(super) fn wrong_key(file: &Gguf, key: &str, value: &Value, expected: &str) -> Error {
    let found = match value {
        Value::Array(_) => value.to_string(),
        Value::String(text) => format!("the string '{}'", text.chars().take(40).collect::<String>()),
        _ => format!("{value} ({})", value.type_name()),
    };
    Error::WrongKey { model: model_name(file), key: key.to_owned(), found, expected: expected.to_owned() }
}

/// The keys of one architecture.
struct Keys<'a> {
    file: &'a Gguf,
    prefix: &'static str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn optional_size(&self, name: &str) -> Result<Option<usize>> {
        let key = self.key(name);
        let Some(value) = self.file.get(&key) else { return Ok(None) };
        // Products of two sizes are then far from overflowing.
        match value.as_u64().filter(|size| (1..=1 << 28).contains(size)) {
            Some(size) => Ok(Some(size as usize)),
            None => Err(wrong_key(self.file, &key, value, "an integer from 1 to 2^28")),
        }
    }

    fn size(&self, name: &str) -> Result<usize> {
        let missing = || Error::MissingKey { model: model_name(self.file), key: self.key(name) };
        self.optional_size(name)?.ok_or_else(missing)
    }

    fn positive(&self, name: &str) -> Result<Option<f64>> {
        let key = self.key(name);
        let Some(value) = self.file.get(&key) else { return Ok(None) };
        match value.as_f64().filter(|x| x.is_finite() && *x > 0.0) {
            Some(x) => Ok(Some(x)),
            None => Err(wrong_key(self.file, &key, value, "a positive float")),
        }
    }

    fn norm_eps(&self) -> Result<f32> {
        let name = "attention.layer_norm_rms_epsilon";
        let missing = || Error::MissingKey { model: model_name(self.file), key: self.key(name) };
        Ok(self.positive(name)?.ok_or_else(missing)? as f32)
    }

    fn head_dim(&self, hidden: usize, query_heads: usize) -> Result<usize> {
        let lengths =
            [self.optional_size("attention.key_length")?, self.optional_size("attention.value_length")?];
        let inconsistent = |reason| Error::Inconsistent { model: model_name(self.file), reason };
        match lengths {
            [Some(key), Some(value)] if key != value => Err(inconsistent(format!(
                "keys of {key} channels and values of {value}; one head_dim is needed"
            ))),
            [Some(length), _] | [None, Some(length)] => Ok(length),
            [None, None] if hidden.is_multiple_of(query_heads) => Ok(hidden / query_heads),
            [None, None] => {
                Err(inconsistent(format!("{hidden} channels are no multiple of {query_heads} heads")))
            }
        }
    }

    /// The rows of the embedding, which the metadata must not contradict.
    fn vocab(&self) -> Result<usize> {
        let file = self.file;
        let model = || model_name(file);
        let Some(embedding) = file.tensor("token_embd.weight") else {
            let expected = "[tokens, hidden]".to_owned();
            return Err(Error::MissingTensor { model: model(), name: "token_embd.weight".into(), expected });
        };
        let vocab = embedding.rows();
        let said = self.optional_size("vocab_size")?;
        if let Some(said) = said.filter(|said| *said != vocab) {
            let reason = format!("'{}' is {said} and the embedding has {vocab} rows", self.key("vocab_size"));
            return Err(Error::Inconsistent { model: model(), reason });
        }
        Ok(vocab)
    }

    fn rope_factors(&self, dims: usize) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.file.tensor("rope_freqs.weight") else { return Ok(None) };
        if tensor.tensor_type != TensorType::F32 || tensor.rows() != 1 || tensor.columns() != dims / 2 {
            return Err(Error::TensorShape {
                model: model_name(self.file),
                name: tensor.name.clone(),
                found: format!("{:?} of {}", tensor.dims, tensor.tensor_type),
                expected: format!("[{}] of F32", dims / 2),
            });
        }
        let mut factors = vec![0.0; tensor.columns()];
        gguf::dequantize(tensor.tensor_type, &self.file.data(tensor), &mut factors);
        match factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
            None => Ok(Some(factors)),
            Some(factor) => Err(Error::Inconsistent {
                model: model_name(self.file),
                reason: format!("a RoPE frequency is divided by {factor}"),
            }),
        }
    }

    fn refuse_what_is_not_supported(&self) -> Result<()> {
        let unsupported = |feature| Err(Error::Unsupported { model: model_name(self.file), feature });
        let experts = self.key("expert_count");
        if let Some(value) = self.file.get(&experts).filter(|value| value.as_u64() != Some(0)) {
            return unsupported(format!("a mixture of experts ({experts} = {value})"));
        }
        let scaling = self.key("rope.scaling.type");
        if let Some(value) = self.file.get(&scaling).filter(|value| value.as_str() != Some("none")) {
            return unsupported(format!("scaled RoPE ({scaling} = {value})"));
        }
        Ok(())
    }
}

impl From<&ModelConfig> for crate::kv::Geometry {
    fn from(config: &ModelConfig) -> Self {
        let &ModelConfig { layers, query_heads: q_heads, kv_heads, head_dim, .. } = config;
        crate::kv::Geometry { layers, q_heads, kv_heads, head_dim }
    }
}

impl From<&ModelConfig> for crate::kv::Rope {
    fn from(config: &ModelConfig) -> Self {
        crate::kv::Rope {
            pairing: match config.rope.kind {
                RopeKind::Interleaved => crate::attention::rope::Pairing::Interleaved,
                RopeKind::HalfSplit => crate::attention::rope::Pairing::HalfSplit,
            },
            rotary: config.rope.dims as u32,
            frequencies: config.rope.frequencies().into_iter().map(|f| f as f32).collect(),
        }
    }
}
